"""A user's own step in the processes of a trial. Begin with `run.py`."""
