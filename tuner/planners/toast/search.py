"""TOAST: named dims, conflicts and their resolutions, and a tree search over the remaining decisions (section 4).

A state costs C = RT + MP (section 4.5). RT is its step time over that of the unsharded step. MP is a penalty for its
memory beyond that of a device, relative to the memory of the unsharded step. Times and memory are those of
`costmodels.sharding.plan`.

Three steps go beyond the paper. A further tree begins with trajectories as people would write them
(`colour_scripts`) and with the closest state to D-Rec's plan. Small changes are tried on the best actions of every tree
(`tree_search.edit_actions`). The best plans are improved by `axis_descent`, which does not depend on colours. The plans
of all these steps are reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan, cost_of
from tuner.planners.engine.outcome import ROUNDING, Incumbent, Known, Limits, Outcome, Progress, Stop
from tuner.planners.engine.workers import AbstractBound, AbstractWorkers, InProcessWorkers
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.class_costs import ClassCosts, Figures, decode_rows
from tuner.planners.sharding.memory_prices import fit_to_memory
from tuner.planners.sharding.pins import Pinned
from tuner.planners.sharding.plan_bounds import step_time_bound
from tuner.planners.sharding.sharding_terms import ShardingTerms, total_charge_s
from tuner.planners.toast.colour_actions import ColourActions, State
from tuner.planners.toast.colour_scripts import hand_written, nearest
from tuner.planners.toast.compatibility import Compatibility, compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.tree_search import SearchOptions, Tree, edit_actions, search

MEMORY_PENALTY = 100.0
"""Constant C of the paper, which gives no value: a hundredth of the unsharded peak too much costs a whole step."""

MOST_STATES = 4000
"""Most states of a tree, unless a limit is given."""

ENOUGH = 0.015
"""Gap to the bound, as a fraction of it, at which a plan is polished no further."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToastOptions:
    """Options of TOAST.

    Attributes:
        search: Options of each tree search.
        searches: Number of trees, each with random numbers of its own; the best one counts.
        seed: Seed of the random numbers.
        least_dims: Fewest names that an action must cut; see `ColourActions`.
        memory_bytes: Memory of a device; None for that of the smallest device of the mesh.
        is_seeded: Whether a further tree begins with plans by hand, and with given plans.
        is_edited: Whether small changes of every tree's best actions are tried.
        is_polished: Whether the best plans are improved by axis descent.
    """

    search: SearchOptions = field(default_factory=SearchOptions)
    searches: int = 4
    seed: int = 0
    least_dims: int | None = None
    memory_bytes: float | None = None
    is_seeded: bool = True
    is_edited: bool = True
    is_polished: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A plan on the way to the last one.

    Attributes:
        name: Name of the step that made the plan.
        cost: Cost C of the plan.
        figures: Time and memory of the plan.
    """

    name: str
    cost: float
    figures: Figures


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Toast:
    """Result of TOAST.

    Attributes:
        outcome: Plan by its cost C, with its status.
        found: Named dims of the graph that are decided together.
        actions: Actions of the search.
        trees: Trees of all searches.
        steps: Unsharded step, the trees' best plans, given plans and polished plans, in the order of their making.
        bound_s: Lower bound of the step time of every plan, whatever memory it takes and whichever pins it keeps [s].
    """

    outcome: Outcome[Plan]
    found: Compatibility
    actions: ColourActions
    trees: tuple[Tree[State], ...]
    steps: tuple[Step, ...]
    bound_s: float

    @property
    def plan(self) -> Plan:
        """Best plan that was found."""
        assert self.outcome.best is not None, "the unsharded step is a plan"
        return self.outcome.best.solution


class ColourGame:
    """Sharding of a step as a game, after `tree_search.AbstractGame`.

    Attributes:
        actions: Actions on the graph.
        first: State in which no axis serves anything but hard pins.
        whole: Time and memory of the unsharded step, without pins.
    """

    def __init__(self, actions: ColourActions, memory_bytes: float) -> None:
        """Prepare the costs of states.

        Args:
            actions: Actions on the graph.
            memory_bytes: Memory of a device.
        """
        self.actions = actions
        self.first = actions.first
        self._memory_bytes = memory_bytes
        self._costs = ClassCosts(actions.found.names.graph, actions.mesh, actions.classes)
        self.whole = self._costs.figures([0] * (len(self.first) // 8))
        self._charged = self._find_soft_ops()

    @property
    def num_actions(self) -> int:
        """Number of actions of the graph on the mesh."""
        return len(self.actions.actions)

    def after(self, state: State, action: int) -> State:
        """Return the state that an action leads to."""
        return self.actions.after(state, self.actions.actions[action])

    def cost(self, state: State) -> float:
        """Return the cost C of a state, with the charge of soft pins."""
        codes = self.actions.codes(state)
        cost = self.of_figures(self._costs.figures(codes))
        pins = self.actions.pins
        if pins is None or not self._charged or self.whole.step_time_s <= 0:
            return cost
        num_axes = len(self.actions.mesh.sizes)
        charge = pins.charge
        assert charge is not None, "soft pins charge"
        # Only operators that soft pins match can be charged.
        charged_s = sum(charge(op, decode_rows(codes[self.actions.classes[op]], num_axes)) for op in self._charged)
        return cost + charged_s / self.whole.step_time_s

    def _find_soft_ops(self) -> tuple[int, ...]:
        """Return the operators that soft pins match."""
        pins = self.actions.pins
        if pins is None:
            return ()
        soft = [factors for pin, factors in zip(pins.pins, pins.factors, strict=True) if not pin.is_hard]
        return tuple(dict.fromkeys(op for factors in soft for op in factors))

    def __reduce__(self) -> tuple[type[ColourGame], tuple[ColourActions, float]]:
        """Pickle the arguments only: another process prepares the costs itself."""
        return ColourGame, (self.actions, self._memory_bytes)

    def figures(self, state: State) -> Figures:
        """Return time and memory of a state."""
        return self._costs.figures(self.actions.codes(state))

    def of_figures(self, figures: Figures) -> float:
        """Return C = RT + MP."""
        whole = self.whole
        # RT and MP of section 4.5, each relative to the unsharded step.
        relative = figures.step_time_s / whole.step_time_s if whole.step_time_s > 0 else 1.0
        over_bytes = figures.peak_memory_bytes - self._memory_bytes
        if over_bytes <= 0:
            return relative
        return relative + MEMORY_PENALTY * over_bytes / whole.peak_memory_bytes


def toast_plan(
    graph: Graph,
    mesh: DeviceMesh,
    options: ToastOptions | None = None,
    *,
    limits: Limits | None = None,
    given: Sequence[Plan] = (),
    pins: Pinned | None = None,
    workers: AbstractWorkers | None = None,
) -> Toast:
    """Plan the sharding of a graph.

    Args:
        graph: Graph of the training step to shard.
        mesh: Mesh of devices to shard it over. Every axis serves at most one factor of an operator, so that a mesh of
            prime factors (`recursive.refine_mesh`) has more plans.
        options: Options of TOAST; None for the defaults.
        limits: Limits of seconds and states for each tree; None for MOST_STATES.
        given: Plans on this mesh to begin with, such as D-Rec's; used only if `is_seeded`.
        pins: Pins of the user, on levels of this mesh; given plans must satisfy the hard ones.
        workers: Workers that grow the trees; None for this process.
    """
    options, limits = options or ToastOptions(), limits or Limits(nodes=MOST_STATES)
    began_s = time.perf_counter()
    found = compatibility(named_dims(graph))
    actions = ColourActions(found, mesh, least_dims=options.least_dims, pins=pins)
    memory_bytes = options.memory_bytes
    if memory_bytes is None:
        memory_bytes = min(device.memory_bytes for device in mesh.cluster.devices)
    game = ColourGame(actions, memory_bytes)
    given = given if options.is_seeded else ()
    # One tree more than asked for begins with the scripts, if the options ask for seeds.
    scripts = [*hand_written(actions), *(nearest(actions, plan) for plan in given)] if options.is_seeded else []
    grow = partial(_grow, game, options, limits, scripts)
    grown = (workers or InProcessWorkers()).map(grow, range(options.searches + options.is_seeded))
    # The tree with seeds is the last one, and is reported by itself.
    trees = [tree for tree, _ in grown]
    tried = _Tried(game=game, memory_bytes=memory_bytes)
    best = min(trees[: options.searches], key=lambda tree: tree.nodes[tree.best].cost)
    tried.add_state("search", best.nodes[best.best].state)
    if options.is_seeded:
        seeded = trees[-1]
        tried.add_state("seeded search", seeded.nodes[seeded.best].state)
    if options.is_edited:
        # The best end of all trees, whichever tree it comes from.
        tried.add_state("edited", min((end for _, end in grown), key=game.cost))
    terms = ShardingTerms(graph, mesh)
    bound_s = step_time_bound(terms)
    for plan in given:
        tried.add_plan("given", plan)
    if options.is_polished:
        _polish(tried, terms, given, bound_s)
    step, plan = tried.best
    unsharded = Step(name="unsharded", cost=game.of_figures(game.whole), figures=game.whole)
    return Toast(
        outcome=_outcome(game, trees, Incumbent(cost=step.cost, solution=plan), bound_s, time.perf_counter() - began_s),
        found=found,
        actions=actions,
        trees=tuple(trees),
        steps=(unsharded, *(step for step, _ in tried.tried)),
        bound_s=bound_s,
    )


class _Tried:
    """Plans that were tried.

    Attributes:
        game: Game that prices the plans.
        memory_bytes: Memory of a device.
        tried: All plans, each with its step.
    """

    def __init__(self, game: ColourGame, memory_bytes: float) -> None:
        self.game, self.memory_bytes = game, memory_bytes
        self.tried: list[tuple[Step, Plan]] = []

    def add_state(self, name: str, state: State) -> None:
        """Try a state of the game."""
        step = Step(name=name, cost=self.game.cost(state), figures=self.game.figures(state))
        self.tried.append((step, self.game.actions.plan(state)))

    def add_plan(self, name: str, plan: Plan) -> None:
        """Try a plan, whose cost includes the charge of soft pins."""
        cost, pins, whole_s = cost_of(plan), self.game.actions.pins, self.game.whole.step_time_s
        figures = Figures(step_time_s=cost.step_time_s, peak_memory_bytes=cost.peak_memory_bytes)
        charged_s = 0.0 if pins is None else total_charge_s(plan, pins.charge)
        more = charged_s / whole_s if whole_s > 0 else 0.0
        self.tried.append((Step(name=name, cost=self.game.of_figures(figures) + more, figures=figures), plan))

    def fits(self, step: Step) -> bool:
        """Return whether a plan fits into memory."""
        return step.figures.peak_memory_bytes <= self.memory_bytes

    @property
    def best(self) -> tuple[Step, Plan]:
        """Best plan with its step: the cheapest of those that fit, or of all if none fits."""
        return min(self.tried, key=lambda each: (not self.fits(each[0]), each[0].cost))


def _polish(tried: _Tried, terms: ShardingTerms, given: Sequence[Plan], bound_s: float) -> None:
    """Improve the best plan by descent, then the given ones, unless the result is already close to the bound.

    Where nothing fits into memory, prices of memory lead to a plan that does.
    """
    pins = tried.game.actions.pins
    is_open, charge = (None, None) if pins is None else (pins.restriction, pins.charge)
    starts = [tried.best[1]]
    # A given plan may lead to a better local optimum than the best one.
    starts += [plan for plan in given if (plan.served != starts[0].served).any()]
    for start in starts:
        tried.add_plan("polished", descend(start, terms, is_open=is_open, charge=charge).plan)
        step, plan = tried.best
        if tried.fits(step) and step.figures.step_time_s <= bound_s * (1 + ENOUGH):
            break
    if not tried.fits(step):
        below = fit_to_memory(plan, terms, tried.memory_bytes, is_open=is_open, charge=charge)
        if below.plan is not None:
            tried.add_plan("polished for memory", below.plan)


def _grow(
    game: ColourGame,
    options: ToastOptions,
    limits: Limits,
    scripts: Sequence[Sequence[int]],
    number: int,
    bound: AbstractBound,
) -> tuple[Tree[State], State]:
    """Grow the tree of a number, and return it with its best state, after small changes if the options ask for them.

    The tree behind all others begins with the scripts.
    """
    own = scripts if number == options.searches else ()
    rng = np.random.default_rng((options.seed, number))
    tree = search(game, options.search, rng, limits=limits, scripts=own)
    state = tree.nodes[tree.best].state
    if options.is_edited:
        state, _ = edit_actions(game, tree.actions, most=min(limits.nodes, len(tree.nodes)))
    bound.offer(game.cost(state))
    return tree, state


def _outcome(
    game: ColourGame, trees: Sequence[Tree[State]], best: Incumbent[Plan], bound_s: float, seconds: float
) -> Outcome[Plan]:
    """Return the best plan with its status; the step-time bound also bounds the cost from below."""
    whole_s = game.whole.step_time_s
    # The penalty for memory is never negative, so that the time's bound is one of C, too.
    bound = bound_s / whole_s if whole_s > 0 else 1.0
    is_optimal = best.cost <= bound * (1 + ROUNDING)
    nodes = sum(len(tree.nodes) for tree in trees)
    stop = next((tree.stop for tree in trees if tree.stop is not Stop.EXHAUSTED), Stop.EXHAUSTED)
    last = Progress(seconds=seconds, nodes=nodes, cost=best.cost, bound=bound)
    return Outcome(
        known=Known.OPTIMAL if is_optimal else Known.FEASIBLE,
        stop=stop,
        best=best,
        bound=bound if math.isfinite(best.cost) else math.inf,
        nodes=nodes,
        dominated=0,
        seconds=seconds,
        trace=(*min(trees, key=lambda tree: tree.nodes[tree.best].cost).trace, last),
    )
