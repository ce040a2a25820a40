"""Search of the placement of modules, and what it is compared with. Begin with `branch_and_bound.py`."""
