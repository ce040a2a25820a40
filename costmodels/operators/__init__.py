"""Operators of a layer with their shapes, and the time of each one alone on a device.

Begin with `layer_operators.py` for the operators and `kernels.py` for their times (FlexParallel, section 3.1).
"""
