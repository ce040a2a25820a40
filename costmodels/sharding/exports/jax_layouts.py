"""Layouts of a plan on JAX arrays: constraints that pin a value to its layout, and lead it from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from costmodels.sharding.exports.axis_order import AxisOrders
from costmodels.sharding.exports.jax_specs import Spec, name_axes
from costmodels.sharding.exports.reorders import Orders, way
from costmodels.sharding.plan import Plan
from hardware.io.errors import ConfigError


def jax_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the plan's mesh of JAX devices, by default the first ones.

    Raises:
        ConfigError: There are fewer devices than the mesh has.
    """
    found = list(jax.devices() if devices is None else devices)
    count = plan.mesh.num_devices
    if len(found) < count:
        raise ConfigError(
            f"needs {count} devices", key="mesh", value=plan.mesh.in_words, nearest=f"{len(found)} are here"
        )
    return Mesh(np.array(found[:count]).reshape(plan.mesh.sizes), plan.mesh.names)


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """Return the plan's mesh without devices."""
    return AbstractMesh(plan.mesh.sizes, plan.mesh.names)


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return a spec as a JAX PartitionSpec."""
    return PartitionSpec(*(axes or None for axes in spec))


@dataclass(frozen=True, slots=True)
class JaxLayouts:
    """Constraints on values of a traced function.

    Attributes:
        orders: Axis orders of the plan.
        mesh: Mesh of the plan; an abstract one lets the shardings of the arguments determine the devices.
    """

    orders: AxisOrders
    mesh: Mesh | AbstractMesh

    def spec(self, axes: Orders) -> PartitionSpec:
        """Return a layout as a PartitionSpec."""
        return partition_spec(name_axes(self.orders.plan, axes))

    def sharding(self, axes: Orders) -> NamedSharding:
        """Return a layout as a sharding on the mesh."""
        return NamedSharding(self.mesh, self.spec(axes))

    def pin(self, value: Any, axes: Orders) -> Any:
        """Return a value that lies in a layout."""
        return lax.with_sharding_constraint(value, self.sharding(axes))

    def move(self, value: Any, before: Orders, after: Orders) -> Any:
        """Return a value in another layout, on the way that a partitioner finds cheap (`reorders`)."""
        if before == after:
            return self.pin(value, after)
        for axes in way(before, after, float(np.size(value)), self.orders.plan.mesh.sizes).layouts:
            value = self.pin(value, axes)
        return value

    def settle(self, value: Any, written: Orders, lies: Orders) -> Any:
        """Return an operator's result in its own layout, with its partial sums added up."""
        if any(one and len(other) > len(one) for one, other in zip(written, lies, strict=True)):
            # Sums scattered along a dim that other axes partition, too: reduce them first, or XLA gathers that dim.
            value = self.pin(value, written)
        return self.move(value, written, lies)
