"""Predict the step time and the memory of parallelism configurations.

Most functions are pure and take many configurations at once as arrays. The rooms build on each other: `job`, then
`operators`, `step`, `simulator`, `surrogates`. Begin with `step/step_time.py`, which adds up the time of one step.
"""
