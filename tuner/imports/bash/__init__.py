"""Read launch scripts without running them. Begin with `script.py`."""
