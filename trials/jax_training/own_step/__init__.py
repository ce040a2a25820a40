"""Trials that run a user's own step. Begin with `backend.py`; `run.py` runs in the processes of a trial."""
