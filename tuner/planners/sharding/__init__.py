"""Plan the sharding of a graph: D-Rec, ManuMatic's pins, and descent. Begin with `recursive.py`."""
