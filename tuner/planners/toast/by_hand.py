"""Plans by hand for any graph: data parallelism, FSDP, Megatron's and their mixes, from the roles of its dims.

They are the scripts with which TOAST's seeded tree begins (`colour_scripts.py`), priced as its game prices states.
"""

from __future__ import annotations

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan
from tuner.planners.toast.colour_actions import ColourActions
from tuner.planners.toast.colour_scripts import hand_written
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.search import ColourGame


def data_parallel(graph: Graph, mesh: DeviceMesh) -> Plan:
    """Return the plan that cuts the batch by all axes of a mesh, as far as they divide it."""
    actions = ColourActions(compatibility(named_dims(graph)), mesh)
    game = ColourGame(actions, 0.0)
    state = game.first
    for action in hand_written(actions, most=1)[0]:  # every axis cuts data
        state = game.after(state, action)
    return actions.plan(state)


def plans_by_hand(
    graph: Graph, mesh: DeviceMesh, *, memory_bytes: float, most: int, with_data: bool = False
) -> list[Plan]:
    """Return the cheapest plans by hand, the cheapest first.

    Args:
        graph: Graph of the training step.
        mesh: Mesh of devices; each of its axes serves at most one factor of an operator.
        memory_bytes: Memory of a device [bytes]: plans above it are dear, as in TOAST's cost.
        most: Most plans.
        with_data: Whether data parallelism follows them if it is none of them.
    """
    game = ColourGame(ColourActions(compatibility(named_dims(graph)), mesh), memory_bytes)
    cost_of = {game.first: game.cost(game.first)}
    data = game.first
    for number, script in enumerate(hand_written(game.actions)):
        state = game.first
        for action in script:
            state = game.after(state, action)
        if state not in cost_of:
            cost_of[state] = game.cost(state)
        if number == 0:  # in which every axis cuts data
            data = state
    found = sorted(cost_of, key=lambda state: cost_of[state])[:most]
    if with_data and data not in found:
        found.append(data)
    return list(map(game.actions.plan, found))
