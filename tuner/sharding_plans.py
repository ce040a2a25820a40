"""A graph on a mesh, planned: the planners by name, the mesh in a user's words, and a plan as the commands print it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from costmodels.device_mesh import DeviceMesh
from costmodels.frontends.transformer import transformer_graph
from costmodels.graph import Graph
from costmodels.parallel import ParallelConfig
from costmodels.plan import Plan, PlanCost
from costmodels.plan_totals import collective_lines, collectives_by_kind
from costmodels.reduced import least_layers, with_layers
from hardware.cluster import Cluster
from hardware.errors import ConfigError
from tuner.planners.manumatic import PinnedPlan, PinReport, pinned_plan
from tuner.planners.pins import Pin
from tuner.planners.recursive import ORDERS, Order, refined, whole
from tuner.planners.sharding_terms import ShardingTerms
from tuner.rules import Setting

Planner = Literal["descent", "recursive"]
PLANNERS: tuple[Planner, ...] = get_args(Planner)

OrderChoice = Order | Literal["best"]
ORDER_CHOICES: tuple[OrderChoice, ...] = ("best", *ORDERS)


MANY_OPS = 1000
"""With more operators only the cheapest of D-Rec's plans is gone on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """How a graph is planned.

    Attributes:
        planner: `recursive` is D-Rec alone; `descent` goes on from its plan, axis by axis.
        order: In which D-Rec visits operators; `best` tries all and keeps the cheapest.
        whole_axes: Whether an axis of the mesh cuts one dim only, which is what frameworks can express.
        pins: What a user asks for.
    """

    planner: Planner = "descent"
    order: OrderChoice = "best"
    whole_axes: bool = False
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A graph that was planned.

    Attributes:
        found: The plan, its cost, and what became of the pins.
        order: The order that found it.
        search_s: What finding it took.
    """

    found: PinnedPlan
    order: Order
    search_s: float

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def cost(self) -> PlanCost:
        """What a step costs with it."""
        return self.found.cost


def planned(graph: Graph, mesh: DeviceMesh, options: PlannerOptions) -> Planned:
    """The plan of a graph by D-Rec, under pins if there are any.

    Raises:
        ConfigError: the pins can't hold.
    """
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
    found = tried[best]
    if options.pins:
        found = pinned_plan(graph, mesh, own_mesh, levels, options.pins, order=best, descent=terms)
    return Planned(found=found, order=best, search_s=time.perf_counter() - began_s)


def _cheapest(plans: Mapping[Order, PinnedPlan]) -> Order:
    return min(plans, key=lambda order: plans[order].cost.step_time_s)


def of_candidate(setting: Setting, config: ParallelConfig, num_layers: int | None = None) -> tuple[Graph, DeviceMesh]:
    """A few layers of a study's model, one micro-batch of all replicas, and the devices of a pipeline's first stage.

    Args:
        setting: Job and cluster.
        config: Its degrees but pp are the axes, in the order in which ranks are counted.
        num_layers: None for as few as have every kind of layer.

    Raises:
        ConfigError: the model has not so many layers, or too few for its kinds.
    """
    job = setting.job
    if num_layers is not None and num_layers > job.model.num_layers:
        raise ConfigError(
            f"must be at most the {job.model.num_layers} of {job.model.name}", key="--layers", value=num_layers
        )
    model = with_layers(job.model, num_layers or least_layers(job.model))
    degrees = {"dp": config.dp, "cp": config.cp, "up": config.up, "tp": config.tp}
    axes = {name: size for name, size in degrees.items() if size > 1} or {"dp": 1}
    graph = transformer_graph(replace(job, model=model), micro_batch_size=config.mbs * config.dp)
    return graph, DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=setting.cluster)


def mesh_of(text: str, cluster: Cluster, *, option: str = "--mesh") -> DeviceMesh:
    """The mesh that `data=2,model=4` names, on a cluster.

    Raises:
        ConfigError: it reads otherwise, or the cluster can't form it.
    """
    names: list[str] = []
    sizes: list[int] = []
    for part in text.split(","):
        name, equals, count = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and equals and count.isdigit() and 1 <= int(count) <= cluster.num_devices):
            raise ConfigError(
                f"must be axes with sizes from 1 to {cluster.num_devices}",
                key=option,
                value=text,
                nearest="for example data=2,model=4",
            )
        names.append(name)
        sizes.append(int(count))
    if len(set(names)) < len(names):
        raise ConfigError("names an axis twice", key=option, value=text, nearest="for example data=2,model=4")
    num_devices = math.prod(sizes)
    if cluster.num_devices % num_devices:
        divisors = [one for one in range(1, cluster.num_devices + 1) if cluster.num_devices % one == 0]
        nearest = min(divisors, key=lambda one: abs(one - num_devices))
        raise ConfigError(
            f"is {num_devices} devices, which do not divide the {cluster.num_devices} of {cluster.name}",
            key=option,
            value=text,
            nearest=f"axes whose product is {nearest}, or other --hosts",
        )
    return DeviceMesh(names=tuple(names), sizes=tuple(sizes), cluster=cluster)


def plan_json(planned: Planned) -> dict[str, Any]:
    """What `meshtune plan` prints."""
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
        "peak_memory_bytes": cost.peak_memory_bytes,
        "is_optimum": planned.found.is_optimum,
        "order": planned.order,
        "search_s": planned.search_s,
        "pins": [_pin_json(report) for report in planned.found.reports],
        "unknown_primitives": dict(graph.unknown),
    }


def _pin_json(report: PinReport) -> dict[str, Any]:
    return {
        "pin": report.pin.in_words,
        "is_hard": report.pin.is_hard,
        "ops": report.num_ops,
        "held": report.num_held,
        "over_provisioned": report.num_over_provisioned,
        "missing": report.missing,
        "saved_s": report.saved_s,
    }


def in_lines(planned: Planned) -> list[str]:
    """The same for people: totals, collectives by kind and axes, and what became of the pins."""
    plan, cost = planned.plan, planned.cost
    together = collectives_by_kind(plan, cost)
    lines = [
        f"{cost.step_time_s:.4g} s per step, {cost.comm_s:.4g} s of them communication, nothing overlapped; "
        f"{cost.peak_memory_bytes / 2**30:.1f} GiB per device",
        f"planned {len(plan.graph.ops):,} operators in {planned.search_s:.2f} s (order: {planned.order})"
        + (", and no plan is faster" if planned.found.is_optimum else ""),
        *collective_lines(together),
        *(_pin_line(report) for report in planned.found.reports),
    ]
    if plan.graph.unknown:
        found = ", ".join(f"{name} ({count} times)" for name, count in plan.graph.unknown)
        lines.append(f"no rule is known for {found}; what these read and write stays whole")
    return lines


def _pin_line(report: PinReport) -> str:
    held = "holds" if report.is_held else f"holds at {report.num_held} of {report.num_ops} operators"
    more = f", cut further at {report.num_over_provisioned}" if report.num_over_provisioned else ""
    saved = ""
    if report.saved_s is not None:
        saved = f"; without it a step takes {abs(report.saved_s):.3g} s {'more' if report.saved_s >= 0 else 'less'}"
    return f"  pin {report.pin.in_words}: {held}{more}{saved}"


def shardings_table(planned: Planned) -> Mapping[str, str]:
    """How the tensors that the step begins with lie, as `name: dim/axis`."""
    plan = planned.plan
    found = {}
    for op in plan.graph.ops:
        if op.is_source:
            tensor = op.results[0]
            dims = plan.graph.tensors[tensor].dim_names or tuple(map(str, range(len(plan.graph.tensors[tensor].shape))))
            cut = [f"{dim}/{'*'.join(axes)}" for dim, axes in zip(dims, plan.dims_of(tensor), strict=True) if axes]
            found[op.name] = ", ".join(cut) or "whole everywhere"
    return found
