"""Which configurations may fit in memory under at least one of several runtime profiles.

Answers are those of `memory.estimate_memory` under each profile in turn. What no profile changes is computed once, and
a configuration is predicted only until one profile lets it fit. Most of those that fit nowhere are told by a bound that
no profile's prediction falls below, so that they are not predicted at all.

Letters: n configurations, c kinds of stages, k configurations of one pipeline, u rows of shapes, w rows of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.operators.layer_operators import unique_shapes
from costmodels.step.error_models import MemoryErrorModel, memory_error_of
from costmodels.step.memory.activations import Ends, LayerActivations, Passes
from costmodels.step.memory.peak import LEAST_CHANCE, busiest_micro_batches, probability_of_fit
from costmodels.step.memory.training_states import HeldWeights, UnitBuffers, training_states
from costmodels.step.pipeline.schedules import stage_in_flight
from costmodels.step.placement import StageKinds, pipelines
from hardware.arrays import FloatArray, IntArray

Tally = TypeVar("Tally", LayerActivations, Ends)


def may_fit_under_any(
    setting: Setting, profiles: Sequence[RuntimeProfile], grid: ConfigGrid, headroom: float
) -> NDArray[np.bool_]:
    """Return whether each configuration may fit as at least one of the profiles predicts it [n].

    A profile's answer is that of `MemoryEstimate.may_fit` for its own error, under `setting.predicted_by(profile)`.

    Args:
        setting: Job and cluster; its runtime says how layers are cut.
        profiles: Profiles that may predict the memory.
        grid: Configurations [n].
        headroom: Share of the device that must stay free.
    """
    fits = np.zeros(len(grid), dtype=np.bool_)
    runtimes = [setting.predicted_by(profile).runtime for profile in profiles]
    for hosts, at in grid.by_host_order():
        ordered = replace(setting, cluster=setting.cluster.reordered(hosts))
        own = grid if len(at) == len(grid) else grid.take(at)
        fits[at] = _may_fit(ordered, runtimes, own, headroom)
    return fits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """Configurations of one pipeline [k].

    Attributes:
        stages: Kinds of the stages [c].
        smallest: Memory of the smallest device of each kind of stage [bytes], [c, 1].
        at: Positions of the configurations in their grid [k].
        in_flight: Micro-batches whose activations each kind of stage holds [c, k].
        shape: Shape row of each configuration [k].
        weights: Weights row of each configuration [k].
    """

    stages: StageKinds
    smallest: FloatArray
    at: IntArray
    in_flight: FloatArray
    shape: IntArray
    weights: IntArray

    def take(self, kept: NDArray[np.bool_]) -> _Rows:
        """Select the configurations of a mask [k]."""
        if kept.all():
            return self
        return replace(
            self,
            at=self.at[kept],
            in_flight=self.in_flight[:, kept],
            shape=self.shape[kept],
            weights=self.weights[kept],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """Profiles with one error of memory, and a bound of their needs.

    Attributes:
        error: Error of memory under the profiles.
        members: Memory of passes under each profile.
        least: Least memory of passes under any of them; None if no bound holds.
    """

    error: MemoryErrorModel
    members: tuple[Passes, ...]
    least: Passes | None


def _may_fit(
    setting: Setting, runtimes: Sequence[RuntimeProfile], grid: ConfigGrid, headroom: float
) -> NDArray[np.bool_]:
    """Answer for hosts that stand in the order of the ranks [n]."""
    shapes, shape_of = unique_shapes(grid)
    passes = [Passes.of(setting.job, runtime, shapes, has_recomputed=grid.has_recomputed) for runtime in runtimes]
    groups = _grouped(passes)
    num_micro_batches = busiest_micro_batches(setting.job, grid)
    memory_bytes = [float(device.memory_bytes) for device in setting.cluster.devices]
    fits = np.zeros(len(grid), dtype=np.bool_)
    # the profile that let most fit so far comes first, which leaves the fewest to the others
    num_fitting = {own.runtime.name: 0 for own in passes}
    for pipeline in pipelines(setting, grid).each:
        stages, at = pipeline.stages, pipeline.at
        rows = _Rows(
            stages=stages,
            smallest=stages.smallest(memory_bytes)[:, None],
            at=at,
            in_flight=stage_in_flight(stages.first[:, None], pipeline.pp, grid.vpp[at], num_micro_batches[at]),
            shape=shape_of[at],
            weights=pipeline.weights_of,
        )
        held = HeldWeights.of(setting.job, pipeline.weights, stages)
        for group in groups:
            states = {own.runtime.name: _states_bytes(setting, own.runtime, held) for own in group.members}
            left = rows.take(~fits[rows.at])
            if group.least is not None:
                left = left.take(_passes_bound(group, group.least, left, list(states.values()), headroom))
            for own in sorted(group.members, key=lambda own: -num_fitting[own.runtime.name]):
                if not len(left.at):
                    break
                buffers = UnitBuffers.of(setting.job, own.runtime, held)
                needed, capacity = _needed_bytes(own, left, states[own.runtime.name], buffers)
                fitting = probability_of_fit(needed, capacity, headroom, group.error) >= LEAST_CHANCE
                num_fitting[own.runtime.name] += int(fitting.sum())
                fits[left.at[fitting]] = True
                left = left.take(~fitting)
    return fits


def _grouped(passes: Sequence[Passes]) -> list[_Group]:
    """Group the profiles that one bound can serve; the others are alone."""
    by_error: dict[tuple[float, int | None], list[Passes]] = {}
    for own in passes:
        error = memory_error_of(own.runtime)
        by_error.setdefault((error.scale, error.freedom), []).append(own)
    together = [members for members in by_error.values() if len(members) > 1]
    alone = [[own] for own in passes if not any(own in members for members in together)]
    # a bound leaves little to predict, so its profiles come first
    return [_group_of(members) for members in (*together, *alone)]


def _group_of(members: Sequence[Passes]) -> _Group:
    return _Group(
        error=memory_error_of(members[0].runtime),
        members=tuple(members),
        least=_least_passes(members) if len(members) > 1 else None,
    )


def _least_passes(every: Sequence[Passes]) -> Passes:
    """Return memory of passes that is nowhere above that under any profile: `_Moments.total` grows with each field."""
    return replace(
        every[0],
        layers=_least([own.layers for own in every]),
        again=_least([own.again for own in every]),
        ends=_least([own.ends for own in every]),
    )


def _least(every: Sequence[Tally]) -> Tally:
    """Return the smallest values of each field [u]."""
    names = [field.name for field in fields(every[0])]
    return replace(every[0], **{name: np.min([getattr(own, name) for own in every], axis=0) for name in names})


def _states_bytes(setting: Setting, runtime: RuntimeProfile, held: HeldWeights) -> FloatArray:
    """Compute the memory that does not depend on micro-batches [bytes], [c, w]."""
    states = training_states(setting.job, runtime, held)
    return np.asarray(sum(states.values()) + runtime.memory_overhead_bytes)


def _passes_bound(
    group: _Group, least: Passes, rows: _Rows, states: Sequence[FloatArray], headroom: float
) -> NDArray[np.bool_]:
    """Return whether a configuration may fit at the least memory that any profile of the group predicts [k].

    The stage that counts is the fullest one, to which fragmentation adds.
    """
    needed = least.moments(rows.stages, rows.in_flight, rows.shape).total()
    needed += np.min(states, axis=0).take(rows.weights, axis=1)
    share = (needed / rows.smallest).max(axis=0)
    return np.asarray(probability_of_fit(share, 1.0, headroom, group.error) >= LEAST_CHANCE)


def _needed_bytes(
    own: Passes, rows: _Rows, states: FloatArray, buffers: UnitBuffers | None
) -> tuple[FloatArray, FloatArray]:
    """Compute what the fullest stage needs, and the memory of its smallest device [bytes], each [k]."""
    buffers = None if buffers is None else buffers.take(rows.weights)
    dynamic = own.moments(rows.stages, rows.in_flight, rows.shape, buffers).total()
    needed = dynamic + states.take(rows.weights, axis=1)
    peak = needed + own.fragmentation(dynamic, rows.stages, rows.in_flight, rows.shape)
    fullest = (peak / rows.smallest).argmax(axis=0)
    return peak[fullest, np.arange(len(fullest))], rows.smallest[fullest, 0]
