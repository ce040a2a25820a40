"""Describe devices, links and clusters, and the time of collectives on them.

The catalog holds devices, links and hosts by name, each figure with its source. Nothing here knows about training.
Begin with `cluster.py`, and read `collectives.py` for the time of a collective on a group of ranks.
"""
