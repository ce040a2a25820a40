"""The operators that a profile of one step shows, and where they differ from those of costmodels/operators/.

Collectives are left out: a trace of gloo tells no sizes, so the process groups themselves do (call_profile.py). What
work on weights and gradients between the products takes (copies of FSDP, sums over micro-batches, clipping, the
optimizer) is no operator either; costmodels/step/weight_passes.py and weight_traffic.py are about that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import Phase
from costmodels.step.executions import operator_executions
from trials.backend import OperatorSample

SHARE_WORTH_SAYING = 0.02
"""Unexplained work below this share of its pass is not told one by one."""

_ROUTED = ("moe_mlp.permute", "moe_mlp.up", "moe_mlp.activation", "moe_mlp.down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unexplained:
    """Computing in a forward or backward pass that belongs to no operator.

    Attributes:
        phase: The pass.
        name: What torch calls it, for example `aten::copy_`.
        time_s: All of it in one step [s].
    """

    phase: Phase
    name: str
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """One step of one rank.

    Attributes:
        samples: One per operator, or several if it has had several shapes; `count` is this rank's.
        forward_s: What the operators of the forward pass take, recomputed ones included [s].
        backward_s: What those of the backward pass take [s].
        unexplained: What else the passes compute.
    """

    samples: tuple[OperatorSample, ...]
    forward_s: float
    backward_s: float
    unexplained: tuple[Unexplained, ...]

    def explained_s(self, phase: Phase) -> float:
        """What the operators of a pass take [s]."""
        return self.forward_s if phase == Phase.FORWARD else self.backward_s


def is_routed(name: str) -> bool:
    """Whether the router decides how many rows an operator has.

    What the cost model predicts of such a shape is the mean over the ranks.
    """
    return name.startswith(_ROUTED)


def merged(samples: Iterable[OperatorSample], *, by_shape: bool) -> OperatorSample:
    """One sample for all executions of an operator: the median of times, and the mean of shapes if they may differ.

    Args:
        samples: Each stands for its `count` executions.
        by_shape: Whether all have one shape.
    """
    samples = tuple(samples)
    count = sum(sample.count for sample in samples)
    shape = samples[0].shape
    if not by_shape:
        columns = zip(*(sample.shape for sample in samples), strict=True)
        shape = tuple(
            math.fsum(sample.count * size for sample, size in zip(samples, column, strict=True)) / count
            for column in columns
        )
    times_s = [sample.time_s for sample in samples for _ in range(sample.count)]
    return replace(samples[0], shape=shape, time_s=statistics.median(times_s), count=count)


def of_pipeline(samples: Sequence[Iterable[OperatorSample]], config: ParallelConfig) -> tuple[OperatorSample, ...]:
    """The operators of one step on one pipeline, as `costmodels.step.executions.operator_executions` counts them.

    Counts are those of the first pipeline, added up over its stages; times are medians over all ranks, and so are
    shapes that the router decides their means.

    Args:
        samples: Those of each rank, by its number.
        config: What the ranks ran.
    """
    assert len(samples) == config.num_devices, "every rank has a profile"
    ranks_per_stage = config.num_devices // config.pp
    found: dict[tuple[str, tuple[float, ...]], list[OperatorSample]] = defaultdict(list)
    counts: dict[tuple[str, tuple[float, ...]], int] = defaultdict(int)
    for rank, own in enumerate(samples):
        for sample in own:
            key = sample.name, () if is_routed(sample.name) else sample.shape
            found[key].append(sample)
            counts[key] += sample.count if rank % ranks_per_stage == 0 else 0
    return tuple(
        replace(merged(each, by_shape=bool(key[1])), count=counts[key]) for key, each in found.items() if counts[key]
    )


def unexplained_share(profiles: Iterable[RankProfile], phase: Phase) -> float:
    """The share of the time that a pass computes which no operator explains, all ranks together."""
    unexplained_s, explained_s = 0.0, 0.0
    for profile in profiles:
        unexplained_s += sum(other.time_s for other in profile.unexplained if other.phase == phase)
        explained_s += profile.explained_s(phase)
    return unexplained_s / (unexplained_s + explained_s) if unexplained_s else 0.0


def mismatches(
    job: TrainingJob, runtime: RuntimeProfile, config: ParallelConfig, profiles: Sequence[RankProfile]
) -> tuple[str, ...]:
    """Where a step was not what the cost model makes of it, one sentence each; empty if it was.

    Args:
        job: What was trained.
        runtime: The framework as the cost model knows it.
        config: What the ranks ran.
        profiles: Of each rank, by its number.
    """
    grid = ConfigGrid.from_configs([config])
    predicted = {
        operator.name: (round(float(count[0])), tuple(operator.shape[0].tolist()))
        for operator, count in operator_executions(job, runtime, grid)
        if count[0]
    }
    seen: dict[str, list[OperatorSample]] = defaultdict(list)
    for sample in of_pipeline([profile.samples for profile in profiles], config):
        seen[sample.name].append(sample)
    found = []
    for name in (*predicted, *(name for name in seen if name not in predicted)):
        count, shape = predicted.get(name, (0, None))
        saw = sum(sample.count for sample in seen[name])
        if count != saw:
            found.append(f"{name}: predicted {_times(count)}, saw {_times(saw)}")
        found += [
            f"{name}: predicted shape {_written(shape)}, saw {_written(sample.shape)}"
            for sample in seen[name]
            if shape is not None and not _is_same(shape, sample.shape)
        ]
    return (*found, *(sentence for phase in Phase for sentence in _unexplained(profiles, phase)))


def _unexplained(profiles: Sequence[RankProfile], phase: Phase) -> list[str]:
    """What else takes a share worth saying, the largest first."""
    times_s: dict[str, float] = defaultdict(float)
    for profile in profiles:
        for other in profile.unexplained:
            if other.phase == phase:
                times_s[other.name] += other.time_s
    total_s = sum(times_s.values()) + sum(profile.explained_s(phase) for profile in profiles)
    return [
        f"saw {name} for {time_s / total_s:.0%} of the {phase} time, which no operator predicts"
        for name, time_s in sorted(times_s.items(), key=lambda item: -item[1])
        if time_s >= SHARE_WORTH_SAYING * total_s
    ]


def _is_same(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b) for a, b in zip(one, other, strict=True))


def _times(count: int) -> str:
    return "none" if not count else f"{count} execution{'s' if count > 1 else ''}"


def _written(shape: Iterable[float]) -> str:
    return f"({', '.join(f'{size:g}' if size % 1 else f'{size:.0f}' for size in shape)})"
