"""Gradients that every device adds up by itself over the micro-batches of a step, before the devices add them up.

JAX has no layout for partial sums: an operator whose result is one adds it up at once. So an operator that writes such
a gradient runs in parts here, along the axes on which its result is a partial sum (`jax.shard_map`, with these axes
alone manual), and its result gets a leading dim for each of them, on which the parts of all devices lie side by side.
After the last micro-batch they are added up along these dims, which is the plan's collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from costmodels.sharding.exports.jax_layouts import JaxLayouts
from costmodels.sharding.exports.reorders import Orders
from costmodels.sharding.layouts import PARTIAL
from costmodels.sharding.micro_batches import accumulated, count_micro_batches
from costmodels.sharding.plan import Plan
from trials.jax_training.model.operators import Compute


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalSums:
    """Tensors of a plan that are added up over micro-batches.

    Attributes:
        plan: Plan of the step.
        layouts: Constraints on the plan's mesh.
        count: Number of micro-batches.
        axes: Axes along which each of these tensors is a partial sum as it is written, by tensor.
    """

    plan: Plan
    layouts: JaxLayouts
    count: int
    axes: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, plan: Plan, layouts: JaxLayouts) -> LocalSums:
        """Return the sums of a plan; none where its step has one micro-batch."""
        graph = plan.graph
        return cls(
            plan=plan,
            layouts=layouts,
            count=count_micro_batches(graph),
            axes={
                tensor: tuple(axis for axis, cut in enumerate(plan.written(*graph.maker[tensor])) if cut == PARTIAL)
                for tensor in accumulated(graph)
            },
        )

    def zeros(self) -> dict[int, Array]:
        """Return the sums before the first micro-batch, by tensor, each with its leading dims."""
        graph, sizes = self.plan.graph, self.plan.mesh.sizes
        return {
            tensor: self.pin(
                tensor, jnp.zeros((*(sizes[axis] for axis in axes), *graph.tensors[tensor].shape), jnp.float32)
            )
            for tensor, axes in self.axes.items()
        }

    def pin(self, tensor: int, value: Array) -> Array:
        """Return a sum, of which every device has its own part."""
        pinned: Array = jax.lax.with_sharding_constraint(
            value, NamedSharding(self.layouts.mesh, self._spec(self.axes[tensor], self._written(tensor)))
        )
        return pinned

    def mean(self, tensor: int, value: Array) -> Array:
        """Return the mean over all micro-batches in the tensor's own layout, added up over the devices."""
        # dividing the parts costs no pass over what the devices have added up, which may be larger
        whole = (value / self.count).sum(axis=tuple(range(len(self.axes[tensor]))))
        settled: Array = self.layouts.settle(whole, self._written(tensor), self.layouts.orders.lying(tensor))
        return settled

    def compute(self, number: int, function: Compute, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Compute the results of an operator; those that are summed have their leading dims, and are not added up."""
        op, orders = self.plan.graph.ops[number], self.layouts.orders
        summed = {tensor: self.axes[tensor] for tensor in op.results if tensor in self.axes}
        manual = {axis for axes in summed.values() for axis in axes}
        if not manual:
            return function(op, *operands)
        for slot, tensor in enumerate(op.results):
            partial = {axis for axis, cut in enumerate(self.plan.written(number, slot)) if cut == PARTIAL}
            assert tensor in summed or not partial & manual, f"{op.name} adds up one result in parts, and another whole"

        def part(*parts: Array) -> tuple[Array, ...]:
            return tuple(
                value.reshape((1,) * len(summed.get(tensor, ())) + value.shape)
                for tensor, value in zip(op.results, function(op, *parts), strict=True)
            )

        run = jax.shard_map(
            part,
            mesh=self.layouts.mesh,
            in_specs=tuple(self._spec((), _only(orders.read(number, slot), manual)) for slot in range(len(operands))),
            out_specs=tuple(
                self._spec(summed.get(tensor, ()), _only(orders.written(number, slot), manual))
                for slot, tensor in enumerate(op.results)
            ),
            axis_names={self.plan.mesh.names[axis] for axis in manual},
            check_vma=False,
        )
        results: tuple[Array, ...] = run(*operands)
        return results

    def _written(self, tensor: int) -> Orders:
        return self.layouts.orders.written(*self.plan.graph.maker[tensor])

    def _spec(self, leading: Sequence[int], orders: Orders) -> PartitionSpec:
        return PartitionSpec(*(self.plan.mesh.names[axis] for axis in leading), *self.layouts.spec(orders))


def _only(orders: Orders, axes: set[int]) -> Orders:
    """Return the orders of a layout with some axes alone."""
    return tuple(tuple(axis for axis in order if axis in axes) for order in orders)
