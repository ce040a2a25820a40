"""Strategy assignment below sharding plans: choose one strategy for every node under one memory limit.

Begin in `solve.py`. Messages between variables are the product's own (`tuner/planners/sharding/messages.py`).
"""
