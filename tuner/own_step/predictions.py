"""Candidates of a user's own step with their predictions, in the forms of the space and of the search.

The planner's cost has no overlap and knows no kernels, so that it ranks plans and predicts no step. The search
therefore takes its errors as wide ones (all assumed): in the time of compute and in that of the collectives of each
axis, which all candidates share, and in each plan of a planner. What remains varies between meshes, as for other
studies.

Letters: n candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, Value
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.error_models import error_models
from costmodels.step.memory.peak import MEMORY_PARTS, MemoryEstimate
from costmodels.step.step_time import StepEstimate
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError, did_you_mean
from tuner.own_step.plans import OwnCandidate, OwnStepPlans, words_of
from tuner.planners.doubts import sampled_in_words
from tuner.space.enumeration import Space, SpaceOptions

if TYPE_CHECKING:  # surrogates load scipy, and only a search needs them
    from tuner.search.posterior import Posterior

OPENED = ("zero_stage", "plan")
"""Further dimensions of the candidates, beside the degrees `dp` and `tp`."""

SEARCHED = ("dp", "tp", "mbs", "zero_stage")
"""Dimensions that a study may tighten."""

DEFAULTS: dict[str, Value] = {
    "recompute": "none",
    "offload": "none",
    "zero_stage": 0,
    "sequence_parallel": True,
    "expert_tp": 0,
    "dp_shard": 0,
    "recompute_layers": 0,
    "plan": "hand",
    "assignment": "",
}
"""Values of the further dimensions where nothing else is said: plain data parallelism, sharded by hand."""

COMPUTE_ERROR, DATA_ERROR, MODEL_ERROR = 0.3, 0.5, 0.5
"""Standard deviations of the logarithms of true over predicted time: of compute, of collectives along `data`, and of
all others (assumed; `trials/simulated` takes 0.3 for the errors of operators)."""


def space_of(plans: OwnStepPlans, options: SpaceOptions, current: ParallelConfig | None) -> Space:
    """Return the candidates of a study that may fit in memory, and the current one.

    Raises:
        ConfigError: The step cannot be planned, or the current configuration is none of its plans by hand.
    """
    allowed = dict(options.allowed)
    removed: dict[str, int] = {}
    found: list[OwnCandidate] = []
    for tp in plans.degrees:
        mesh = plans.on(tp)
        if not mesh.candidates:
            removed[mesh.rule] = removed.get(mesh.rule, 0) + 1
        for each in mesh.candidates:
            unwanted = next((name for name in allowed if getattr(each.config, name) not in allowed[name]), None)
            if unwanted is not None:
                removed[f"space.{unwanted}"] = removed.get(f"space.{unwanted}", 0) + 1
            else:
                found.append(each)
    num_before_memory = len(found)
    grid = ConfigGrid.from_configs([each.config for each in found], OPENED)
    fits = memory_of(plans, grid).may_fit(options.memory_headroom, error_models().unknown_memory)
    if not fits.all():
        removed["memory"] = int((~fits).sum())
    kept = [each.config for each, fit in zip(found, fits.tolist(), strict=True) if fit]
    if current is not None and current not in kept:
        if plans.find(current) is None:
            shown = [each.in_words for each in found if each.config.plan == current.plan]
            raise ConfigError(
                "is none of the plans by hand of this step",
                key="current",
                value=words_of(current),
                nearest=did_you_mean(words_of(current), shown) if shown else "`meshtune space` says why there is none",
            )
        kept.append(current)
    grid = ConfigGrid.from_configs(kept, OPENED)
    return Space(
        grid=grid,
        memory=memory_of(plans, grid),
        num_before_memory=num_before_memory,
        removed=removed,
        warnings=_warnings(plans, num_before_memory, len(kept)),
    )


def _warnings(plans: OwnStepPlans, num_before_memory: int, num_kept: int) -> tuple[str, ...]:
    unknown = ", ".join(f"{name} ({count})" for name, count in plans.graph().unknown)
    notes = [f"no sharding rule is known for {unknown}: every device runs it whole"] if unknown else []
    notes += [words] if (words := sampled_in_words(plans.graph())) else []
    notes += (
        ["nothing fits: no plan leaves enough of a device's memory free"] if num_before_memory and not num_kept else []
    )
    return tuple(notes)


def reasons_against(plans: OwnStepPlans, options: SpaceOptions, chosen: ParallelConfig, space: Space) -> dict[str, str]:
    """Return every reason that keeps a configuration out of the space, by the rule's name; empty for a candidate."""
    devices = plans.cluster.num_devices
    known = ("dp", "tp", "mbs") if plans.mbs else ("dp", "tp")
    others = {name: value for name, value in chosen.values().items() if name not in known and value != 1}
    if others:
        told = ", ".join(f"{name}={value}" for name, value in others.items())
        beside = ", and mbs with space.mbs" if "mbs" in others else ""
        return {"mesh": f"a step of your own has dp (data) and tp (model) alone{beside}, and not {told}"}
    if chosen.dp * chosen.tp != devices:
        return {"devices": f"dp*tp must be the {devices} devices of the cluster"}
    mesh = plans.on(chosen.tp)
    if not mesh.candidates:
        return {mesh.rule: mesh.reason}
    if plans.find(chosen) is None:
        others_here = "; ".join(each.in_words for each in mesh.candidates)
        return {"plan": f"this mesh has no such plan, or another that is the same; it has {others_here}"}
    reasons = {
        f"space.{name}": f"the study allows {name} only {', '.join(map(str, values))}"
        for name, values in options.allowed
        if getattr(chosen, name) not in values
    }
    if not reasons and tuple(chosen.values(space.grid.dimensions).values()) not in space.grid.positions():
        memory = memory_of(plans, ConfigGrid.from_configs([chosen], OPENED))
        need, has = (float(each[0]) / 2**30 for each in (memory.needed_bytes, memory.capacity_bytes))
        reasons["memory"] = f"needs {need:.3g} GiB of {has:.3g} GiB, and {options.memory_headroom:.0%} must stay free"
    return reasons


def rule_reasons(options: SpaceOptions) -> dict[str, str]:
    """Return what each rule demands, in words, by its name."""
    return {
        "data": "data must divide the batch, the first dim of an input",
        "model": "model must divide a dim of a layer that a plan by hand can cut",
    } | {f"space.{name}": f"the study allows {name} only {', '.join(map(str, of))}" for name, of in options.allowed}


def _rows(plans: OwnStepPlans, grid: ConfigGrid) -> list[OwnCandidate]:
    found = [plans.find(grid.config(position)) for position in range(len(grid))]
    assert all(found), "a grid has candidates alone"
    return [each for each in found if each is not None]


def memory_of(plans: OwnStepPlans, grid: ConfigGrid) -> MemoryEstimate:
    """Return the predicted memory of the candidates; what is neither parameter nor other state is activations."""
    rows = _rows(plans, grid)
    parts = {part: np.zeros(len(rows)) for part in MEMORY_PARTS}
    peak_bytes = np.array([each.peak_bytes for each in rows], dtype=np.float64)
    parts["weights"] = np.array([each.weights_bytes for each in rows], dtype=np.float64)
    parts["optimizer"] = np.array([each.optimizer_bytes for each in rows], dtype=np.float64)
    parts["activations"] = peak_bytes - parts["weights"] - parts["optimizer"]
    capacity_bytes = float(min(device.memory_bytes for device in plans.cluster.devices))
    return MemoryEstimate(
        peak_bytes=peak_bytes, parts_bytes=parts, capacity_bytes=np.full(len(rows), capacity_bytes, dtype=np.float64)
    )


def estimate_of(plans: OwnStepPlans, grid: ConfigGrid) -> StepEstimate:
    """Return the predicted step times; collectives along `data` alone are `dp`, and all others `tp`."""
    rows = _rows(plans, grid)
    breakdown = {part: np.zeros(len(rows)) for part in BREAKDOWN}
    breakdown["compute"] = np.array([each.compute_s for each in rows], dtype=np.float64)
    breakdown["dp"] = np.array([each.data_s for each in rows], dtype=np.float64)
    breakdown["tp"] = np.array([each.model_s for each in rows], dtype=np.float64)
    step_time_s = breakdown["compute"] + breakdown["dp"] + breakdown["tp"]
    return StepEstimate(step_time_s=step_time_s, breakdown_s=breakdown)


def features_of(grid: ConfigGrid, estimate: StepEstimate) -> FloatArray:
    """Return features of the candidates [n, 5], in the units of `costmodels/surrogates/features.py`."""
    octaves = 3.0
    columns = (
        np.log2(grid.tp) / octaves,
        np.log2(grid.mbs) / octaves,
        np.minimum(grid.zero_stage, 1) + grid.zero_stage / 6.0,
        grid.is_planned.astype(np.float64),
        2.0 * (estimate.breakdown_s["dp"] + estimate.breakdown_s["tp"]) / estimate.step_time_s,
    )
    return np.stack(columns, axis=1)


def posterior_before_trials(plans: OwnStepPlans, grid: ConfigGrid) -> Posterior:
    """Return the posterior of the candidates before any trial."""
    from costmodels.surrogates.predicted import PLAN_ERROR, Predicted  # noqa: PLC0415 # see the imports above
    from tuner.search.posterior import posterior_of  # noqa: PLC0415 # see the imports above

    estimate, memory = estimate_of(plans, grid), memory_of(plans, grid)
    of_parts = {"compute": COMPUTE_ERROR, "dp": DATA_ERROR, "tp": MODEL_ERROR}
    effects = [error * estimate.breakdown_s[part] / estimate.step_time_s for part, error in of_parts.items()]
    effects.append(PLAN_ERROR * grid.is_planned.astype(np.float64))
    return posterior_of(
        Predicted(
            step_time_s=estimate.step_time_s,
            constant_effects=np.stack(effects, axis=1),
            features=features_of(grid, estimate),
            needed_bytes=memory.needed_bytes,
            capacity_bytes=memory.capacity_bytes,
            peak_bytes=memory.peak_bytes,
            memory_shares=np.stack([memory.parts_bytes[part] / memory.needed_bytes for part in MEMORY_PARTS], axis=1),
            memory_error=error_models().unknown_memory,
            stall_variance=np.zeros(len(grid)),
        ),
        grid,
    )


def flops_utilisation(plans: OwnStepPlans, step_time_s: float) -> float:
    """Return the FLOPs of the step's operators per second over the peak of all devices, at a step time."""
    cluster, graph = plans.cluster, plans.graph()
    peaks = {
        precision: sum(device.peak_flop_per_s(precision) for device in cluster.devices) / len(cluster.devices)
        for precision in {op.precision for op in graph.ops if op.precision}
    }
    busy_s = sum(op.times * op.flop / peaks[op.precision] for op in graph.ops if op.precision)
    return float(busy_s / cluster.num_devices / step_time_s)
