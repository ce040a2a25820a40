"""Search over pairs of a layout and the values of knobs, without enumerating the pairs.

Begin with `knob_choices.py`, what the sampler chooses from. `knob_space.py` holds the knobs with the priors of their
effects, `pairs.py` the pairs that were tried or are worth a trial, and `knob_posterior.py` the draws over both.
"""
