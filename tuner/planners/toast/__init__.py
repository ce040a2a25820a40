"""Plan the sharding of a graph by TOAST's named dimensions and tree search. Begin with `search.py`."""
