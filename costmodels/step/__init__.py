"""Predict the time and the memory of one optimizer step in closed form.

Begin with `step_time.py`, which adds up the terms (FlexParallel, equation 1), and `memory/peak.py`, which finds the
peak of every stage. Every other module computes one of the terms.
"""
