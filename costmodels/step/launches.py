"""Host time to launch operators and to issue collectives, and the part of it that a step waits for.

Letters: c kinds of stages, k configurations, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.blocks.operator import Family, Operator, OpKind
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.step.placement import Groups
from hardware.arrays import FloatArray, IntArray

CAPTURED: Mapping[str, tuple[Family, ...]] = {
    "none": (),
    "attention": (Family.MIXER,),
    "router": (),
    "attention+router": (Family.MIXER,),
    "attention+mlp": (Family.MIXER, Family.MLP),
}
"""Families of the blocks that are whole in the captured graphs of a layer, by `RuntimeProfile.captured_blocks`. The
launch of a block's norm stands for that of its graph."""


SCORED_OPERATORS, SORTED_OPERATORS = 10.0, 10.0
"""Operators of a framework in each pass of a layer of experts beside those of layer_operators.py: those that score
tokens, with their losses and counts, and those that sort tokens and probabilities before and after each exchange. Both
together take what Megatron-LM's functional tests of tiny models with experts take longer than those without
(`python -m benchmarks.calibration.host_time`); that each is a half is assumed."""


def launches_of(runtime: RuntimeProfile, operator: Operator) -> float:
    """Return the number of operators that the host launches for one pass of an operator.

    Dispatchers that send a token once, DeepEP's and HybridEP's, sort it in the kernel that sends it.
    """
    if not is_launched(runtime, operator):
        return 0.0
    if operator.family is not Family.EXPERTS:
        return 1.0
    scores = operator.role in ("router", "router.data_gradient")
    sorts = operator.role in ("permute", "permute.gradient") and not runtime.deduplicates_tokens
    return 1.0 + SCORED_OPERATORS * scores + SORTED_OPERATORS * sorts


def is_launched(runtime: RuntimeProfile, operator: Operator) -> bool:
    """Return whether the host launches an operator by itself, and not as a part of a captured graph."""
    is_router = operator.family is Family.EXPERTS and operator.role.startswith("router")
    is_captured = captures_block(runtime, operator.family) or (is_router and "router" in runtime.captured_blocks)
    return operator.kind == OpKind.NORM or not is_captured


def captures_block(runtime: RuntimeProfile, family: Family) -> bool:
    """Return whether captured graphs hold the blocks of a family, with their collectives."""
    return family in CAPTURED[runtime.captured_blocks]


def issue_s(runtime: RuntimeProfile, weights: ConfigGrid, groups: Groups) -> FloatArray:
    """Return the host time to issue one collective inside a layer [w].

    It is longer while transfers between domains are pending.
    """
    is_pending = (groups.pp.domains > 1) & (weights.tp > 1)
    return np.asarray(runtime.collective_launch_s + np.where(is_pending, weights.tp * runtime.pending_transfer_s, 0.0))


def hops_launch_s(runtime: RuntimeProfile, pp: int, vpp: IntArray) -> FloatArray:
    """Return the host time to hand one micro-batch on, both ways, through every chunk of a stage [k]."""
    return np.asarray(2 * vpp * (runtime.hop_launch_s if pp > 1 else 0.0), dtype=np.float64)


def beyond_device_s(device_s: FloatArray, host_s: FloatArray) -> FloatArray:
    """Return the time that a stage takes beyond its device's time because the host launches too slowly [c, k].

    Launches run ahead of the device, so a stage takes the longer of host and device time (the guides of Megatron-Core
    and PyTorch call a step launch-bound if the host sets its pace). The two times are joined by their norm of order
    four. A large order would be their maximum, but parts of a layer wait for the host although the whole does not
    (assumed).
    """
    # norm of order four: (device^4 + host^4)^(1/4)
    fourth_power = np.square(np.square(device_s)) + np.square(np.square(host_s))
    return np.asarray(np.sqrt(np.sqrt(fourth_power)) - device_s)
