"""Studies of a user's own training step, which a factory returns, in place of a model of the catalog.

Begin with `plans.py`: the candidates are meshes `data` x `model` of all devices, as the degrees `dp` and `tp`, each
with its plans by hand and the planner's. `tracing.py` reads the step, in JAX or in torch, `predictions.py` gives its
candidates the forms that the search works with, and `setting.py` refuses what needs a model of the catalog.
`programs.py` writes the answer as a program, by `jax_program.py` or `torch_program.py`.
"""
