"""Give every candidate its sharding plan. Begin with `layer_plans.py`."""
