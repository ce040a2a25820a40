"""What the stages still to come cost at least, for every state of the pipeline search: tables made backwards.

A state is: the stages placed, how many of each kind they use, the kind of the last one, and the layers placed. For
each there is a table of the least possible slowest stage, and of the least possible sum of stages and hops.

The two come from different plans: the least sum crowds layers on the fast kinds, and the slowest stage pays. So there
is one table of sums for each of several caps: the least sum if no stage takes longer than the cap. A plan whose
slowest stage lies between two caps costs at least what the slower part of that interval allows in the sum and the
faster part in the maximum; and the best plan lies in one of the intervals.

Letters as in `stages`; U numbers the ways to use kinds, J caps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hardware.arrays import FloatArray
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.pipeline.stages import Pipeline

MOST_CAPS = 24
"""Caps: with more of them the tables take longer than the nodes that they save (measured)."""

Used = tuple[int, ...]
"""Stages of each kind that are in use [K]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageBounds:
    """The tables.

    Attributes:
        used: For each number of stages placed, the row of every way to use kinds.
        slowest_s: For each number of stages placed, the least slowest stage to come [U, K, L + 1].
        sum_s: For each number of stages placed, the least sum of what is to come under each cap [U, K, L + 1, J].
        floor_s: The least time that the slowest stage of a plan in each interval can have [J].
        cap_s: The longest [J].
    """

    used: tuple[dict[Used, int], ...]
    slowest_s: tuple[FloatArray, ...]
    sum_s: tuple[FloatArray, ...]
    floor_s: FloatArray
    cap_s: FloatArray


def stage_bounds(pipeline: Pipeline, times_s: FloatArray, most_caps: int = MOST_CAPS) -> StageBounds | None:
    """The tables of a pipeline; None if it has no plan.

    Args:
        pipeline: The problem.
        times_s: Of every segment, from `segment_times_s`.
        most_caps: More caps make tighter bounds and take longer.
    """
    used = _ways_to_use(pipeline)
    slowest = _to_go(times_s, used, np.maximum, np.zeros_like(pipeline.hop_s))
    least_slowest_s = _of_root(slowest)
    if np.isinf(least_slowest_s):
        return None

    def sums(cap_s: float) -> tuple[FloatArray, ...]:
        return _to_go(np.where(times_s <= cap_s, times_s, np.inf), used, np.add, pipeline.hop_s)

    of_slowest, of_sum = pipeline.weights
    # the best of the plans with the least possible slowest stage bounds the slowest stage of all that are better
    cost_s = of_slowest * least_slowest_s + of_sum * _of_root(sums(least_slowest_s))
    longest_s = (cost_s - of_sum * _of_root(sums(np.inf))) / of_slowest if of_slowest > 0 else np.inf
    is_possible = (times_s >= least_slowest_s) & (times_s <= max(longest_s, least_slowest_s) * (1 + ROUNDING))
    values = np.unique(times_s[is_possible & np.isfinite(times_s)])
    edges = np.unique(np.linspace(0, len(values), min(most_caps, len(values)) + 1).round().astype(np.int64))
    cap_s = values[edges[1:] - 1]
    tables = [sums(float(cap)) for cap in cap_s]
    return StageBounds(
        used=used,
        slowest_s=slowest,
        sum_s=tuple(np.stack(of_caps, axis=-1) for of_caps in zip(*tables, strict=True)),
        floor_s=values[edges[:-1]],
        cap_s=cap_s,
    )


def _ways_to_use(pipeline: Pipeline) -> tuple[dict[Used, int], ...]:
    """For each number of stages placed, the ways to use kinds, numbered."""
    layers: list[set[Used]] = [{(0,) * pipeline.num_kinds}]
    for stage in range(pipeline.num_stages):
        layers.append(
            {
                add(used, kind)
                for used in layers[-1]
                for kind in range(pipeline.num_kinds)
                if used[kind] < pipeline.supply[kind] and pipeline.may_serve(kind, stage)
            }
        )
    return tuple({used: row for row, used in enumerate(sorted(layer))} for layer in layers)


def add(used: Used, kind: int) -> Used:
    """The same with one more stage of the kind."""
    return (*used[:kind], used[kind] + 1, *used[kind + 1 :])


def _to_go(
    times_s: FloatArray, used: tuple[dict[Used, int], ...], join: np.ufunc, hop_s: FloatArray
) -> tuple[FloatArray, ...]:
    """The least of what is to come, from every state; inf where nothing can come.

    Args:
        times_s: Of every segment [K, S, L, w].
        used: From `_ways_to_use`.
        join: How a stage and what comes after it make one number.
        hop_s: Added between two stages [K, K].

    Returns:
        For each number of stages placed [U, K, L + 1].
    """
    num_kinds, num_stages, num_layers, _ = times_s.shape
    end = np.full((len(used[-1]), num_kinds, num_layers + 1), np.inf)
    end[:, :, num_layers] = 0.0
    tables = [end]
    for stage in reversed(range(num_stages)):
        table = np.full((len(used[stage]), num_kinds, num_layers + 1), np.inf)
        for kind in range(num_kinds):
            rows = [(row, used[stage + 1].get(add(way, kind))) for way, row in used[stage].items()]
            pairs = [(row, next_row) for row, next_row in rows if next_row is not None]
            own = times_s[kind, stage]
            width = int(np.isfinite(own).any(axis=0).nonzero()[0].max(initial=-1)) + 1
            if not pairs or not width:
                continue
            from_, to = map(list, zip(*pairs, strict=True))
            after = np.pad(tables[-1][to, kind, 1:], ((0, 0), (0, width - 1)), constant_values=np.inf)
            joined = join(own[:, :width], sliding_window_view(after, width, axis=1)).min(axis=2)
            hops = np.zeros(num_kinds) if stage == 0 else hop_s[:, kind]
            through = joined[:, None, :] + hops[:, None]
            table[from_, :, :num_layers] = np.minimum(table[from_, :, :num_layers], through)
        tables.append(table)
    return tuple(reversed(tables))


def _of_root(tables: tuple[FloatArray, ...]) -> float:
    return float(tables[0][0, 0, 0])
