"""Place several models on one cluster: devices, layouts and order of each step. Begin with `workload.py`."""
