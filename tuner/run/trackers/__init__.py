"""Trackers of experiments that are told of each ended trial (`search.callbacks`). `following.py` is the entry point."""
