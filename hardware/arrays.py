"""Array types that every package uses in annotations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
"""Double precision: times, bytes and everything that is computed from them."""

NarrowArray = NDArray[np.float32]
"""Single precision: large tables of joint draws."""

IntArray = NDArray[np.int64]
"""Whole numbers: degrees, counts and positions."""
