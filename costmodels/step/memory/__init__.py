"""Predict the peak memory of a device in a step: `peak.py`; and which configurations may fit at all: `plausible.py`."""
