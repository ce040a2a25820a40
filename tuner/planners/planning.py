"""A graph on a mesh, planned: the planners by their names, their options, and what is known of the plan they found."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan, PlanCost, cost_of
from hardware.io.errors import ConfigError
from tuner.planners.engine.outcome import Known, Limits
from tuner.planners.engine.workers import AbstractWorkers
from tuner.planners.sharding.class_costs import Figures
from tuner.planners.sharding.manumatic import MEMORY_KEY, Perturbed, PinnedPlan, perturbed, pinned_plan, report_of
from tuner.planners.sharding.pins import Pin, pinned
from tuner.planners.sharding.recursive import ORDERS, Order, refined, whole
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms
from tuner.planners.toast.search import Step, ToastOptions, toast_plan

Planner = Literal["descent", "recursive", "toast"]
PLANNERS: tuple[Planner, ...] = get_args(Planner)

OrderChoice = Order | Literal["best"]
ORDER_CHOICES: tuple[OrderChoice, ...] = ("best", *ORDERS)


MANY_OPS = 1000
"""With more operators only the cheapest of D-Rec's plans is gone on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """How a graph is planned.

    Attributes:
        planner: `recursive` is D-Rec alone; `descent` goes on from its plan, axis by axis; `toast` is a tree search
            over colours of dims, from D-Rec's plan and others, that goes on in the same way.
        order: In which D-Rec visits operators; `best` tries all and keeps the cheapest.
        whole_axes: Whether an axis of the mesh cuts one dim only, which is what frameworks can express.
        pins: What a user asks for.
        memory_bytes: The most that a device may hold, which D-Rec alone does not mind; None for anything.
        diagnose: Whether it is told what slightly wrong pins would have cost.
        prove_s: How long HiGHS may take to prove how short a step can be at least; None does not ask.
    """

    planner: Planner = "descent"
    order: OrderChoice = "best"
    whole_axes: bool = False
    pins: tuple[Pin, ...] = ()
    memory_bytes: float | None = None
    diagnose: bool = False
    prove_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A graph that was planned.

    Attributes:
        found: The plan, its cost, and what became of the pins.
        order: The order that found it.
        search_s: What finding it took, and what was asked beside it.
        memory_bytes: The limit, if there was one.
        perturbed: What slightly wrong pins would have led to; None if nobody asked.
        bound_s: No plan without pins has a shorter step, within the limit of memory; None if nobody asked and the
            planner tells none.
        steps: The plans on the way there, where the planner tells.
    """

    found: PinnedPlan
    order: Order
    search_s: float
    memory_bytes: float | None = None
    perturbed: tuple[Perturbed, ...] | None = None
    bound_s: float | None = None
    steps: tuple[Step, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def cost(self) -> PlanCost:
        """What a step costs with it."""
        return self.found.cost


def planned(
    graph: Graph, mesh: DeviceMesh, options: PlannerOptions, *, workers: AbstractWorkers | None = None
) -> Planned:
    """The plan of a graph, under pins if there are any.

    Args:
        graph: What to shard.
        mesh: Over what.
        options: How.
        workers: Who grows TOAST's trees; None for this process.

    Raises:
        ConfigError: the pins can't hold, the planner holds none, or no plan is found that fits into memory.
    """
    if options.memory_bytes is not None and options.planner == "recursive":
        raise ConfigError(
            "needs another planner, for D-Rec alone minds no limit",
            key=MEMORY_KEY,
            nearest="take --planner descent or toast",
        )
    found = _toasted(graph, mesh, options, workers) if options.planner == "toast" else _halved(graph, mesh, options)
    if options.prove_s is None:
        return found
    limits = Limits(time_s=options.prove_s)
    outcome = shard_by_milp(graph, found.plan.mesh, limits=limits, memory_bytes=options.memory_bytes)
    return replace(found, bound_s=max(outcome.bound, found.bound_s or 0.0))


def _halved(graph: Graph, mesh: DeviceMesh, options: PlannerOptions) -> Planned:
    """The plan by D-Rec, and by descent from there if that is asked for."""
    began_s = time.perf_counter()
    own_mesh, levels = whole(mesh) if options.whole_axes else refined(mesh)
    orders = ORDERS if options.order == "best" else (options.order,)
    terms = ShardingTerms(graph, own_mesh) if options.planner == "descent" else None
    if len(orders) > 1 and len(graph.ops) > MANY_OPS:
        halved = {
            order: pinned_plan(graph, mesh, own_mesh, levels, options.pins, order=order, counterfactuals=False)
            for order in orders
        }
        orders = (_cheapest(halved),)
    tried = {
        order: pinned_plan(
            graph, mesh, own_mesh, levels, options.pins, order=order, descent=terms, counterfactuals=False
        )
        for order in orders
    }
    best = _cheapest(tried)
    limit_bytes = options.memory_bytes
    if limit_bytes is not None and tried[best].cost.peak_memory_bytes > limit_bytes:
        small = {order: plan for order, plan in tried.items() if plan.cost.peak_memory_bytes <= limit_bytes}
        try:
            small[best] = pinned_plan(
                graph,
                mesh,
                own_mesh,
                levels,
                options.pins,
                order=best,
                descent=terms,
                memory_bytes=limit_bytes,
                counterfactuals=False,
            )
        except ConfigError:
            if not small:
                raise
        tried, best = small, _cheapest(small)
    found, others = tried[best], None
    if options.pins:
        found = pinned_plan(
            graph, mesh, own_mesh, levels, options.pins, order=best, descent=terms, memory_bytes=limit_bytes
        )
    if options.diagnose:
        others = perturbed(
            graph, mesh, own_mesh, levels, options.pins, order=best, descent=terms, memory_bytes=limit_bytes
        )
    search_s = time.perf_counter() - began_s
    return Planned(found=found, order=best, search_s=search_s, memory_bytes=limit_bytes, perturbed=others)


def _toasted(graph: Graph, mesh: DeviceMesh, options: PlannerOptions, workers: AbstractWorkers | None) -> Planned:
    """The plan by TOAST, from D-Rec's plan and what people write, with its bound; what fits comes first.

    Raises:
        ConfigError: the pins can't hold, or no plan is found below the limit of memory.
    """
    if options.diagnose:
        raise ConfigError(
            "needs another planner", key="--diagnose", value=options.planner, nearest="--planner descent tells it"
        )
    began_s = time.perf_counter()
    halved = _halved(graph, mesh, replace(options, planner="recursive", memory_bytes=None))
    levels = (whole if options.whole_axes else refined)(mesh)[1]
    pins = pinned(options.pins, graph, mesh, levels) if options.pins else None
    limit_bytes = options.memory_bytes
    least_bytes = min(device.memory_bytes for device in mesh.cluster.devices) if limit_bytes is None else limit_bytes
    toast = toast_plan(
        graph,
        halved.plan.mesh,
        ToastOptions(memory_bytes=least_bytes),
        given=[halved.plan],
        pins=pins,
        workers=workers,
    )
    plan, cost, steps = toast.plan, cost_of(toast.plan), toast.steps
    if cost.peak_memory_bytes > least_bytes:
        try:
            below = _halved(graph, mesh, replace(options, planner="descent", memory_bytes=least_bytes)).found
        except ConfigError:
            if limit_bytes is not None:
                raise
        else:
            plan, cost = below.plan, below.cost
            figures = Figures(step_time_s=cost.step_time_s, peak_memory_bytes=cost.peak_memory_bytes)
            whole_s = steps[0].figures.step_time_s
            steps = (*steps, Step(name="descent for memory", cost=cost.step_time_s / whole_s, figures=figures))
    reports = [] if pins is None else [report_of(pins, plan, number) for number in range(len(options.pins))]
    is_optimum = toast.outcome.known is Known.OPTIMAL and plan is toast.plan
    found = PinnedPlan(plan=plan, cost=cost, is_optimum=is_optimum, reports=tuple(reports))
    return Planned(
        found=found,
        order=halved.order,
        search_s=time.perf_counter() - began_s,
        memory_bytes=limit_bytes,
        bound_s=toast.bound_s,
        steps=steps,
    )


def _cheapest(plans: Mapping[Order, PinnedPlan]) -> Order:
    return min(plans, key=lambda order: plans[order].cost.step_time_s)
