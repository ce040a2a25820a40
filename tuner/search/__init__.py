"""Choose the next trial from the posterior over all candidates.

Begin with `sampler.py`, the Optuna sampler, and `posterior.py`, which draws joint step times of all candidates.
`acquisition.py` picks a candidate from the draws (FlexParallel, sections 3.2 and 3.3).
"""
