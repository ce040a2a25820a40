"""JAX as the framework of trials: one process per host of the cluster, with its devices as virtual devices of a CPU.

All processes run on one machine, and are connected by gloo. The virtual clock is the CPU time of one device's share of
the step, alone, and the time of its collectives on the cluster's links.
"""

from __future__ import annotations

from collections.abc import Sequence

from hardware.cluster import Cluster
from trials.ranks.contract import RankSetup
from trials.training.framework import Framework, compare_nothing
from trials.training.messages import StepTaken

JAX_RANKS = RankSetup(
    modules=("jax", "jax.experimental.multihost_utils", "trials.jax_training.rank_program"),
    environment=(("JAX_PLATFORMS", "cpu"),),
)
"""Setup that imports JAX once for all processes; none of its backends starts before they are forked."""


def _virtual_step(taken: Sequence[StepTaken], cluster: Cluster) -> float:  # noqa: ARG001 # the contract's
    """Return the time that every process tells, which includes that of the cluster's links."""
    step_time_s: float = taken[0].detail
    return step_time_s


JAX = Framework(
    name="jax",
    title="JAX",
    ranks=JAX_RANKS,
    program="trials.jax_training.rank_program:run_rank",
    lost_peer=("Connection closed by peer", "Connection reset", "Broken pipe", "UNAVAILABLE", "DEADLINE_EXCEEDED"),
    virtual_step=_virtual_step,
    compare=compare_nothing,
    devices=("cpu",),
    has_rank_per_host=True,
    limits_memory=False,
    accumulates=True,
)
"""JAX."""
