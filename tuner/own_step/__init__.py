"""Studies of a user's own training step, which a factory returns, in place of a model of the catalog.

Begin with `plans.py`: the candidates are meshes `data` x `model` of all devices, as the degrees `dp` and `tp`, each
with its plans by hand and the planner's. `predictions.py` gives them the forms that the search works with, `setting.py`
refuses what needs a model of the catalog, and `jax_program.py` writes the answer as a program.
"""
