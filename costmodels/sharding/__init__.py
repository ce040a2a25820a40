"""Describe how the tensors of a training step are sharded over a mesh, and estimate the cost.

Begin with `graph.py` for the array IR and `plan.py` for sharding plans and their cost. `frontends` builds graphs from
models and programs. `exports` writes plans for frameworks.
"""
