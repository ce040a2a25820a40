"""Repeat FlexParallel's Table 2 in simulated worlds: the explored share of each space at the stop, and the regret.

    python -m benchmarks.search.simulated_worlds [--studies llama-7b-8,gpt-13b-32] [--seeds 10] [--workers 2] [--json]

Each study of configs/studies/flexparallel is searched in worlds of several seeds (trials/simulated/backend.py). The
tuner knows the cost model from which a world was made, but not by how much each operator, collective and the memory
differ in that world. A search starts from the current configuration; with --first it starts from a baseline
(tuner/forecast/baseline.py) or from the best prediction instead. It measures every trial in full and ends when it is
confident or after --trials trials. The tuner and the world have the same seed. The paper's numbers of trials and sizes
of the space are shown for comparison.

Columns: grid counts the candidates before memory removes any, as `meshtune space` counts them. pruned counts the
candidates left after it. feasible counts those of the grid that fit in the world. explored is the number of trials at
the stop as a share of each of these three and, for the paper's Table 2, of the grid. regret compares the noise-free
step time of the configuration that measured fastest with the best pruned candidate of the world. dropped says by how
much the world's best configuration that memory pruned is faster than that candidate: a study accepts this loss for its
memory headroom. All are medians over seeds, except `regret 90%` and the shares of runs.

A last table compares the feasible configurations of LLaMA-7B on 8 devices with the 30 of the paper's appendix A.2. The
paper lists neither these configurations nor its rules. The rules that reproduce its 387 candidates leave us 161 that
fit with 8% of 64 GB free. Memory does not explain the difference: only devices of 26.5 GiB would leave 30, while the
paper's choice and the current configuration need 38 and 51 GiB. A.2 most likely compares the configurations that
Calculon can express, which has neither ring attention nor Ulysses, without virtual stages: 126 of ours use one of the
three, 35 use none, and five of these need more than 49.8 GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.papers.flexparallel import STUDIES, TABLE_2
from benchmarks.support.searchers import Thompson
from benchmarks.support.timing import USERS_MISTAKE, benchmark_parser, count_at_least, publish, tell
from benchmarks.support.trial_metrics import quantile
from benchmarks.support.workers import mapper
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.step.memory.peak import estimate_memory
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError, did_you_mean
from trials.simulated.backend import SimulatedBackend
from tuner.forecast.baseline import baseline_position
from tuner.search.posterior import Posterior
from tuner.search.prior import initial_posterior
from tuner.search.sampler import ThompsonSampler
from tuner.space.enumeration import enumerate_space
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest

SEARCHED: dict[str, tuple[int, int]] = {
    "llama-7b-8": (6, 387),
    "llama-13b-8": (4, 333),
    "llama2-13b-8": (7, 429),
    "llama2-34b-16": (6, 1228),
    "llama3-8b-8": (5, 289),
    "gpt-13b-32": (9, 1040),
    "gpt-38b-4k-128": (17, 3458),
    "gpt-38b-32k-64": (6, 2410),
    "qwen2.5-7b-8": (5, 261),
    "pangu-135b-6144": (22, 58205),
    "pangu-135b-8192": (15, 27608),
    "mixtral-8x7b-64": (31, 2314),
}
"""Trials and size of the search space of each study (FlexParallel, Table 2)."""

A2_STUDY, A2_FEASIBLE = "llama-7b-8", 30
"""Study whose feasible configurations FlexParallel counts (appendix A.2), and their number there."""

NEAR = 0.01
"""Regret below which a run counts as having found the best configuration."""

MAX_TRIALS = 60
FIRST = ("current", "baseline", "prior")
"""Choices for the first trial of a search."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A study before its first trial.

    Attributes:
        config: The loaded study.
        full: Grid before memory removes candidates [g].
        grid: Grid of the candidates [n].
        posterior: Prior over the candidates.
        baseline: First configuration of a search without a current one; None if nothing fits.
    """

    config: StudyRequest
    full: ConfigGrid
    grid: ConfigGrid
    posterior: Posterior
    baseline: ParallelConfig | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One search of one study in one world.

    Attributes:
        study: Name of the study.
        num_grid: Number of candidates before memory removes any.
        num_pruned: Number of candidates after memory pruning.
        num_feasible: Number of configurations of the grid that fit in the world.
        num_trials: Number of trials at the stop.
        is_confident: Whether the search stopped because it was confident.
        regret: Slowdown of the configuration that measured fastest over the best candidate; infinite if none ran.
        regret_of_tried: Slowdown of the truly fastest tried configuration over the best candidate.
        dropped: Speedup of the best configuration of the grid over the best candidate, less 1.
        seconds_per_trial: Time of the sampler itself per trial [s].
    """

    study: str
    num_grid: int
    num_pruned: int
    num_feasible: int
    num_trials: int
    is_confident: bool
    regret: float
    regret_of_tried: float
    dropped: float
    seconds_per_trial: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    study: str
    seed: int
    max_trials: int
    first: str


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    given = _arguments(argv)
    try:
        names = _parse_studies(given.studies)
    except ConfigError as error:
        tell(f"simulated_worlds: {error}")
        return USERS_MISTAKE
    tasks = [
        _Task(study=name, seed=seed, max_trials=given.trials, first=given.first)
        for name in names
        for seed in range(given.seeds)
    ]
    found: dict[str, list[Search]] = {name: [] for name in names}
    with mapper(given.workers) as each:
        for number, search in enumerate(each(_run, tasks), start=1):
            found[search.study].append(search)
            tell(
                f"{number} of {len(tasks)}: {search.study} stopped after {search.num_trials} trials, "
                f"{search.regret:.1%} above the best"
            )
    rows = [row_of(name, searches) for name, searches in found.items()]
    counts = feasible_counts() if A2_STUDY in names else {}
    if given.json:
        settings = {"studies": names, "seeds": given.seeds, "trials": given.trials, "first": given.first}
        print(json.dumps({"studies": rows, "a2": counts, "settings": settings}, indent=2))
        return 0
    publish([_format_row(row) for row in rows], as_json=False)
    for what, count in counts.items():
        print(f"{count:>8}  {what}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("search.simulated_worlds", __doc__)
    parser.add_argument("--studies", default=",".join(SEARCHED), help="comma-separated names of studies (all)")
    parser.add_argument("--seeds", type=count_at_least(1), default=10, help="worlds of each study (10)")
    parser.add_argument(
        "--trials",
        type=count_at_least(1),
        default=MAX_TRIALS,
        help=f"maximum number of trials of each run ({MAX_TRIALS})",
    )
    parser.add_argument(
        "--first", choices=FIRST, default=FIRST[0], help=f"configuration of the first trial ({FIRST[0]})"
    )
    parser.add_argument("--workers", type=count_at_least(1), default=2, help="worker processes (2)")
    return parser.parse_args(argv)


def _parse_studies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in SEARCHED:
            raise ConfigError(
                "is no study of Table 2", key="--studies", value=name, nearest=did_you_mean(name, SEARCHED)
            )
    if not names:
        raise ConfigError("names no study", key="--studies", nearest=f"valid: {', '.join(SEARCHED)}")
    return names


@lru_cache(maxsize=1)
def prepared(study: str) -> Prepared:
    """Prepare what all worlds of a study share; the runs of one study come one after the other."""
    config = load_study(STUDIES / f"{study}.yaml")
    # The paper counts its space before memory pruning, so the unpruned grid is kept for the shares explored.
    full, _ = enumerate_space(config.problem.setting, config.problem.options)
    space = config.problem.space()
    grid = space.grid
    baseline = baseline_position(
        grid,
        space.memory.fits(config.problem.options.memory_headroom),
        devices_per_domain=config.problem.setting.cluster.devices_per_domain,
        defaults=config.problem.subject.defaults,
    )
    return Prepared(
        baseline=None if baseline is None else grid.config(baseline),
        config=config,
        full=full,
        grid=grid,
        posterior=initial_posterior([(config.problem.subject.measured_setting, np.arange(len(grid)))], grid),
    )


def _run(task: _Task) -> Search:
    return search_in(prepared(task.study), task.study, task.seed, task.max_trials, task.first)


def search_in(known: Prepared, study: str, seed: int, max_trials: int, first: str = "current") -> Search:
    """Run one search in the world of a seed, with a sampler of the same seed."""
    config, grid = known.config, known.grid
    assert isinstance(config.trials.backend, SimulatedBackend), "these studies are simulated"
    world = replace(config.trials.backend, seed=seed)
    searcher = Thompson(
        ThompsonSampler(
            grid,
            known.posterior,
            draws=config.search.draws,
            confidence=config.search.confidence,
            seed=seed,
            first={"current": config.problem.current, "baseline": known.baseline, "prior": None}[first],
        )
    )
    measured_s: dict[int, float] = {}
    tried: list[int] = []
    sampler_s, is_confident = 0.0, False
    while len(tried) < max_trials and not is_confident:
        start = time.perf_counter()
        position = searcher.ask()
        tried.append(position)
        sampler_s += time.perf_counter() - start
        outcome = world.measure(grid.config(position), trial_number=len(tried) - 1)
        if outcome.step_time_s is not None:
            measured_s[position] = outcome.step_time_s
        start = time.perf_counter()
        searcher.tell(position, outcome)
        is_confident = searcher.is_confident
        sampler_s += time.perf_counter() - start
    # Regrets compare noise-free times: the search chose by noisy measurements, but the user gets the true step time.
    fastest = min(measured_s, key=measured_s.__getitem__, default=-1)
    in_full, in_grid = true_step_s(world, known.full), true_step_s(world, grid)
    best_s = in_grid.min()
    assert math.isfinite(best_s), "some candidate fits in every world"
    return Search(
        study=study,
        num_grid=len(known.full),
        num_pruned=len(grid),
        num_feasible=int(np.isfinite(in_full).sum()),
        num_trials=len(tried),
        is_confident=is_confident,
        regret=float(in_grid[fastest] / best_s) - 1 if measured_s else math.inf,
        regret_of_tried=float(in_grid[tried].min() / best_s) - 1,
        dropped=max(float(best_s / in_full.min()) - 1, 0.0),
        seconds_per_trial=sampler_s / len(tried),
    )


def true_step_s(world: SimulatedBackend, grid: ConfigGrid) -> FloatArray:
    """Return the noise-free step times of a world [n]; infinite where a configuration does not fit."""
    memory = world.hidden_memory(grid)
    fits = memory.needed_bytes <= memory.capacity_bytes
    # An infinite time keeps configurations without memory out of every minimum.
    return np.where(fits, world.hidden_step(grid).step_time_s, np.inf)


def row_of(study: str, searches: Sequence[Search]) -> dict[str, Any]:
    """Summarise the searches of one study as a row of the table."""
    paper_trials, paper_grid = SEARCHED[study]
    first = searches[0]
    # Sizes of the grid do not depend on the world, but the number of feasible configurations does.
    trials = float(np.median([search.num_trials for search in searches]))
    regrets = [search.regret for search in searches]
    return {
        "study": study,
        "grid": first.num_grid,
        "pruned": first.num_pruned,
        "feasible": float(np.median([search.num_feasible for search in searches])),
        "trials": trials,
        "trials_90": quantile([search.num_trials for search in searches], 0.9),
        "explored_of_grid": trials / first.num_grid,
        "explored_of_pruned": trials / first.num_pruned,
        "explored_of_feasible": float(np.median([search.num_trials / search.num_feasible for search in searches])),
        "paper_trials": paper_trials,
        "paper_grid": paper_grid,
        "paper_explored": paper_trials / paper_grid,
        "regret": _finite(quantile(regrets, 0.5)),
        "regret_90": _finite(quantile(regrets, 0.9)),
        "regret_of_tried": _finite(quantile([search.regret_of_tried for search in searches], 0.5)),
        "share_within_1pct": float(np.mean([regret <= NEAR for regret in regrets])),
        "share_confident": float(np.mean([search.is_confident for search in searches])),
        "dropped": float(np.median([search.dropped for search in searches])),
        "seconds_per_trial": float(np.mean([search.seconds_per_trial for search in searches])),
    }


def _finite(value: float) -> float | None:
    """Replace infinity, which JSON lacks and which marks a search in which nothing ran, by None."""
    return value if math.isfinite(value) else None


def feasible_counts() -> dict[str, float]:
    """Count our feasible configurations of the study of appendix A.2 step by step, beside the paper's count."""
    config = load_study(STUDIES / f"{A2_STUDY}.yaml")
    setting, headroom = config.problem.setting, config.problem.options.memory_headroom
    grid, removed = enumerate_space(setting, config.problem.options)
    memory = estimate_memory(setting, grid)
    fits = memory.fits(headroom)
    # The paper's and the current configuration are found in the grid by their degrees.
    needed_gib = memory.needed_bytes / 2**30
    # Disjoint groups, taken off in this order, so that the counts of the table add up to those that fit.
    rings, ulysses, virtual = grid.cp > 1, (grid.cp == 1) & (grid.up > 1), (grid.cp * grid.up == 1) & (grid.vpp > 1)
    plain = ~(rings | ulysses | virtual)
    positions = grid.positions()
    current, found = (needed_gib[positions[degrees]] for degrees in TABLE_2[A2_STUDY][:2])
    return {
        **{f"raw combinations that the rule {rule} drops": count for rule, count in removed.items()},
        "configurations that obey the rules": len(grid),
        "candidates of the study, which may fit": len(config.problem.space().grid),
        f"predicted to fit with {headroom:.0%} of the memory free": int(fits.sum()),
        "of these with cp above 1": int((fits & rings).sum()),
        "of the rest with up above 1": int((fits & ulysses).sum()),
        "of the rest with vpp above 1": int((fits & virtual).sum()),
        "left with none of the three": int((fits & plain).sum()),
        "feasible configurations in appendix A.2": A2_FEASIBLE,
        f"GiB in which {A2_FEASIBLE} of all would fit": _smallest(needed_gib, A2_FEASIBLE),
        "GiB that the paper's choice needs": round(float(found), 1),
        "GiB that the current one needs": round(float(current), 1),
        f"GiB in which {A2_FEASIBLE} with none of the three would fit": _smallest(needed_gib[plain], A2_FEASIBLE),
    }


def _smallest(needed_gib: FloatArray, count: int) -> float:
    """Return the memory [GiB] in which exactly `count` configurations would fit."""
    return round(float(np.sort(needed_gib)[count - 1]), 1)


SHARES = (
    "explored_of_grid",
    "explored_of_pruned",
    "explored_of_feasible",
    "paper_explored",
    "regret",
    "regret_90",
    "regret_of_tried",
    "share_within_1pct",
    "share_confident",
    "dropped",
)
"""Columns that the table prints in percent."""

HEADINGS = {
    "trials_90": "90%",
    "explored_of_grid": "of grid",
    "explored_of_pruned": "of pruned",
    "explored_of_feasible": "of feasible",
    "paper_trials": "paper",
    "paper_explored": "of grid ",
    "regret_90": "90% ",
    "regret_of_tried": "of tried",
    "share_within_1pct": "within 1%",
    "share_confident": "confident",
    "seconds_per_trial": "s/trial",
}


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Format a row of the table; the paper's size of the grid is left out because it equals ours."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if name in SHARES:
            cells[HEADINGS.get(name, name)] = "-" if value is None else f"{value:.1%}"
        elif name != "paper_grid":
            is_count = isinstance(value, float) and name != "seconds_per_trial"
            cells[HEADINGS.get(name, name)] = f"{value:g}" if is_count else value
    return cells


if __name__ == "__main__":
    sys.exit(main())
