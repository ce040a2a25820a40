"""Trials until the tuner is within 5% of the best measured configuration, beside Optuna's TPE and random search.

The space is the replayed group of configs/studies/ultrascale-llama-8b-128.yaml (116 configurations that ran and 60 that
failed, 128 H100). The shipped nanotron profile was fitted to the sweep without this group, the sampler to nothing.
TPE and random search are restricted to the same candidates in the way that helps them most: a suggestion that is no
candidate, or was tried already, costs nothing and is drawn again, and a failure is told as a step twice as slow as the
slowest one seen.
"""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution

from benchmarks.timing import arguments, publish
from tuner.candidates import Candidates, candidates_of
from tuner.config import StudyConfig, load_study
from tuner.sampler import STATUS, ThompsonSampler

STUDY = Path(__file__).parents[1] / "configs" / "studies" / "ultrascale-llama-8b-128.yaml"
WITHIN = 1.05
MAX_REDRAWS = 20


def measured_s(config: StudyConfig, candidates: Candidates) -> list[float | None]:
    """The measured step time of each candidate, None where it failed."""
    grid = candidates.space.grid
    return [config.backend.measure(grid.config(i), trial_number=i).step_time_s for i in range(len(grid))]


def meshtune_order(
    config: StudyConfig, candidates: Candidates, truth: list[float | None], seed: int
) -> tuple[list[int], int]:
    """The candidates in the order in which Meshtune tries them all, and how many it tried when it was confident."""
    sampler = ThompsonSampler(
        candidates.space.grid,
        candidates.estimate.step_time_s,
        candidates.features,
        memory_share=candidates.space.memory.needed_bytes / candidates.space.memory.capacity_bytes,
        memory_error=config.setting.runtime.memory_error,
        seed=seed,
    )
    study = optuna.create_study(sampler=sampler)
    best, order, stopped = min(t for t in truth if t), [], 0
    while len(order) < len(truth):
        trial = study.ask(fixed_distributions=sampler.search_space)
        position = sampler.position_of(trial.params)
        assert position is not None, "the sampler names candidates only"
        order.append(position)
        seconds = truth[position]
        if seconds is None:
            trial.set_user_attr(STATUS, "crashed")
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, seconds)
        history = sampler.history(study.get_trials(deepcopy=False))
        if not stopped and sampler.is_confident(history):
            stopped = len(order)
        if stopped and any((truth[i] or np.inf) <= WITHIN * best for i in order):
            break
    return order, stopped or len(order)


def tpe_order(candidates: Candidates, truth: list[float | None], seed: int) -> list[int]:
    """The candidates in the order in which Optuna's TPE tries them, until it is within 5% of the best."""
    grid = candidates.space.grid
    positions = grid.positions()
    varying = [name for name in grid.dimensions if len(set(getattr(grid, name).tolist())) > 1]
    distributions = {name: CategoricalDistribution(sorted(set(getattr(grid, name).tolist()))) for name in varying}
    fixed = {name: grid.values(0)[name] for name in grid.dimensions if name not in varying}
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    study = optuna.create_study(sampler=sampler)
    rng = np.random.default_rng(seed)
    best, slowest = min(t for t in truth if t), 1.0
    order: list[int] = []
    while True:
        trial = study.ask()
        position = None
        for _ in range(MAX_REDRAWS):
            # empty during TPE's random start
            drawn = sampler.sample_relative(study, study.trials[trial.number], distributions)
            position = positions.get(tuple((drawn | fixed).get(name) for name in grid.dimensions))
            if not drawn or (position is not None and position not in order):
                break
        if position is None or position in order:
            position = int(rng.choice([i for i in range(len(truth)) if i not in order]))
        order.append(position)
        seconds = truth[position]
        slowest = max(slowest, seconds or 0.0)
        told = seconds if seconds is not None else 2 * slowest
        params = {name: grid.values(position)[name] for name in varying}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=told))
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        if seconds is not None and seconds <= WITHIN * best:
            return order


def random_order(candidates: Candidates, truth: list[float | None], seed: int) -> list[int]:
    """The candidates in random order, none twice."""
    del candidates
    return [int(i) for i in np.random.default_rng(seed).permutation(len(truth))]


def needed(order: list[int], truth: list[float | None]) -> int:
    """Trials until one is within 5% of the best."""
    best = min(t for t in truth if t)
    return next(n for n, i in enumerate(order, start=1) if (truth[i] or np.inf) <= WITHIN * best)


def main() -> None:
    """Compares the three over the seeds."""
    options = arguments(__doc__ or "", seeds=20)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    config = load_study(STUDY)
    candidates = candidates_of(config)
    truth = measured_s(config, candidates)
    best = min(t for t in truth if t)
    counts, stops, regrets = [], [], []
    for seed in range(options.seeds):
        order, stopped = meshtune_order(config, candidates, truth, seed)
        counts.append(needed(order, truth))
        stops.append(stopped)
        regrets.append(min(truth[i] or np.inf for i in order[:stopped]) / best)
    rows = [_row("meshtune", counts, len(truth))]
    for name, order_of in {"optuna TPE": tpe_order, "random search": random_order}.items():
        found = [needed(order_of(candidates, truth, seed), truth) for seed in range(options.seeds)]
        rows.append(_row(name, found, len(truth)))
    rows[0] |= {"median_trials_when_confident": statistics.median(stops), "median_slowdown": statistics.median(regrets)}
    publish([{**dict.fromkeys(rows[0], ""), **row} for row in rows], as_json=options.json)


def _row(name: str, counts: list[int], num_candidates: int) -> dict[str, object]:
    return {
        "tuner": name,
        "median_trials_to_5%": float(statistics.median(counts)),
        "min": min(counts),
        "max": max(counts),
        "share_of_space": statistics.median(counts) / num_candidates,
    }


if __name__ == "__main__":
    main()
