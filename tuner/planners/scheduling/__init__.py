"""Schedule the operators of several models on unlike devices. Begin with `problem.py`."""
