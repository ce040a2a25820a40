"""Simulate trials: our cost model, made wrong in ways that the tuner does not know."""
