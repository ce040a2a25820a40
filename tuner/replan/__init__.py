"""Plan which configuration to train with while the cluster changes. Begin with `replanning.py`."""
