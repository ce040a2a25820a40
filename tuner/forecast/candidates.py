"""Candidates of a study with all predictions before any trial."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodels.job.parallel_config import HAND, ConfigGrid, ParallelConfig
from costmodels.job.runtime import UNKNOWN, find_runtime
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.step_time import StepEstimate, estimate_step
from costmodels.surrogates.uncertainty import SIGMA, WIDE, likely_range, memory_half_width
from hardware.arrays import FloatArray, IntArray
from hardware.rounding import predicted
from tuner.plans.layer_planning import shape_text
from tuner.space.enumeration import Space
from tuner.subject.contract import AbstractSubject
from tuner.subject.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """Space of a study and its predictions, row by row.

    Attributes:
        space: Space of the study, with the candidates that fell and the rules that removed them.
        estimate: Predicted step times and breakdowns.
        features: Features of each candidate for the surrogate [n, d].
    """

    space: Space
    estimate: StepEstimate
    features: FloatArray


def candidates_of(problem: Problem) -> Candidates:
    """Enumerate, prune and predict the candidates of a study."""
    return candidates_in(problem.space(), problem.subject)


def candidates_in(space: Space, subject: AbstractSubject) -> Candidates:
    """Predict the candidates of a space."""
    estimate = subject.forecast(space.grid, space.memory).estimate
    return Candidates(space=space, estimate=estimate, features=subject.features(space.grid, estimate))


def ranking(problem: Problem, candidates: Candidates) -> IntArray:
    """Return the positions of the candidates [n], the shortest predicted step first; those that do not fit come last.

    Of predictions that agree to four digits the plainest configuration comes first: least context parallelism, then
    least tensor, pipeline and virtual pipeline parallelism. A configuration that does not fit is a candidate only where
    somebody measured it, or as the current one.
    """
    grid, step_time_s = candidates.space.grid, candidates.estimate.step_time_s
    fits = candidates.space.memory.fits(problem.options.memory_headroom)
    # lexsort's last key weighs most: first what fits, then the rounded prediction, then the plainest
    rounded = np.round(np.log(step_time_s), 4)
    return np.lexsort((step_time_s, grid.vpp, grid.pp, grid.tp, grid.cp * grid.up, rounded, ~fits))


def speed_of(problem: Problem, step_time_s: float) -> dict[str, float]:
    """Return utilisation and, where a step has tokens, throughput at a step time, by the keys of JSON."""
    throughput = problem.subject.throughput(step_time_s)
    told = {} if throughput is None else {"tokens_per_s_per_device": throughput}
    return {"mfu": problem.subject.utilisation(step_time_s)} | told


def plan_of(problem: Problem, chosen: ParallelConfig) -> dict[str, Any]:
    """Return the sharding plan that a prediction counts, as a part of it; empty where that is the plan by hand."""
    if chosen.plan == HAND:
        return {}
    found = problem.layer_plans.get(shape_text(chosen))
    return {} if found is None else {"plan": found}


def notes_on_plan(problem: Problem, chosen: ParallelConfig) -> tuple[str, ...]:
    """Return what flags cannot say of a configuration whose layers are sharded otherwise than frameworks do."""
    plan = plan_of(problem, chosen).get("plan")
    if not plan:
        return ()
    by_hand_s = predict_candidate(problem, replace(chosen, plan=HAND))["step_time_s"]
    planned_s = predict_candidate(problem, chosen)["step_time_s"]
    return (
        f"plan: this step has its layers sharded as {plan['planner']} plans them, and these flags shard them by hand: "
        f"{len(plan['differs'])} operators differ, see `meshtune predict --plan`; by hand the step is predicted to "
        f"take {predicted(by_hand_s)} s, and {predicted(planned_s)} s as planned",
    )


def prediction_json(problem: Problem, estimate: StepEstimate, memory: MemoryEstimate, position: int) -> dict[str, Any]:
    """Return the prediction of one configuration, as `meshtune predict` prints it and a trial keeps it."""
    # plain numbers of one row of the arrays [n], because JSON knows no others
    step_time_s = float(estimate.step_time_s[position])
    return {
        "step_time_s": step_time_s,
        "breakdown_s": {part: float(seconds[position]) for part, seconds in estimate.breakdown_s.items()},
        "peak_memory_bytes": int(memory.peak_bytes[position]),
        "memory_bytes": {part: int(parts[position]) for part, parts in memory.parts_bytes.items()},
        "memory_capacity_bytes": int(memory.capacity_bytes[position]),
        "fits": bool(memory.fits(problem.options.memory_headroom)[position]),
        **speed_of(problem, step_time_s),
    }


def predict_candidate(problem: Problem, chosen: ParallelConfig) -> dict[str, Any]:
    """Return the prediction of one configuration, whether it is in the study's space or not."""
    grid = ConfigGrid.from_configs([chosen], problem.options.opened)
    forecast = problem.subject.forecast(grid)
    return prediction_json(problem, forecast.estimate, forecast.memory, 0) | plan_of(problem, chosen)


def _unnamed_s(problem: Problem, grid: ConfigGrid) -> float:
    """Return the step time that the first of some configurations has under the profile of a framework without one."""
    unnamed = replace(problem.setting, runtime=find_runtime(UNKNOWN))
    return float(estimate_step(unnamed, grid, memory=estimate_memory(unnamed, grid)).step_time_s[0])


def predict_with_errors(problem: Problem, chosen: ParallelConfig) -> dict[str, Any]:
    """Return a prediction with its error, and with the constants of the profile that weigh most in the error."""
    grid = ConfigGrid.from_configs([chosen], problem.options.opened)
    forecast = problem.subject.forecast(grid)
    memory = forecast.memory
    predicted = prediction_json(problem, forecast.estimate, memory, 0) | plan_of(problem, chosen)
    uncertainty = problem.subject.uncertainty(grid, memory)
    if uncertainty is None:
        return predicted
    runtime, headroom = problem.setting.runtime, problem.options.memory_headroom
    step_error, memory_error = float(uncertainty.log_error_95[0]), memory_half_width(runtime, WIDE)
    return predicted | {
        "unnamed_step_time_s": _unnamed_s(problem, grid),
        "step_time_log_error": float(uncertainty.log_error[0]),
        "step_time_range_s": list(likely_range(predicted["step_time_s"], step_error)),
        "step_time_from_constants": dict(uncertainty.dominant(0)),
        "step_time_from_cluster": uncertainty.from_cluster,
        "peak_memory_log_error": memory_half_width(runtime, SIGMA),
        "peak_memory_range_bytes": list(likely_range(float(memory.peak_bytes[0]), memory_error)),
        "fit_probability": float(memory.probability_of_fit(headroom, memory_error_of(runtime))[0]),
    }
