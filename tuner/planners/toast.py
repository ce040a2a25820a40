"""TOAST: named dims, conflicts and their resolutions, and a tree search over what is left to decide (section 4).

A state costs C = RT + MP (section 4.5): its step time over that of the unsharded step, and a penalty for what it needs
beyond the memory of a device, over what the unsharded step needs. Times and memory are those of `costmodels.plan`.

Beyond the paper a further tree begins with trajectories that people would write (`colour_scripts`) and with what comes
closest to D-Rec's plan; what is committed may be taken back, by small changes of the actions (`mcts.edited`); and the
best plans go on by `axis_descent`, which is free of colours. Each of these steps is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from costmodels.device_mesh import DeviceMesh
from costmodels.graph import Graph
from costmodels.plan import Plan, cost_of, live_bytes
from tuner.planners.axis_descent import descended
from tuner.planners.class_costs import ClassCosts, Figures
from tuner.planners.colour_actions import ColourActions, State
from tuner.planners.colour_scripts import hand_written, nearest
from tuner.planners.compatibility import Compatibility, compatibility
from tuner.planners.mcts import SearchOptions, Tree, edited, search
from tuner.planners.named_dims import named_dims
from tuner.planners.outcome import ROUNDING, Incumbent, Known, Limits, Outcome, Progress, Stop
from tuner.planners.sharding_terms import ShardingTerms
from tuner.planners.workers import AbstractBound, AbstractWorkers, InProcessWorkers

MEMORY_PENALTY = 100.0
"""The paper's constant C, of which it says nothing: a hundredth of the unsharded peak too much is a whole step."""

PRICE = 1.0
"""What a polished plan pays for holding all that the unsharded step does, in unsharded steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToastOptions:
    """How TOAST plans.

    Attributes:
        search: How a tree grows.
        searches: Trees, each with random numbers of its own; the best counts.
        seed: Of the random numbers.
        least_dims: Actions that cut fewer names are left out; see `ColourActions`.
        memory_bytes: Of a device; None for that of the smallest device of the mesh.
        is_seeded: Whether a further tree begins with what people write, and with given plans; its best is edited.
        is_polished: Whether the best plans go on by axis descent.
    """

    search: SearchOptions = field(default_factory=SearchOptions)
    searches: int = 4
    seed: int = 0
    least_dims: int | None = None
    memory_bytes: float | None = None
    is_seeded: bool = True
    is_polished: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A plan on the way to the last one.

    Attributes:
        name: Where it comes from.
        cost: C of it.
        figures: Its time and memory.
    """

    name: str
    cost: float
    figures: Figures


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Toast:
    """What TOAST ends with.

    Attributes:
        outcome: The plan by its cost C, and what is known of it.
        found: What of the graph is decided together.
        actions: What the search could do.
        trees: The searches.
        steps: The unsharded step, the trees' best, given plans and polished ones, in the order of their making.
        analysis_s: What the analysis took [s].
    """

    outcome: Outcome[Plan]
    found: Compatibility
    actions: ColourActions
    trees: tuple[Tree[State], ...]
    steps: tuple[Step, ...]
    analysis_s: float

    @property
    def plan(self) -> Plan:
        """The best plan."""
        assert self.outcome.best is not None, "the unsharded step is a plan"
        return self.outcome.best.solution


class ColourGame:
    """A step as a game: `mcts.AbstractGame`.

    Attributes:
        actions: The moves.
        whole: The unsharded step.
    """

    def __init__(self, actions: ColourActions, memory_bytes: float) -> None:
        """Prepares the costs.

        Args:
            actions: The moves.
            memory_bytes: Of a device.
        """
        self.actions = actions
        self.first = actions.first
        self._memory_bytes = memory_bytes
        self._costs = ClassCosts(actions.found.names.graph, actions.mesh, actions.classes)
        self.whole = self.figures(self.first)

    @property
    def num_actions(self) -> int:
        """Those of the graph on the mesh."""
        return len(self.actions.actions)

    def after(self, state: State, action: int) -> State:
        """Where an action leads."""
        return self.actions.after(state, self.actions.actions[action])

    def cost(self, state: State) -> float:
        """C of a state."""
        return self.of_figures(self.figures(state))

    def __reduce__(self) -> tuple[type[ColourGame], tuple[ColourActions, float]]:
        """Another process prepares the costs itself."""
        return ColourGame, (self.actions, self._memory_bytes)

    def figures(self, state: State) -> Figures:
        """Time and memory of a state."""
        return self._costs.figures(self.actions.codes(state))

    def of_figures(self, figures: Figures) -> float:
        """C = RT + MP."""
        whole = self.whole
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
    workers: AbstractWorkers | None = None,
) -> Toast:
    """The plan of a graph.

    Args:
        graph: What to shard.
        mesh: Over what; every axis serves one factor of an operator at most, so that a mesh of prime factors
            (`recursive.refined`) has more plans.
        options: How.
        limits: Seconds and states of each tree.
        given: Plans on this mesh to begin with, such as D-Rec's; only with seeds.
        workers: Who grows the trees; None for this process.
    """
    options, limits = options or ToastOptions(), limits or Limits()
    began_s = time.perf_counter()
    found = compatibility(named_dims(graph))
    actions = ColourActions(found, mesh, least_dims=options.least_dims)
    analysis_s = time.perf_counter() - began_s
    memory_bytes = options.memory_bytes
    if memory_bytes is None:
        memory_bytes = min(device.memory_bytes for device in mesh.cluster.devices)
    game = ColourGame(actions, memory_bytes)
    scripts: list[list[int]] = []
    if options.is_seeded:
        scripts = [*hand_written(actions), *(nearest(actions, plan) for plan in given)]
    tasks = [
        _Task(
            game=game,
            options=options.search,
            limits=limits,
            scripts=scripts if number == options.searches else (),
            seed=(options.seed, number),
        )
        for number in range(options.searches + options.is_seeded)
    ]
    trees = (workers or InProcessWorkers()).map(_grown, tasks)
    steps = [Step(name="unsharded", cost=game.of_figures(game.whole), figures=game.whole)]
    plans: list[tuple[float, Plan]] = []

    def reached(name: str, state: State) -> None:
        steps.append(Step(name=name, cost=game.cost(state), figures=game.figures(state)))
        plans.append((steps[-1].cost, actions.plan(state)))

    best = min(trees[: options.searches], key=lambda tree: tree.nodes[tree.best].cost)
    reached("search", best.nodes[best.best].state)
    if options.is_seeded:
        seeded = trees[-1]
        reached("seeded search", seeded.nodes[seeded.best].state)
        either = min(best, seeded, key=lambda tree: tree.nodes[tree.best].cost)
        state, _ = edited(game, either.actions, most=min(limits.nodes, len(either.nodes)))
        reached("edited", state)
        plans[:] = [min(plans, key=lambda each: each[0])]

    def try_out(name: str, plan: Plan) -> Figures:
        cost = cost_of(plan)
        figures = Figures(step_time_s=cost.step_time_s, peak_memory_bytes=cost.peak_memory_bytes)
        steps.append(Step(name=name, cost=game.of_figures(figures), figures=figures))
        plans.append((steps[-1].cost, plan))
        return figures

    if options.is_seeded:
        for plan in given:
            try_out("given", plan)
    if options.is_polished:
        starts = [plan for _, plan in plans]
        _polish(game, starts, memory_bytes, try_out)
    cost, plan = min(plans, key=lambda each: each[0])
    return Toast(
        outcome=_outcome(game, trees, Incumbent(cost=cost, solution=plan), time.perf_counter() - began_s),
        found=found,
        actions=actions,
        trees=tuple(trees),
        steps=tuple(steps),
        analysis_s=analysis_s,
    )


def _polish(
    game: ColourGame, starts: Sequence[Plan], memory_bytes: float, try_out: Callable[[str, Plan], Figures]
) -> None:
    """Goes on from some plans; where that takes too much memory, once more with a price on what is held at the peak."""
    graph, mesh = game.actions.found.names.graph, game.actions.mesh
    terms = ShardingTerms(graph, mesh)
    found = [try_out("polished", descended(plan, terms).plan) for plan in starts]
    if all(figures.peak_memory_bytes > memory_bytes for figures in found):
        peak = int(live_bytes(starts[0]).argmax())
        byte_s = {peak: PRICE * game.whole.step_time_s / game.whole.peak_memory_bytes}
        try_out("polished for memory", descended(starts[0], terms.priced(byte_s)).plan)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """A tree to grow."""

    game: ColourGame
    options: SearchOptions
    limits: Limits
    scripts: Sequence[Sequence[int]]
    seed: tuple[int, int]


def _grown(task: _Task, bound: AbstractBound) -> Tree[State]:
    tree = search(
        task.game,
        task.options,
        np.random.default_rng(task.seed),
        limits=task.limits,
        scripts=task.scripts,
    )
    bound.offer(tree.nodes[tree.best].cost)
    return tree


def _outcome(game: ColourGame, trees: Sequence[Tree[State]], best: Incumbent[Plan], seconds: float) -> Outcome[Plan]:
    """What is known; no plan costs less than all compute dealt over all devices."""
    mesh = game.actions.mesh
    bound = 1.0 / mesh.num_devices
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
