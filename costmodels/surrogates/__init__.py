"""Correct the predictions by what trials measured, and draw joint samples of the corrected values.

Begin with `surrogate.py` for whole steps and `operator_surrogate.py` for operators (FlexParallel, section 3.1). Both
rest on `gaussian_process.py`.
"""
