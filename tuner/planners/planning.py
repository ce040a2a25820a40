"""Planning of a graph on a mesh: the planners by name, their options, and the plan with all that is known of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.laid_sources import lay_sources
from costmodels.sharding.overlap import Timeline, overlaps, timeline_of
from costmodels.sharding.plan import Plan, PlanCost, cost_of
from hardware.io.errors import ConfigError
from tuner.planners.assignment.assigned import assigned_plan
from tuner.planners.engine.outcome import Known, Limits
from tuner.planners.engine.workers import AbstractWorkers
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.class_costs import Figures
from tuner.planners.sharding.hidden_moves import MOST_STARTS, hide_moves
from tuner.planners.sharding.manumatic import MEMORY_KEY, Perturbed, PinnedPlan, PinnedSearch, PinReport, report_of
from tuner.planners.sharding.pins import Pin, Pinned, resolve_pins
from tuner.planners.sharding.recursive import ORDERS, Order, refine_mesh, whole
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms, total_charge_s
from tuner.planners.toast.by_hand import plans_by_hand
from tuner.planners.toast.search import Step, ToastOptions, toast_plan

Planner = Literal["descent", "recursive", "toast"]
"""Name of a planner."""
PLANNERS: tuple[Planner, ...] = get_args(Planner)
"""Names of all planners."""

OrderChoice = Order | Literal["best"]
"""Order of D-Rec's visits as a user chooses it."""
ORDER_CHOICES: tuple[OrderChoice, ...] = ("best", *ORDERS)
"""All orders that a user can choose."""


MANY_OPS = 1000
"""Number of operators above which only the cheapest plan of each kind is descended from."""
MOST_SEEDS = 3
"""Most plans by hand that are descended from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """Options of the planners.

    Attributes:
        planner: Name of the planner. `recursive` is D-Rec alone. `descent` improves, axis by axis, D-Rec's plan
            and the cheapest plans by hand, so that it is never worse than these. `toast` is a tree search over colours
            of dims, from D-Rec's plan and others, with the same descent at its end.
        order: Order in which D-Rec visits operators; `best` tries every order and keeps the cheapest plan.
        whole_axes: Whether each axis of the mesh cuts one dim only, which is all that frameworks can express.
        pins: Dims that the user wants cut in a certain way.
        memory_bytes: Most memory that a device may hold, which `recursive` ignores; None for no limit.
        diagnose: Whether to report what slightly wrong pins would have cost.
        prove_s: Time that HiGHS may take to prove a lower bound of the step without overlap [s]; None for no proof.
        assigned: Sweeps and moves of an assignment of both axes of a mesh at once, from whose end another descent
            begins; 0 for none. Meshes of other numbers of axes, and pins, have none.
        effort: States that TOAST may look at in each of two trees after the descent, one of which begins with plans
            by hand; 0 for no such search. The same effort leads to the same plan on every machine.
        effort_s: Time at which these trees end even so [s]; None for none. What is found then depends on the machine.
        overlap: Whether collectives run beside the compute. Plans are then compared, and improved, by their timelines
            (`costmodels/sharding/overlap.py`); `recursive` stays D-Rec alone. None for what XLA does: it overlaps on
            accelerators, and not on processors. Programs that no compiler fuses run without overlap.
    """

    planner: Planner = "descent"
    order: OrderChoice = "best"
    whole_axes: bool = False
    pins: tuple[Pin, ...] = ()
    memory_bytes: float | None = None
    diagnose: bool = False
    prove_s: float | None = None
    assigned: int = 0
    effort: int = 0
    effort_s: float | None = None
    overlap: bool | None = None


ASSIGNED = 60
"""Sweeps and moves of an assignment, for callers in Python."""

EFFORT = 200
"""States of each of TOAST's trees, for callers in Python whose programs overlap collectives with compute."""

WHOLE_AXES = PlannerOptions(whole_axes=True, assigned=ASSIGNED, effort=EFFORT)
"""Options with which plans name the caller's own axes, each of which cuts at most one dim of a tensor.

Otherwise the plan's mesh has an axis for each prime factor of an axis, named as `model.0`.
"""

WITHOUT_TREES = replace(WHOLE_AXES, effort=0)
"""The same for torch modules, where TOAST's trees found nothing better (`benchmarks.judges.contest`)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """Plan of a graph, with all that is known of it.

    Attributes:
        found: Plan, its cost, and the report on each pin.
        order: Order of D-Rec's visits that led to the plan.
        search_s: Time of the search, with counterfactual and perturbed plans [s].
        memory_bytes: Limit of a device's memory; None for no limit.
        perturbed: Plans with slightly wrong pins; None unless `diagnose` was set.
        bound_s: Lower bound of the step time without overlap of all plans without pins within the limit of memory
            [s]; None if neither `prove_s` was set nor the planner computes one.
        steps: Plans from the first to the last, of a planner that reports its progress.
        timeline: Timeline of the step with overlap; None without overlap.
        unhidden: Plan that was fastest without overlap, if another is faster with it; else None.
    """

    found: PinnedPlan
    order: Order
    search_s: float
    memory_bytes: float | None = None
    perturbed: tuple[Perturbed, ...] | None = None
    bound_s: float | None = None
    steps: tuple[Step, ...] = ()
    timeline: Timeline | None = None
    unhidden: PinnedPlan | None = None

    @property
    def plan(self) -> Plan:
        """Plan of the whole graph."""
        return self.found.plan

    @property
    def cost(self) -> PlanCost:
        """Time and memory of a step with the plan, without overlap."""
        return self.found.cost

    @property
    def step_time_s(self) -> float:
        """Time of a step with the plan, with overlap if there is any [s]."""
        return self.cost.step_time_s if self.timeline is None else self.timeline.step_time_s


def plan_graph(
    graph: Graph, mesh: DeviceMesh, options: PlannerOptions, *, workers: AbstractWorkers | None = None
) -> Planned:
    """Plan a graph on a mesh, under pins if there are any.

    Args:
        graph: Graph of the training step to shard.
        mesh: Mesh of devices to shard it over.
        options: Planner and its options.
        workers: Workers that grow TOAST's trees; None to grow them in this process.

    Raises:
        ConfigError: the pins can't hold, the planner supports no limit or no diagnosis, or no plan is found that fits
            into memory.
    """
    if options.memory_bytes is not None and options.planner == "recursive":
        raise ConfigError(
            "needs another planner, for D-Rec alone minds no limit",
            key=MEMORY_KEY,
            nearest="take --planner descent or toast",
        )
    found = (
        _run_toast(graph, mesh, options, workers) if options.planner == "toast" else _run_d_rec(graph, mesh, options)
    )
    first = found.plan
    if options.planner == "descent" and options.assigned > 0 and not options.pins:
        found = _assign(found, graph, mesh, options)
    if options.planner == "descent" and options.effort > 0:
        found = _search_on(found, graph, mesh, options, workers)
    if overlaps(graph, mesh) if options.overlap is None else options.overlap:
        found = _overlap(found, graph, mesh, options, first)
    if options.prove_s is None:
        return found
    limits = Limits(time_s=options.prove_s)
    outcome = shard_by_milp(graph, found.plan.mesh, limits=limits, memory_bytes=options.memory_bytes)
    return replace(found, bound_s=max(outcome.bound, found.bound_s or 0.0))


def _run_d_rec(graph: Graph, mesh: DeviceMesh, options: PlannerOptions) -> Planned:
    """Plan by D-Rec, followed by the descent where `options.planner` asks for it."""
    began_s = time.perf_counter()
    own_mesh, levels = whole(mesh) if options.whole_axes else refine_mesh(mesh)
    orders = ORDERS if options.order == "best" else (options.order,)
    terms = ShardingTerms(graph, own_mesh) if options.planner == "descent" else None
    search = PinnedSearch(graph=graph, mesh=mesh, refined_mesh=own_mesh, levels=levels, descent=terms)
    if len(orders) > 1 and len(graph.ops) > MANY_OPS:
        # on a large graph the descent takes long, so that only the cheapest of D-Rec's plans is descended from
        undescended = {
            order: replace(search, order=order, descent=None).plan(options.pins, counterfactuals=False)
            for order in orders
        }
        orders = (_cheapest(undescended),)
    tried = {order: replace(search, order=order).plan(options.pins, counterfactuals=False) for order in orders}
    best = _cheapest(tried)
    limit_bytes = options.memory_bytes
    limited = replace(search, order=best, memory_bytes=limit_bytes)
    if limit_bytes is not None and tried[best].cost.peak_memory_bytes > limit_bytes:
        # Plans of other orders may fit as they are, and are compared with the best plan brought below the limit.
        small = {order: plan for order, plan in tried.items() if plan.cost.peak_memory_bytes <= limit_bytes}
        try:
            small[best] = limited.plan(options.pins, counterfactuals=False)
        except ConfigError:
            if not small:
                raise
        tried, best = small, _cheapest(small)
        limited = replace(limited, order=best)
    found = limited.plan(options.pins) if options.pins else tried[best]
    if terms is not None and not options.pins:
        found = min([found, *_from_hands(terms, options)], key=lambda one: one.cost.step_time_s)
    others = limited.perturb(options.pins) if options.diagnose else None
    search_s = time.perf_counter() - began_s
    return Planned(found=found, order=best, search_s=search_s, memory_bytes=limit_bytes, perturbed=others)


def _overlap(planned: Planned, graph: Graph, mesh: DeviceMesh, options: PlannerOptions, first: Plan) -> Planned:
    """Return what was planned, with the plan that is fastest with overlap and its timeline.

    It is no slower than from the planner's first plan, which what came after it has made faster without overlap.
    """
    began_s = time.perf_counter()
    found = planned.found
    if options.planner != "recursive":
        levels = (whole if options.whole_axes else refine_mesh)(mesh)[1]
        pins = resolve_pins(options.pins, graph, mesh, levels) if options.pins else None
        least_bytes = _least_bytes(found, mesh, options)
        own_mesh, most = found.plan.mesh, MOST_SEEDS if len(graph.ops) <= MANY_OPS else 1
        starts = [found.plan, *([] if first is found.plan else [first])]
        further = len(starts) - 1
        if pins is None:
            starts += plans_by_hand(graph, own_mesh, memory_bytes=least_bytes, most=most, with_data=True)
            alone = replace(options, planner="recursive", order=planned.order, memory_bytes=None, diagnose=False)
            starts.append(_run_d_rec(graph, mesh, alone).plan)
        terms = ShardingTerms(graph, own_mesh)
        plan, cost = hide_moves(starts, terms, memory_bytes=least_bytes, pins=pins, most=MOST_STARTS + further)
        if plan is not found.plan:
            found = PinnedPlan(plan=plan, cost=cost, is_optimum=False, reports=_reports_anew(found, pins, plan, cost))
    # Neither an optimum nor a bound without overlap says anything of plans with it.
    found = replace(found, is_optimum=False)
    return replace(
        planned,
        found=found,
        bound_s=None,
        timeline=timeline_of(found.plan, found.cost),
        unhidden=None if found.plan is planned.plan else planned.found,
        search_s=planned.search_s + time.perf_counter() - began_s,
    )


def _from_hands(terms: ShardingTerms, options: PlannerOptions) -> list[PinnedPlan]:
    """Return the ends of descents from the cheapest plans by hand, within the limit of memory if there is one."""
    graph, mesh, limit_bytes = terms.graph, terms.mesh, options.memory_bytes
    memory_bytes = min(device.memory_bytes for device in mesh.cluster.devices) if limit_bytes is None else limit_bytes
    most = MOST_SEEDS if len(graph.ops) <= MANY_OPS else 1
    found = []
    for plan in plans_by_hand(graph, mesh, memory_bytes=memory_bytes, most=most):
        end = descend(plan, terms)
        laid = lay_sources(end.plan)
        cost = cost_of(laid)
        if limit_bytes is None or cost.peak_memory_bytes <= limit_bytes:
            found.append(PinnedPlan(plan=laid, cost=cost, is_optimum=end.is_optimum, reports=()))
    return found


def _assign(found: Planned, graph: Graph, mesh: DeviceMesh, options: PlannerOptions) -> Planned:
    """Return the better of the descent's plan and of the end of another one from an assignment of both axes."""
    if found.found.is_optimum or sum(size > 1 for size in found.plan.mesh.sizes) != 2:  # both
        return found
    began_s = time.perf_counter()
    terms = ShardingTerms(graph, found.plan.mesh)
    plan = lay_sources(descend(assigned_plan(terms, Limits(nodes=options.assigned)), terms).plan)
    best, cost = found.found, cost_of(plan)
    fits = cost.peak_memory_bytes <= _least_bytes(best, mesh, options)
    if fits and cost.step_time_s < best.cost.step_time_s:
        best = replace(best, plan=plan, cost=cost, is_optimum=False)
    return replace(found, found=best, search_s=found.search_s + time.perf_counter() - began_s)


def _search_on(
    found: Planned, graph: Graph, mesh: DeviceMesh, options: PlannerOptions, workers: AbstractWorkers | None
) -> Planned:
    """Return the better of the descent's plan and of what TOAST finds from there with the effort of the options."""
    if found.found.is_optimum:
        return found
    began_s = time.perf_counter()
    levels = (whole if options.whole_axes else refine_mesh)(mesh)[1]
    pins = resolve_pins(options.pins, graph, mesh, levels) if options.pins else None
    least_bytes = _least_bytes(found.found, mesh, options)
    toast = toast_plan(
        graph,
        found.plan.mesh,
        ToastOptions(searches=1, memory_bytes=least_bytes),
        limits=Limits(nodes=options.effort, time_s=math.inf if options.effort_s is None else options.effort_s / 2),
        # The descent's plan is not given: TOAST would only descend from it again, and not from its own best one.
        pins=pins,
        workers=workers,
    )
    kept = () if pins is None else {op for factors in pins.factors for op in factors}
    laid = lay_sources(toast.plan, kept=kept)
    best, cost = found.found, cost_of(laid)
    charge = None if pins is None else pins.charge
    now_s, then_s = (
        each.step_time_s + total_charge_s(plan, charge) for each, plan in ((best.cost, best.plan), (cost, laid))
    )
    if then_s < now_s and cost.peak_memory_bytes <= least_bytes:
        is_optimum = toast.outcome.known is Known.OPTIMAL
        reports = _reports_anew(best, pins, laid, cost)
        best = PinnedPlan(plan=laid, cost=cost, is_optimum=is_optimum, reports=reports)
    return replace(
        found,
        found=best,
        search_s=found.search_s + time.perf_counter() - began_s,
        bound_s=toast.bound_s,
        steps=toast.steps,
    )


def _least_bytes(found: PinnedPlan, mesh: DeviceMesh, options: PlannerOptions) -> float:
    """Return the memory that a plan may need in place of another: the limit, or else what there is [bytes]."""
    if options.memory_bytes is not None:
        return options.memory_bytes
    return max(float(min(device.memory_bytes for device in mesh.cluster.devices)), found.cost.peak_memory_bytes)


def _reports_anew(before: PinnedPlan, pins: Pinned | None, plan: Plan, cost: PlanCost) -> tuple[PinReport, ...]:
    """Return the reports on pins for another plan under the same pins."""
    return tuple(
        replace(report_of(pins, plan, number), saved_s=_saved_s(old, before.cost, cost))
        for number, old in enumerate(before.reports)
        if pins is not None
    )


def _saved_s(old: PinReport, before: PlanCost, after: PlanCost) -> float | None:
    """Return the time that a pin saves in the plan `after`, given its saving in the plan `before` [s]."""
    return None if old.saved_s is None else old.saved_s + before.step_time_s - after.step_time_s


def _run_toast(graph: Graph, mesh: DeviceMesh, options: PlannerOptions, workers: AbstractWorkers | None) -> Planned:
    """Plan by TOAST, from D-Rec's plan and plans by hand, with its bound on the step time.

    Where TOAST's plan does not fit into the memory of a device, the descent looks for one that does.
    """
    if options.diagnose:
        raise ConfigError(
            "needs another planner", key="--diagnose", value=options.planner, nearest="--planner descent tells it"
        )
    began_s = time.perf_counter()
    d_rec = _run_d_rec(graph, mesh, replace(options, planner="recursive", memory_bytes=None))
    levels = (whole if options.whole_axes else refine_mesh)(mesh)[1]
    pins = resolve_pins(options.pins, graph, mesh, levels) if options.pins else None
    limit_bytes = options.memory_bytes
    # Without a limit TOAST still keeps to the memory of the smallest device, but a plan above that is accepted.
    least_bytes = min(device.memory_bytes for device in mesh.cluster.devices) if limit_bytes is None else limit_bytes
    toast = toast_plan(
        graph, d_rec.plan.mesh, ToastOptions(memory_bytes=least_bytes), given=[d_rec.plan], pins=pins, workers=workers
    )
    kept = () if pins is None else {op for factors in pins.factors for op in factors}
    laid = lay_sources(toast.plan, kept=kept)
    plan, cost, steps = laid, cost_of(laid), toast.steps
    if cost.peak_memory_bytes > least_bytes:
        try:
            below = _run_d_rec(graph, mesh, replace(options, planner="descent", memory_bytes=least_bytes)).found
        except ConfigError:
            if limit_bytes is not None:
                raise
        else:
            plan, cost = below.plan, below.cost
            figures = Figures(step_time_s=cost.step_time_s, peak_memory_bytes=cost.peak_memory_bytes)
            whole_s = steps[0].figures.step_time_s
            steps = (*steps, Step(name="descent for memory", cost=cost.step_time_s / whole_s, figures=figures))
    reports = [] if pins is None else [report_of(pins, plan, number) for number in range(len(options.pins))]
    is_optimum = toast.outcome.known is Known.OPTIMAL and plan is laid
    found = PinnedPlan(plan=plan, cost=cost, is_optimum=is_optimum, reports=tuple(reports))
    return Planned(
        found=found,
        order=d_rec.order,
        search_s=time.perf_counter() - began_s,
        memory_bytes=limit_bytes,
        bound_s=toast.bound_s,
        steps=steps,
    )


def _cheapest(plans: Mapping[Order, PinnedPlan]) -> Order:
    return min(plans, key=lambda order: plans[order].cost.step_time_s)
