"""Candidates of a study with all predictions before any trial."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodels.job.parallel_config import FURTHER_DIMENSIONS, HAND, ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory import MemoryEstimate, estimate_memory
from costmodels.step.step_time import StepEstimate, estimate_step, model_flops_utilisation
from costmodels.surrogates.features import configuration_features
from costmodels.surrogates.uncertainty import SIGMA, WIDE, likely_range, memory_half_width, step_uncertainty
from hardware.arrays import FloatArray, IntArray
from tuner.own_step import predictions as own
from tuner.plans.layer_planning import shape_text
from tuner.space.enumeration import Space, why_not
from tuner.study_file.config import StudyConfig


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


def candidates_of(config: StudyConfig) -> Candidates:
    """Enumerate, prune and predict the candidates of a study."""
    space, setting = config.space(), config.setting
    if config.own_step is not None:
        estimate = own.estimate_of(config.own_step, space.grid)
        return Candidates(space=space, estimate=estimate, features=own.features_of(space.grid, estimate))
    estimate = estimate_step(setting, space.grid, memory=space.memory)
    features = configuration_features(setting.job, setting.cluster, space.grid, estimate)
    return Candidates(space=space, estimate=estimate, features=features)


def ranking(config: StudyConfig, candidates: Candidates) -> IntArray:
    """Return the positions of the candidates [n], the shortest predicted step first; those that do not fit come last.

    Of predictions that agree to four digits the plainest configuration comes first: least context parallelism, then
    least tensor, pipeline and virtual pipeline parallelism. A configuration that does not fit is a candidate only where
    somebody measured it, or as the current one.
    """
    grid, step_time_s = candidates.space.grid, candidates.estimate.step_time_s
    fits = candidates.space.memory.fits(config.options.memory_headroom)
    # lexsort's last key weighs most: first what fits, then the rounded prediction, then the plainest
    rounded = np.round(np.log(step_time_s), 4)
    return np.lexsort((step_time_s, grid.vpp, grid.pp, grid.tp, grid.cp * grid.up, rounded, ~fits))


def reasons_against(config: StudyConfig, space: Space, chosen: ParallelConfig) -> dict[str, str]:
    """Return every reason that keeps `chosen` out of the study's space, by the rule's name; empty for a candidate."""
    if config.own_step is not None:
        return own.reasons_against(config.own_step, config.options, chosen, space)
    if config.measured is not None:
        if tuple(chosen.values(space.grid.dimensions).values()) in space.grid.positions():
            return {}
        return {"measured": f"is none of the {len(space.grid):,} measured configurations"}
    # a dimension that the study does not open has the job's value
    fixed = config.config_defaults
    reasons = why_not(config.setting, config.options, chosen) | {
        f"job.{name}": f"the study fixes {name} to {fixed[name]}; space.{name} would search it"
        for name in FURTHER_DIMENSIONS
        if name not in config.options.opened and name != "plan" and chosen.values([name])[name] != fixed[name]
    }
    positions = space.grid.positions()
    if not reasons and chosen.plan != HAND and tuple(chosen.values(space.grid.dimensions).values()) not in positions:
        reasons["plan"] = (
            f"no plan of {chosen.plan} is known for layers of this shape that differs from the one by hand"
        )
    if not reasons and chosen.assignment and tuple(chosen.values(space.grid.dimensions).values()) not in positions:
        reasons["assignment"] = f"is not what is planned for these degrees: {_planned_for(space, chosen)}"
    return reasons


def _planned_for(space: Space, chosen: ParallelConfig) -> str:
    """Return the uneven work of the candidate that otherwise equals a configuration."""
    others = [name for name in space.grid.dimensions if name != "assignment"]
    for position in np.flatnonzero(space.grid.assignment).tolist():
        candidate = space.grid.config(position)
        if candidate.values(others) == chosen.values(others):
            return str(candidate.assignment)
    return "even work"


def speed_of(config: StudyConfig, step_time_s: float) -> dict[str, float]:
    """Return throughput and utilisation at a step time, by the keys of JSON; a step of the user's own has no tokens."""
    if config.own_step is not None:
        return {"mfu": own.flops_utilisation(config.own_step, step_time_s)}
    setting = config.setting
    mfu = model_flops_utilisation(setting.job, setting.cluster, np.array([step_time_s]))
    return {"mfu": float(mfu[0]), "tokens_per_s_per_device": tokens_per_s_per_device(setting, step_time_s)}


def throughput_of(config: StudyConfig, step_time_s: float) -> float | None:
    """Return the throughput of one device at a step time [tokens/s]; None for a step of the user's own."""
    return None if config.own_step is not None else tokens_per_s_per_device(config.setting, step_time_s)


def tokens_per_s_per_device(setting: Setting, step_time_s: float) -> float:
    """Return the throughput of one device at a step time [tokens/s]."""
    return setting.job.tokens_per_step / (step_time_s * setting.cluster.num_devices)


def plan_of(config: StudyConfig, chosen: ParallelConfig) -> dict[str, Any]:
    """Return the sharding plan that a prediction counts, as a part of it; empty where that is the plan by hand."""
    if chosen.plan == HAND:
        return {}
    found = config.layer_plans.get(shape_text(chosen))
    return {} if found is None else {"plan": found}


def notes_on_plan(config: StudyConfig, chosen: ParallelConfig) -> tuple[str, ...]:
    """Return what flags cannot say of a configuration whose layers are sharded otherwise than frameworks do."""
    plan = plan_of(config, chosen).get("plan")
    if not plan:
        return ()
    by_hand_s = predict_candidate(config, replace(chosen, plan=HAND))["step_time_s"]
    return (
        f"plan: this step has its layers sharded as {plan['planner']} plans them, and these flags shard them by hand: "
        f"{len(plan['differs'])} operators differ, see `meshtune predict --plan`; by hand the step is predicted to "
        f"take {by_hand_s:.4g} s, and {predict_candidate(config, chosen)['step_time_s']:.4g} s as planned",
    )


def prediction_json(
    config: StudyConfig, estimate: StepEstimate, memory: MemoryEstimate, position: int
) -> dict[str, Any]:
    """Return the prediction of one configuration, as `meshtune predict` prints it and a trial keeps it."""
    # plain numbers of one row of the arrays [n], because JSON knows no others
    step_time_s = float(estimate.step_time_s[position])
    return {
        "step_time_s": step_time_s,
        "breakdown_s": {part: float(seconds[position]) for part, seconds in estimate.breakdown_s.items()},
        "peak_memory_bytes": int(memory.peak_bytes[position]),
        "memory_bytes": {part: int(parts[position]) for part, parts in memory.parts_bytes.items()},
        "memory_capacity_bytes": int(memory.capacity_bytes[position]),
        "fits": bool(memory.fits(config.options.memory_headroom)[position]),
        **speed_of(config, step_time_s),
    }


def predict_candidate(config: StudyConfig, chosen: ParallelConfig) -> dict[str, Any]:
    """Return the prediction of one configuration, whether it is in the study's space or not."""
    grid = ConfigGrid.from_configs([chosen], config.options.opened)
    if config.own_step is not None:
        own_memory = own.memory_of(config.own_step, grid)
        return prediction_json(config, own.estimate_of(config.own_step, grid), own_memory, 0)
    setting = config.setting
    memory = estimate_memory(setting, grid)
    estimate = estimate_step(setting, grid, memory=memory)
    return prediction_json(config, estimate, memory, 0) | plan_of(config, chosen)


def predict_with_errors(config: StudyConfig, chosen: ParallelConfig) -> dict[str, Any]:
    """Return a prediction with its error, and with the constants of the profile that weigh most in the error."""
    setting, headroom = config.setting, config.options.memory_headroom
    predicted = predict_candidate(config, chosen)
    if config.own_step is not None:
        return predicted
    grid = ConfigGrid.from_configs([chosen], config.options.opened)
    memory = estimate_memory(setting, grid)
    uncertainty = step_uncertainty(setting, grid, memory=memory)
    step_error, memory_error = float(uncertainty.log_error_95[0]), memory_half_width(setting.runtime, WIDE)
    return predicted | {
        "step_time_log_error": float(uncertainty.log_error[0]),
        "step_time_range_s": list(likely_range(predicted["step_time_s"], step_error)),
        "step_time_from_constants": dict(uncertainty.dominant(0)),
        "step_time_from_cluster": uncertainty.from_cluster,
        "peak_memory_log_error": memory_half_width(setting.runtime, SIGMA),
        "peak_memory_range_bytes": list(likely_range(float(memory.peak_bytes[0]), memory_error)),
        "fit_probability": float(memory.probability_of_fit(headroom, memory_error_of(setting.runtime))[0]),
    }
