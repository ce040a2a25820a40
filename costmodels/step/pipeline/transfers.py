"""Transfers between the stages of a pipeline: their duration, and the part of it that is exposed.

Each micro-batch's activations go to the next stage, and their gradients come back.

Letters: n or k configurations, c stages, u kinds of boundaries between stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import Collective, residual_tokens
from costmodels.step.pipeline.schedules import of_round
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
        forward = forward + job.element_bytes * job.row_tokens(grid.mbs) ** 2 / efficiency
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hops:
    """Time of the messages between neighbouring stages, for n configurations.

    Attributes:
        forward_s: Time to hand one micro-batch on, over each kind of boundary [s], [u, n].
        backward_s: Time to hand its gradients back, over each kind of boundary [s], [u, n].
        begin_s: Time until both messages of one chunk begin [s], [n].
        leaves_domain: Whether messages over each kind of boundary go from domain to domain [u, n].
        of_boundary: Kind of the boundary behind each stage but the last [pp - 1], by the number of stages.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    begin_s: FloatArray
    leaves_domain: NDArray[np.bool_]
    of_boundary: Mapping[int, IntArray]

    def take(self, index: IntArray) -> Hops:
        """Select the configurations at the positions `index`."""
        return replace(
            self,
            forward_s=self.forward_s.take(index, axis=1),
            backward_s=self.backward_s.take(index, axis=1),
            begin_s=self.begin_s.take(index),
            leaves_domain=self.leaves_domain.take(index, axis=1),
        )

    def wait_s(
        self, runtime: RuntimeProfile, pp: int, vpp: IntArray, forward_s: FloatArray, backward_s: FloatArray
    ) -> FloatArray:
        """Compute for how long each micro-batch keeps every stage waiting in the steady state [s], [pp, k].

        A stage without chunks waits for one exchange with each of its neighbours: it sends activations and receives
        gradients at once, on links with two directions (Megatron-LM, send_forward_recv_backward).

        With chunks a stage waits for every message, or, where messages run beside compute, until each begins. A
        message forward then has the time of the backward pass that comes between, and a message back that of a forward
        pass. What takes longer delays the next chunk of the same micro-batch on all stages, except behind the last
        chunk. And no stage can be faster than its links.

        Args:
            runtime: Profile of the runtime.
            pp: Number of stages of all configurations.
            vpp: Chunks per stage [k].
            forward_s: Time of one micro-batch's forward passes on each stage [s], [pp, k].
            backward_s: Time of one micro-batch's backward passes on each stage [s], [pp, k].
        """
        if pp == 1:
            return np.zeros(forward_s.shape)
        boundaries = self.of_boundary[pp]
        exchange = np.maximum(self.forward_s, self.backward_s)[boundaries]
        # the first and the last stage have no neighbour on one side
        none = np.zeros((1, len(vpp)))
        plain = np.concatenate([none, exchange]) + np.concatenate([exchange, none])
        if (vpp == 1).all():
            return np.asarray(plain)
        both = (self.forward_s + self.backward_s)[boundaries].max(axis=0)
        if not runtime.overlaps_p2p:
            return np.asarray(np.where(vpp == 1, plain, vpp * both))
        hop_s = self.ring_s(pp)
        stage_s = forward_s + backward_s
        pace_s = stage_s.max(axis=0)
        late_s = [
            vpp * hop + passes_s.mean(axis=0) - pace_s
            for hop, passes_s in zip(hop_s, (forward_s, backward_s), strict=True)
        ]
        late = (vpp - 1) / vpp * np.maximum(*late_s)
        waits = np.maximum(np.maximum(vpp * self.begin_s, vpp * both - stage_s), late)
        return np.asarray(np.where(vpp == 1, plain, waits))

    def ring_s(self, pp: int) -> FloatArray:
        """Compute the mean time of a message forward, and of one back, on their way through all stages [s], [2, k]."""
        boundaries = self.of_boundary[pp]
        # the message from the last stage to the first one's next chunk takes as long as the longest
        return np.stack(
            [(hop_s[boundaries].sum(axis=0) + hop_s.max(axis=0)) / pp for hop_s in (self.forward_s, self.backward_s)]
        )

    def between_s(self, pp: int) -> tuple[FloatArray, FloatArray]:
        """Return the time of a message over every boundary, forward and back [s], each [pp - 1, k]."""
        boundaries = self.of_boundary[pp]
        return self.forward_s[boundaries], self.backward_s[boundaries]

    def ring_hops(self, pp: int) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Return the messages from each stage to the next one, and then those to the one before, all [2 * pp, k].

        The first result is the time of each [s], the second whether it goes from domain to domain. The way between the
        last stage and the first one is taken to be as long as the longest.
        """
        boundaries = self.of_boundary[pp]

        def both_ways(forward: NDArray[Any], backward: NDArray[Any]) -> NDArray[Any]:
            longest = [kinds.max(axis=0, keepdims=True) for kinds in (forward, backward)]
            return np.concatenate([forward[boundaries], *longest, backward[boundaries]])

        return both_ways(self.forward_s, self.backward_s), both_ways(self.leaves_domain, self.leaves_domain)

    def rings_s(
        self,
        runtime: RuntimeProfile,
        pp: int,
        vpp: IntArray,
        num_micro_batches: IntArray,
        forward_s: FloatArray,
        backward_s: FloatArray,
    ) -> FloatArray:
        """Compute the wait for messages on their ways through all stages while the pipeline fills and empties [s], [k].

        Behind each chunk but the last, messages go on to the first stage. While the pipeline fills, nothing runs beside
        them, because all passes are forward, and while it empties all are backward.
        """
        if pp == 1 or not runtime.overlaps_p2p or (vpp == 1).all():
            return np.zeros(len(vpp))
        # a round of more micro-batches than stages leaves time for the way back to the first stage
        spare = np.maximum(of_round(num_micro_batches, pp) - pp, 0)
        rings = [
            np.maximum(pp * hop_s - spare * passes_s.mean(axis=0) / vpp, 0.0)
            for hop_s, passes_s in zip(self.ring_s(pp), (forward_s, backward_s), strict=True)
        ]
        return np.asarray((vpp - 1) * np.sum(rings, axis=0))


def hops_of(setting: Setting, grid: ConfigGrid, groups: Groups, collective_time: CollectiveTime = collective_s) -> Hops:
    """Compute the time of the messages between all stages."""
    links = setting.cluster.stage_links(grid.tp * grid.up * grid.cp * grid.dp)
    by_phase: dict[Phase, list[FloatArray]] = {phase: [] for phase in Phase}
    begin_s = np.zeros(len(grid))
    for kind in links.kinds:
        collectives = transfer_collectives(setting.job, setting.runtime, grid, replace(groups, pp=kind))
        for phase, found in by_phase.items():
            each = hop_collectives(setting.runtime, grid, phase)
            found.append(np.sum([count * collective_time(collectives[name]) for name, count in each], axis=0))
        begin_s = np.maximum(begin_s, 2 * collective_time(collectives["pp.start"]))
    return Hops(
        forward_s=np.stack(by_phase[Phase.FORWARD]),
        backward_s=np.stack(by_phase[Phase.BACKWARD]),
        begin_s=begin_s,
        leaves_domain=np.stack([np.broadcast_to(kind.domains > 1, len(grid)) for kind in links.kinds]),
        of_boundary=links.of_boundary,
    )


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
