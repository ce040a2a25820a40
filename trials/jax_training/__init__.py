"""Backend `jax`: trials run a jitted training step, sharded by the candidate's plan. Begin with `backend.py`.

`rank_program.py` runs in the processes of a trial, and `model/` holds the step.
"""
