"""Predictions of step times alone."""

import numpy as np

from costmodels.step.error_models import MemoryErrorModel
from costmodels.step.memory.peak import MEMORY_PARTS
from costmodels.surrogates.predicted import Predicted


def predicted_times(step_time_s, features):
    """Return candidates of which only step times [n] are predicted, with features [n, d] to tell them apart.

    Memory is not predicted: every candidate is assumed to fit.
    """
    count = len(step_time_s)
    return Predicted(
        step_time_s=np.asarray(step_time_s, dtype=np.float64),
        constant_effects=np.zeros((count, 0)),
        features=np.asarray(features, dtype=np.float64),
        needed_bytes=np.ones(count),
        capacity_bytes=np.full(count, np.inf),
        peak_bytes=np.ones(count),
        memory_shares=np.zeros((count, len(MEMORY_PARTS))),
        memory_error=MemoryErrorModel(scale=0.0),
        stall_variance=np.zeros(count),
    )
