"""Sharding plans of a study's candidates. Begin with `layer_plans.py`."""
