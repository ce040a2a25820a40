"""Training step of the study's model in JAX, sharded by a plan. Begin with `sharded_step.py`."""
