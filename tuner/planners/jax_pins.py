"""Pins from shardings that a JAX user has written: `in_shardings` of arguments, and `with_sharding_constraint` inside.

A sharding cuts the dims that it names by the axes that it names, and these must hold. What it leaves whole, the planner
may still cut: a PartitionSpec can't say whether None is meant. The order of several axes on one dim is the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.jax.graph import flatten_trace
from costmodels.sharding.frontends.jax.program import Program
from costmodels.sharding.frontends.jax.shard_maps import SHARD_MAP, name_of_axes, pinned_axes
from hardware.io.errors import ConfigError, did_you_mean
from tuner.planners.sharding.pins import Pin

KEY = "in_shardings"


def pins_of_arguments(program: Program, shardings: Any, mesh: DeviceMesh) -> tuple[Pin, ...]:
    """Return pins for the arguments of a program.

    Args:
        program: Traced function.
        shardings: Sequence with a NamedSharding, a PartitionSpec or None for each argument, or a tree of them, which
            may end above the argument's leaves, as in `jax.jit`.
        mesh: Mesh with the axes that the shardings name.

    Raises:
        ConfigError: the trees don't belong together, or a sharding does not fit its argument or the mesh.
    """
    given = tuple(shardings) if isinstance(shardings, (list, tuple)) else shardings
    whole = jax.tree_util.tree_unflatten(program.in_tree, range(program.in_tree.num_leaves))
    found: list[Pin] = []
    try:
        jax.tree_util.tree_map(
            lambda sharding, part: found.extend(_of_leaves(program, sharding, jax.tree_util.tree_leaves(part), mesh)),
            given,
            whole,
            is_leaf=_is_sharding,
        )
    except ValueError as error:
        raise ConfigError(
            "must be a tree like the arguments, or one that ends above their leaves",
            key=KEY,
            value=str(error).splitlines()[0],
            nearest="None leaves an argument to the planner",
        ) from None
    return tuple(found)


def pins_of_constraints(program: Program, mesh: DeviceMesh) -> tuple[Pin, ...]:
    """Return pins for each `jax.lax.with_sharding_constraint` in a program whose axes the mesh has."""
    found: list[Pin] = []
    for step in flatten_trace(program)[0].steps:
        sharding = step.params.get("sharding")
        if step.primitive == "sharding_constraint" and isinstance(sharding, NamedSharding):
            found += _of_spec(step.name, sharding.spec, mesh, "with_sharding_constraint")
    return tuple(found)


def pins_of_shard_maps(program: Program, mesh: DeviceMesh) -> tuple[Pin, ...]:
    """Return pins for the specs of each `jax.shard_map` in a program.

    Raises:
        ConfigError: it names an axis that the mesh lacks, or has with another size.
    """
    found: list[Pin] = []
    for step in flatten_trace(program)[0].steps:
        if step.primitive != SHARD_MAP:
            continue
        for axes in pinned_axes(step.params):
            for axis in axes:
                own, its = dict(zip(mesh.names, mesh.sizes, strict=True)).get(axis), step.params["mesh"].shape[axis]
                if own != its:
                    raise ConfigError(
                        f"of {step.name} is not the plan's",
                        key="shard_map",
                        value=f"{axis}={its}",
                        nearest=f"plan on a mesh with it; this one is {mesh.in_words}",
                    )
                found.append(Pin(op=step.name, dim=name_of_axes(axes), axis=axis))
    return tuple(found)


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, (NamedSharding, PartitionSpec))


def _of_leaves(program: Program, sharding: Any, leaves: list[int], mesh: DeviceMesh) -> Iterator[Pin]:
    """Yield the pins of a sharding for the leaves below it."""
    if sharding is None:
        return
    if not _is_sharding(sharding):
        raise ConfigError(
            "must be a NamedSharding, a PartitionSpec or None", key=KEY, value=sharding, nearest="PartitionSpec('data')"
        )
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    for leaf in leaves:
        name, shape = program.arguments[leaf].name, program.jaxpr.in_avals[leaf].shape
        if len(spec) > len(shape):
            raise ConfigError(
                f"has more dims than {name} of shape {shape}",
                key=KEY,
                value=spec,
                nearest=f"at most {len(shape)} entries",
            )
        yield from _of_spec(name, spec, mesh, KEY)


def _of_spec(op: str, spec: PartitionSpec, mesh: DeviceMesh, key: str) -> Iterator[Pin]:
    """Yield a pin for each axis that a spec names; axes of one device cut nothing."""
    for dim, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ():
            if axis not in mesh.names:
                raise ConfigError(
                    f"of {op} names no axis of the mesh {mesh.in_words}",
                    key=key,
                    value=axis,
                    nearest=did_you_mean(axis, mesh.names),
                )
            if mesh.sizes[mesh.names.index(axis)] > 1:
                yield Pin(op=op, dim=f"result.{dim}", axis=axis)
