"""Training step of a graph of the transformer frontend, with every tensor in the layout that a plan gives it.

The graph's operators run one after the other, as `operators.py` computes them. Each operand is pinned to the layout in
which its operator reads it, and each result to the layout in which the plan leaves it, so that XLA communicates where
the plan does. Constraints change no number beyond the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from costmodels.sharding.exports.axis_order import axis_orders
from costmodels.sharding.exports.jax_layouts import JaxLayouts
from costmodels.sharding.exports.reorders import Orders
from costmodels.sharding.graph import INPUT, STATE, Graph
from costmodels.sharding.plan import Plan
from trials.jax_training.model.operators import Compute, operators
from trials.jax_training.model.optimizers import OPTIMIZERS
from trials.step_numerics import LOSS

Values = Mapping[str, Array]
"""Arrays by the names of their tensors."""


def missing_operators(graph: Graph) -> tuple[str, ...]:
    """Return the primitives of a graph that JAX cannot compute here, each once."""
    names = {op.primitive for op in graph.ops if not op.is_source}
    return tuple(sorted(names - operators(top_k=1).keys() - OPTIMIZERS.keys()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedStep:
    """Training step of a plan on a mesh of devices.

    Attributes:
        plan: Plan of the whole step.
        layouts: Constraints on the plan's mesh.
        top_k: Number of experts that a token of the model chooses; 0 for dense models.
    """

    plan: Plan
    layouts: JaxLayouts
    top_k: int

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, *, top_k: int = 0) -> ShardedStep:
        """Return the step of a plan on devices."""
        missing = missing_operators(plan.graph)
        assert not missing, f"the graph has {missing[0]}, which nothing here computes"
        return cls(plan=plan, layouts=JaxLayouts(axis_orders(plan), mesh), top_k=top_k)

    def shardings(self, primitive: str) -> dict[str, NamedSharding]:
        """Return the shardings of all states or of all inputs of the step, by name."""
        graph, orders = self.plan.graph, self.layouts.orders
        return {
            op.name: self.layouts.sharding(orders.lying(op.results[0])) for op in graph.ops if op.primitive == primitive
        }

    def lower(self) -> Any:
        """Lower the step by `jax.jit`; its states are donated.

        The compiled function takes the states by name, the number of the step from 1 as a float32, and the inputs by
        name, and each array is a parameter of the program, in the order of names; it returns the states after the step,
        and the loss before it [1].
        """
        kept, given = self.shardings(STATE), self.shardings(INPUT)
        whole = NamedSharding(self.layouts.mesh, PartitionSpec())
        jitted = jax.jit(
            self._run,
            in_shardings=(kept, whole, given),
            out_shardings=(kept, whole),
            donate_argnums=(0,),
            keep_unused=True,
        )
        return jitted.lower(self._shapes(STATE), jax.ShapeDtypeStruct((), jnp.float32), self._shapes(INPUT))

    def compile(self) -> Any:
        """Compile the lowered step for the devices of the mesh."""
        return self.lower().compile()

    def _shapes(self, primitive: str) -> dict[str, jax.ShapeDtypeStruct]:
        graph, dtype = self.plan.graph, jnp.int32 if primitive == INPUT else jnp.float32
        return {
            op.name: jax.ShapeDtypeStruct(graph.tensors[op.results[0]].shape, dtype)
            for op in graph.ops
            if op.primitive == primitive
        }

    def _run(self, states: Values, step: Array, inputs: Values) -> tuple[Values, Array]:
        graph = self.plan.graph
        run = _Run(self.plan, self.layouts, operators(top_k=self.top_k))
        for op in graph.ops:
            if op.primitive in (STATE, INPUT):
                run.hold(op.results[0], (states if op.primitive == STATE else inputs)[op.name])
        for number in range(len(graph.ops)):
            run.execute(number, step)
        after = {op.name: run.kept_by(op.operands[0], op.results[0]) for op in graph.ops if op.primitive == STATE}
        return after, run.values[[tensor.name for tensor in graph.tensors].index(LOSS)]


@dataclass(slots=True)
class _Run:
    """Execution of the operators of a plan.

    Attributes:
        plan: Plan of the step.
        layouts: Constraints on the plan's mesh.
        compute: What each primitive computes.
        values: Tensors so far, each in its own layout, by number.
        copies: Tensors in layouts other than their own, by number and layout.
    """

    plan: Plan
    layouts: JaxLayouts
    compute: Mapping[str, Compute]
    values: dict[int, Array] = field(default_factory=dict)
    copies: dict[tuple[int, Orders], Array] = field(default_factory=dict)

    def hold(self, tensor: int, value: Array) -> None:
        """Hold a tensor that the step begins with."""
        self.values[tensor] = self.layouts.pin(value, self.layouts.orders.lying(tensor))

    def execute(self, number: int, step: Array) -> None:
        """Compute the results of an operator that is no source."""
        op = self.plan.graph.ops[number]
        if op.is_source:
            return
        operands = [self._read(number, slot) for slot in range(len(op.operands))]
        if op.primitive in OPTIMIZERS:
            results = OPTIMIZERS[op.primitive](*operands, step=step)
        else:
            results = self.compute[op.primitive](op, *operands)
        orders = self.layouts.orders
        for slot, (tensor, value) in enumerate(zip(op.results, results, strict=True)):
            self.values[tensor] = self.layouts.settle(value, orders.written(number, slot), orders.lying(tensor))

    def kept_by(self, made: int, state: int) -> Array:
        """Return an updated value in the layout of the state that it replaces."""
        orders = self.layouts.orders
        kept: Array = self.layouts.move(self.values[made], orders.lying(made), orders.lying(state))
        return kept

    def _read(self, number: int, slot: int) -> Array:
        """Return an operand in the layout in which its operator reads it; readers that want one layout share it."""
        orders, tensor = self.layouts.orders, self.plan.graph.ops[number].operands[slot]
        wanted, lies = orders.read(number, slot), orders.lying(tensor)
        if wanted == lies:
            return self.values[tensor]
        if (tensor, wanted) not in self.copies:
            self.copies[tensor, wanted] = self.layouts.move(self.values[tensor], lies, wanted)
        return self.copies[tensor, wanted]
