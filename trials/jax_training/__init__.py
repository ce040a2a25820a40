"""Backend `jax`: trials run a jitted training step, sharded by the candidate's plan. Begin with `framework.py`.

`rank_program.py` runs in the processes of a trial, and `model/` holds the step. The backends are those of
`trials/training/planned.py`.
"""
