"""Cells of the map of the search space: facets by tp and pp, with a cell for every micro-batch size and cp*up.

A cell stands for all candidates that share these four values, and shows the fastest of them. Its step time is measured
if there is a trial; otherwise it is the mean of the posterior. A cell without candidates counts the rules that removed
its combinations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, Value
from costmodels.step.memory.peak import estimate_memory
from hardware.arrays import IntArray
from trials.backend import Status
from tuner.report.data import ReportData
from tuner.space.enumeration import enumerate_space
from tuner.space.rules.rule import Columns, Keep
from tuner.storage.record import TrialRecord, step_time_of
from tuner.subject.ability import Ability

Key = tuple[int, int, int, int]
"""Key of a cell: tp, pp, mbs and cp*up; mbs is 0 if a rule removed all sizes without looking at mbs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Figures of one cell.

    Attributes:
        candidates: Number of candidates.
        fastest: Fastest candidate by its dimensions; empty without a candidate.
        step_time_s: Step time of the fastest candidate [s]; None without a candidate.
        measured: Whether that step time was measured.
        is_best: Whether the fastest candidate is the best of the study.
        failed: Status of a trial in the cell that ended without a step time; None if none did.
        removed: Number of combinations of the degrees that each rule removed.
        least_bytes: Smallest memory need among the configurations that the memory limit removed [bytes].
    """

    candidates: int
    fastest: Mapping[str, Value] = field(default_factory=dict)
    step_time_s: float | None = None
    measured: bool = False
    is_best: bool = False
    failed: Status | None = None
    removed: Mapping[str, int] = field(default_factory=dict)
    least_bytes: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceMap:
    """Map of a study's cells.

    Attributes:
        tp: Values of tp that some candidate has.
        pp: Values of pp that some candidate has.
        mbs: Values of mbs that some candidate has.
        inner: Values of cp*up that some candidate has.
        cells: Cells by tp, pp, mbs and cp*up; combinations that do not divide the devices are absent.
        num_trials: Number of trials that the step times rest on; 0 for predictions.
    """

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    mbs: tuple[int, ...]
    inner: tuple[int, ...]
    cells: Mapping[Key, Cell]
    num_trials: int


def space_map(data: ReportData) -> SpaceMap:
    """Build the map of a study with its trials so far."""
    grid, expected = data.candidates.space.grid, data.expected
    keys, order = _keys(grid), np.lexsort((expected.step_time_s, ~expected.fits))
    # Candidates that are expected to fit come first, the fastest before others: the first row of each cell is its best.
    distinct, first, counts = np.unique(keys[order], axis=0, return_index=True, return_counts=True)
    measured, failed = _find_tried(data.records)
    removed, least_bytes = _count_removed(data) if data.problem.subject.has(Ability.RULES) else ({}, {})
    shown = [tuple(np.unique(keys[:, at]).tolist()) for at in range(4)]
    cells: dict[Key, Cell] = {}
    for row, at, count in zip(distinct.tolist(), order[first].tolist(), counts.tolist(), strict=True):
        key: Key = tuple(row)
        record = measured.get(key)
        cells[key] = Cell(
            candidates=count,
            fastest=record.params if record else grid.values(at),
            step_time_s=record.step_time_s if record else float(expected.step_time_s[at]),
            measured=record is not None,
            is_best=record is not None and data.best is not None and record.params == data.best.params,
            failed=failed.get(key),
        )
    # Cells without a candidate show what removed their combinations.
    for key, rules in _restrict_to_map(removed, shown).items():
        if key not in cells:
            cells[key] = Cell(candidates=0, removed=rules, least_bytes=least_bytes.get(key))
    tp, pp, mbs, inner = shown
    return SpaceMap(tp=tp, pp=pp, mbs=mbs, inner=inner, cells=cells, num_trials=expected.num_trials)


def _keys(grid: ConfigGrid) -> IntArray:
    """Compute the cell key of every configuration [n, 4]."""
    return np.stack([grid.tp, grid.pp, grid.mbs, grid.cp * grid.up], axis=1)


def _key(params: Mapping[str, Value]) -> Key:
    tp, pp, mbs, cp, up = (int(params[name]) for name in ("tp", "pp", "mbs", "cp", "up"))
    return tp, pp, mbs, cp * up


def _find_tried(records: Sequence[TrialRecord]) -> tuple[dict[Key, TrialRecord], dict[Key, Status]]:
    """Find each cell's fastest measured trial, with its candidate's step time over all trials, and its failures."""
    measured: dict[Key, tuple[float, TrialRecord]] = {}
    failed: dict[Key, Status] = {}
    for record in records:
        key = _key(record.params)
        # A candidate with several trials has one step time, from all of them.
        step_s = step_time_of(records, record.params) if record.step_time_s else None
        if step_s is not None and (key not in measured or step_s < measured[key][0]):
            measured[key] = step_s, record
        elif record.has_failed and record.status and not record.is_proxy:
            failed[key] = record.status
    return {key: record for key, (_, record) in measured.items()}, failed


def _count_removed(data: ReportData) -> tuple[dict[Key, Counter[str]], dict[Key, float]]:
    """Count per cell the combinations that each rule removed, and find the least memory of those over the limit."""
    setting, options = data.problem.setting, data.problem.options
    removed: dict[Key, Counter[str]] = defaultdict(Counter)

    def count_broken(rule: str, columns: Columns, broken: Keep, weight: int) -> None:
        mbs = columns["mbs"] if "mbs" in columns else np.zeros(len(broken), dtype=np.int64)
        # Rules that break before mbs is enumerated count for all sizes at once (mbs 0).
        rows = np.stack([columns["tp"], columns["pp"], mbs, columns["cp"] * columns["up"]], axis=1)[broken]
        for key, number in zip(*_count_rows(rows), strict=True):
            removed[key][rule] += number * weight

    grid, _ = enumerate_space(setting, options, on_broken=count_broken)
    left = {tuple(row) for row in np.unique(_keys(data.candidates.space.grid), axis=0).tolist()}
    keys = _keys(grid)
    # Memory removed a cell only if no candidate of it is left.
    is_empty = np.array([tuple(row) not in left for row in keys.tolist()], dtype=np.bool_)
    dropped = grid.take(is_empty)
    least_bytes: dict[Key, float] = {}
    if len(dropped):
        needed = estimate_memory(setting, dropped).needed_bytes
        for key, count in zip(*_count_rows(keys[is_empty]), strict=True):
            removed[key]["memory"] += count
        for row, size in zip(keys[is_empty].tolist(), needed.tolist(), strict=True):
            least_bytes[tuple(row)] = min(size, least_bytes.get(tuple(row), size))
    return removed, least_bytes


def _count_rows(rows: IntArray) -> tuple[list[Key], list[int]]:
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    return [tuple(row) for row in distinct.tolist()], counts.tolist()


def _restrict_to_map(removed: Mapping[Key, Counter[str]], shown: Sequence[Sequence[int]]) -> dict[Key, Counter[str]]:
    """Restrict the counts to cells on the map; counts without mbs are added to every mbs."""
    tps, pps, sizes, inners = map(frozenset, shown)
    found: dict[Key, Counter[str]] = defaultdict(Counter)
    for (tp, pp, mbs, inner), rules in removed.items():
        if tp in tps and pp in pps and inner in inners:
            for size in [mbs] if mbs else sizes:
                if size in sizes:
                    found[tp, pp, size, inner].update(rules)
    return found
