"""ManuMatic: D-Rec under a user's pins, and a report on each pin (ManuMatic, section 3).

Without pins the plan is exactly D-Rec's. With pins the plan is searched under them. A second plan without a pin tells
the cost or gain of that pin, and a plan with a perturbed pin tells the cost of a slightly wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.laid_sources import lay_sources
from costmodels.sharding.plan import Plan, PlanCost, cost_of
from hardware.device import GIB
from hardware.io.errors import ConfigError
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.axis_descent import charged_s, descend
from tuner.planners.sharding.memory_prices import fit_to_memory
from tuner.planners.sharding.pins import Pin, Pinned, deviation, resolve_pins, words_of
from tuner.planners.sharding.recursive import Level, Order, recursive_plan
from tuner.planners.sharding.sharding_terms import Charge, ShardingTerms, together, total_charge_s

MEMORY_KEY = "memory_gib"
"""Key of the memory limit, as error messages name it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PinReport:
    """Report on one pin in a plan.

    Attributes:
        pin: Pin as the user wrote it.
        ways: Number of parts that it asks for on this mesh; of a soft pin the nearest that divides devices and
            dim.
        num_ops: Number of operators that the pin matches.
        num_held: Number of matched operators that are cut into a multiple of the pin's ways.
        num_over_provisioned: Number of matched operators that are cut into more parts than the pin asks for.
        missing: Mean deviation D(split, target) over the operators; 0 where the pin holds everywhere.
        saved_s: Step time of the plan without the pin, less that of the plan with it [s]; infinite if no plan without
            the pin was found that fits into memory, None if it was not computed.
    """

    pin: Pin
    ways: int
    num_ops: int
    num_held: int
    num_over_provisioned: int
    missing: float
    saved_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether the pin holds at every operator that it matches."""
        return self.num_held == self.num_ops


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PinnedPlan:
    """A plan under pins, with a report on each pin.

    Attributes:
        plan: Plan of the whole graph.
        cost: Time and memory of a step with the plan.
        is_optimum: Whether it is proven that no other plan costs less.
        reports: Report on each pin, in the order of the pins.
    """

    plan: Plan
    cost: PlanCost
    is_optimum: bool
    reports: tuple[PinReport, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbed:
    """A plan with one pin changed.

    Attributes:
        pin: Changed pin, in full.
        number: Index of the pin that it replaces.
        step_time_s: Step time with the changed pin [s]; None if it can't hold, or no plan fits into memory.
    """

    pin: Pin
    number: int
    step_time_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PinnedSearch:
    """Search for plans of a graph under pins: D-Rec, and from its plan an optional descent axis by axis.

    Attributes:
        graph: Graph of the training step to shard.
        mesh: Mesh with the axes that pins name.
        refined_mesh: The same devices with the axes that `recursive.refine_mesh` or `recursive.whole` returns.
        levels: Levels that belong to `refined_mesh`.
        order: Order of D-Rec's visits to operators.
        descent: Cost tables for the descent from D-Rec's plan; None to keep D-Rec's plan.
        charge: Further costs per operator, for the descent only; None for no further costs.
        memory_bytes: Most memory that a device may hold; requires `descent`. None for no limit.
    """

    graph: Graph
    mesh: DeviceMesh
    refined_mesh: DeviceMesh
    levels: Sequence[Level]
    order: Order = "price"
    descent: ShardingTerms | None = None
    charge: Charge | None = None
    memory_bytes: float | None = None

    def plan(self, pins: Sequence[Pin], *, counterfactuals: bool = True) -> PinnedPlan:
        """Plan under the pins.

        Args:
            pins: Pins of the user; hard ones must hold, soft ones cost something where they do not.
            counterfactuals: Whether to plan once more without each pin, to report what the pin saved.

        Raises:
            ConfigError: the pins can't hold, or no plan is found that fits into memory.
        """
        checked = self._check(pins)
        plan, is_optimum = self._plan_under(checked)
        cost = cost_of(plan)
        reports = []
        for number in range(len(pins)):
            report = report_of(checked, plan, number)
            if counterfactuals:
                without_s = self._step_time_s([*pins[:number], *pins[number + 1 :]])
                report = replace(report, saved_s=math.inf if without_s is None else without_s - cost.step_time_s)
            reports.append(report)
        return PinnedPlan(plan=plan, cost=cost, is_optimum=is_optimum, reports=tuple(reports))

    def perturb(self, pins: Sequence[Pin]) -> tuple[Perturbed, ...]:
        """Plan with one pin changed at a time: half and twice its ways, and each other dim its operators can cut."""
        checked = self._check(pins)
        changed: list[tuple[int, Pin]] = []
        for number, (pin, ways, factors) in enumerate(zip(checked.pins, checked.ways, checked.factors, strict=True)):
            changed += [(number, replace(pin, ways=other)) for other in (ways // 2, ways * 2) if other > 1]
            names: set[str] = set()
            for op, pinned_factor in factors.items():
                rule = self.graph.ops[op].rule
                # Dims are named by the words of each operator, because operators of one pin may differ.
                words = words_of(rule)
                names.update(words[factor] for factor in rule.cuttable if factor != pinned_factor)
            changed += [(number, replace(pin, dim=name)) for name in sorted(names)]
        return tuple(
            Perturbed(pin=pin, number=number, step_time_s=self._step_time_s([*pins[:number], pin, *pins[number + 1 :]]))
            for number, pin in changed
        )

    def _step_time_s(self, pins: Sequence[Pin]) -> float | None:
        """Return the step time of the plan under pins [s]; None if they can't hold, or no plan fits into memory."""
        try:
            plan, _ = self._plan_under(self._check(pins))
        except ConfigError:
            return None
        return cost_of(plan).step_time_s

    def _check(self, pins: Sequence[Pin]) -> Pinned:
        """Resolve pins to operators, factors and levels.

        Raises:
            ConfigError: a pin can't be meant, or the pins can't hold together.
        """
        return resolve_pins(pins, self.graph, self.mesh, self.levels)

    def _plan_under(self, pins: Pinned) -> tuple[Plan, bool]:
        """Return the plan under checked pins, and whether it is proven that no other costs less.

        Raises:
            ConfigError: no plan is found that fits into memory.
        """
        plan, is_optimum = self._start_from(pins, pins)
        charge = together(pins.charge, self.charge)
        # D-Rec's early levels may use up the room of a soft pin. Where one is violated, start from hard pins instead.
        if total_charge_s(plan, pins.charge):
            other, _ = self._start_from(self._harden(pins), pins)
            if charged_s(other, charge) < charged_s(plan, charge) * (1 - ROUNDING):
                plan, is_optimum = other, False
        kept = {op for factors in pins.factors for op in factors}
        if self.descent is not None:  # without it the plan is D-Rec's
            plan = lay_sources(plan, kept=kept)
        if self.memory_bytes is None:
            return plan, is_optimum
        assert self.descent is not None, "a limit of memory needs the descent"
        peak_bytes = cost_of(plan).peak_memory_bytes
        if peak_bytes <= self.memory_bytes:
            return plan, is_optimum
        below = fit_to_memory(plan, self.descent, self.memory_bytes, is_open=pins.restriction, charge=charge, kept=kept)
        if below.plan is None:
            raise ConfigError(
                f"no plan was found that fits: without a limit {peak_bytes / GIB:.3g} are needed",
                key=MEMORY_KEY,
                value=self.memory_bytes / GIB,
                nearest=f"the least that was found is {_round_up(below.least_bytes / GIB):g}",
            )
        return below.plan, False

    def _start_from(self, begin: Pinned, pins: Pinned) -> tuple[Plan, bool]:
        """Compute D-Rec's plan under the pins `begin`, then descend from it under `pins`."""
        plan = recursive_plan(
            self.graph, self.refined_mesh, self.levels, order=self.order, closed=begin.closed, extra=begin.extra
        )
        if self.descent is None:
            return plan, False
        found = descend(plan, self.descent, is_open=pins.restriction, charge=together(pins.charge, self.charge))
        return found.plan, found.is_optimum

    def _harden(self, pins: Pinned) -> Pinned:
        """Make soft pins hard, the weightiest first, as long as all hard ones can hold together.

        A level of D-Rec may leave a soft pin no room at a later level, however large its weight is.
        """
        own = list(pins.pins)
        found = pins
        for number in sorted(range(len(own)), key=lambda number: -(own[number].weight_s or 0.0)):
            hard = [*own[:number], replace(own[number], weight_s=None), *own[number + 1 :]]
            try:
                found, own = self._check(hard), hard
            except ConfigError:
                continue
        return found


def _round_up(number: float) -> float:
    """Round up to three digits, so that a limit of the printed size is large enough."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / unit) * unit:.3g}")


def report_of(pins: Pinned, plan: Plan, number: int) -> PinReport:
    """Report on one pin in a plan, without the time that it saved."""
    target, rows = pins.ways[number], plan.served.tolist()
    splits = [pins.split(number, op, rows[op]) for op in pins.factors[number]]
    return PinReport(
        pin=pins.pins[number],
        ways=target,
        num_ops=len(splits),
        num_held=sum(split % target == 0 for split in splits),
        num_over_provisioned=sum(split % target == 0 and split > target for split in splits),
        missing=sum(deviation(split, target) for split in splits) / len(splits),
    )
