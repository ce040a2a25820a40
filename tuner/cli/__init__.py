"""Define the commands of `meshtune`. Begin with `main.py`."""
