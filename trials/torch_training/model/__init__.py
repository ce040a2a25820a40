"""Train a transformer with torch under one configuration. Begin with `stage_model.py`."""
