"""The trace itself, with torch and transformers. Begin with `tracing.py`."""
