"""One rule: a condition on the degrees of configurations, and what several themes of rules count alike.

A rule takes columns of degrees [n] and a Setting, and returns a mask of the rows that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job.setting import Setting
from hardware.arrays import IntArray

Keep = NDArray[np.bool_]


Columns = Mapping[str, IntArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One condition that a configuration must meet.

    Attributes:
        name: Name by which studies switch the rule off and reports count it.
        needs: Names of the dimensions that the rule reads.
        keep: Function that returns a mask [n] of the rows that meet the rule.
        reason: Function that explains the rule with the numbers of a setting, for configurations that break it.
    """

    name: str
    needs: tuple[str, ...]
    keep: Callable[[Setting, Columns], Keep]
    reason: Callable[[Setting], str]


def replicas(c: Columns) -> IntArray:
    """Return the number of ranks that hold the same parameters without ZeRO [n]."""
    return np.asarray(c["dp"] * c["cp"] * c["up"])


def micro_batches(s: Setting, c: Columns) -> IntArray:
    """Return the micro-batches of a replica in a step [n]."""
    return np.asarray(s.job.global_batch_size // np.maximum(c["dp"] * c["mbs"], 1))


def expert_tensor(c: Columns) -> IntArray:
    """Return the tensor degree of experts [n]."""
    return np.where(c["expert_tp"] == 0, c["tp"], c["expert_tp"])


def joined(sizes: Sequence[int]) -> str:
    """Return sizes as words."""
    return " and ".join(str(size) for size in sizes)


def all_divide(sizes: Sequence[int], degree: IntArray) -> Keep:
    """Return whether a degree divides every size [n]."""
    return np.asarray(np.all([degree > 0, *(size % degree == 0 for size in sizes)], axis=0))


def own_shards(c: Columns) -> IntArray:
    """Return over how many replicas states are sharded, torchtitan's data_parallel_shard_degree; 1 without ZeRO [n]."""
    shards = np.where(c["dp_shard"] == 0, c["dp"], c["dp_shard"])
    return np.where(c["zero_stage"] == 0, 1, shards)
