"""Run trials: training steps, replayed measurements or simulations, in parallel on Ray.

Every backend has a folder: its `backend.py` keeps the contract in `trials/backend.py`, and its `keys.py` holds its keys
of a study file, which `registry.py` lists. Those that train share `training/`. Begin with the contract, and read
`on_ray/executor.py` for the pool of workers that runs backends. Failures come back as observations, never as
exceptions.
"""
