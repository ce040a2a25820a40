"""Sharding plans of a study's candidates, and the changes they make to the cost model's layers.

A plan stands for all candidates whose layers have the same shape: tp, cp, up, ep and the micro-batch. It is found on
two layers (or the fewest that include every kind), with the median number of micro-batches of these candidates. It is
compared with the plan written by hand on the same graph and mesh. On each device it holds no more of a parameter, a
moment or a gradient and needs no more memory than that plan, so that the memory model's predictions stay valid.

A pin applies to the shapes whose mesh has its axis. If a hard pin names a number of parts, the number of devices there
must also be a multiple of it; a soft pin takes the nearest number that divides them. The other shapes are planned
without the pin. A pin may cost memory, but not for weights: in that case the plan by hand is kept, and the summary says
that the pin does not hold. Of activations, the memory model counts what a plan's layers keep for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from costmodels.job.layer_change import LayerChange
from costmodels.job.proxy_job import planned_layers
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.block_figures import block_figures, ratios, runs_once
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import Graph, TensorKind
from costmodels.sharding.layouts import local_share
from costmodels.sharding.micro_batches import repeat_micro_batches
from costmodels.sharding.plan import NONE, Plan, PlanCost, cost_of, written_layout
from costmodels.sharding.plan_totals import collective_lines, collectives_by_kind
from hardware.cluster import Cluster
from hardware.collector import without_collector
from hardware.device import GIB
from hardware.rounding import predicted
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.hand_made import hand_made
from tuner.planners.sharding.layer_axes import layer_axes
from tuner.planners.sharding.manumatic import PinnedSearch
from tuner.planners.sharding.pins import Pin, Pinned, devices_of, match_pin, resolve_pins, taken_ways
from tuner.planners.sharding.recursive import whole
from tuner.planners.sharding.sharding_terms import Charge, ShardingTerms, together
from tuner.planners.sharding.table_forms import Forms, Row
from tuner.planners.toast.search import ToastOptions, toast_plan
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.layer_tasks import LayerTask, freeze, sequences_of

_FORMS = Forms()
"""Forms of the cost tables of all shapes."""

TOO_MUCH_S = 1e6
"""Penalty for holding more of a parameter than the plan by hand does [s]: more than any step takes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedLayer:
    """Plan that was found for a shape.

    Attributes:
        by_hand: Plan that frameworks write by hand.
        by_hand_cost: Cost of the plan by hand.
        found: Plan that is used; it may equal the plan by hand.
        cost: Cost of the plan that is used.
        change: Change of the cost model's layers; None if the plan equals the plan by hand.
        pins: Pins that the shape's degrees allow, with the numbers of matching and of satisfying operators, and the
            number of parts that each asks for.
    """

    by_hand: Plan
    by_hand_cost: PlanCost
    found: Plan
    cost: PlanCost
    change: LayerChange | None
    pins: tuple[tuple[Pin, int, int, int], ...]


@without_collector
def plan_layer(task: LayerTask) -> PlannedLayer | None:
    """Plan one shape; None if there is no plan by hand to compare with.

    Raises:
        ConfigError: The pins cannot be satisfied.
    """
    graph, mesh = _layers_of(task)
    by_hand = hand_made(graph, mesh, task.config)
    if by_hand is None:
        return None
    limit = cost_of(by_hand)
    pins = _pins_of(task.planning.pins, graph, mesh)
    found = _find_cheapest(task.planning, by_hand, limit, pins)
    plan, cost = (by_hand, limit) if found is None else found
    is_same = bool((plan.served == by_hand.served).all())
    return PlannedLayer(
        by_hand=by_hand,
        by_hand_cost=limit,
        found=plan,
        cost=cost,
        change=None if is_same else _change_of(task, plan, cost, by_hand, limit),
        pins=_count_held(plan, pins),
    )


def _layers_of(task: LayerTask) -> tuple[Graph, DeviceMesh]:
    """Build the graph of the layers to plan, and the mesh of the shape."""
    axes = layer_axes(task.config)
    assert axes, "a planned shape has an axis"
    mesh = DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=task.cluster)
    return _graph_of(task.job, sequences_of(task), task.num_micro_batches), mesh


@lru_cache(maxsize=64)
def _graph_of(job: TrainingJob, micro_batch_size: int, num_micro_batches: int) -> Graph:
    """Return the graph of the layers to plan; shapes that differ in their mesh alone share it."""
    graph = transformer_graph(replace(job, model=planned_layers(job.model)), micro_batch_size=micro_batch_size)
    return repeat_micro_batches(graph, num_micro_batches)


@lru_cache(maxsize=8)
def _terms_of(graph: Graph, sizes: tuple[int, ...], cluster: Cluster) -> ShardingTerms:
    """Return the cost tables of a graph; meshes that differ in the names of their axes alone share them."""
    return ShardingTerms(graph, _unnamed_mesh(sizes, cluster), _FORMS)


@lru_cache(maxsize=64)
def _unnamed_mesh(sizes: tuple[int, ...], cluster: Cluster) -> DeviceMesh:
    return DeviceMesh(names=tuple(map(str, range(len(sizes)))), sizes=sizes, cluster=cluster)


def _find_cheapest(
    planning: LayerPlanning, by_hand: Plan, limit: PlanCost, pins: Sequence[Pin]
) -> tuple[Plan, PlanCost] | None:
    """Find the cheapest plan that fits on a device whenever the plan by hand does.

    Returns:
        Plan with its cost; None if there is none, or, without pins, none cheaper than the plan by hand. With pins the
        plan may need more memory beside the weights if every plan found does.
    """
    if planning.name == "megatron":
        return None
    graph, mesh = by_hand.graph, by_hand.mesh
    charge = _no_more_than(by_hand)
    is_pinned = any(pin != _void(pin) for pin in pins)
    # Two starting points: the planner's own plan, and the plan by hand with the pins applied (improved by descent).
    if is_pinned:
        own, own_cost = _own_plan(planning.name, graph, mesh, charge, pins)
    else:
        own, own_cost = _own_plan_without_pins(planning.name, graph, mesh.sizes, mesh.cluster, charge)
        own = replace(own, mesh=mesh)
    plans: list[Plan] = [own]
    held = resolve_pins(pins, graph, mesh, whole(mesh)[1])
    if planning.name == "toast":
        plans.append(_grow_toast(plans[0], held, limit))
    start = _with_pins(by_hand, held)
    plans.append(start)
    if planning.name != "recursive":
        terms = _terms_of(graph, mesh.sizes, mesh.cluster)
        # the first plan comes from a descent with these charges already
        plans[1:] = [
            descend(plan, terms, is_open=held.restriction, charge=together(held.charge, charge)).plan
            for plan in plans[1:]
        ]
    # Both descents often end in one plan, or where they began.
    known = {plan.served.tobytes(): cost for plan, cost in ((by_hand, limit), (own, own_cost))}
    costs = [(plan, known.get(plan.served.tobytes()) or cost_of(plan)) for plan in plans]
    # No plan may hold more weights or gradients than the plan by hand. Among the rest, those without more memory
    # come first, then the fastest.
    fitting = [
        (cost.peak_memory_bytes > limit.peak_memory_bytes * (1 + ROUNDING), cost.step_time_s, (plan, cost))
        for plan, cost in costs
        if not any(charge(number, tuple(row)) for number, row in enumerate(plan.served.tolist()))
    ]
    needs_more, _, cheapest = min(fitting, key=lambda one: one[:2], default=(True, 0.0, None))
    if cheapest is None or is_pinned:
        return cheapest
    # Without pins another plan is only worth using if it is faster without needing more memory.
    is_faster = cheapest[1].step_time_s < limit.step_time_s * (1 - ROUNDING)
    return cheapest if is_faster and not needs_more else None


def _own_plan(
    planner: str, graph: Graph, mesh: DeviceMesh, charge: Charge, pins: Sequence[Pin]
) -> tuple[Plan, PlanCost]:
    """Return D-Rec's plan under the pins, improved by descent unless D-Rec alone is the planner."""
    own_mesh, levels = whole(mesh)
    # Prices of rows and edges are only needed for the descent, which changes one axis at a time.
    terms = None if planner == "recursive" else _terms_of(graph, own_mesh.sizes, own_mesh.cluster)
    search = PinnedSearch(graph=graph, mesh=mesh, refined_mesh=own_mesh, levels=levels, descent=terms, charge=charge)
    found = search.plan(pins, counterfactuals=False)
    return found.plan, found.cost


@lru_cache(maxsize=8)
def _own_plan_without_pins(
    planner: str, graph: Graph, sizes: tuple[int, ...], cluster: Cluster, charge: Charge
) -> tuple[Plan, PlanCost]:
    """Return the same plan without pins, which depends on no name of an axis."""
    return _own_plan(planner, graph, _unnamed_mesh(sizes, cluster), charge, ())


def _grow_toast(start: Plan, held: Pinned, limit: PlanCost) -> Plan:
    """Return TOAST's plan, from the given plan and plans by hand, below the memory of the plan by hand if it can."""
    options = ToastOptions(memory_bytes=limit.peak_memory_bytes)
    return toast_plan(start.graph, start.mesh, options, given=[start], pins=held if held.pins else None).plan


def _no_more_than(plan: Plan) -> Charge:
    """Return a charge on rows that leave more of a parameter, its moments or its gradient on a device than `plan` does.

    Gradients count as their operator leaves them, since the gradients of several micro-batches are summed in that form.
    """
    graph, sizes = plan.graph, plan.mesh.sizes
    # Share that the given plan holds of each operator's persistent results; rows above it are charged.
    most = tuple(_held(graph, sizes, number, tuple(row)) for number, row in enumerate(plan.served.tolist()))
    return _charge_above(graph, sizes, most)


@lru_cache(maxsize=8)
def _charge_above(graph: Graph, sizes: tuple[int, ...], most: tuple[float, ...]) -> Charge:
    """Return a charge on rows that leave more of an operator's persistent results on a device than `most` [o].

    Equal arguments lead to the same function, so that shapes share what rests on it.
    """

    @cache
    def charge(number: int, row: Row) -> float:
        return TOO_MUCH_S if most[number] and _held(graph, sizes, number, row) > most[number] * (1 + ROUNDING) else 0.0

    return charge


def _held(graph: Graph, sizes: Sequence[int], number: int, row: Row) -> float:
    """Compute the device's part of an operator's results that persist across micro-batches."""
    op = graph.ops[number]
    if runs_once(graph, number):
        # Operators of the update: weights and moments are cut by every axis that the operator serves.
        return 1 / math.prod(size for size, factor in zip(sizes, row, strict=True) if factor != NONE)
    return sum(
        graph.tensors[tensor].num_bytes * local_share(written_layout(op.rule, slot, row), sizes)
        for slot, tensor in enumerate(op.results)
        if graph.tensors[tensor].kind is TensorKind.GRADIENT
    )


def _pins_of(pins: Sequence[Pin], graph: Graph, mesh: DeviceMesh) -> tuple[Pin, ...]:
    """Return the pins of a shape; one that its degrees do not allow becomes void, so that messages count all of them.

    Raises:
        ConfigError: A pin matches no operator, or names a dim that does not exist or cannot be cut on any mesh.
    """
    for number, pin in enumerate(pins):
        match_pin(number, pin, graph)
    # A pin on an absent axis has one device there, and becomes void.
    devices = [devices_of(pin, mesh) for pin in pins]
    return tuple(
        pin if along > 1 and taken_ways(pin, along) is not None else _void(pin)
        for pin, along in zip(pins, devices, strict=True)
    )


def _with_pins(plan: Plan, pins: Pinned) -> Plan:
    """Apply hard pins to a plan; operators keep their other cuts as far as sizes remain divisible."""
    served = plan.served.copy()
    for (op, level), factor in pins.served.items():
        served[op, pins.levels[level].axis] = factor
    for op in {op for op, _ in pins.served}:
        rule, row = plan.graph.ops[op].rule, served[op]
        for axis in range(len(row)):
            # All axes that cut the same dim divide it together, so check their product.
            ways = math.prod(size for size, other in zip(plan.mesh.sizes, row, strict=True) if other == row[axis])
            is_pinned = any(pins.levels[level].axis == axis for at, level in pins.served if at == op)
            if row[axis] != NONE and rule.factors[row[axis]].size % ways and not is_pinned:
                row[axis] = NONE
    return replace(plan, served=served)


def _void(pin: Pin) -> Pin:
    """Return the pin with all of its demands removed."""
    return replace(pin, axis=None, ways=1, weight_s=0.0)


def _count_held(plan: Plan, pins: Sequence[Pin]) -> tuple[tuple[Pin, int, int, int], ...]:
    """Count for each effective pin the matching operators and those at which the plan satisfies it, with its ways."""
    found = resolve_pins(pins, plan.graph, plan.mesh, whole(plan.mesh)[1])
    rows = plan.served.tolist()
    return tuple(
        (pin, len(ops), sum(found.split(number, op, rows[op]) % ways == 0 for op in ops), ways)
        for number, (pin, ops, ways) in enumerate(zip(found.pins, found.factors, found.ways, strict=True))
        if pin != _void(pin)
    )


def _change_of(task: LayerTask, plan: Plan, cost: PlanCost, by_hand: Plan, by_hand_cost: PlanCost) -> LayerChange:
    """Compute the change of a shape's layers from the plan by hand to the plan found."""
    # Ratios of the plan found to the plan by hand, per part and block of a layer, both passes summed [4, B]. The change
    # scales the communication that both plans have in common, and adds what only the new plan sends.
    own, other = block_figures(plan, cost), block_figures(by_hand, by_hand_cost)
    own_s, other_s = own.exposed_s.sum(axis=0), other.exposed_s.sum(axis=0)
    config = task.config
    more = np.maximum(1 - ratios(other_s, own_s), 0.0)  # share of its communication beyond that of the plan by hand
    return LayerChange(
        tp=config.tp,
        cp=config.cp,
        up=config.up,
        ep=config.ep,
        expert_tp=config.expert_tp,
        mbs=config.mbs,
        sequence_parallel=config.sequence_parallel,
        plan=task.planning.name,
        compute=freeze(ratios(own.compute_s, other.compute_s).tolist()),
        exposed=freeze(np.minimum(ratios(own_s, other_s), 1.0).tolist()),
        added_s=freeze((more * own.exposed_s).tolist()),
        once_s=tuple((own.once_s - other.once_s).tolist()),
        kept=freeze(ratios(own.kept_bytes, other.kept_bytes).tolist()),
        entry=own.entry_bytes / other.entry_bytes if other.entry_bytes else 1.0,
        blocks=own.blocks,
    )


def summary_of(task: LayerTask, planned: PlannedLayer) -> dict[str, Any]:
    """Summarise the plan of a shape as trials store it and commands print it.

    `predicted_ratio` is filled in by the caller that predicts steps: the step time of the shape's fastest candidate
    with the plan found, over that with the plan by hand.
    """
    plan, cost = planned.found, planned.cost
    return {
        "planner": task.planning.name,
        "predicted_ratio": None,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "layers": plan.graph.name,
        "micro_batches": task.num_micro_batches,
        "step_time_s": cost.step_time_s,
        "by_hand_step_time_s": planned.by_hand_cost.step_time_s,
        "comm_s": cost.comm_s,
        "by_hand_comm_s": planned.by_hand_cost.comm_s,
        "peak_memory_bytes": cost.peak_memory_bytes,
        "by_hand_peak_memory_bytes": planned.by_hand_cost.peak_memory_bytes,
        "collectives": collectives_by_kind(plan, cost),
        "differs": _differences(planned),
        "pins": [
            {
                "pin": pin.in_words,
                "ops": num_ops,
                "held": num_held,
                **({} if pin.ways in (None, ways) else {"taken_ways": ways}),
            }
            for pin, num_ops, num_held, ways in planned.pins
        ],
    }


def plan_lines(summary: Mapping[str, Any] | None) -> list[str]:
    """Format a summary as lines of text."""
    if summary is None:
        return ["No sharding is planned: each device holds whole layers, or no plan by hand exists for these degrees."]
    axes = ",".join(f"{name}={size}" for name, size in summary["mesh"].items())
    own_s, hand_s = summary["step_time_s"], summary["by_hand_step_time_s"]
    gained = f"{1 - own_s / hand_s:.1%} less than by hand" if own_s < hand_s else "as by hand"
    if own_s > hand_s:
        gained = f"{own_s / hand_s - 1:.1%} more than by hand"
    lines = [
        f"Plan of {summary['layers']} on {axes} ({summary['planner']}): {predicted(own_s)} s for "
        f"{summary['micro_batches']} micro-batches without overlap, {gained}",
        *collective_lines(summary["collectives"]),
        *predicted_lines(summary),
    ]
    lines += [f"  {name}: {planned} (by hand {by_hand})" for name, planned, by_hand in differences_in_words(summary)]
    more_bytes = summary["peak_memory_bytes"] - summary["by_hand_peak_memory_bytes"]
    if more_bytes > ROUNDING * summary["by_hand_peak_memory_bytes"]:
        lines.append(f"  {more_bytes / GIB:.2g} GiB more than by hand; memory predictions count what layers keep of it")
    lines += [f"  pin {pin_in_words(each)}" for each in summary["pins"]]
    return lines


def pin_in_words(pin: Mapping[str, Any]) -> str:
    """Return what a summary says of a pin."""
    taken = (
        f"taken as {pin['taken_ways']} ways, the nearest that divides devices and dim; " if "taken_ways" in pin else ""
    )
    return f"{pin['pin']}: {taken}holds at {pin['held']} of {pin['ops']} operators"


def predicted_lines(summary: Mapping[str, Any]) -> list[str]:
    """Describe the predicted step time relative to the plan by hand; empty if no other plan was found."""
    ratio = summary["predicted_ratio"]
    if ratio is None:
        return []
    words = f"{abs(ratio - 1):.1%} {'less' if ratio < 1 else 'more'} than by hand"
    return [f"  Its fastest candidate's step is predicted to take {words}."]


def differences_in_words(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """List operators sharded unlike by hand, with both shardings; layers that agree are merged."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for name, both in summary["differs"].items():
        # Operators are grouped by their name inside the layer and by both shardings, so that equal layers share a line.
        layer, inside = name.split(".", 2)[1:] if name.startswith("layers.") else ("", name)
        words = tuple(_served_in_words(both[key]) for key in ("planned", "by_hand"))
        together.setdefault((inside, *words), []).append(layer)
    return [
        (f"layers.{','.join(layers)}.{inside}" if layers != [""] else inside, planned, by_hand)
        for (inside, planned, by_hand), layers in together.items()
    ]


def _served_in_words(served: Mapping[str, str]) -> str:
    return ", ".join(f"{factor}/{axis}" for axis, factor in served.items()) or "whole"


def _differences(planned: PlannedLayer) -> dict[str, dict[str, dict[str, str]]]:
    """Collect the forward operators sharded unlike by hand, with the dim that each axis cuts in both plans."""
    graph, names = planned.found.graph, planned.found.mesh.names
    # The backward pass follows from the forward pass, so only forward operators are listed.
    last = graph.first_backward or len(graph.ops)

    def served(plan: Plan, number: int) -> dict[str, str]:
        factors = graph.ops[number].rule.factors
        row = plan.served[number].tolist()
        return {name: factors[factor].name for name, factor in zip(names, row, strict=True) if factor != NONE}

    rows = {
        op.name: {"by_hand": served(planned.by_hand, number), "planned": served(planned.found, number)}
        for number, op in enumerate(graph.ops[:last])
        if not op.is_source
    }
    return {name: both for name, both in rows.items() if both["by_hand"] != both["planned"]}
