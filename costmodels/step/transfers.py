"""Transfers between the stages of a pipeline: their duration, and the part of it that is exposed.

Each micro-batch's activations go to the next stage, and their gradients come back.

Letters: n configurations.
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import Collective, OpKind, Phase, residual_tokens
from costmodels.step.placement import Groups
from hardware.arrays import FloatArray, IntArray


def transfer_collectives(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, groups: Groups
) -> dict[str, Collective]:
    """Return the collectives of one hop, by their names, for every configuration [n].

    With sequence parallelism each tp rank sends its own share (Narayanan et al. 2021, section 4.1, scatter/gather). A
    runtime that scatters without it has to gather the message at the receiver. `pp.activations` goes forward if it
    differs from the message that comes back; `pp.send_recv` is the rest.
    """
    efficiency = runtime.network_efficiency
    message = job.element_bytes * residual_tokens(job, grid) * job.model.hidden_size / efficiency
    gather = {}
    # Without sequence parallelism every tp rank holds the whole message and may send a share of it.
    share = np.where(_is_whole(grid), message / grid.tp, message)
    forward = share if _scatters(runtime, Phase.FORWARD) else message
    if runtime.sends_mask:
        forward = forward + job.element_bytes * job.sequence_length**2 / efficiency
    if _scatters(runtime, Phase.FORWARD):
        gather["pp.all_gather"] = Collective(
            name="pp.all_gather",
            kind=OpKind.ALL_GATHER,
            wire_bytes=message,
            network_efficiency=efficiency,
            group=groups.tp,
        )
    sent = {"pp.send_recv": share if _scatters(runtime, Phase.BACKWARD) else message, "pp.start": np.zeros(1)}
    if _is_lopsided(runtime):
        sent["pp.activations"] = forward
    return gather | {
        name: Collective(
            name=name, kind=OpKind.SEND_RECV, wire_bytes=wire_bytes, network_efficiency=efficiency, group=groups.pp
        )
        for name, wire_bytes in sent.items()
    }


def transfer_executions(
    runtime: RuntimeProfile, grid: ConfigGrid, num_micro_batches: IntArray
) -> tuple[tuple[str, Phase, FloatArray], ...]:
    """Count the executions of each transfer in one step on one pipeline: name, phase and number [n].

    `pp.start` is no execution of its own: it is the remaining cost of a hidden transfer.
    """
    hops = np.where(grid.pp > 1, (grid.pp * grid.vpp - 1.0) * num_micro_batches, 0.0)
    return tuple(
        (name, phase, hops * count) for phase in Phase for name, count in hop_collectives(runtime, grid, phase)
    )


def hop_collectives(runtime: RuntimeProfile, grid: ConfigGrid, phase: Phase) -> tuple[tuple[str, FloatArray], ...]:
    """Return the collectives that hand one micro-batch on, or its gradients back: name and number of executions [n]."""
    gathers = _is_whole(grid).astype(np.float64)
    sends = ((_hop_name(runtime, phase), np.ones(len(grid))),)
    return (*sends, ("pp.all_gather", gathers)) if _scatters(runtime, phase) else sends


def exposed_transfers_s(
    job: TrainingJob,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    groups: Groups,
    num_micro_batches: IntArray,
    collective_time: CollectiveTime = collective_s,
) -> FloatArray:
    """Compute the time that a step waits for transfers between stages [s], [n]."""
    collectives = transfer_collectives(job, runtime, grid, groups)
    total = np.zeros(len(grid))
    for phase in Phase:
        each = hop_collectives(runtime, grid, phase)
        hop = np.sum([count * collective_time(collectives[name]) for name, count in each], axis=0)
        # Not overlapped, each of the m + pp - 1 slots of the pipeline waits for one hop per chunk.
        exposed = hop * (num_micro_batches + grid.pp - 1) * grid.vpp
        if runtime.overlaps_p2p:
            # In the steady state transfers run beside compute, but each chunk still waits for its message to begin.
            beginnings = collective_time(collectives["pp.start"]) * num_micro_batches * grid.vpp
            exposed = np.where(grid.vpp > 1, hop * (grid.pp - 1) + beginnings, exposed)
        total += exposed
    return np.where(grid.pp > 1, total, 0.0)


def _hop_name(runtime: RuntimeProfile, phase: Phase) -> str:
    return "pp.activations" if phase == Phase.FORWARD and _is_lopsided(runtime) else "pp.send_recv"


def _is_lopsided(runtime: RuntimeProfile) -> bool:
    """Return whether other bytes go forward than come back."""
    return runtime.sends_mask or runtime.scatters_p2p == "activations"


def _scatters(runtime: RuntimeProfile, phase: Phase) -> bool:
    """Return whether tp ranks send only their share of the message of this pass."""
    return runtime.scatters_p2p is True or (phase == Phase.FORWARD and runtime.scatters_p2p == "activations")


def _is_whole(grid: ConfigGrid) -> np.ndarray:
    """Return whether every tp rank holds the whole message [n]."""
    return np.asarray(~grid.sequence_parallel & (grid.tp > 1))
