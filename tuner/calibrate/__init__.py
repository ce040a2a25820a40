"""Calibrate: fit a profile to measured steps, or measure the operators of this machine's device."""
