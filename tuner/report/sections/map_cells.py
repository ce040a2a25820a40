"""The space as a map: facets of tp and pp, and in each a cell for every micro-batch size and cp*up.

A cell stands for all candidates that have these four in common, and shows the fastest of them: measured, where one was,
else predicted, times the median of measured over predicted. Where a cell has no candidate, it keeps what removed its
combinations.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, Value
from costmodels.step.memory import estimate_memory
from hardware.arrays import IntArray
from trials.backend import Status
from tuner.report.data import ReportData
from tuner.space.enumeration import enumerate_space
from tuner.space.rules import Columns, Keep
from tuner.storage.record import TrialRecord, step_time_of

Key = tuple[int, int, int, int]
"""tp, pp, mbs and cp*up of a cell; mbs is 0 where a rule needs no mbs to remove all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What is known of one cell.

    Attributes:
        candidates: How many it has.
        fastest: The fastest of them by its dimensions; empty without a candidate.
        step_time_s: Its step time; None without a candidate.
        measured: Whether that was measured.
        is_best: Whether it is the best of the study.
        failed: How a trial in it ended without a step time; None if none did.
        removed: How many combinations of the degrees each rule removed.
        least_bytes: What the smallest of those needs that memory removed.
    """

    candidates: int
    fastest: Mapping[str, Value]
    step_time_s: float | None
    measured: bool
    is_best: bool
    failed: Status | None
    removed: Mapping[str, int]
    least_bytes: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceMap:
    """The cells of a study.

    Attributes:
        tp: Values of tp that some candidate has, as all below.
        pp: Of pp.
        mbs: Of mbs.
        inner: Of cp*up.
        cells: By tp, pp, mbs and cp*up; a cell that is absent is no division of the devices.
        correction: What predictions are multiplied with.
    """

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    mbs: tuple[int, ...]
    inner: tuple[int, ...]
    cells: Mapping[Key, Cell]
    correction: float


def space_map(data: ReportData) -> SpaceMap:
    """The map of a study as its trials have it."""
    grid, predicted_s = data.candidates.space.grid, data.candidates.estimate.step_time_s
    keys = _keys(grid)
    order = np.argsort(predicted_s, kind="stable")
    distinct, first, counts = np.unique(keys[order], axis=0, return_index=True, return_counts=True)
    correction = _correction(data.records)
    measured, failed = _tried(data.records)
    removed, least_bytes = _removed(data) if data.config.measured is None else ({}, {})
    shown = [tuple(np.unique(keys[:, at]).tolist()) for at in range(4)]
    cells: dict[Key, Cell] = {}
    for row, at, count in zip(distinct.tolist(), order[first].tolist(), counts.tolist(), strict=True):
        key: Key = tuple(row)
        record = measured.get(key)
        cells[key] = Cell(
            candidates=count,
            fastest=record.params if record else grid.values(at),
            step_time_s=record.step_time_s if record else float(predicted_s[at]) * correction,
            measured=record is not None,
            is_best=record is not None and data.best is not None and record.params == data.best.params,
            failed=failed.get(key),
            removed={},
            least_bytes=None,
        )
    for key, rules in _of_cells(removed, shown).items():
        if key not in cells:
            cells[key] = Cell(
                candidates=0,
                fastest={},
                step_time_s=None,
                measured=False,
                is_best=False,
                failed=None,
                removed=rules,
                least_bytes=least_bytes.get(key),
            )
    tp, pp, mbs, inner = shown
    return SpaceMap(tp=tp, pp=pp, mbs=mbs, inner=inner, cells=cells, correction=correction)


def _keys(grid: ConfigGrid) -> IntArray:
    """The cell of every configuration [n, 4]."""
    return np.stack([grid.tp, grid.pp, grid.mbs, grid.cp * grid.up], axis=1)


def _key(params: Mapping[str, Value]) -> Key:
    tp, pp, mbs, cp, up = (int(params[name]) for name in ("tp", "pp", "mbs", "cp", "up"))
    return tp, pp, mbs, cp * up


def _correction(records: Sequence[TrialRecord]) -> float:
    ratios = [
        record.step_time_s / record.predicted_s for record in records if record.step_time_s and record.predicted_s
    ]
    return statistics.median(ratios) if ratios else 1.0


def _tried(records: Sequence[TrialRecord]) -> tuple[dict[Key, TrialRecord], dict[Key, Status]]:
    """The fastest measured trial of each cell, with the step time of all trials of its candidate; and what failed."""
    measured: dict[Key, tuple[float, TrialRecord]] = {}
    failed: dict[Key, Status] = {}
    for record in records:
        key = _key(record.params)
        step_s = step_time_of(records, record.params) if record.step_time_s else None
        if step_s is not None and (key not in measured or step_s < measured[key][0]):
            measured[key] = step_s, record
        elif record.has_failed and record.status and not record.is_proxy:
            failed[key] = record.status
    return {key: record for key, (_, record) in measured.items()}, failed


def _removed(data: ReportData) -> tuple[dict[Key, Counter[str]], dict[Key, float]]:
    """What removed how many combinations of each cell, and the least memory that those need that memory removed."""
    setting, options = data.config.setting, data.config.options
    removed: dict[Key, Counter[str]] = defaultdict(Counter)

    def hear(rule: str, columns: Columns, broken: Keep, weight: int) -> None:
        mbs = columns["mbs"] if "mbs" in columns else np.zeros(len(broken), dtype=np.int64)
        rows = np.stack([columns["tp"], columns["pp"], mbs, columns["cp"] * columns["up"]], axis=1)[broken]
        for key, count in zip(*_counted(rows), strict=True):
            removed[key][rule] += count * weight

    grid, _ = enumerate_space(setting, options, on_broken=hear)
    left = {tuple(row) for row in np.unique(_keys(data.candidates.space.grid), axis=0).tolist()}
    keys = _keys(grid)
    is_empty = np.array([tuple(row) not in left for row in keys.tolist()], dtype=np.bool_)
    dropped = grid.take(is_empty)
    least_bytes: dict[Key, float] = {}
    if len(dropped):
        needed = estimate_memory(setting, dropped).needed_bytes
        for key, count in zip(*_counted(keys[is_empty]), strict=True):
            removed[key]["memory"] += count
        for row, size in zip(keys[is_empty].tolist(), needed.tolist(), strict=True):
            least_bytes[tuple(row)] = min(size, least_bytes.get(tuple(row), size))
    return removed, least_bytes


def _counted(rows: IntArray) -> tuple[list[Key], list[int]]:
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    return [tuple(row) for row in distinct.tolist()], counts.tolist()


def _of_cells(removed: Mapping[Key, Counter[str]], shown: Sequence[Sequence[int]]) -> dict[Key, Counter[str]]:
    """The same of the cells on the map: what needs no mbs holds for each."""
    tps, pps, sizes, inners = map(frozenset, shown)
    found: dict[Key, Counter[str]] = defaultdict(Counter)
    for (tp, pp, mbs, inner), rules in removed.items():
        if tp in tps and pp in pps and inner in inners:
            for size in [mbs] if mbs else sizes:
                if size in sizes:
                    found[tp, pp, size, inner].update(rules)
    return found
