"""Strategy assignment below sharding plans: choose one strategy for every node under one memory limit.

Begin in `solve.py`; `assigned.py` makes plans of assignments.
"""
