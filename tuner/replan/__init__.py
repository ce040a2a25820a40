"""Planning of configuration changes while the cluster changes. Begin with `replanning.py`."""
