"""What a recorded step communicated, and where that is not what the cost model makes of it.

The process groups tell kind, bytes and ranks of every call (rank_recording.py). Groups stand in the mesh of
costmodels/step/placement.py, so the distance of a group's neighbours and its size say to which dimension it belongs.
Several dimensions may share groups: with dp = 2 and ep = 2 alone, both have the same two ranks. Calls of one kind on
the same groups are therefore compared together, under the names of all collectives that the cost model has there.

Bytes are compared, of all calls of a step together. The number of calls is told beside them but decides nothing: the
cost model counts the weights of an outer module to some layer's, and Ulysses' four tensors as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.operators.layer_operators import OpKind
from costmodels.step.executions import collective_executions
from costmodels.step.placement import extents
from trials.torch_training.profiling.rank_recording import Issued, RankRecording

TOLERANCE = 0.03
"""Share of the predicted bytes that may come in addition or lack: FSDP2 fills shards up to equal rows, up to 1.5% of
tiny models' weights (measured)."""

ROUTED_TOLERANCE = 0.5
"""The same where the router decides who gets how much. The larger of what a rank sends and receives counts: under
random weights on average 13% above its even share with 2 ranks of experts, 24% with 4 (measured). A capacity factor
leaves out some."""

SHARE_WORTH_SAYING = 0.01
"""A difference below this share of all bytes of the step is not told: the loss, the norm of the gradients, the counts
of routed tokens, and the gradients of norms and biases that tp ranks add up under sequence parallelism, up to 0.9% of
tiny models' bytes (measured)."""

_DIMENSIONS = {"copies": "weight_copies", "tied": "ends"}
"""The dimension of a site whose name begins otherwise."""

_ROUTED = ("ep", "expert_tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """Calls of one kind on all groups of one form.

    Attributes:
        kind: Of the calls.
        stride: How far apart neighbours in a group are.
        size: Ranks in a group.
    """

    kind: OpKind
    stride: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The calls of a channel in one step of one pipeline: of one rank of every stage, the mean over a stage's ranks.

    Attributes:
        num_calls: How many.
        num_bytes: Their messages together, as hardware/collectives.py defines these [bytes].
        allowed_bytes: What may be more or less where these are predicted [bytes].
        sites: Names of the collectives that the cost model has there; none where these were recorded.
    """

    num_calls: float
    num_bytes: float
    allowed_bytes: float = 0.0
    sites: tuple[str, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            num_calls=self.num_calls + other.num_calls,
            num_bytes=self.num_bytes + other.num_bytes,
            allowed_bytes=self.allowed_bytes + other.allowed_bytes,
            sites=(*self.sites, *(site for site in other.sites if site not in self.sites)),
        )


NOTHING = Traffic(num_calls=0, num_bytes=0)


def predicted_calls(setting: Setting, config: ParallelConfig) -> dict[Channel, Traffic]:
    """What a step communicates by the cost model; experts get even shares."""
    grid = ConfigGrid.from_configs([config])
    forms = _forms(config)
    found: dict[Channel, Traffic] = {}
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
    """What a step communicated; of messages those that a rank sent.

    Args:
        recordings: Of all ranks.
        config: What they ran.
    """
    assert len(recordings) == config.num_devices, "every rank has a recording"
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


def call_mismatches(
    setting: Setting,
    config: ParallelConfig,
    recordings: Sequence[RankRecording],
) -> tuple[str, ...]:
    """Where a step communicated other bytes than the cost model predicts, one sentence each; empty if nowhere.

    Args:
        setting: Job, cluster and runtime of the ranks.
        config: What the ranks ran.
        recordings: Of all ranks.
    """
    predicted = predicted_calls(setting, config)
    recorded = recorded_calls(recordings, config)
    total_bytes = sum(traffic.num_bytes for traffic in recorded.values())
    found = []
    for channel in (*predicted, *(channel for channel in recorded if channel not in predicted)):
        expected, saw = predicted.get(channel, NOTHING), recorded.get(channel, NOTHING)
        if abs(saw.num_bytes - expected.num_bytes) > max(expected.allowed_bytes, SHARE_WORTH_SAYING * total_bytes):
            name = ", ".join(expected.sites) or _unpredicted(channel, config)
            found.append(f"{name}: predicted {_written(expected)}, saw {_written(saw)}")
    return tuple(found)


def _is_own(call: Issued, rank: int) -> bool:
    return call.ends is None or call.ends[0] == rank


def _forms(config: ParallelConfig) -> dict[str, tuple[int, int]]:
    """The distance of neighbours and the size of every dimension's groups."""
    each = extents(ConfigGrid.from_configs([config]))
    forms = {name: (int(stride[0]), int(size[0])) for name, (stride, size) in each.items()}
    return forms | {"ends": ((config.pp - 1) * forms["pp"][0], 2)}


def _unpredicted(channel: Channel, config: ParallelConfig) -> str:
    """What to call a channel on which the cost model has nothing: the dimensions of its groups, and the kind."""
    form = channel.stride, channel.size
    names: Iterable[str] = [name for name, own in _forms(config).items() if own == form]
    if channel.size == config.num_devices:
        names = ("world",)
    return f"{'/'.join(names) or f'groups of {channel.size}'}.{channel.kind}"


def _written(traffic: Traffic) -> str:
    if not traffic.num_bytes:
        return "nothing"
    num_calls = round(traffic.num_calls)
    return f"{_size(traffic.num_bytes)} in {num_calls} call{'s' if num_calls != 1 else ''}"


def _size(num_bytes: float) -> str:
    """In the unit that leaves a number below 1000."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
