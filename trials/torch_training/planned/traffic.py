"""Comparison of what the ranks of a planned step send with the plan's list of collectives, byte for byte.

Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.exports.layout_changes import Axes
from costmodels.sharding.plan import Plan, cost_of
from trials.torch_training.profiling.rank_recording import Issued, RankRecording

Traffic = Mapping[tuple[OpKind, tuple[int, ...]], float]
"""Sum of the messages of a rank in a step, by the kind of the calls and the ranks of their group [bytes]."""


def members(mesh: DeviceMesh, axes: Axes, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from a rank along some axes only, in the order of the mesh."""
    ranks = np.arange(mesh.num_devices).reshape(mesh.sizes)
    place = np.unravel_index(rank, mesh.sizes)
    picked = ranks[tuple(slice(None) if axis in axes else place[axis] for axis in range(len(mesh.sizes)))]
    return tuple(picked.flatten().tolist())


def planned_traffic(plan: Plan, rank: int) -> Traffic:
    """Return what a rank sends in a step by the plan's list."""
    found: dict[tuple[OpKind, tuple[int, ...]], float] = defaultdict(float)
    for each in cost_of(plan).collectives:
        found[each.move.kind, members(plan.mesh, each.move.axes, rank)] += each.times * each.move.message_bytes
    return {channel: num_bytes for channel, num_bytes in found.items() if num_bytes}


def recorded_traffic(recording: RankRecording) -> Traffic:
    """Return what a rank has sent in a step, as it was counted at its calls."""
    found: Counter[tuple[OpKind, tuple[int, ...]]] = Counter()
    for event in recording.events:
        if isinstance(event, Issued):
            found[event.kind, event.group.ranks] += event.message_bytes
    return found


def traffic_mismatches(plan: Plan, recordings: Sequence[RankRecording]) -> tuple[str, ...]:
    """Return the differences between the plan's list and what any rank has sent, one sentence each."""
    found: dict[str, None] = {}
    for recording in recordings:
        planned, sent = planned_traffic(plan, recording.rank), recorded_traffic(recording)
        for kind, ranks in sorted(planned.keys() | sent.keys()):
            expected, saw = planned.get((kind, ranks), 0.0), sent.get((kind, ranks), 0.0)
            if expected != saw:
                name = f"{_axes_in_words(plan.mesh, ranks)}.{kind}"
                found[f"{name}: the plan has {expected:,.0f} bytes, sent {saw:,.0f} bytes"] = None
    return tuple(found)


def _axes_in_words(mesh: DeviceMesh, ranks: tuple[int, ...]) -> str:
    """Return the axes along which the ranks of a group differ."""
    places = np.array(np.unravel_index(np.array(ranks), mesh.sizes))
    return "*".join(name for name, along in zip(mesh.names, places, strict=True) if len(set(along.tolist())) > 1)
