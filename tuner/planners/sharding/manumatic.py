"""ManuMatic: D-Rec with a user's pins, and what became of each of them (ManuMatic section 3).

Without pins the plan is D-Rec's to the bit. With pins it is found under them; what a pin has cost or saved is told by a
plan without that one, and a perturbed pin shows what a slightly wrong one would have cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan, PlanCost, cost_of
from hardware.device import GIB
from hardware.io.errors import ConfigError
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.axis_descent import IsOpen, charged_s, descended
from tuner.planners.sharding.memory_prices import fitted
from tuner.planners.sharding.pins import Pin, Pinned, deviation, pinned, words_of
from tuner.planners.sharding.recursive import Level, Order, recursive_plan
from tuner.planners.sharding.sharding_terms import Charge, ShardingTerms, together

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
    task = _Task(
        graph=graph,
        mesh=mesh,
        refined_mesh=refined_mesh,
        levels=levels,
        order=order,
        descent=descent,
        charge=charge,
        memory_bytes=memory_bytes,
    )
    found = task.pinned(pins)
    plan, is_optimum = task.planned(found)
    cost = cost_of(plan)
    reports = []
    for number in range(len(pins)):
        report = report_of(found, plan, number)
        if counterfactuals:
            others = task.pinned([pin for at, pin in enumerate(pins) if at != number])
            try:
                plan_without, _ = task.planned(others)
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
    task = _Task(
        graph=graph,
        mesh=mesh,
        refined_mesh=refined_mesh,
        levels=levels,
        order=order,
        descent=descent,
        charge=None,
        memory_bytes=memory_bytes,
    )
    found = task.pinned(pins)
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
            own = task.pinned([pin if at == number else other for at, other in enumerate(pins)])
            plan, _ = task.planned(own)
            step_time_s = cost_of(plan).step_time_s
        except ConfigError:
            step_time_s = None
        results.append(Perturbed(pin=pin, number=number, step_time_s=step_time_s))
    return tuple(results)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """What is planned, and how: the arguments of `pinned_plan` but the pins."""

    graph: Graph
    mesh: DeviceMesh
    refined_mesh: DeviceMesh
    levels: Sequence[Level]
    order: Order
    descent: ShardingTerms | None
    charge: Charge | None
    memory_bytes: float | None

    def pinned(self, pins: Sequence[Pin]) -> Pinned:
        """Pins, checked."""
        return pinned(pins, self.graph, self.mesh, self.levels)

    def planned(self, pins: Pinned) -> tuple[Plan, bool]:
        """The plan under pins, and whether it is known that none costs less.

        Raises:
            ConfigError: none is found that fits into memory.
        """
        plan, is_optimum = self._from(pins, pins)
        charge = together(pins.charge, self.charge)
        if _charge_of(plan, pins.charge):
            other, _ = self._from(self._hardened(pins), pins)
            if charged_s(other, charge) < charged_s(plan, charge) * (1 - ROUNDING):
                plan, is_optimum = other, False
        if self.memory_bytes is None:
            return plan, is_optimum
        assert self.descent is not None, "a limit of memory needs the descent"
        peak_bytes = cost_of(plan).peak_memory_bytes
        if peak_bytes <= self.memory_bytes:
            return plan, is_optimum
        below = fitted(plan, self.descent, self.memory_bytes, is_open=_is_open(pins), charge=charge)
        if below.plan is None:
            raise ConfigError(
                f"no plan was found that fits: without a limit {peak_bytes / GIB:.3g} are needed",
                key=MEMORY_KEY,
                value=self.memory_bytes / GIB,
                nearest=f"the least that was found is {_rounded_up(below.least_bytes / GIB):g}",
            )
        return below.plan, False

    def _from(self, begin: Pinned, pins: Pinned) -> tuple[Plan, bool]:
        """D-Rec's plan under some pins, gone on from under others."""
        plan = recursive_plan(
            self.graph, self.refined_mesh, self.levels, order=self.order, closed=begin.closed, extra=begin.extra
        )
        if self.descent is None:
            return plan, False
        found = descended(plan, self.descent, is_open=_is_open(pins), charge=together(pins.charge, self.charge))
        return found.plan, found.is_optimum

    def _hardened(self, pins: Pinned) -> Pinned:
        """The same with soft pins hard, the weightiest first, as long as they can hold together.

        What a level has cut may leave a soft pin no room at a later one, however much it weighs.
        """
        own = list(pins.pins)
        found = pins
        for number in sorted(range(len(own)), key=lambda number: -(own[number].weight_s or 0.0)):
            hard = [*own[:number], replace(own[number], weight_s=None), *own[number + 1 :]]
            try:
                found, own = self.pinned(hard), hard
            except ConfigError:
                continue
        return found


def _is_open(pins: Pinned) -> IsOpen | None:
    return pins.is_open if pins.served else None


def _charge_of(plan: Plan, charge: Charge | None) -> float:
    """What is charged for a plan [s]."""
    return 0.0 if charge is None else sum(charge(op, tuple(row)) for op, row in enumerate(plan.served.tolist()))


def _rounded_up(number: float) -> float:
    """To three digits, so that what is told is enough."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / unit) * unit:.3g}")


def report_of(pins: Pinned, plan: Plan, number: int) -> PinReport:
    """What became of one of the pins in a plan, without a word on what it saved."""
    target, rows = pins.ways[number], plan.served.tolist()
    splits = [pins.split(number, op, rows[op]) for op in pins.factors[number]]
    return PinReport(
        pin=pins.pins[number],
        num_ops=len(splits),
        num_held=sum(split % target == 0 for split in splits),
        num_over_provisioned=sum(split % target == 0 and split > target for split in splits),
        missing=sum(deviation(split, target) for split in splits) / len(splits),
    )
