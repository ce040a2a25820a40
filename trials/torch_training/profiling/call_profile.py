"""Comparison of a recorded step's communication with the cost model's prediction.

The process groups report kind, bytes and ranks of every call (rank_recording.py). Groups lie in the mesh of
costmodels/step/placement.py, so the distance of a group's neighbours and its size identify its dimension. Several
dimensions may share groups: with only dp = 2 and ep = 2, both consist of the same two ranks. Therefore calls of one
kind on the same groups are compared together, under the names of all collectives that the cost model has there.

The comparison uses the total bytes of a step's calls. The number of calls is reported, but does not count as a
difference: the cost model attributes an outer module's weights to some layer, and counts Ulysses' four tensors as one
call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from costmodels.blocks.operator import OpKind
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.executions import collective_executions
from costmodels.step.placement import extents
from trials.torch_training.profiling.rank_recording import Issued, RankRecording

TOLERANCE = 0.03
"""Tolerated deviation from the predicted bytes.

FSDP2 pads shards to equal rows, which adds up to 1.5% of a tiny model's weights (measured).
"""

ROUTED_TOLERANCE = 0.5
"""Tolerated deviation if the router decides the distribution of tokens.

The larger one of a rank's sent and received bytes counts. With random weights, it is on average 13% above the even
share with 2 expert parallel ranks, and 24% with 4 (measured). A capacity factor drops some tokens.
"""

SHARE_WORTH_SAYING = 0.01
"""Share of the step's bytes below which a difference is not reported.

It covers the loss, the gradient norm, the counts of routed tokens, and the gradients of norms and biases that tp ranks
add up under sequence parallelism: up to 0.9% of a tiny model's bytes (measured).
"""

_DIMENSIONS = {"copies": "weight_copies", "tied": "ends"}
"""Dimension of collectives whose names begin differently."""

_ROUTED = ("ep", "expert_tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """Calls of one kind on all groups of one shape.

    Attributes:
        kind: Kind of the calls.
        stride: Distance between neighbours in a group.
        size: Number of ranks in a group.
    """

    kind: OpKind
    stride: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Calls of a channel in one step of one pipeline, summed over the stages and averaged over the ranks of a stage.

    Attributes:
        num_calls: Number of calls.
        num_bytes: Total size of their messages, as hardware/collectives.py defines them [bytes].
        allowed_bytes: Tolerated deviation from predicted bytes [bytes].
        sites: Names of the predicted collectives; empty for recorded calls.
    """

    num_calls: float
    num_bytes: float
    allowed_bytes: float = 0.0
    sites: tuple[str, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sum of two traffics, with all their sites."""
        return Traffic(
            num_calls=self.num_calls + other.num_calls,
            num_bytes=self.num_bytes + other.num_bytes,
            allowed_bytes=self.allowed_bytes + other.allowed_bytes,
            sites=(*self.sites, *(site for site in other.sites if site not in self.sites)),
        )


NOTHING = Traffic(num_calls=0, num_bytes=0)


def predicted_calls(setting: Setting, config: ParallelConfig) -> dict[Channel, Traffic]:
    """Return the traffic of a step by the cost model, with even shares for all experts."""
    grid = ConfigGrid.from_configs([config])
    forms = _find_forms(config)
    found: dict[Channel, Traffic] = {}
    # The recorded bytes of routed tokens are compared with even shares, within ROUTED_TOLERANCE.
    balanced = replace(setting, runtime=replace(setting.runtime, expert_imbalance=0.0))
    for collective, _, count in collective_executions(balanced, grid):
        dimension = collective.name.split(".")[0]
        stride, size = forms[_DIMENSIONS.get(dimension, dimension)]
        channel = Channel(kind=collective.kind, stride=stride, size=size)
        num_bytes = float((count * collective.wire_bytes).sum()) * collective.network_efficiency
        traffic = Traffic(
            num_calls=float((count * collective.messages).sum()),
            num_bytes=num_bytes,
            allowed_bytes=num_bytes * (ROUTED_TOLERANCE if dimension in _ROUTED else TOLERANCE),
            sites=(collective.name,),
        )
        found[channel] = found.get(channel, NOTHING) + traffic
    return found


def recorded_calls(recordings: Sequence[RankRecording], config: ParallelConfig) -> dict[Channel, Traffic]:
    """Return the recorded traffic of a step of all ranks; messages count at their sender."""
    assert len(recordings) == config.num_devices, "every rank needs a recording"
    # Mean over the ranks of each stage, summed over the pp stages.
    part = config.pp / config.num_devices
    found: dict[Channel, Traffic] = {}
    for recording in recordings:
        for event in recording.events:
            if isinstance(event, Issued) and len(event.group.ranks) > 1 and _is_own(event, recording.rank):
                first, second, *_ = ranks = event.group.ranks
                channel = Channel(kind=event.kind, stride=second - first, size=len(ranks))
                traffic = Traffic(num_calls=part, num_bytes=part * event.message_bytes)
                found[channel] = found.get(channel, NOTHING) + traffic
    return found


def call_mismatches(setting: Setting, config: ParallelConfig, recordings: Sequence[RankRecording]) -> tuple[str, ...]:
    """Return the differences between recorded and predicted bytes, one sentence each; empty if they agree."""
    predicted = predicted_calls(setting, config)
    recorded = recorded_calls(recordings, config)
    total_bytes = sum(traffic.num_bytes for traffic in recorded.values())
    found = []
    for channel in (*predicted, *(channel for channel in recorded if channel not in predicted)):
        expected, saw = predicted.get(channel, NOTHING), recorded.get(channel, NOTHING)
        # Report a difference only if it exceeds both the channel's tolerance and a share of the whole step.
        if abs(saw.num_bytes - expected.num_bytes) > max(expected.allowed_bytes, SHARE_WORTH_SAYING * total_bytes):
            name = ", ".join(expected.sites) or _name_unpredicted(channel, config)
            found.append(f"{name}: predicted {_describe(expected)}, saw {_describe(saw)}")
    return tuple(found)


def _is_own(call: Issued, rank: int) -> bool:
    return call.ends is None or call.ends[0] == rank


def _find_forms(config: ParallelConfig) -> dict[str, tuple[int, int]]:
    """Return the distance of neighbours and the size of every dimension's groups."""
    each = extents(ConfigGrid.from_configs([config]))
    forms = {name: (int(stride[0]), int(size[0])) for name, (stride, size) in each.items()}
    return forms | {"ends": ((config.pp - 1) * forms["pp"][0], 2)}


def _name_unpredicted(channel: Channel, config: ParallelConfig) -> str:
    """Return a name for a channel without prediction: the dimensions of its groups, and the kind."""
    form = channel.stride, channel.size
    names: Iterable[str] = [name for name, own in _find_forms(config).items() if own == form]
    if channel.size == config.num_devices:
        names = ("world",)
    return f"{'/'.join(names) or f'groups of {channel.size}'}.{channel.kind}"


def _describe(traffic: Traffic) -> str:
    if not traffic.num_bytes:
        return "nothing"
    num_calls = round(traffic.num_calls)
    return f"{_format_bytes(traffic.num_bytes)} in {num_calls} call{'s' if num_calls != 1 else ''}"


def _format_bytes(num_bytes: float) -> str:
    """Format a size in the unit that leaves a number below 1000."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
