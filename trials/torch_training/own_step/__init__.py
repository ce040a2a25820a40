"""Trials that train a user's own module. Begin with `backend.py`; `run.py` runs in the ranks of a trial."""
