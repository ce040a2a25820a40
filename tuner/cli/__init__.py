"""Commands of `meshtune`. Begin with `main.py`."""
