"""Placements as the keys of RL frameworks. Begin with `registry.py`."""
