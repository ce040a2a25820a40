"""A user's own module in the ranks of a trial. Begin with `run.py`."""
