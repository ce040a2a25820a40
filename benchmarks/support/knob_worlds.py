"""Simulated worlds whose layouts are searched together with knobs, and the best pair of each world.

Letters: n layouts, p pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from costmodels.job.parallel_config import DEGREES, ConfigGrid, ParallelConfig
from hardware.arrays import FloatArray
from trials.knobs.knob import Knob, today_of
from trials.simulated.backend import SimulatedBackend
from trials.simulated.knob_world import hidden_effects, idle_knobs
from tuner.forecast.candidates import Candidates, candidates_of
from tuner.forecast.searched_knobs import searched_knobs
from tuner.search.knobs.knob_space import KnobSpace
from tuner.search.posterior import Posterior
from tuner.search.prior import initial_posterior
from tuner.study_file.config import load_study
from tuner.study_file.knob_keys import KnobKeys, build_knobs
from tuner.study_file.request import StudyRequest

STUDIES = Path("configs/studies")

KNOBS = build_knobs(
    [
        KnobKeys.model_validate(keys)
        for keys in (
            {"name": "overlap_gradients", "when": "dp > 1", "affects": ["dp communication"]},
            {
                "name": "overlap_parameters",
                "when": "dp > 1 and overlap_gradients == true",
                "affects": ["dp communication"],
            },
            {
                "name": "bucket",
                "range": {"first": 10_000_000, "last": 640_000_000, "factor": 2},
                "today": 40_000_000,
                "when": "dp > 1",
                "affects": ["dp communication", "memory"],
            },
            {"name": "overlap_tp", "when": "tp > 1", "affects": ["tp communication"]},
            {"name": "connections", "values": [1, 8, 32]},
            {"name": "algorithm", "values": [None, "Ring", "Tree"]},
            {"name": "graphs", "values": ["none", "attention", "whole"], "affects": ["host", "memory"]},
            {"name": "dispatcher", "values": ["first", "second", "third"]},
        )
    ]
)
"""Eight knobs of the kinds that frameworks have: flags, a size, variables of NCCL and CUDA, choices."""

ENUMERATED = 200
"""Layouts of a world among which its best pair is looked for, the fastest that may fit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobProblem:
    """Study with knobs before its first trial.

    Attributes:
        config: Study.
        candidates: Layouts and their predictions.
        posterior: Posterior of the layouts before any trial.
        space: Knobs and the priors of their effects.
    """

    config: StudyRequest
    candidates: Candidates
    posterior: Posterior
    space: KnobSpace

    @property
    def grid(self) -> ConfigGrid:
        """Grid of the layouts."""
        return self.candidates.space.grid


@lru_cache(maxsize=1)
def knob_problem(study: str, num_knobs: int) -> KnobProblem:
    """Prepare a study of configs/studies with the first of KNOBS."""
    config = load_study(STUDIES / f"{study}.yaml")
    config = replace(config, problem=replace(config.problem, knobs=KNOBS[:num_knobs], known_knobs=()))
    candidates = candidates_of(config.problem)
    grid = candidates.space.grid
    space = searched_knobs(config.problem, candidates)
    assert space is not None, "the study has knobs"
    return KnobProblem(
        config=config,
        candidates=candidates,
        posterior=initial_posterior([(config.problem.subject.measured_setting, np.arange(len(grid)))], grid),
        space=space,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobWorld:
    """Simulated world of a seed.

    Attributes:
        backend: Backend that answers trials.
        step_time_s: Noise-free step times of the layouts with today's knobs [n].
        log_room: Logarithm of the capacity over the needed memory of each layout [n].
        best_layout_s: Shortest of the layouts that fit, with today's knobs [s].
        best_pair_s: Shortest over all pairs that fit [s].
    """

    backend: SimulatedBackend
    step_time_s: FloatArray
    log_room: FloatArray
    best_layout_s: float
    best_pair_s: float

    def true_s(self, layout: int, config: ParallelConfig) -> float:
        """Return the noise-free step time of a pair, which has run [s]."""
        return float(self.step_time_s[layout] * np.exp(self.backend.hidden_knobs(config).step[0]))


def knob_world(problem: KnobProblem, seed: int, *, works: bool = True) -> KnobWorld:
    """Return the world of a seed; unless `works`, its knobs do nothing."""
    backend = problem.config.trials.backend
    assert isinstance(backend, SimulatedBackend), "these studies are simulated"
    backend = replace(backend, seed=seed, knobs=problem.config.problem.knobs if works else ())
    memory, step_time_s = backend.hidden_memory(problem.grid), backend.hidden_step(problem.grid).step_time_s
    log_room = np.log(memory.capacity_bytes / memory.needed_bytes)
    best_layout_s = float(step_time_s[log_room >= 0].min())
    world = KnobWorld(
        backend=backend,
        step_time_s=step_time_s,
        log_room=log_room,
        best_layout_s=best_layout_s,
        best_pair_s=best_layout_s,
    )
    return replace(world, best_pair_s=_best_pair_s(problem, world)) if works else world


def _best_pair_s(problem: KnobProblem, world: KnobWorld) -> float:
    """Return the shortest step of all pairs of the fastest layouts, over all values of knobs that do something."""
    grid, backend = problem.grid, world.backend
    order = np.argsort(np.where(world.log_room > -0.5, world.step_time_s, np.inf), kind="stable")[:ENUMERATED]
    log_degrees = np.log2(grid.matrix(DEGREES).astype(np.float64))
    idle = idle_knobs(backend.knobs, backend.seed)
    best_s = np.inf
    # layouts that set the same knobs have the same combinations
    patterns, inverse = np.unique(problem.space.active[order], axis=0, return_inverse=True)
    for number in range(len(patterns)):
        layouts = order[inverse.ravel() == number]
        for active in _combinations(backend.knobs, grid.config(int(layouts[0])), idle):
            effects = hidden_effects(active, log_degrees[layouts], backend.seed)
            fits = world.log_room[layouts] >= effects.memory
            if fits.any():
                best_s = min(best_s, float((world.step_time_s[layouts] * np.exp(effects.step))[fits].min()))
    return best_s


def _combinations(
    knobs: Sequence[Knob], layout: ParallelConfig, idle: frozenset[str]
) -> list[list[tuple[Knob, object]]]:
    """Return every set of values of the knobs that a layout sets, those that do nothing at today's."""
    found = []
    choices = [(knob.today,) if knob.name in idle else knob.values for knob in knobs]
    for values in itertools.product(*choices):
        chosen = dict(zip((knob.name for knob in knobs), values, strict=True))
        found.append(
            [(knob, chosen[knob.name]) for knob in knobs if knob.when.holds_for(layout, today_of(knobs) | chosen)]
        )
    return found
