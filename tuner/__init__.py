"""Choose the next trials, run the study, and hold everything that a user touches.

Begin with `cli/main.py` for the commands and `run/loop.py` for the loop of one study. `search/sampler.py` is the Optuna
sampler that chooses the trials.
"""
