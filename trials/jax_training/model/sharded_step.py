"""Training step of a graph of the transformer frontend, with every tensor in the layout that a plan gives it.

The graph's operators run one after the other, as `operators.py` computes them. Each operand is pinned to the layout in
which its operator reads it, and each result to the layout in which the plan leaves it, so that XLA communicates where
the plan does. Constraints change no number beyond the order of sums.

Several micro-batches run one after the other in a loop of XLA's. Their gradients are added up in float32, on each
device by itself (`local_sums.py`). Then the devices add them up, and the update runs once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from costmodels.sharding.micro_batches import count_micro_batches
from costmodels.sharding.plan import Plan
from trials.jax_training.model.initial import dtype_of
from trials.jax_training.model.local_sums import LocalSums
from trials.jax_training.model.operators import Compute, operators
from trials.jax_training.model.optimizers import OPTIMIZERS
from trials.training.numerics import LOSS

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

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the step."""
        return count_micro_batches(self.plan.graph)

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, *, top_k: int = 0) -> ShardedStep:
        """Return the step of a plan on devices."""
        missing = missing_operators(plan.graph)
        assert not missing, f"the graph has {missing[0]}, which nothing here computes"
        return cls(plan=plan, layouts=JaxLayouts(axis_orders(plan), mesh), top_k=top_k)

    def shardings(self, primitive: str) -> dict[str, NamedSharding]:
        """Return the shardings of all states or of all inputs of the step, by name.

        Inputs of several micro-batches lie one after the other along a first dim, which nothing cuts.
        """
        graph, orders = self.plan.graph, self.layouts.orders
        found = {op.name: orders.lying(op.results[0]) for op in graph.ops if op.primitive == primitive}
        if primitive == INPUT and self.num_micro_batches > 1:
            found = {name: ((), *lying) for name, lying in found.items()}
        return {name: self.layouts.sharding(lying) for name, lying in found.items()}

    def lower(self) -> Any:
        """Lower the step by `jax.jit`; its states are donated.

        The compiled function takes the states by name, the number of the step from 1 as a float32, and the inputs by
        name, and each array is a parameter of the program, in the order of names; it returns the states after the step,
        and the loss before it.
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
        graph, count = self.plan.graph, self.num_micro_batches
        leading = (count,) if primitive == INPUT and count > 1 else ()
        return {
            op.name: jax.ShapeDtypeStruct((*leading, *array.shape), dtype_of(array))
            for op in graph.ops
            if op.primitive == primitive
            for array in (graph.tensors[op.results[0]],)
        }

    def _run(self, states: Values, step: Array, inputs: Values) -> tuple[Values, Array]:
        graph = self.plan.graph
        if self.num_micro_batches == 1:
            run = self._begin({**states, **inputs})
            run.execute(range(len(graph.ops)), step)
            loss = run.values[self._loss]
        else:
            run, loss = self._accumulate(states, inputs)
            run.execute((number for number, op in enumerate(graph.ops) if op.times == 1), step)
        after = {op.name: run.kept_by(op.operands[0], op.results[0]) for op in graph.ops if op.primitive == STATE}
        return after, loss.reshape(())

    def _accumulate(self, states: Values, inputs: Values) -> tuple[_Run, Array]:
        """Run all micro-batches, and return what the update begins with, and the mean loss."""
        sums = LocalSums.of(self.plan, self.layouts)
        repeated = [number for number, op in enumerate(self.plan.graph.ops) if op.times > 1]

        def add(total: tuple[dict[int, Array], Array], inputs: Values) -> tuple[tuple[dict[int, Array], Array], None]:
            # what a micro-batch makes of a state is made anew in the next one: XLA would keep it during the whole loop
            held, inputs = jax.lax.optimization_barrier((states, inputs))
            run = self._begin({**held, **inputs}, sums)
            run.execute(repeated, jnp.float32(0))
            gradients = {tensor: sums.pin(tensor, one + run.values[tensor]) for tensor, one in total[0].items()}
            return (gradients, total[1] + run.values[self._loss]), None

        (gradients, loss), _ = jax.lax.scan(add, (sums.zeros(), jnp.zeros(1)), inputs)
        run = self._begin(states)
        run.values |= {tensor: sums.mean(tensor, total) for tensor, total in gradients.items()}
        return run, loss / sums.count

    def _begin(self, sources: Values, sums: LocalSums | None = None) -> _Run:
        """Return a run that holds states, and perhaps the inputs of a micro-batch, by name."""
        run = _Run(self.plan, self.layouts, operators(top_k=self.top_k), sums)
        for op in self.plan.graph.ops:
            if op.primitive in (STATE, INPUT) and op.name in sources:
                run.hold(op.results[0], sources[op.name])
        return run

    @property
    def _loss(self) -> int:
        """Number of the tensor that holds the loss."""
        return [tensor.name for tensor in self.plan.graph.tensors].index(LOSS)


@dataclass(slots=True)
class _Run:
    """Execution of the operators of a plan.

    Attributes:
        plan: Plan of the step.
        layouts: Constraints on the plan's mesh.
        compute: What each primitive computes.
        sums: Gradients that devices add up by themselves; None if no operator is repeated.
        values: Tensors so far, each in its own layout, by number.
        copies: Tensors in layouts other than their own, by number and layout, and for the backward pass or not.
    """

    plan: Plan
    layouts: JaxLayouts
    compute: Mapping[str, Compute]
    sums: LocalSums | None = None
    values: dict[int, Array] = field(default_factory=dict)
    copies: dict[tuple[int, Orders, bool], Array] = field(default_factory=dict)

    def hold(self, tensor: int, value: Array) -> None:
        """Hold a tensor that the step begins with."""
        self.values[tensor] = self.layouts.pin(value, self.layouts.orders.lying(tensor))

    def execute(self, numbers: Iterable[int], step: Array) -> None:
        """Compute the results of some operators, without sources, in the number of the optimizer's step."""
        for number in numbers:
            op = self.plan.graph.ops[number]
            if not op.is_source:
                operands = [self._read(number, slot) for slot in range(len(op.operands))]
                for slot, value in enumerate(self._results(number, operands, step)):
                    self._keep(number, slot, value)

    def _results(self, number: int, operands: Sequence[Array], step: Array) -> tuple[Array, ...]:
        op = self.plan.graph.ops[number]
        if op.primitive in OPTIMIZERS:
            return OPTIMIZERS[op.primitive](*operands, step=step)
        function = self.compute[op.primitive]
        return function(op, *operands) if self.sums is None else self.sums.compute(number, function, operands)

    def _keep(self, number: int, slot: int, value: Array) -> None:
        """Keep a result in its own layout; gradients of a micro-batch stay as the devices have them."""
        orders, tensor = self.layouts.orders, self.plan.graph.ops[number].results[slot]
        value = value.astype(dtype_of(self.plan.graph.tensors[tensor]))
        is_summed = self.sums is not None and tensor in self.sums.axes
        lies = orders.lying(tensor)
        self.values[tensor] = value if is_summed else self.layouts.settle(value, orders.written(number, slot), lies)

    def kept_by(self, made: int, state: int) -> Array:
        """Return an updated value in the layout of the state that it replaces."""
        orders = self.layouts.orders
        kept: Array = self.layouts.move(self.values[made], orders.lying(made), orders.lying(state))
        return kept

    def _read(self, number: int, slot: int) -> Array:
        """Return an operand in the layout in which its operator reads it.

        Readers that want one layout share it, but a copy of a state is made anew for the backward pass (`plan.py`).
        """
        graph, orders = self.plan.graph, self.layouts.orders
        tensor = graph.ops[number].operands[slot]
        wanted, lies = orders.read(number, slot), orders.lying(tensor)
        if wanted == lies:
            return self.values[tensor]
        is_state, turn = graph.ops[graph.maker[tensor][0]].primitive == STATE, graph.first_backward
        is_again = is_state and turn is not None and number >= turn
        if (tensor, wanted, is_again) not in self.copies:
            value = self.values[tensor]
            # XLA would keep the copy of the forward pass
            value = jax.lax.optimization_barrier(value) if is_again else value
            self.copies[tensor, wanted, is_again] = self.layouts.move(value, lies, wanted)
        return self.copies[tensor, wanted, is_again]
