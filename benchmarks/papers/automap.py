"""AutoMap-like search: it shards arguments, lets a compiler propagate the shardings, and prices the propagated program.

The method follows Schaarschmidt et al. (2021) and Alabed et al. (2022), which are published without code. An action
shards one dim of one argument along one mesh axis, with the arguments of repeated layers together. After each action
the compiler's propagation runs over the whole program. A tree search looks for the cheapest program. The compiler alone
decides between alternative propagations, so that some plans, such as sharding the sequence in attention, are out of
reach.

In all other respects it has TOAST's advantages. Arguments are grouped as TOAST groups their dims, also within a layer,
and pruned in the same way (`colour_actions`). Tree search, options, costs and memory penalty are TOAST's own. A state
costs one propagation, however many actions led to it, and is remembered across trees. Shardy propagates in the cheapest
way it can run (`propagation`), and the plan is the one that sends the fewest bytes (`propagated_plans`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.propagated_plans import PlanReader
from benchmarks.papers.propagation import Propagation
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import Program
from costmodels.sharding.graph import INPUT, STATE, Graph
from costmodels.sharding.layouts import REPLICATED, Layout
from costmodels.sharding.plan import Plan
from tuner.planners.engine.outcome import Limits
from tuner.planners.sharding.class_costs import ClassCosts, encode_rows
from tuner.planners.toast.colour_actions import ColourActions
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.search import ColourGame, ToastOptions
from tuner.planners.toast.tree_search import Tree, search

State = tuple[Layout, ...]
"""Layouts of all arguments as the actions shard them, before propagation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentAction:
    """Dims of arguments that are cut together.

    Attributes:
        group: Group of colours of these dims.
        dims: Pairs of an argument's position and its dim to cut.
        axis: Index of the mesh axis that cuts them.
    """

    group: int
    dims: tuple[tuple[int, int], ...]
    axis: int


@dataclass(slots=True)
class Spent:
    """CPU time of the evaluations.

    Attributes:
        evaluations: Number of states that were propagated and priced.
        propagation_s: Time in Shardy [s].
        cost_s: Time of pricing [s].
        reading_s: Time of reading shardings and plans back, which only this comparison needs [s].
    """

    evaluations: int = 0
    propagation_s: float = 0.0
    cost_s: float = 0.0
    reading_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Time of all evaluations without reading [s]."""
        return self.propagation_s + self.cost_s

    @property
    def evaluation_s(self) -> float:
        """Mean time of one evaluation without reading [s]."""
        return self.total_s / max(self.evaluations, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Automap:
    """Result of the search.

    Attributes:
        plan: Best plan.
        cost: Cost C of the best plan, as TOAST defines it.
        trees: Trees of all searches.
        spent: CPU time of the evaluations.
        prepared_s: CPU time of grouping, lowering and importing [s].
        search_s: CPU time of all trees, with the reading [s].
        pipeline_s: CPU time of Shardy's whole pipeline on the best state, of which an evaluation runs a part [s].
    """

    plan: Plan
    cost: float
    trees: tuple[Tree[State], ...]
    spent: Spent
    prepared_s: float
    search_s: float
    pipeline_s: float


class ArgumentGame:
    """Sharding of arguments as a game for the tree search (`tree_search.AbstractGame`).

    Attributes:
        first: State in which no argument is sharded.
        actions: All actions on the arguments.
        spent: CPU time of the evaluations so far.
        propagation: Compiler's propagation.
    """

    def __init__(self, propagation: Propagation, base: ColourGame) -> None:
        """Prepare actions and costs.

        Args:
            propagation: Compiler's propagation.
            base: TOAST's game on the same graph and mesh, for its groups and its measure of time and memory.
        """
        self.propagation = propagation
        self._base = base
        graph, mesh = propagation.graph, propagation.mesh
        self.arguments = tuple(number for number, op in enumerate(graph.ops) if op.primitive in (STATE, INPUT))
        self.actions = argument_actions(base.actions, self.arguments)
        self.first: State = ((REPLICATED,) * len(mesh.sizes),) * len(self.arguments)
        self.spent = Spent()
        self._shapes = [graph.tensors[graph.ops[number].results[0]].shape for number in self.arguments]
        self._reader = PlanReader(graph, mesh)
        self._costs = ClassCosts(graph, mesh, range(len(graph.ops)))
        self._known: dict[State, float] = {}

    @property
    def num_actions(self) -> int:
        """Number of actions."""
        return len(self.actions)

    def after(self, state: State, action: int) -> State:
        """Return the state after an action; an axis cuts at most one dim of an argument, and only into equal parts."""
        chosen = self.actions[action]
        found = list(state)
        sizes = self.propagation.mesh.sizes
        for argument, dim in chosen.dims:
            layout = found[argument]
            # All axes that would cut this dim together must divide it; otherwise the action does nothing.
            ways = sizes[chosen.axis]
            for size, cut in zip(sizes, layout, strict=True):
                ways *= size if cut == dim else 1
            if layout[chosen.axis] == REPLICATED and self._shapes[argument][dim] % ways == 0:
                found[argument] = (*layout[: chosen.axis], dim, *layout[chosen.axis + 1 :])
        return tuple(found)

    def cost(self, state: State) -> float:
        """Compute the cost C of a state."""
        if state not in self._known:
            rows = self._rows(state)
            began_s = time.process_time()
            figures = self._costs.figures([encode_rows(row) for row in rows])
            self._known[state] = self._base.of_figures(figures)
            self.spent.cost_s += time.process_time() - began_s
        return self._known[state]

    def plan(self, state: State) -> Plan:
        """Return the plan that propagation makes of a state."""
        return self._reader.plan(self.propagation.layouts(self.layouts(state)).layouts)

    def layouts(self, state: State) -> dict[int, Layout]:
        """Return the layouts of the sharded arguments by tensor."""
        ops = self.propagation.graph.ops
        return {
            ops[number].results[0]: layout
            for number, layout in zip(self.arguments, state, strict=True)
            if any(cut != REPLICATED for cut in layout)
        }

    def _rows(self, state: State) -> list[tuple[int, ...]]:
        propagated = self.propagation.layouts(self.layouts(state))
        began_s = time.process_time()
        rows = self._reader.rows(propagated.layouts)
        # Reading is counted apart: a compiler with a cost model of its own would not need it.
        self.spent.evaluations += 1
        self.spent.propagation_s += propagated.propagation_s
        self.spent.reading_s += propagated.reading_s + time.process_time() - began_s
        return rows


def argument_actions(colours: ColourActions, arguments: Sequence[int]) -> tuple[ArgumentAction, ...]:
    """Restrict TOAST's actions to the dims of arguments; several dims of a group in one argument are separate actions.

    Args:
        colours: TOAST's actions.
        arguments: Numbers of the operators that bring arguments.
    """
    names = colours.found.names
    dims: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for position, number in enumerate(arguments):
        seen: dict[int, int] = defaultdict(int)
        for name in range(int(names.begins[number]), int(names.begins[number + 1])):
            factor = int(names.factors[name])
            if factor < 0:
                continue
            group = int(colours.found.colour_groups[names.colours[name]])
            dim = names.graph.ops[number].rule.result_dims[0][factor]
            assert dim is not None, "each dim of an argument is a factor"
            # The n-th dim of a group in one argument is cut together with the n-th dims of that group in others.
            dims[group, seen[group]].append((position, dim))
            seen[group] += 1
    # Only groups and axes that survive TOAST's pruning become actions; dict keys keep their order.
    groups = dict.fromkeys((action.group, action.axis) for action in colours.actions)
    return tuple(
        ArgumentAction(group=group, dims=tuple(cut), axis=axis)
        for group, axis in groups
        for (own, _), cut in dims.items()
        if own == group
    )


def automap_plan(
    program: Program,
    mesh: DeviceMesh,
    options: ToastOptions | None = None,
    *,
    limits: Limits | None = None,
    graph: Graph | None = None,
) -> Automap:
    """Plan a traced JAX program.

    Args:
        program: Program to shard.
        mesh: Mesh over which to shard it.
        options: TOAST's options for its unseeded search: number of trees, their options and seeds, pruning and memory.
        limits: Limits on the seconds and states of each tree.
        graph: Graph of the program from `frontends.jax.graph.graph_of`, if known.
    """
    options, limits = options or ToastOptions(), limits or Limits()
    began_s = time.process_time()
    graph = graph_of(program) if graph is None else graph
    memory_bytes = options.memory_bytes
    if memory_bytes is None:
        memory_bytes = min(device.memory_bytes for device in mesh.cluster.devices)
    actions = ColourActions(compatibility(named_dims(graph)), mesh, least_dims=options.least_dims)
    # TOAST's own game supplies groups and costs, so that the two searches differ only in their actions.
    game = ArgumentGame(Propagation(program, graph, mesh), ColourGame(actions, memory_bytes))
    prepared_s = time.process_time() - began_s
    began_s = time.process_time()
    trees = tuple(
        search(game, options.search, np.random.default_rng((options.seed, number)), limits=limits)
        for number in range(options.searches)
    )
    search_s = time.process_time() - began_s
    best = min((tree.nodes[tree.best] for tree in trees), key=lambda node: node.cost)
    return Automap(
        plan=game.plan(best.state),
        cost=best.cost,
        trees=trees,
        spent=game.spent,
        prepared_s=prepared_s,
        search_s=search_s,
        pipeline_s=game.propagation.pipeline_s(game.layouts(best.state)),
    )
