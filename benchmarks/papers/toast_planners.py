"""Planners with which TOAST is compared, each as a function of a problem: a graph on a mesh of whole axes.

All plans are priced by `costmodels.sharding.plan.cost_of` alone. PLANNERS is the table; a new planner needs one line
there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan, cost_of
from hardware.device import GIB
from hardware.io.errors import ConfigError
from tuner.planners.engine.outcome import Limits
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.class_costs import Figures
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.toast.colour_actions import ColourActions, State
from tuner.planners.toast.colour_scripts import hand_written, roles
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.search import ColourGame, ToastOptions, toast_plan

MOST_SCRIPTS = 100_000
"""Maximum number of manual plans; three axes and two resolutions give about 14,000."""

MOST_EXCHANGED = 60
"""Number of a decoder's cheapest manual plans that are also tried with multi-query attention by the batch."""

MOST_OPS = 1500
"""Maximum number of operators of a graph for HiGHS, which proves nothing about larger ones within minutes."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A planning problem.

    Attributes:
        graph: Graph of one step.
        mesh: Mesh each of whose axes cuts one dim of a tensor.
        seed: Seed of random numbers.
        prove_s: Time limit of HiGHS [s]; 0 leaves HiGHS out.
        factory: Name of the JAX program in the zoo, for planners that call Shardy.
        automap_states: Maximum number of evaluations of the AutoMap-like search; 0 leaves it out.
    """

    graph: Graph
    mesh: DeviceMesh
    seed: int = 0
    prove_s: float = 0.0
    factory: str = ""
    automap_states: int = 0

    @cached_property
    def memory_bytes(self) -> float:
        """Memory of the smallest device [bytes]."""
        return min(device.memory_bytes for device in self.mesh.cluster.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a planner.

    Attributes:
        plan: Plan of the graph; None if the planner has none.
        told: Further entries of the table's cell.
    """

    plan: Plan | None
    told: Mapping[str, Any]


def manual(problem: Problem) -> Found:
    """Find the best of all combinations of hand-written actions, preferring plans that fit."""
    actions = ColourActions(compatibility(named_dims(problem.graph)), problem.mesh, least_dims=0)
    game = ColourGame(actions, problem.memory_bytes)
    # Many scripts lead to the same state; each state is priced once.
    reached: dict[State, tuple[int, ...]] = {}
    for script in hand_written(actions, most=MOST_SCRIPTS):
        state = game.first
        for action in script:
            state = game.after(state, action)
        reached.setdefault(state, tuple(script))
    costs = {state: game.cost(state) for state in reached}
    # Sharding multi-query attention by the batch pays only sometimes, so it is tried on the cheapest plans alone.
    ranked = sorted(costs, key=lambda state: costs[state])
    best, cost, plan = ranked[0], costs[ranked[0]], actions.plan(ranked[0])
    by_the_batch = ""
    for state in ranked[:MOST_EXCHANGED] if roles(actions).is_kept else ():
        for axis, name in enumerate(problem.mesh.names):
            other = multi_query(actions, actions.plan(state), axis)
            other_cost = game.of_figures(figures_of(other))
            if other_cost < cost:
                best, cost, plan, by_the_batch = state, other_cost, other, name
    words = [actions.in_words(actions.actions[action]) for action in reached[best]]
    if by_the_batch:
        words.append(f"attention by the batch by {by_the_batch}")
    return Found(plan=plan, told={"scripts": len(reached), "script": words})


def multi_query(actions: ColourActions, plan: Plan, axis: int) -> Plan:
    """Return a plan with the batch cut by an axis in all operators over past tokens, whatever it cuts elsewhere.

    Where heads share keys, this is multi-query attention by the batch: each device reads a part of the keys, and
    queries are exchanged from heads to the batch and back (Pope et al. 2022, section 3.3). Colours can't express it,
    because heads have one colour in the products with parameters and over the past.
    """
    found, role = actions.found, roles(actions)
    names = found.names
    served = plan.served.copy()
    groups = found.colour_groups[names.colours]
    for number, op in enumerate(names.graph.ops):
        own = range(int(names.begins[number]), int(names.begins[number + 1]))
        batch = [int(names.factors[name]) for name in own if groups[name] in role.data]
        if not batch or not any(groups[name] in role.along for name in own):
            continue
        others = [
            size for each, size in enumerate(plan.mesh.sizes) if each != axis and served[number, each] == batch[0]
        ]
        if op.rule.factors[batch[0]].size % (math.prod(others) * plan.mesh.sizes[axis]) == 0:
            served[number, axis] = batch[0]
    return replace(plan, served=served)


def figures_of(plan: Plan) -> Figures:
    """Return time and memory of any plan."""
    cost = cost_of(plan)
    return Figures(step_time_s=cost.step_time_s, peak_memory_bytes=cost.peak_memory_bytes)


def d_rec(problem: Problem) -> Found:
    """Find D-Rec's cheapest plan over all orders, which ignores memory."""
    found = plan_graph(problem.graph, problem.mesh, PlannerOptions(planner="recursive", whole_axes=True, overlap=False))
    return Found(plan=found.plan, told={"order": found.order})


def descent(problem: Problem) -> Found:
    """Run axis descent from D-Rec's plan, within the memory of a device if such a plan is found."""
    options = PlannerOptions(whole_axes=True, memory_bytes=problem.memory_bytes, overlap=False)
    try:
        found = plan_graph(problem.graph, problem.mesh, options)
    except ConfigError:
        found = plan_graph(problem.graph, problem.mesh, replace(options, memory_bytes=None))
    return Found(plan=found.plan, told={"order": found.order})


def unseeded(problem: Problem) -> Found:
    """Run TOAST on colours alone: tree searches and small edits of their results, without hand-written plans."""
    options = ToastOptions(seed=problem.seed, is_seeded=False, is_polished=False)
    toast = toast_plan(problem.graph, problem.mesh, options)
    steps = {step.name: step.cost for step in toast.steps}
    return Found(
        plan=toast.plan,
        told={
            "states": toast.outcome.nodes,
            "actions": len(toast.actions.actions),
            "edits": steps["edited"] / steps["search"],
        },
    )


def seeded(problem: Problem) -> Found:
    """Run TOAST with all extensions: seeds from hand-written plans and D-Rec's plan, and polishing."""
    given = d_rec(problem).plan
    assert given is not None, "D-Rec always has a plan"
    toast = toast_plan(problem.graph, problem.mesh, ToastOptions(seed=problem.seed), given=[given])
    return Found(
        plan=toast.plan, told={"gap": toast.outcome.gap, "step": min(toast.steps, key=lambda step: step.cost).name}
    )


def milp(problem: Problem) -> Found:
    """Run HiGHS within the memory of a device, if graph and time limit allow it."""
    if not problem.prove_s or len(problem.graph.ops) > MOST_OPS:
        return Found(plan=None, told={})
    outcome = shard_by_milp(
        problem.graph, problem.mesh, limits=Limits(time_s=problem.prove_s), memory_bytes=problem.memory_bytes
    )
    plan = None if outcome.best is None else outcome.best.solution
    return Found(plan=plan, told={"known": outcome.known.name.lower(), "bound_s": outcome.bound})


def automap(problem: Problem) -> Found:
    """Run a tree search over arguments that leaves everything else to Shardy (automap.py), with few states."""
    if not problem.automap_states:
        return Found(plan=None, told={})
    from benchmarks.papers.automap import automap_plan  # noqa: PLC0415 # JAX may be missing
    from benchmarks.zoo import FACTORIES  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # as above

    function, shapes, donated = FACTORIES[problem.factory]()
    found = automap_plan(
        trace_function(function, *shapes, donated=donated),
        problem.mesh,
        ToastOptions(seed=problem.seed, searches=1),
        limits=Limits(nodes=problem.automap_states),
        graph=problem.graph,
    )
    return Found(plan=found.plan, told={"states": sum(len(tree.nodes) for tree in found.trees)})


PLANNERS: Mapping[str, Callable[[Problem], Found]] = {
    "manual": manual,
    "d_rec": d_rec,
    "descent": descent,
    "milp": milp,
    "automap": automap,
    "unseeded": unseeded,
    "seeded": seeded,
}
"""Planners of the table's columns, in their order."""

OURS = ("unseeded", "seeded")
"""Columns of TOAST."""


def cell_of(planner: str, problem: Problem) -> dict[str, Any] | None:
    """Run a planner and return its cell of the table; None without a plan."""
    began_s = time.process_time()
    found = PLANNERS[planner](problem)
    search_s = time.process_time() - began_s
    if found.plan is None:
        return None
    cost = cost_of(found.plan)
    return {
        "step_time_s": cost.step_time_s,
        "gib": cost.peak_memory_bytes / GIB,
        "fits": cost.peak_memory_bytes <= problem.memory_bytes,
        "cpu_s": search_s,
        **found.told,
    }
