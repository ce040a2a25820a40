"""Upward ranks of operators: how much follows each of them (Topcuoglu et al. 2002, section 4.1).

The upward rank is the mean time of an operator and of the longest way from it to an end, transfers included, here times
the weight of its model.
"""

from __future__ import annotations

import numpy as np

from hardware.arrays import FloatArray
from tuner.planners.scheduling.problem import Workload
from tuner.planners.scheduling.tables import ScheduleTables


def by_rank(workload: Workload, tables: ScheduleTables) -> list[int]:
    """Return all operators, the one with the largest rank first; each stands after its predecessors."""
    rank_s = upward_ranks_s(workload, tables) * workload.weights[workload.model_of]
    # a predecessor has the larger rank; numbers settle ranks that are equal
    return sorted(range(workload.num_ops), key=lambda op: (-rank_s[op], op))


def upward_ranks_s(workload: Workload, tables: ScheduleTables) -> FloatArray:
    """Return the mean time from the start of each operator to the end of all that follows it [V]."""
    exec_s = np.ma.masked_invalid(workload.exec_s).mean(axis=1).filled(0.0)
    pairs = ~np.eye(workload.num_devices, dtype=np.bool_)
    ranks_s = np.zeros(workload.num_ops)
    for op in reversed(range(workload.num_ops)):
        onward_s = [0.0]
        for edge, to in tables.after[op]:
            between_s = np.ma.masked_invalid(tables.transfer_s[edge][pairs])
            sent_s = float(between_s.mean()) if between_s.count() else 0.0
            onward_s.append(sent_s + float(ranks_s[to]))
        ranks_s[op] = exec_s[op] + max(onward_s)
    return ranks_s
