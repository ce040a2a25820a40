"""Graph and mesh of a study's candidate, and the output of a sharding plan as text and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import least_layers, planned_layers, with_layers
from costmodels.job.setting import Setting
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan_totals import collective_lines, collectives_by_kind
from hardware.device import GIB
from hardware.io.errors import ConfigError
from hardware.rounding import predicted
from tuner.planners.doubts import sampled_in_words
from tuner.planners.judged import Verdict
from tuner.planners.planning import Planned
from tuner.planners.sharding.manumatic import Perturbed, PinReport
from tuner.planners.sharding.pins import Pin
from tuner.planners.toast.search import Step


def of_candidate(
    setting: Setting, config: ParallelConfig, num_layers: int | None = None, *, has_prediction: bool = False
) -> tuple[Graph, DeviceMesh]:
    """Build a graph of a few layers with one micro-batch of all replicas, on the devices of the first pipeline stage.

    Args:
        setting: Job, cluster and runtime of the study.
        config: Configuration whose degrees but pp become the axes, in the order in which ranks are counted.
        num_layers: Number of layers; None for the fewest that include every kind of layer.
        has_prediction: Whether the model's modules of multi-token prediction are planned, too.

    Raises:
        ConfigError: The model has fewer layers or no such modules, or `num_layers` is too few for its kinds of layers.
    """
    job = setting.job
    if num_layers is not None and num_layers > job.model.num_layers:
        raise ConfigError(
            f"must be at most the {job.model.num_layers} layers of {job.model.name}", key="--layers", value=num_layers
        )
    if has_prediction and not job.model.num_mtp_layers:
        raise ConfigError(
            f"needs modules of multi-token prediction, and {job.model.name} has none",
            key="--prediction",
            nearest="leave it out",
        )
    if num_layers:
        model = with_layers(job.model, num_layers)
    else:
        model = with_layers(job.model, least_layers(job.model)) if job.model.is_plain else planned_layers(job.model)
    degrees = {"dp": config.dp, "cp": config.cp, "up": config.up, "tp": config.tp}
    axes = {name: size for name, size in degrees.items() if size > 1} or {"dp": 1}
    graph = transformer_graph(
        replace(job, model=model), micro_batch_size=config.mbs * config.dp, has_prediction=has_prediction
    )
    return graph, DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=setting.cluster)


def plan_json(planned: Planned) -> dict[str, Any]:
    """Build the JSON object of `meshtune plan`."""
    plan, cost = planned.plan, planned.cost
    graph, names = plan.graph, plan.mesh.names
    return {
        "mesh": dict(zip(names, plan.mesh.sizes, strict=True)),
        "shardings": {
            graph.tensors[tensor].name: {
                "shape": list(graph.tensors[tensor].shape),
                "axes": [list(axes) for axes in plan.dims_of(tensor)],
            }
            for op in graph.ops
            if op.is_source
            for tensor in op.results
        },
        "collectives": [
            {
                "kind": each.move.kind.value,
                "bytes": each.move.message_bytes,
                "axis": [names[axis] for axis in each.move.axes],
                "op": graph.ops[each.op].name,
                "tensor": graph.tensors[each.tensor].name,
                "times": each.times,
                "seconds": each.seconds,
            }
            for each in cost.collectives
        ],
        "comm_s": cost.comm_s,
        "step_time_s": cost.step_time_s,
        "overlapped_s": None if planned.timeline is None else planned.timeline.step_time_s,
        "exposed_s": None if planned.timeline is None else float(planned.timeline.exposed_s.sum()),
        "peak_memory_bytes": cost.peak_memory_bytes,
        "memory_limit_bytes": planned.memory_bytes,
        "is_optimum": planned.found.is_optimum,
        "bound_s": planned.bound_s,
        "order": planned.order,
        "search_s": planned.search_s,
        "steps": [
            {
                "name": step.name,
                "cost": step.cost,
                "step_time_s": step.figures.step_time_s,
                "peak_memory_bytes": step.figures.peak_memory_bytes,
            }
            for step in planned.steps
        ],
        "pins": [_pin_json(report) for report in planned.found.reports],
        "unknown_primitives": dict(graph.unknown),
        "sampled_values": list(graph.sampled),
        **({} if planned.perturbed is None else {"diagnosis": _diagnosis_json(planned, planned.perturbed)}),
    }


def _diagnosis_json(planned: Planned, others: Sequence[Perturbed]) -> dict[str, Any]:
    step_time_s = planned.cost.step_time_s
    return {
        "left_out": [
            {"pin": report.pin.in_words, "saved_s": _finite(report.saved_s)} for report in planned.found.reports
        ],
        "perturbed": [
            {
                "pin": planned.found.reports[other.number].pin.in_words,
                "instead": other.pin.in_words,
                "step_time_s": other.step_time_s,
                "more_s": None if other.step_time_s is None else other.step_time_s - step_time_s,
            }
            for other in others
        ],
    }


def _finite(seconds: float | None) -> float | None:
    """Return None for a number that JSON cannot represent."""
    return seconds if seconds is not None and math.isfinite(seconds) else None


def _pin_json(report: PinReport) -> dict[str, Any]:
    return {
        "pin": report.pin.in_words,
        "is_hard": report.pin.is_hard,
        "ways": report.ways,
        "ops": report.num_ops,
        "held": report.num_held,
        "over_provisioned": report.num_over_provisioned,
        "missing": report.missing,
        "saved_s": _finite(report.saved_s),
    }


def in_lines(planned: Planned) -> list[str]:
    """Format a plan as text: totals, collectives by kind and axes, and the result of each pin."""
    plan, cost = planned.plan, planned.cost
    together = collectives_by_kind(plan, cost)
    digits, limit = 1, ""
    if planned.memory_bytes is not None:
        digits, limit = 3, f" (limit {planned.memory_bytes / GIB:g})"
    together_s = ""
    if planned.timeline is not None:
        exposed_s = planned.timeline.exposed_s.sum()
        step_s = planned.timeline.step_time_s
        together_s = f"{predicted(step_s)} s per step with {predicted(exposed_s)} s exposed communication; "
    lines = [
        f"{together_s}{predicted(cost.step_time_s)} s {'' if together_s else 'per step '}without overlap, of which "
        f"{predicted(cost.comm_s)} s communication; {cost.peak_memory_bytes / GIB:.{digits}f} GiB per device{limit}",
        f"planned {len(plan.graph.ops):,} operators in {planned.search_s:.2f} s (order: {planned.order})"
        + (", proven optimal" if planned.found.is_optimum else ""),
        *_bound_lines(planned),
        *collective_lines(together),
        *map(_step_line, planned.steps),
        *(_pin_line(report) for report in planned.found.reports),
        *_diagnosis_lines(planned),
    ]
    if plan.graph.unknown:
        found = ", ".join(f"{name} ({count} times)" for name, count in plan.graph.unknown)
        lines.append(f"no sharding rule is known for {found}; their operands and results are not sharded")
    if words := sampled_in_words(plan.graph):
        lines.append(words)
    return lines


def judged_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Build the list of candidates that a compiler judged, the answer first and the others by their schedules."""
    return [
        {
            "name": each.name,
            "is_answer": each.is_answer,
            "is_propagated": each.is_propagated,
            "planned_s": each.planned_s,
            "planned_bytes": each.planned_bytes,
            "scheduled_s": each.scheduled_s,
            "compute_s": each.compute_s,
            "comm_s": each.comm_s,
            "compiled_bytes": each.compiled_bytes,
            "fits": each.fits,
            "compile_s": each.compile_s,
            "refusal": each.refusal,
        }
        for each in _by_schedule(verdicts)
    ]


def judged_lines(verdicts: Sequence[Verdict], device: str) -> list[str]:
    """Format the candidates that a compiler judged, the answer first, with our price beside its schedule."""
    width = max(len(each.name) for each in verdicts)
    lines = [f"XLA's schedules for {device}, beside our prices:"]
    for each in _by_schedule(verdicts):
        name = f"{'*' if each.is_answer else ' '} {each.name:<{width}}"
        if each.scheduled_s is None or each.compiled_bytes is None:
            lines.append(f"{name}  is refused: {each.refusal}")
            continue
        more = each.planned_s / each.scheduled_s - 1 if each.scheduled_s else 0.0
        lines.append(
            f"{name}  {predicted(each.scheduled_s)} s, {each.compiled_bytes / GIB:.2f} GiB"
            f"{'' if each.fits else ' (does not fit)'}; ours {predicted(each.planned_s)} s ({more:+.0%}), "
            f"{each.planned_bytes / GIB:.2f} GiB; compiled in {each.compile_s:.1f} s"
        )
    return lines


def _by_schedule(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return sorted(
        verdicts, key=lambda each: (not each.is_answer, math.inf if each.scheduled_s is None else each.scheduled_s)
    )


def _bound_lines(planned: Planned) -> list[str]:
    if planned.bound_s is None:
        return []
    if planned.bound_s <= 0:
        return ["HiGHS proved no bound within its time limit"]
    over = planned.cost.step_time_s / planned.bound_s - 1
    place = "" if planned.timeline is None else "without overlap, "
    distance = f"is within {max(over, 0.0):.2%}" if over < 1 else f"takes at most {1 + over:.3g} times as long"
    return [f"{place}no plan without pins is faster than {predicted(planned.bound_s)} s: this one {distance}"]


def _step_line(step: Step) -> str:
    figures = step.figures
    return f"  {step.name + ':':<20} {predicted(figures.step_time_s)} s, {figures.peak_memory_bytes / 2**30:.1f} GiB"


def _pin_line(report: PinReport) -> str:
    held = "holds" if report.is_held else f"holds at {report.num_held} of {report.num_ops} operators"
    more = f", cut further at {report.num_over_provisioned}" if report.num_over_provisioned else ""
    saved = ""
    if report.saved_s is not None:
        saved = f"; without it a step takes {_more_or_less(report.saved_s)}"
    if report.saved_s == math.inf:
        saved = "; without it no plan that fits was found"
    return f"  pin {report.pin.in_words}: {taken_in_words(report.pin, report.ways)}{held}{more}{saved}"


def taken_in_words(pin: Pin, ways: int) -> str:
    """Return the beginning of what is said of a soft pin whose ways do not divide the devices; empty for others."""
    return "" if pin.ways in (None, ways) else f"taken as {ways} ways, the nearest that divides devices and dim; "


def _more_or_less(seconds: float) -> str:
    return f"{predicted(abs(seconds))} s {'more' if seconds >= 0 else 'less'}"


def _diagnosis_lines(planned: Planned) -> list[str]:
    """Format the step times with slightly different pins, one per line, the worst first."""
    if planned.perturbed is None:
        return []
    rows = []
    for other in planned.perturbed:
        more_s = math.inf if other.step_time_s is None else other.step_time_s - planned.cost.step_time_s
        told = "infeasible" if other.step_time_s is None else _more_or_less(more_s)
        rows.append((more_s, planned.found.reports[other.number].pin.in_words, other.pin.in_words, told))
    rows.sort(key=lambda row: -row[0])
    width = max((len(instead) for _, _, instead, _ in rows), default=0)
    return [
        "Step time with another pin:",
        *(f"  {instead:<{width}}  {told:<16} (instead of {pin})" for _, pin, instead, told in rows),
    ]


def shardings_table(planned: Planned) -> Mapping[str, str]:
    """Map each input tensor of the step to its sharding, written as `dim/axis`."""
    plan = planned.plan
    found = {}
    for op in plan.graph.ops:
        if op.is_source:
            tensor = op.results[0]
            dims = plan.graph.tensors[tensor].dim_names or tuple(map(str, range(len(plan.graph.tensors[tensor].shape))))
            cut = [f"{dim}/{'*'.join(axes)}" for dim, axes in zip(dims, plan.dims_of(tensor), strict=True) if axes]
            found[op.name] = ", ".join(cut) or "replicated"
    return found
