"""Optimizers that a job may have: what each keeps of a model's parts, what its update moves, and its names.

Begin with `contract.py`, which says what an optimizer answers, and `registry.py`, which names them all. A further one
is an entry of the registry, or a file beside the others if none of their kinds fits, and a name in `OptimizerName`.
What its update computes stands with the library that runs it: `trials/torch_training/optimizers.py` and
`trials/jax_training/model/optimizers.py`. The time of its passes is in `costmodels/step/weights`.
"""
