"""Normal distribution function of arrays.

`scipy.special.ndtr` gives the same values. Importing scipy.special takes a fifth of the time in which
`meshtune rank` answers, and this function is all that its path needs of it.
"""

from __future__ import annotations

import math

import numpy as np

from hardware.arrays import FloatArray


def normal_cdf(standardised: FloatArray) -> FloatArray:
    """Return the probability that a standard normal variable is at most each value [n]."""
    # Phi(x) = erfc(-x / sqrt(2)) / 2, accurate in both tails
    below = map(math.erfc, (standardised * -math.sqrt(0.5)).tolist())
    return 0.5 * np.fromiter(below, dtype=np.float64, count=len(standardised))
