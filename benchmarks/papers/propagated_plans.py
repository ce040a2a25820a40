"""Turn propagated shardings into a plan, so that `costmodels.sharding.plan` prices them like any other.

A propagation states the layouts of tensors, but a plan states which factor each axis serves in each operator. An axis
may serve a factor that it cuts in an operand or a result, or no factor. If that leaves a choice, the operator takes the
factors that send the fewest bytes, from the operands' layouts to its own and on to those of its results, and among
equals the ones that share the work among most devices. If all tensors are cut alike there is no choice, and XLA sends
the same bytes. Elsewhere this is kinder than XLA, which moves more between conflicting layouts; see
docs/research/search-time.md.

Axes that do not divide a dim do not cut it, as in every plan. Constants are made in the layout of their first reader.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import CONSTANT, Graph
from costmodels.sharding.layouts import REPLICATED, Layout, Move, moves
from costmodels.sharding.plan import NONE, Plan, wanted_layout, written_layout

Row = tuple[int, ...]


class PlanReader:
    """Reader of plans from layouts of tensors; it remembers the result for each kind of operator.

    Attributes:
        graph: Graph of the plans.
        mesh: Mesh of the plans.
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        self.graph, self.mesh = graph, mesh
        self._rows: dict[Any, Row] = {}
        self._sent: dict[tuple[Layout, Layout, float], float] = {}
        self._bytes = [tensor.num_bytes for tensor in graph.tensors]

    def rows(self, layouts: Sequence[Layout | None]) -> list[Row]:
        """Return the factors that the axes serve in each operator.

        Args:
            layouts: Layout of each tensor; None where it is unknown.
        """
        graph = self.graph
        found: list[Row] = []
        for op in graph.ops:
            if op.primitive == CONSTANT:
                found.append(())
                continue
            reads = () if op.begins else tuple([layouts[tensor] for tensor in op.operands])
            writes = tuple([layouts[tensor] for tensor in op.results])
            # Repeated layers have equal rules, layouts and sizes, so most operators are found in the memo.
            sizes = tuple([self._bytes[tensor] for tensor in (*op.operands, *op.results)])
            key = (id(op.rule), reads, writes, sizes)
            if key not in self._rows:
                self._rows[key] = self._row(op.rule, reads, writes, sizes)
            found.append(self._rows[key])
        for number, op in enumerate(graph.ops):
            if op.primitive == CONSTANT:
                found[number] = self._constant(number, found)
        return found

    def plan(self, layouts: Sequence[Layout | None]) -> Plan:
        """Return the plan for layouts of all tensors."""
        return Plan(graph=self.graph, mesh=self.mesh, served=np.array(self.rows(layouts), dtype=np.int64))

    def _row(
        self, rule: Rule, reads: Sequence[Layout | None], writes: Sequence[Layout | None], num_bytes: Sequence[float]
    ) -> Row:
        """Return the factors of one operator that send the fewest bytes."""
        axes = range(len(self.mesh.sizes))
        # Each axis may serve nothing, or a factor whose dim it cuts in some operand or result.
        places = [*zip(rule.operand_dims, reads, strict=False), *zip(rule.result_dims, writes, strict=True)]
        choices = [
            (
                NONE,
                *(
                    factor
                    for factor in rule.cuttable
                    if any(
                        layout is not None and layout[axis] != REPLICATED and dims[factor] == layout[axis]
                        for dims, layout in places
                    )
                ),
            )
            for axis in axes
        ]
        # The product over axes is small: a tensor is cut by few axes, each with few choices.
        rows = [row for row in itertools.product(*choices) if self._divides(rule, row)]
        return min(rows, key=lambda row: (self._sent_bytes(rule, row, reads, writes, num_bytes), -self._shared_by(row)))

    def _divides(self, rule: Rule, row: Row) -> bool:
        return all(
            rule.factors[factor].size
            % math.prod(size for size, other in zip(self.mesh.sizes, row, strict=True) if other == factor)
            == 0
            for factor in set(row) - {NONE}
        )

    def _sent_bytes(
        self,
        rule: Rule,
        row: Row,
        reads: Sequence[Layout | None],
        writes: Sequence[Layout | None],
        num_bytes: Sequence[float],
    ) -> float:
        # Moves from the given layouts to the wanted ones of operands, and from the written ones to those of results.
        sent_bytes = 0.0
        for slot, layout in enumerate(reads):
            if layout is not None:
                sent_bytes += self._moved_bytes(layout, wanted_layout(rule, slot, row), num_bytes[slot])
        for slot, layout in enumerate(writes):
            if layout is not None:
                written = written_layout(rule, slot, row)
                sent_bytes += self._moved_bytes(written, layout, num_bytes[len(num_bytes) - len(writes) + slot])
        return sent_bytes

    def _moved_bytes(self, before: Layout, after: Layout, num_bytes: float) -> float:
        if before == after:
            return 0.0
        key = (before, after, num_bytes)
        if key not in self._sent:
            changes = moves(before, after, num_bytes, self.mesh.sizes)
            self._sent[key] = sum(self._ring_bytes(move) for move in changes)
        return self._sent[key]

    def _ring_bytes(self, move: Move) -> float:
        """Return the bytes that a device sends in a ring.

        An all-reduce sends 2 (n-1)/n of the message, any other collective half of that.
        """
        group = math.prod(self.mesh.sizes[axis] for axis in move.axes)
        return (2 if move.kind is OpKind.ALL_REDUCE else 1) * move.message_bytes * (group - 1) / group

    def _shared_by(self, row: Row) -> int:
        return math.prod(size for size, factor in zip(self.mesh.sizes, row, strict=True) if factor != NONE)

    def _constant(self, number: int, rows: Sequence[Row]) -> Row:
        """Return the factors of a constant in the layout of its first reader."""
        graph = self.graph
        op = graph.ops[number]
        (result,) = op.results
        use = next(iter(graph.uses[result]), None)
        nothing = (NONE,) * len(self.mesh.sizes)
        if use is None or not rows[use.op]:
            return nothing
        # A constant exists on every device, so making it in the reader's layout costs nothing.
        wanted = wanted_layout(graph.ops[use.op].rule, use.operand, rows[use.op])
        dims = op.rule.result_dims[0]
        return tuple(
            NONE if cut == REPLICATED else next((one for one in op.rule.cuttable if dims[one] == cut), NONE)
            for cut in wanted
        )
