"""Training step of a graph of the transformer frontend on one rank, as a plan shards it.

The graph's operators run one after the other, as an SPMD compiler would lay them out: each on this rank's parts, in the
layout that the plan serves at the operator, with the plan's collectives between them. Parts are freed after their last
reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodels.sharding.exports.torch_changes import Change
from costmodels.sharding.graph import INPUT, STATE, Graph
from costmodels.sharding.layouts import Layout, moves
from costmodels.sharding.plan import Plan
from trials.torch_training.optimizers import UPDATES
from trials.torch_training.planned.digits import digits_of
from trials.torch_training.planned.local_op import LocalOp
from trials.torch_training.planned.mesh import PlanMesh
from trials.torch_training.planned.operators import OPERATORS
from trials.torch_training.planned.relayout import Relayout, group_axes
from trials.training.numerics import LOSS, initial_state, whole_batch

Copied = tuple[int, Layout]
"""A tensor, and a layout other than its own."""


def missing_operators(graph: Graph) -> tuple[str, ...]:
    """Return the primitives of a graph that nothing here computes, each once."""
    names = {op.primitive for op in graph.ops if not op.is_source}
    return tuple(sorted(names - OPERATORS.keys() - UPDATES.keys()))


class PlannedStep:
    """Training step of a plan; every rank has one.

    Args:
        plan: Plan of the whole step, whose mesh has as many devices as the process group has ranks.
        seed: Seed of weights and data.
        top_k: Number of experts that a token goes to; unused without experts.
    """

    def __init__(self, plan: Plan, *, seed: int = 0, top_k: int = 1) -> None:
        graph = plan.graph
        missing = missing_operators(graph)
        assert not missing, f"the graph has {missing[0]}, which nothing here computes"
        self._plan = plan
        digits = digits_of(plan)
        mesh = PlanMesh(plan.mesh, group_axes(digits))
        self._relayout = Relayout(digits, mesh)
        self._ops = [
            LocalOp(digits=digits, number=number, place=mesh.place, top_k=top_k) for number in range(len(graph.ops))
        ]
        self._ends = _Ends.of(plan)
        self._reads = [self._reads_of(number) for number in range(len(graph.ops))]
        self._writes = [self._writes_of(number) for number in range(len(graph.ops))]
        self._kept = {
            made: self._relayout.change(made, plan.layout(made), plan.layout(state))
            for made, state in self._ends.states.items()
        }
        self._number = 0
        inputs = whole_batch(graph, seed)
        # tensors so far, each in its own layout, by number; between steps those that a step begins with
        self._values: dict[int, Tensor] = {}
        # tensors in layouts other than their own, for several readers
        self._copies: dict[Copied, Tensor] = {}
        for op in graph.ops:
            if op.primitive in (STATE, INPUT):
                whole = inputs[op.name] if op.primitive == INPUT else initial_state(graph, op, seed)
                (tensor,) = op.results
                part = self._relayout.cut(torch.from_numpy(whole), tensor, plan.layout(tensor))
                self._values[tensor] = part.clone(memory_format=torch.contiguous_format)

    def step(self) -> float:
        """Train one optimizer step, and return the mean loss over all tokens before it."""
        self._number += 1
        loss = 0.0
        with torch.no_grad():
            for number, op in enumerate(self._plan.graph.ops):
                if op.is_source:
                    continue
                self._execute(number)
                if op.name == LOSS:
                    loss = self._values[op.results[0]].item()
                self._free(number)
        return loss

    def _execute(self, number: int) -> None:
        """Compute the results of an operator, and add up their partial sums."""
        op = self._plan.graph.ops[number]
        operands = [self._read(*read) for read in self._reads[number]]
        if op.primitive in UPDATES:
            results = UPDATES[op.primitive](*operands, step=self._number)
        else:
            results = OPERATORS[op.primitive](self._ops[number], *operands)
        for (tensor, change), value in zip(self._writes[number], results, strict=True):
            self._values[tensor] = self._moved(value, change)

    def _read(self, tensor: int, change: Change | None, copied: Copied | None) -> Tensor:
        """Return an operand in the layout in which its operator reads it; readers that want one layout share it."""
        if copied is None:
            return self._moved(self._values[tensor], change)
        if copied not in self._copies:
            self._copies[copied] = self._moved(self._values[tensor], change)
        return self._copies[copied]

    def _moved(self, value: Tensor, change: Change | None) -> Tensor:
        return value if change is None else self._relayout.move(value, change)

    def _reads_of(self, number: int) -> list[tuple[int, Change | None, Copied | None]]:
        """Return the operands of an operator, the changes of their layouts, and the copies that are kept of them."""
        plan, found = self._plan, []
        for slot, tensor in enumerate(plan.graph.ops[number].operands):
            wanted = plan.wanted(number, slot)
            copied = (tensor, wanted)
            change = self._relayout.change(tensor, plan.layout(tensor), wanted)
            found.append((tensor, change, copied if copied in self._ends.kept else None))
        return found

    def _writes_of(self, number: int) -> list[tuple[int, Change | None]]:
        """Return the results of an operator, and the changes that add up their partial sums."""
        plan, op = self._plan, self._plan.graph.ops[number]
        is_maximum = op.primitive == "maximum"
        return [
            (
                tensor,
                self._relayout.change(tensor, plan.written(number, slot), plan.layout(tensor), is_maximum=is_maximum),
            )
            for slot, tensor in enumerate(op.results)
        ]

    def _free(self, number: int) -> None:
        """Forget what no later operator reads, and replace states by their updated values."""
        for copied in self._ends.copies.get(number, ()):
            del self._copies[copied]
        for tensor in self._ends.tensors.get(number, ()):
            value = self._values.pop(tensor)
            if tensor in self._kept:
                self._values[self._ends.states[tensor]] = self._moved(value, self._kept[tensor])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ends:
    """Ends of a plan's tensors and copies.

    Attributes:
        states: State that an updated value replaces, by the value.
        tensors: Tensors that no operator after one reads, by its number.
        copies: Copies that no operator after one reads, by its number. Those of states end with the forward pass, and
            again with the backward pass, which makes them anew (`plan.py`).
        kept: Copies that are kept for further readers; a slice is not, because it costs no message.
    """

    states: Mapping[int, int]
    tensors: Mapping[int, list[int]]
    copies: Mapping[int, list[Copied]]
    kept: frozenset[Copied]

    @classmethod
    def of(cls, plan: Plan) -> _Ends:
        """Return the ends under a plan."""
        graph, sizes = plan.graph, plan.mesh.sizes
        tensors: dict[int, list[int]] = defaultdict(list)
        copies: dict[int, list[Copied]] = defaultdict(list)
        for tensor, array in enumerate(graph.tensors):
            maker, _ = graph.maker[tensor]
            if not graph.ops[maker].begins:
                tensors[max((use.op for use in graph.uses[tensor] if not use.is_back), default=maker)].append(tensor)
            for copy in plan.copies(tensor):
                readers = [use.op for use in copy.uses if not use.is_back]
                if readers and moves(plan.layout(tensor), copy.layout, array.num_bytes, sizes):
                    copies[max(readers)].append((tensor, copy.layout))
        return cls(
            states={op.operands[0]: op.results[0] for op in graph.ops if op.primitive == STATE and op.operands},
            tensors=tensors,
            copies=copies,
            kept=frozenset(copied for found in copies.values() for copied in found),
        )
