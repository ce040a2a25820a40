"""ManuMatic: D-Rec with a user's pins, and what became of each of them (ManuMatic section 3).

Without pins the plan is D-Rec's to the bit. With pins it is found under them; what a pin has cost or saved is told by a
plan without that one, and a perturbed pin shows what a slightly wrong one would have cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodels.device_mesh import DeviceMesh
from costmodels.graph import Graph
from costmodels.plan import Plan, PlanCost, cost_of
from hardware.device import GIB
from hardware.errors import ConfigError
from tuner.planners.axis_descent import descended
from tuner.planners.memory_prices import fitted
from tuner.planners.pins import Pin, Pinned, deviation, pinned, words_of
from tuner.planners.recursive import Level, Order, recursive_plan
from tuner.planners.sharding_terms import Charge, ShardingTerms, together

MEMORY_KEY = "memory_gib"
"""Where the limit stands, in messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PinReport:
    """What became of a pin.

    Attributes:
        pin: The pin.
        num_ops: Operators that it matches.
        num_held: Those of them that are cut into a multiple of its ways.
        num_over_provisioned: Those of these that are cut further.
        missing: Mean of D(split, target) over the operators; 0 where it holds everywhere.
        saved_s: Step time of the plan without it, less that of the plan with it; infinite where without it no plan is
            found that fits into memory, None if nobody asked.
    """

    pin: Pin
    num_ops: int
    num_held: int
    num_over_provisioned: int
    missing: float
    saved_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether it holds everywhere."""
        return self.num_held == self.num_ops


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PinnedPlan:
    """A plan under pins.

    Attributes:
        plan: The plan.
        cost: What a step costs with it.
        is_optimum: Whether it is known that no plan costs less.
        reports: What became of each pin.
    """

    plan: Plan
    cost: PlanCost
    is_optimum: bool
    reports: tuple[PinReport, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbed:
    """A plan with one pin changed.

    Attributes:
        pin: The changed pin.
        number: Which it replaces.
        step_time_s: The step with it; None where it can't hold, or no plan is found that fits into memory.
    """

    pin: Pin
    number: int
    step_time_s: float | None


def pinned_plan(
    graph: Graph,
    mesh: DeviceMesh,
    refined_mesh: DeviceMesh,
    levels: Sequence[Level],
    pins: Sequence[Pin],
    *,
    order: Order = "price",
    descent: ShardingTerms | None = None,
    charge: Charge | None = None,
    memory_bytes: float | None = None,
    counterfactuals: bool = True,
) -> PinnedPlan:
    """The plan under the pins.

    Args:
        graph: What to shard.
        mesh: With the axes that the pins name.
        refined_mesh: The same as `recursive.refined` or `whole` gives it.
        levels: With these levels.
        pins: What must hold, or costs something where it does not.
        order: Of D-Rec's visits.
        descent: What plans cost, for going on from D-Rec's plan axis by axis; None to stay with that.
        charge: Further costs, for that way on alone.
        memory_bytes: The most that a device may hold, which needs that way on; None for anything.
        counterfactuals: Whether a plan without each pin says what it saved.

    Raises:
        ConfigError: the pins can't hold, or no plan is found that fits into memory.
    """
    found = pinned(pins, graph, mesh, levels)
    plan, is_optimum = _planned(graph, refined_mesh, levels, found, order, descent, charge, memory_bytes)
    cost = cost_of(plan)
    reports = []
    for number in range(len(pins)):
        report = _report(found, plan, number)
        if counterfactuals:
            others = pinned([pin for at, pin in enumerate(pins) if at != number], graph, mesh, levels)
            try:
                plan_without, _ = _planned(graph, refined_mesh, levels, others, order, descent, charge, memory_bytes)
                saved_s = cost_of(plan_without).step_time_s - cost.step_time_s
            except ConfigError:
                saved_s = math.inf
            report = replace(report, saved_s=saved_s)
        reports.append(report)
    return PinnedPlan(plan=plan, cost=cost, is_optimum=is_optimum, reports=tuple(reports))


def perturbed(
    graph: Graph,
    mesh: DeviceMesh,
    refined_mesh: DeviceMesh,
    levels: Sequence[Level],
    pins: Sequence[Pin],
    *,
    order: Order = "price",
    descent: ShardingTerms | None = None,
    memory_bytes: float | None = None,
) -> tuple[Perturbed, ...]:
    """Plans with one pin changed at a time: half and double its ways, and each other dim that its operators can cut."""
    found = pinned(pins, graph, mesh, levels)
    changed: list[tuple[int, Pin]] = []
    for number, (pin, ways, factors) in enumerate(zip(found.pins, found.ways, found.factors, strict=True)):
        changed += [(number, replace(pin, ways=other)) for other in (ways // 2, ways * 2) if other > 1]
        names: set[str] = set()
        for op, pinned_factor in factors.items():
            rule = graph.ops[op].rule
            words = words_of(rule)
            names.update(words[factor] for factor in rule.cuttable if factor != pinned_factor)
        changed += [(number, replace(pin, dim=name)) for name in sorted(names)]
    results = []
    for number, pin in changed:
        try:
            own = pinned([pin if at == number else other for at, other in enumerate(pins)], graph, mesh, levels)
            plan, _ = _planned(graph, refined_mesh, levels, own, order, descent, None, memory_bytes)
            step_time_s = cost_of(plan).step_time_s
        except ConfigError:
            step_time_s = None
        results.append(Perturbed(pin=pin, number=number, step_time_s=step_time_s))
    return tuple(results)


def _planned(
    graph: Graph,
    mesh: DeviceMesh,
    levels: Sequence[Level],
    pins: Pinned,
    order: Order,
    descent: ShardingTerms | None,
    charge: Charge | None = None,
    memory_bytes: float | None = None,
) -> tuple[Plan, bool]:
    """The plan under pins, and whether it is known that none costs less.

    Raises:
        ConfigError: none is found that fits into memory.
    """
    plan = recursive_plan(graph, mesh, levels, order=order, closed=pins.closed, extra=pins.extra)
    assert descent is not None or memory_bytes is None, "a limit of memory needs the descent"
    if descent is None:
        return plan, False
    is_open = pins.is_open if pins.served else None
    all_charges = together(pins.charge, charge)
    found = descended(plan, descent, is_open=is_open, charge=all_charges)
    peak_bytes = cost_of(found.plan).peak_memory_bytes
    if memory_bytes is None or peak_bytes <= memory_bytes:
        return found.plan, found.is_optimum
    below = fitted(found.plan, descent, memory_bytes, is_open=is_open, charge=all_charges)
    if below.plan is None:
        raise ConfigError(
            f"no plan was found that fits: without a limit {peak_bytes / GIB:.3g} are needed",
            key=MEMORY_KEY,
            value=memory_bytes / GIB,
            nearest=f"the least that was found is {_rounded_up(below.least_bytes / GIB):g}",
        )
    return below.plan, False


def _rounded_up(number: float) -> float:
    """To three digits, so that what is told is enough."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / unit) * unit:.3g}")


def _report(pins: Pinned, plan: Plan, number: int) -> PinReport:
    target, rows = pins.ways[number], plan.served.tolist()
    splits = [pins.split(number, op, rows[op]) for op in pins.factors[number]]
    return PinReport(
        pin=pins.pins[number],
        num_ops=len(splits),
        num_held=sum(split % target == 0 for split in splits),
        num_over_provisioned=sum(split % target == 0 and split > target for split in splits),
        missing=sum(deviation(split, target) for split in splits) / len(splits),
    )
