"""Trials on Ray: the only room that imports it.

Begin with `executor.py`, which keeps the slots of a study busy. `local.py` starts a Ray instance of one's own, and
`cluster.py` joins one; `worker.py` runs a trial on it.
"""
