"""Rule of `shard_map`, whose body is the user's own program for each device, and is neither planned nor changed.

Its specs say which axes cut which dims. The axes that cut a dim are a factor of the rule, as long as they are, with
their names as its name, and the rest of the dim is blocked. A pin for each axis (`tuner.planners.jax_pins`) then leaves
nothing to choose. An axis can serve one factor of an operator only: if a `shard_map` cuts one dim by `data` and another
by `data` and `model`, as its gradients do, the dims with fewer axes are in the rule. The other tensors are free: no
layout of the plan is pinned on them, so that they pass from one body to the next as they are.

An axis that cuts operands, but no result, is counted as a sum over it, which the body contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.sharding.dims import Factor, FactorKind, Rule
from costmodels.sharding.frontends.rule_parts import Call, Loops

SHARD_MAP = "shard_map"

Axes = tuple[str, ...]
"""Names of the axes that cut a dim."""


def shard_map_rule(call: Call) -> Rule:
    """Return the rule of a `shard_map` with the parameters of JAX's primitive."""
    loops, sizes = Loops(), _sizes(call.params)
    factor_of: dict[Axes, int] = {}
    reduced = _in_operands_only(call.params)
    for axes in pinned_axes(call.params):
        size = _product(axes, sizes)
        kind = FactorKind.REDUCTION if axes in reduced else FactorKind.MAP
        factor_of[axes] = len(loops.factors)
        loops.factors.append(Factor(size=size, kind=kind, name=name_of_axes(axes)))

    def place(shape: tuple[int, ...], spec: Any) -> tuple[tuple[int, ...], ...]:
        found = []
        for size, axes in zip(shape, _dims(spec, len(shape), sizes), strict=True):
            cut = factor_of.get(axes)
            left = size if cut is None else size // loops.factors[cut].size
            found.append((*(() if cut is None else (cut,)), *loops.dim(left, FactorKind.BLOCKED)))
        return tuple(found)

    return loops.rule(
        [place(shape, spec) for shape, spec in zip(call.operands, call.params["in_specs"], strict=True)],
        [place(shape, spec) for shape, spec in zip(call.results, call.params["out_specs"], strict=True)],
    )


def pinned_axes(params: Mapping[str, Any]) -> tuple[Axes, ...]:
    """Return the combinations of axes that the rule of a `shard_map` has as factors; none has an axis of another."""
    sizes = _sizes(params)
    found: list[Axes] = []
    used = [
        axes for spec in (*params["in_specs"], *params["out_specs"]) for axes in _dims(spec, len(spec), sizes) if axes
    ]
    for axes in sorted(dict.fromkeys(used), key=len):
        if not any(axis in other for other in found for axis in axes):
            found.append(axes)
    return tuple(found)


def free_slots(params: Mapping[str, Any], side: str) -> frozenset[int]:
    """Return the tensors of a side, `in_specs` or `out_specs`, of which the rule does not say all axes."""
    sizes, pinned = _sizes(params), pinned_axes(params)
    return frozenset(
        slot
        for slot, spec in enumerate(params[side])
        if any(axes and axes not in pinned for axes in _dims(spec, len(spec), sizes))
    )


def name_of_axes(axes: Axes) -> str:
    """Return the name of the factor that some axes serve."""
    return "*".join(axes)


def num_shards(params: Mapping[str, Any]) -> int:
    """Return the number of parts into which the rule's factors cut the work of a body."""
    sizes = _sizes(params)
    found = 1
    for axes in pinned_axes(params):
        found *= _product(axes, sizes)
    return found


def _in_operands_only(params: Mapping[str, Any]) -> set[Axes]:
    sizes = _sizes(params)
    before, after = (
        {axes for spec in params[side] for axes in _dims(spec, len(spec), sizes)} for side in ("in_specs", "out_specs")
    )
    return before - after


def _sizes(params: Mapping[str, Any]) -> dict[str, int]:
    return dict(params["mesh"].shape)


def _dims(spec: Any, rank: int, sizes: Mapping[str, int]) -> list[Axes]:
    """Return the axes of more than one device that a spec names for each dim."""
    entries = [*spec, *(None,) * (rank - len(spec))]
    named = [(entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else () for entry in entries]
    return [tuple(axis for axis in axes if sizes[axis] > 1) for axes in named]


def _product(axes: Axes, sizes: Mapping[str, int]) -> int:
    found = 1
    for axis in axes:
        found *= sizes[axis]
    return found
