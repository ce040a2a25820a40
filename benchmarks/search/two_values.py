"""Search the Pareto front of step time and peak memory in measured grids, beside general-purpose optimizers.

    python -m benchmarks.search.two_values [--measured C.csv ...] [--seeds 5] [--trials 40] [--json]

Each group of runs (one model on one cluster) is a search space that is known completely. Groups with too few candidates
whose step time and peak memory were both measured are left out, and so are timed candidates without a peak. Failed
candidates stay, and cost a trial. Predictions are those of a shipped profile that was never fitted to the source, as in
`python -m benchmarks.search.sample_efficiency`.

The figure is the share of the hypervolume of the true front that the trials dominate, in logarithms of both values,
with the worst measured values as its reference: 0 before the first trial, 1 with the whole front. Samplers: directions
is Meshtune's, whose draws each name a candidate of the front in a random direction (tuner/search/objectives.py). nsga2
and tpe are Optuna's, on whole numbers; a point counts as the nearest candidate that is not yet tried. random is
uniform. Figures are means over seeds within a group, then medians over groups.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler
from optuna.trial import TrialState

from benchmarks.support.points import points_of
from benchmarks.support.problems import Group, Problem, problem_of, read_groups
from benchmarks.support.timing import answer, count_at_least, publish, searching, tell
from benchmarks.support.workers import mapper
from hardware.arrays import FloatArray
from tuner.forecast.pareto import pareto_front
from tuner.search.objectives import GIB, MEMORY, STEP_TIME, MinimizedValue, Objective, label_of
from tuner.search.observations import OBSERVATION, STATUS
from tuner.search.sampler import ThompsonSampler

LEAST_MEASURED = 20
"""Fewest candidates of a group with a measured step time and a measured peak."""
AT = (5, 10, 20, 40)
"""Numbers of trials after which the share is told."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Landscape:
    """What a group's trials find.

    Attributes:
        group: Group of measured runs.
        problem: What a sampler knows of it before its first trial.
        logs: Logarithms of step time and peak memory of each candidate [n, 2]; inf for one that fails.
    """

    group: Group
    problem: Problem
    logs: FloatArray


Ask = Callable[[], int]
Tell = Callable[[int], None]
Searcher = Callable[[Landscape, int], tuple[Ask, Tell]]
"""Function of a landscape and a seed; returns functions that name the next candidate and take its outcome."""


def directions(scape: Landscape, seed: int) -> tuple[Ask, Tell]:
    """Meshtune's sampler."""
    grid, predicted = scape.problem.grid, scape.problem.posterior.predicted
    rates = {STEP_TIME: np.zeros(len(grid)), MEMORY: np.log(predicted.peak_bytes / GIB)}
    values = tuple(MinimizedValue(name=name, label=label_of(name), log_rate=rate) for name, rate in rates.items())
    sampler = ThompsonSampler(grid, scape.problem.posterior, seed=seed, objective=Objective(values=values))
    study = optuna.create_study(sampler=sampler, directions=["minimize"] * 2)
    asked: list[optuna.Trial] = []

    def ask() -> int:
        asked.append(study.ask(fixed_distributions=sampler.search_space))
        position = sampler.position_of(asked[-1].params)
        assert position is not None, "the sampler names candidates only"
        return position

    def learn(position: int) -> None:
        trial, outcome = asked[-1], scape.group.outcomes[position]
        trial.set_user_attr(OBSERVATION, outcome.as_json())
        if outcome.step_time_s is None:
            trial.set_user_attr(STATUS, outcome.status)
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, [outcome.step_time_s, float(np.exp(scape.logs[position, 1])) / GIB])

    return ask, learn


def _optunas(make: Callable[[int], BaseSampler]) -> Searcher:
    """Return a searcher of one of Optuna's samplers on whole numbers; see benchmarks/support/peers.py."""

    def search(scape: Landscape, seed: int) -> tuple[Ask, Tell]:
        points, rng = points_of(scape.problem.grid), np.random.default_rng(seed)
        study = optuna.create_study(sampler=make(seed), directions=["minimize"] * 2)
        space: Mapping[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1) for name, values in zip(points.names, points.values, strict=True)
        }
        closed: set[int] = set()
        asked: list[optuna.Trial] = []

        def ask() -> int:
            asked.append(study.ask(fixed_distributions=dict(space)))
            return points.nearest(points.at(asked[-1].params), closed, rng)

        def learn(position: int) -> None:
            closed.add(position)
            ran = np.isfinite(scape.logs[position]).all()
            study.tell(asked[-1], scape.logs[position].tolist() if ran else None, None if ran else TrialState.FAIL)

        return ask, learn

    return search


def uniform(scape: Landscape, seed: int) -> tuple[Ask, Tell]:
    """Name the candidates in a random order."""
    order = iter(np.random.default_rng(seed).permutation(len(scape.logs)).tolist())
    return lambda: int(next(order)), lambda _position: None


SEARCHERS: Mapping[str, Searcher] = {
    "directions": directions,
    "nsga2": _optunas(lambda seed: NSGAIISampler(seed=seed, population_size=10)),
    "tpe": _optunas(lambda seed: TPESampler(seed=seed, multivariate=True)),
    "random": uniform,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """One search of a group with one sampler and seed."""

    sampler: str
    scape: Landscape
    seed: int
    trials: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    return answer("two_values", _arguments(argv), _measure, lambda figures: publish(figures["rows"], as_json=False))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = searching("search.two_values", __doc__)
    parser.add_argument("--seeds", type=count_at_least(1), default=5, help="searches of each group (5)")
    parser.add_argument("--trials", type=count_at_least(1), default=AT[-1], help=f"trials of each search ({AT[-1]})")
    parser.add_argument("--groups", type=count_at_least(1), help="number of groups, the first ones (all)")
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    groups, _ = read_groups(given.measured, LEAST_MEASURED)
    scapes = [scape for scape in map(_landscape, groups) if scape is not None][: given.groups]
    tell(f"{len(scapes)} groups")
    tasks = [
        _Task(sampler=name, scape=scape, seed=seed, trials=given.trials)
        for scape in scapes
        for name in SEARCHERS
        for seed in range(given.seeds)
    ]
    with mapper(given.workers) as run:
        shares = np.array(list(run(_search, tasks)))
    shares = shares.reshape(len(scapes), len(SEARCHERS), given.seeds, given.trials).mean(
        axis=2
    )  # [g, samplers, trials]
    told = [count for count in AT if count <= given.trials]
    rows = [
        {"sampler": name, **{f"after {count}": float(np.median(shares[:, at, count - 1])) for count in told}}
        for at, name in enumerate(SEARCHERS)
    ]
    return {"groups": len(scapes), "seeds": given.seeds, "rows": rows}


def _landscape(group: Group) -> Landscape | None:
    """Return what the trials of a group find; None if too few candidates have both values."""
    peaks = [outcome.peak_memory_bytes for outcome in group.outcomes]
    memory = np.array([np.nan if peak is None else float(peak) for peak in peaks])
    timed = np.isfinite(group.step_time_s)
    if np.sum(timed & np.isfinite(memory)) < LEAST_MEASURED:
        return None
    logs = np.stack([np.log(group.step_time_s), np.where(timed, np.log(memory), np.inf)], axis=1)
    keep = np.flatnonzero(~timed | np.isfinite(memory))
    kept = Group(
        runs=tuple(group.runs[at] for at in keep),
        grid=group.grid.take(keep),
        outcomes=tuple(group.outcomes[at] for at in keep),
    )
    return Landscape(group=kept, problem=problem_of(kept, ()), logs=logs[keep])


def _search(task: _Task) -> list[float]:
    """Return the share of the front's hypervolume after each trial [trials]; the last stays where none is left."""
    scape = task.scape
    ran = np.isfinite(scape.logs).all(axis=1)
    reference = scape.logs[ran].max(axis=0)
    whole = hypervolume(scape.logs[ran], reference)
    ask, learn = SEARCHERS[task.sampler](scape, task.seed)
    tried: list[int] = []
    shares = []
    for _ in range(min(task.trials, len(scape.logs))):
        tried.append(ask())
        learn(tried[-1])
        known = scape.logs[[at for at in tried if ran[at]]]
        shares.append(hypervolume(known, reference) / whole if len(known) else 0.0)
    return shares + [shares[-1]] * (task.trials - len(shares))


def hypervolume(points: FloatArray, reference: FloatArray) -> float:
    """Return the area that points dominate up to a reference, both to be minimized.

    Args:
        points: Points [n, 2].
        reference: Corner that bounds the area [2].
    """
    front = points[pareto_front(points)]
    front = front[np.argsort(front[:, 0])]
    heights = np.minimum.accumulate(front[:, 1])
    ends = np.append(front[1:, 0], reference[0])
    return float(np.sum(np.clip(ends - front[:, 0], 0, None) * np.clip(reference[1] - heights, 0, None)))


if __name__ == "__main__":
    sys.exit(main())
