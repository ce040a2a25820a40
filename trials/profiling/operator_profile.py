"""Operators that a profile of one step shows, compared with the operators that the cost model predicts.

Collectives are not part of it: a trace of gloo has no sizes, so the process groups record them (`call_profile.py`).
Work on weights and gradients between the products (copies of FSDP, sums over micro-batches, clipping, the optimizer) is
no operator either; `costmodels/step/weights/passes.py` and `traffic.py` beside it model it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from costmodels.blocks.operator import Phase
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.step.executions import operator_executions
from trials.backend import OperatorSample

SHARE_WORTH_SAYING = 0.02
"""Share of a pass below which unexplained work is not listed one by one."""

_ROUTED = ("moe_mlp.permute", "moe_mlp.up", "moe_mlp.activation", "moe_mlp.down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unexplained:
    """Computation in a forward or backward pass that belongs to no operator.

    Attributes:
        phase: Pass in which it runs.
        name: Name of the operation in torch, for example `aten::copy_`.
        time_s: Total time in one step [s].
    """

    phase: Phase
    name: str
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """Profile of one step of one rank.

    Attributes:
        samples: One sample per operator and shape; `count` is this rank's.
        forward_s: Time of all operators of the forward pass, recomputed ones included [s].
        backward_s: Time of all operators of the backward pass [s].
        unexplained: Computations of the passes that belong to no operator.
    """

    samples: tuple[OperatorSample, ...]
    forward_s: float
    backward_s: float
    unexplained: tuple[Unexplained, ...]

    def explained_s(self, phase: Phase) -> float:
        """Return the time of all operators of a pass [s]."""
        return self.forward_s if phase == Phase.FORWARD else self.backward_s


def is_routed(name: str) -> bool:
    """Return whether the router decides how many rows an operator has.

    The cost model predicts the mean of such a shape over the ranks.
    """
    return name.startswith(_ROUTED)


def merge_samples(samples: Iterable[OperatorSample], *, by_shape: bool) -> OperatorSample:
    """Merge all executions of an operator into one sample: the median of times, and the mean of differing shapes.

    With `by_shape` all samples have one shape.
    """
    # every sample weighs as much as the executions that it stands for
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


def merge_pipeline(samples: Sequence[Iterable[OperatorSample]], config: ParallelConfig) -> tuple[OperatorSample, ...]:
    """Return the operators of one step on one pipeline, counted as in `costmodels.step.executions`.

    Counts are those of the first pipeline, added up over its stages. Times are medians over all ranks. Shapes that the
    router decides are means over all ranks. `samples` holds those of each rank, in the order of the ranks.
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
        replace(merge_samples(each, by_shape=bool(key[1])), count=counts[key])
        for key, each in found.items()
        if counts[key]
    )


def mismatches(
    job: TrainingJob, runtime: RuntimeProfile, config: ParallelConfig, profiles: Sequence[RankProfile]
) -> tuple[str, ...]:
    """List the differences between a measured step and the cost model's operators, one sentence each.

    The profiles are those of all ranks, in their order.
    """
    # both sides by the operator's name: executions per step on one pipeline, and the shape of one execution
    grid = ConfigGrid.from_configs([config])
    predicted = {
        operator.name: (round(float(count[0])), tuple(operator.shape[0].tolist()))
        for operator, count in operator_executions(job, runtime, grid)
        if count[0]
    }
    seen: dict[str, list[OperatorSample]] = defaultdict(list)
    for sample in merge_pipeline([profile.samples for profile in profiles], config):
        seen[sample.name].append(sample)
    found = []
    for name in (*predicted, *(name for name in seen if name not in predicted)):
        count, shape = predicted.get(name, (0, None))
        saw = sum(sample.count for sample in seen[name])
        if count != saw:
            found.append(f"{name}: predicted {_count_in_words(count)}, saw {_count_in_words(saw)}")
        found += [
            f"{name}: predicted shape {_format_shape(shape)}, saw {_format_shape(sample.shape)}"
            for sample in seen[name]
            if shape is not None and not _is_same(shape, sample.shape)
        ]
    return (*found, *(sentence for phase in Phase for sentence in _list_unexplained(profiles, phase)))


def _list_unexplained(profiles: Sequence[RankProfile], phase: Phase) -> list[str]:
    """List the computations without an operator that take a notable share of a pass, the largest first."""
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


def _count_in_words(count: int) -> str:
    return "none" if not count else f"{count} execution{'s' if count > 1 else ''}"


def _format_shape(shape: Iterable[float]) -> str:
    return f"({', '.join(f'{size:g}' if size % 1 else f'{size:.0f}' for size in shape)})"
