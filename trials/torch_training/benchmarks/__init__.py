"""Measure single operators and collectives on this machine's devices. Begin with `device.py`."""
