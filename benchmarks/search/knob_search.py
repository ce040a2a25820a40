"""Trials to the best layout and knobs in simulated worlds, beside other optimizers.

    python -m benchmarks.search.knob_search [--study llama3-8b-dgx-h100] [--knobs 8] [--seeds 20] [--peers tpe,gp]
        [--json]

Each world (trials/simulated/) has hidden effects of its layouts and of its knobs, about half of which do nothing. A
search ends once it has tried a pair of layout and knobs whose noise-free step is within --within of the best pair, or
after --trials trials. Columns: trials in the median and at the 90th percentile over worlds, share of worlds in which it
got there, regret of the best pair tried in the median, and time of a suggestion in the median and at most.

Rows: `layouts` searches the layouts alone, with today's knobs, for the best of them. `knobs` searches both. `idle`
searches both where no knob does anything: what it takes longer than `layouts`, knobs that do nothing have cost. The
other rows are optimizers that know no prediction (benchmarks/support/knob_peers.py).

The best pair is found by enumerating, for the 200 fastest layouts, all values of the knobs that do something.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from benchmarks.support.knob_peers import KNOB_PEERS, missing
from benchmarks.support.knob_worlds import KNOBS, KnobProblem, KnobWorld, knob_problem, knob_world
from benchmarks.support.timing import USERS_MISTAKE, count_at_least, publish, tell
from benchmarks.support.trial_metrics import quantile
from benchmarks.support.workers import mapper
from hardware.io.errors import ConfigError, did_you_mean
from trials.backend import Observation
from trials.knobs.knob import today_of
from tuner.search.observations import OBSERVATION, STATUS
from tuner.search.sampler import ThompsonSampler

OWN = ("layouts", "knobs", "idle")
"""Rows of Meshtune's own sampler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One search of one world.

    Attributes:
        trials: Number of trials after which the search was within reach of the best; infinite if it never was.
        regret: Slowdown of the best pair tried over the best pair of the world, at the end.
        suggestion_s: Time of each suggestion [s].
    """

    trials: float
    regret: float
    suggestion_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    study: str
    num_knobs: int
    searcher: str
    seed: int
    within: float
    max_trials: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    given = _arguments(argv)
    try:
        names = _searchers(given.peers)
    except ConfigError as error:
        tell(str(error))
        return USERS_MISTAKE
    tasks = [
        _Task(
            study=given.study,
            num_knobs=given.knobs,
            searcher=name,
            seed=seed,
            within=given.within,
            max_trials=given.trials,
        )
        for name in names
        for seed in range(given.first_seed, given.first_seed + given.seeds)
    ]
    problem = knob_problem(given.study, given.knobs)
    tell(f"{len(problem.grid):,} layouts, {problem.space.num_pairs:,} pairs; {len(tasks)} searches")
    with mapper(given.workers) as run_all:
        searches = []
        for task, search in zip(tasks, run_all(_run, tasks), strict=True):
            searches.append(search)
            tell(f"{task.searcher}, world {task.seed}: {search.trials:g} trials, regret {search.regret:.2%}")
    by_name = {
        name: [search for task, search in zip(tasks, searches, strict=True) if task.searcher == name] for name in names
    }
    rows = [_row(name, found) for name, found in by_name.items()]
    publish(rows, as_json=given.json)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search.knob_search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", default="llama3-8b-dgx-h100", help="study of configs/studies")
    parser.add_argument(
        "--knobs", type=int, default=len(KNOBS), choices=range(1, len(KNOBS) + 1), help="number of knobs"
    )
    parser.add_argument("--seeds", type=count_at_least(1), default=20, help="number of worlds; default 20")
    parser.add_argument("--first-seed", type=count_at_least(0), default=0, help="seed of the first world; default 0")
    parser.add_argument("--trials", type=count_at_least(1), default=100, help="trials of each search; default 100")
    parser.add_argument("--within", type=float, default=0.02, help="regret that is reach of the best; default 0.02")
    parser.add_argument("--peers", default="", help=f"other optimizers, of {','.join(KNOB_PEERS)}; default none")
    parser.add_argument("--workers", type=count_at_least(1), default=1, help="processes; default 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _searchers(peers: str) -> list[str]:
    names = [name for name in peers.split(",") if name]
    for name in names:
        if name not in KNOB_PEERS:
            raise ConfigError("is no optimizer", key="--peers", value=name, nearest=did_you_mean(name, KNOB_PEERS))
        if lacking := missing(name):
            raise ConfigError(f"needs {', '.join(lacking)}, which is not installed", key="--peers", value=name)
    return [*OWN, *names]


def _run(task: _Task) -> Search:
    problem = knob_problem(task.study, task.num_knobs)
    world = knob_world(problem, task.seed, works=task.searcher not in ("layouts", "idle"))
    if task.searcher in OWN:
        return _search_own(problem, world, task)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    peer = KNOB_PEERS[task.searcher](problem, task.seed)
    best_s, times = math.inf, []
    for number in range(task.max_trials):
        begun = time.perf_counter()
        layout, config = peer.ask()
        times.append(time.perf_counter() - begun)
        outcome = world.backend.measure(config, trial_number=number)
        begun = time.perf_counter()
        peer.tell(outcome)
        times[-1] += time.perf_counter() - begun
        best_s = _better(best_s, world, layout, config, outcome)
        if best_s <= (1 + task.within) * world.best_pair_s:
            break
    return _search(best_s, world.best_pair_s, times, task.within)


def _search_own(problem: KnobProblem, world: KnobWorld, task: _Task) -> Search:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    has_knobs = task.searcher != "layouts"
    current = problem.config.problem.current
    sampler = ThompsonSampler(
        problem.grid,
        problem.posterior,
        knobs=problem.space if has_knobs else None,
        seed=task.seed,
        first=current and replace(current, knobs=tuple(today_of(problem.space.knobs).items()) if has_knobs else ()),
    )
    study = optuna.create_study(sampler=sampler)
    best_s, times = math.inf, []
    for number in range(task.max_trials):
        begun = time.perf_counter()
        trial = study.ask(fixed_distributions=sampler.search_space)
        position = sampler.position_of(trial.params)
        assert position is not None, "the sampler names candidates only"
        times.append(time.perf_counter() - begun)
        config = sampler.choices.config(position)
        outcome = world.backend.measure(config, trial_number=number)
        best_s = _better(best_s, world, sampler.choices.layout_of(position), config, outcome)
        begun = time.perf_counter()
        trial.set_user_attr(OBSERVATION, outcome.as_json())
        if outcome.step_time_s is not None:
            study.tell(trial, outcome.step_time_s)
        else:
            trial.set_user_attr(STATUS, outcome.status)
            study.tell(trial, state=TrialState.FAIL)
        times[-1] += time.perf_counter() - begun
        if best_s <= (1 + task.within) * world.best_pair_s:
            break
    return _search(best_s, world.best_pair_s, times, task.within)


def _better(best_s: float, world: KnobWorld, layout: int, config: Any, outcome: Observation) -> float:
    return best_s if outcome.step_time_s is None else min(best_s, world.true_s(layout, config))


def _search(best_s: float, reach_s: float, times: Sequence[float], within: float) -> Search:
    regret = best_s / reach_s - 1
    return Search(trials=len(times) if regret <= within else math.inf, regret=regret, suggestion_s=tuple(times))


def _row(name: str, searches: Sequence[Search]) -> dict[str, Any]:
    trials = [search.trials for search in searches]
    times = np.concatenate([search.suggestion_s for search in searches])
    return {
        "searcher": name,
        "trials": quantile(trials, 0.5),
        "trials_90": quantile(trials, 0.9),
        "got_there": sum(map(math.isfinite, trials)) / len(trials),
        "regret": float(np.median([search.regret for search in searches])),
        "suggestion_s": float(np.median(times)),
        "longest_s": float(times.max()),
    }


if __name__ == "__main__":
    sys.exit(main())
