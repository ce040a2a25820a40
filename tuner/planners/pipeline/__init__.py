"""Divide layers and micro-batches among unlike stages and replicas. Begin with `stages.py`."""
