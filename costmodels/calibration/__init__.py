"""Fit runtime profiles to measured runs, and measure how well the cost model predicts them.

Begin with `measured_runs.py`, which reads the runs, and `fitting.py`, which fits the constants. `fidelity.py` quotes
the errors.
"""
