"""Graphs of training steps: a transformer's from its sizes, and those of JAX programs."""
