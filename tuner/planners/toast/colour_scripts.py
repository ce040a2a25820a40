"""Plans by hand, and plans of other planners, as colour actions with which a search may begin.

The role of a colour follows from the graph. Data (inputs, and tensors that a step keeps for the next) has the batch as
its first dim; its other dims are cut otherwise, such as the sequence. Of the colours of parameters, the one in most
parameters is the model dim, which the residual stream carries. The others are inside a layer: heads, hidden dims,
experts, vocabulary.

    data       cut the batch by an axis; with several batch dims, such as nodes and edges, cut all of them or each
        alone, which is edge sharding
    FSDP       then also cut parameters by it, which are gathered where the batch is cut (Rajbhandari et al. 2020)
    Megatron   cut the dims inside a layer by another axis (Shoeybi et al. 2019)
    expert     as Megatron, but with another colour of the layer first, so that this one gets its operators
    sequence   then also cut the sequence by that axis, where nothing inside a layer is cut (Korthikanti et al. 2022)
    context    cut the sequence by an axis alone
    queries    cut the batch by an axis that also cuts the dims inside a layer except one colour, the heads, where a
        step keeps keys and values for the next

All combinations of these over the axes of a mesh are written. TOAST's experts write the same (section 5.1.1).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.sharding.graph import INPUT, STATE, TensorKind
from costmodels.sharding.plan import NONE, Plan
from tuner.planners.toast.colour_actions import Action, ColourActions
from tuner.planners.toast.named_dims import WHOLE

MOST_FIRST = 6
"""Most colours inside a layer that come first in turn."""

MOST_SCRIPTS = 512
"""Most combinations, unless more are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Roles of groups of colours.

    Attributes:
        data: First dims of inputs, the group with most names first.
        along: Other dims of inputs.
        model: Dim in most parameters.
        inside: Other dims of parameters, by decreasing bytes of the parameters that they cut.
        is_kept: Whether a step keeps data for the next.
    """

    data: tuple[int, ...]
    along: tuple[int, ...]
    model: tuple[int, ...]
    inside: tuple[int, ...]
    is_kept: bool


def roles(actions: ColourActions) -> Roles:
    """Return the roles of a graph's groups of colours, for groups that some action cuts."""
    found = actions.found
    names, graph = found.names, found.names.graph
    able = {action.group for action in actions.actions}
    counts: Counter[int] = Counter(found.colour_groups[names.colours].tolist())
    first: list[int] = []
    along: list[int] = []
    bytes_of: Counter[int] = Counter()
    parameters: Counter[int] = Counter()
    is_kept = False
    for number, op in enumerate(graph.ops):
        if op.primitive not in (INPUT, STATE):
            continue
        tensor = graph.tensors[op.results[0]]
        for name in range(int(names.begins[number]), int(names.begins[number + 1])):
            group = int(found.colour_groups[names.colours[name]])
            if tensor.kind is TensorKind.PARAMETER:
                bytes_of[group] += int(tensor.num_bytes)
                parameters[group] += 1
            elif tensor.kind is TensorKind.DATA:
                # The batch is the first dim of inputs by convention.
                (first if names.factors[name] == 0 else along).append(group)
                is_kept |= op.primitive == STATE

    def by_names(groups: Sequence[int]) -> list[int]:
        """Sort groups by their number of names, and leave out those that no action cuts."""
        return sorted(set(groups) & able, key=lambda group: (-counts[group], group))

    data = by_names(first)
    others = [group for group in by_names(along) if group not in data and group not in bytes_of]
    weights = [group for group in bytes_of if group in able and group not in data and group not in others]
    # The residual stream carries the dim that most parameters have.
    model = sorted(weights, key=lambda group: (-parameters[group], -counts[group], group))[:1]
    inside = sorted((group for group in weights if group not in model), key=lambda group: (-bytes_of[group], group))
    return Roles(data=tuple(data), along=tuple(others), model=tuple(model), inside=tuple(inside), is_kept=is_kept)


def hand_written(actions: ColourActions, *, most: int = MOST_SCRIPTS) -> list[list[int]]:
    """Enumerate combinations of plans by hand, each as the numbers of its actions in their order.

    Args:
        actions: Actions of a graph on a mesh.
        most: Most combinations that are looked at; on three axes there are thousands.
    """
    role = roles(actions)
    numbers = {action: number for number, action in enumerate(actions.actions)}
    axes = [axis for axis, size in enumerate(actions.mesh.sizes) if size > 1]
    # As many resolutions are tried as the conflicts of the sequence have, such as that between queries and keys.
    resolutions = max((action.resolution + 1 for action in actions.actions if action.group in role.along), default=1)

    def cut(groups: Sequence[int], axis: int, bits: int) -> list[Action]:
        """Cut groups by an axis; each takes as many of the resolution's bits as it has sets."""
        found = []
        for group in groups:
            count = len(actions.sets_of[group])
            found.append(Action(group=group, resolution=bits % 2**count, axis=axis))
        return found

    def of_axis(way: str, axis: int, bits: int) -> tuple[list[Action], list[Action]]:
        """Return the actions of an axis, and those that follow the actions of all axes."""
        parameters = (*role.model, *role.inside)
        if way in ("data", "fsdp"):
            return cut(role.data, axis, bits), cut(parameters, axis, bits) if way == "fsdp" else []
        if way == "context":
            return cut(role.along, axis, bits), cut(parameters, axis, bits)
        kind, _, position = way.rpartition(":")
        if kind == "data":
            return cut((role.data[int(position)],), axis, bits), []
        if kind == "queries":
            heads = role.inside[int(position)]
            return cut([group for group in role.inside if group != heads], axis, bits), cut(role.data, axis, bits)
        position, _, sequence = way.partition("+")
        first = role.inside[int(position) : int(position) + 1]
        rest = [group for group in role.inside if group not in first]
        return cut((*first, *rest), axis, bits), cut(role.along, axis, bits) if sequence else []

    # Names of ways: a number is the colour inside a layer that comes first.
    layers = [str(position) for position in range(min(len(role.inside), MOST_FIRST))]
    ways = ["data", "fsdp", "context", *layers, *(f"{layer}+sequence" for layer in layers)]
    ways += [f"data:{position}" for position in range(len(role.data)) if len(role.data) > 1]
    ways += [f"queries:{layer}" for layer in layers if role.is_kept]
    found: dict[tuple[int, ...], None] = {}
    combinations = itertools.product(itertools.product(ways, repeat=len(axes)), range(resolutions))
    for chosen, bits in itertools.islice(combinations, most):
        parts = [of_axis(way, axis, bits) for way, axis in zip(chosen, axes, strict=True)]
        script = [*itertools.chain(*(now for now, _ in parts)), *itertools.chain(*(later for _, later in parts))]
        found[tuple(numbers[action] for action in script if action in numbers)] = None
    return [list(script) for script in found]


def nearest(actions: ColourActions, plan: Plan) -> list[int]:
    """Return the actions that come close to a plan: for each axis the groups that it mostly serves, by decreasing work.

    Args:
        actions: Actions of the plan's graph on its mesh.
        plan: Plan of any planner.
    """
    found = actions.found
    names, graph = found.names, found.names.graph
    work = np.array([op.flop + sum(graph.tensors[tensor].num_bytes for tensor in op.results) for op in graph.ops])
    numbers = {action: number for number, action in enumerate(actions.actions)}
    own = np.flatnonzero(names.factors != WHOLE)
    groups = found.colour_groups[names.colours[own]]
    weighed: list[tuple[float, int]] = []
    for axis, size in enumerate(actions.mesh.sizes):
        if size == 1:
            continue
        # Weigh a group by the work of the operators in which the plan's axis serves one of its factors.
        is_served = plan.served[names.ops[own], axis] == names.factors[own]
        served = np.bincount(groups, weights=is_served * work[names.ops[own]], minlength=found.num_groups)
        for group in np.flatnonzero(served > 0).tolist():
            several = [action for action in actions.actions if action.group == group and action.axis == axis]
            if several:
                # Of the resolutions of a group, take the one that serves the same factors as the plan in most of the
                # work.
                best = max(several, key=lambda action: (_agreement(actions, action, plan, work), -action.resolution))
                weighed.append((float(served[group]), numbers[best]))
    return [number for _, number in sorted(weighed, key=lambda each: (-each[0], each[1]))]


def _agreement(actions: ColourActions, action: Action, plan: Plan, work: np.ndarray) -> float:
    """Return the work of all operators in which an action serves the same factors as the plan."""
    served = actions.plan(actions.after(actions.first, action)).served[:, action.axis]
    return float(work[(served == plan.served[:, action.axis]) & (served != NONE)].sum())
