"""Knobs: settings beside the parallel layout that people tune by hand, such as flags and environment variables.

Begin with `knob.py`, a knob with its values. `places.py` says where a value goes: flags, variables, keys of files.
`condition.py` reads the conditions under which a knob has an effect.
"""
