"""Cost of a plan as a sum of small tables: one for each operator's compute, and one for the moves of each tensor.

A table has an axis for each operator that influences it: the operator that writes a tensor and all operators that read
it. `elimination` can therefore find the cheapest combination of the operators' choices. The sum of all tables equals
the step time that `costmodels.sharding.plan.cost_of` computes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import CONSTANT, STATE, Graph
from costmodels.sharding.joining import latency_shares
from costmodels.sharding.layouts import Layout, local_share
from costmodels.sharding.loop_sums import whole_sums
from costmodels.sharding.plan import NONE, MoveTimes, Plan, Roofline
from hardware.arrays import FloatArray
from tuner.planners.engine.elimination import Known, Order, Table, Term, cheapest_order, least
from tuner.planners.sharding.byte_prices import BytePrices, TensorPrice, price_table, tensor_prices
from tuner.planners.sharding.table_forms import Forms, Reads, Row, Shape, Slot, evenness

MOST_ENTRIES = 3e5
"""Most entries that one table may have."""

MOST_READERS = 6
"""Most readers of a tensor that are charged together.

The cost of a tensor with more readers is split into shares, one for each pair of the maker and a reader. The sum of the
shares is exact if all readers want the same layout, and too low if they want different ones.
"""

MOST_KEPT = 100_000
"""Most eliminations of variables that are kept for later calls."""

Charge = Callable[[int, Row], float]
"""Function that returns the further cost of an operator with a row [s]."""


def together(*charges: Charge | None) -> Charge | None:
    """Add up the charges that are not None; return None if all are."""
    there = [charge for charge in charges if charge is not None]
    if len(there) == 1:
        return there[0]
    return (lambda number, row: sum(charge(number, row) for charge in there)) if there else None


def total_charge_s(plan: Plan, charge: Charge | None) -> float:
    """Return the sum of a charge over all operators of a plan [s]."""
    return 0.0 if charge is None else sum(charge(op, tuple(row)) for op, row in enumerate(plan.served.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Properties of tensors that are charged alike.

    Attributes:
        num_bytes: Size of the whole tensor [bytes].
        shape: Shape of the whole tensor.
        times: Number of times that its partial sums are added up in a step, if an axis cuts them and if none does.
        reads: Number of reads by each use, 0 for a constant; and whether the use reads a state in the backward pass,
            which gathers it again.
        latency_share: Part of a collective's latency that it pays (`joining.latency_shares`).
        price: Price of a byte while a device holds it; None for no price.
        exposed: Share of its moves that is charged.
        share: Fraction of the cost that this table charges.
        is_least: Whether readers outside this table may want the sums in another layout. If so, the table holds the
            least cost over all layouts in which the sums may end.
    """

    num_bytes: float
    shape: tuple[int, ...]
    times: tuple[int, int]
    reads: tuple[tuple[int, bool], ...]
    latency_share: float
    price: TensorPrice | None = None
    exposed: float = 1.0
    share: float = 1.0
    is_least: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """Maker and readers of a tensor that share one table.

    Attributes:
        kind: Number of the properties of the tensor that determine its cost.
        form: Number of its slots. Parts of one form have the same layouts if their operators have the same rows.
        slots: Its maker, followed by its readers.
        ops: Operators of the slots in ascending order.
        rows_of: Function that selects what belongs to them from what belongs to all operators.
    """

    kind: int
    form: int
    slots: tuple[Slot, ...]
    ops: tuple[int, ...]
    rows_of: Callable[[Sequence[int]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    """Result of an elimination.

    Attributes:
        cost_s: Time of the step, with all charges and prices [s].
        rows: Row chosen for each operator [o].
        kept: Operators that kept their row because the tables would have been too large otherwise.
    """

    cost_s: float
    rows: tuple[Row, ...]
    kept: frozenset[int]


class ShardingTerms:
    """Cost tables of a graph on a mesh, computed on first use and kept.

    Attributes:
        graph: Graph of the training step.
        mesh: Mesh of devices to shard it over.
        is_exact: Whether the tables add up to what `cost_of` computes; they do not if a tensor has more than
            MOST_READERS readers.
        byte_s: Prices of the memory that a device holds, charged in addition to the step time.
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh, forms: Forms | None = None) -> None:
        """Prepare the tables of a graph on a mesh.

        Args:
            graph: Graph of the training step.
            mesh: Mesh of devices to shard it over.
            forms: Forms that are shared with tables of other graphs and meshes; None for none.
        """
        self.graph, self.mesh = graph, mesh
        self.byte_s: BytePrices = {}
        self._forms = Forms() if forms is None else forms
        self._roofline = Roofline(graph, mesh)
        traffic, alike = self._roofline.traffic, dict[object, int]()
        rules = {id(op.rule): op.rule for op in graph.ops}
        self._rules = {key: self._forms.number_of_rule(rule) for key, rule in rules.items()}
        self._op_forms = [
            alike.setdefault((id(op.rule), op.is_free, op.flop, op.times, op.precision, traffic[number]), len(alike))
            for number, op in enumerate(graph.ops)
        ]
        tensors = range(len(graph.tensors))
        self._kinds = [self._kind(tensor) for tensor in tensors]
        # Kinds of tables, each with the moves that it has in common with others, by its number.
        self._tabled: list[tuple[_Kind, Reads]] = []
        self._number_of_kind: dict[_Kind, int] = {}
        self._parts = [part for tensor in tensors for part in self._parts_of(tensor)]
        self.is_exact = all(self._tabled[part.kind][0].share == 1.0 for part in self._parts)
        self._rows_beside: dict[tuple[int, Row, int], tuple[Row, ...]] = {}
        self._compute: dict[tuple[int, int], Table] = {}
        self._tables: dict[tuple[int, int], Table | None] = {}
        self._eliminated: Known = {}
        self._move_s = MoveTimes(graph, mesh)
        self._pair_s: defaultdict[tuple[float, float], dict[int, float]] = defaultdict(dict)
        self._charges: dict[tuple[Charge, int, int], tuple[float, ...] | None] = {}
        self._charged: dict[tuple[int, int, tuple[float, ...]], Table] = {}

    def with_prices(self, byte_s: BytePrices) -> ShardingTerms:
        """Return these tables with prices of the memory that a device holds; computed tables are reused."""
        prices = tensor_prices(self.graph, self.mesh, byte_s)
        found = self._with_kinds([replace(kind, price=price) for kind, price in zip(self._kinds, prices, strict=True)])
        found.byte_s = byte_s
        return found

    def with_exposed(self, shares: FloatArray) -> ShardingTerms:
        """Return these tables with a share of each tensor's moves charged [t]; computed tables are reused."""
        found = self._with_kinds(
            [replace(kind, exposed=share) for kind, share in zip(self._kinds, shares.tolist(), strict=True)]
        )
        # Their sum is no step time.
        found.is_exact = True
        return found

    def _with_kinds(self, kinds: list[_Kind]) -> ShardingTerms:
        """Return these tables with other kinds of tensors."""
        found = copy(self)
        found._tables, found._tabled = dict(self._tables), list(self._tabled)
        found._number_of_kind = dict(self._number_of_kind)
        found._eliminated = {}
        found._kinds = kinds
        found._parts = [part for tensor in range(len(kinds)) for part in found._parts_of(tensor)]
        return found

    def rows_beside(self, number: int, row: Row, axis: int) -> tuple[Row, ...]:
        """Return the rows of an operator that equal `row` on every axis except perhaps `axis`."""
        rule = self.graph.ops[number].rule
        key = (id(rule), row, axis)
        if key not in self._rows_beside:
            self._rows_beside[key] = rows_beside(rule, self.mesh.sizes, row, axis)
        return self._rows_beside[key]

    def least(
        self,
        rows: Sequence[tuple[Row, ...]],
        now: Sequence[Row],
        *,
        charge: Charge | None = None,
        spared: frozenset[int] = frozenset(),
    ) -> Cheapest:
        """Find the cheapest combination of rows of all operators.

        If that would need too large tables, some operators keep the row that they have now.

        Args:
            rows: Rows that each operator may take [o][c].
            now: Row that each operator has now [o].
            charge: Further costs per operator; None for no further costs.
            spared: Operators that should stay free to change if possible.
        """
        sizes, choices = [len(own) for own in rows], self._number_all(rows)
        shapes = self._shapes_of(self._parts, rows, choices)
        scopes = tuple(map(_scope_of, self._parts, shapes))
        # Operators whose elimination would need too large tables keep their row. All tables are then made for the
        # rows that are left.
        order = _cheapest_order(tuple(sizes), scopes, spared)
        if order.fixed:
            rows = [(now[op],) if op in order.fixed else own for op, own in enumerate(rows)]
            sizes, choices = [len(own) for own in rows], self._number_all(rows)
            shapes = self._shapes_of(self._parts, rows, choices)
            scopes = tuple(map(_scope_of, self._parts, shapes))
        terms = [
            self._of_op(op, own, choice, charge) for op, (own, choice) in enumerate(zip(rows, choices, strict=True))
        ]
        for part, shape, scope in zip(self._parts, shapes, scopes, strict=True):
            table = self._table_of(part, shape)
            if table is not None:
                terms.append(Term(scope, table))
        if len(self._eliminated) > MOST_KEPT:
            self._eliminated.clear()
        found = least(sizes, terms, order.variables, self._eliminated)
        return Cheapest(
            cost_s=found.cost,
            rows=tuple([own[value] for own, value in zip(rows, found.values, strict=True)]),
            kept=order.fixed,
        )

    def pairwise(self, rows: Sequence[tuple[Row, ...]]) -> list[Term]:
        """Return terms of at most two operators each, whose sum never exceeds the step time of a plan.

        The cost of a tensor that several operators read is split into shares, one for each pair of the maker and a
        reader. A move that all readers need is then paid once in total. If the readers want different layouts, all
        moves together cost at least the mean of what each reader alone would need. For that, partial sums may end in
        whichever layout is cheapest for the reader, among those that other readers can bring about.

        Args:
            rows: Rows that each operator may take [o][c].
        """
        terms, choices = self.alone(rows), self._number_all(rows)
        for tensor in range(len(self._kinds)):
            parts = self._shares_of(tensor)
            for part, shape in zip(parts, self._shapes_of(parts, rows, choices), strict=True):
                table = self._table_of(part, shape)
                if table is not None:
                    terms.append(Term(_scope_of(part, shape), table))
        return terms

    def alone(self, rows: Sequence[tuple[Row, ...]]) -> list[Term]:
        """Return the terms of the operators' compute, without any moves.

        Args:
            rows: Rows that each operator may take [o][c].
        """
        choices = self._number_all(rows)
        return [self._of_op(op, own, choice, None) for op, (own, choice) in enumerate(zip(rows, choices, strict=True))]

    def _shares_of(self, tensor: int) -> list[_Part]:
        """Return a part for each use of a tensor: one copy, divided by the number of uses in the pass.

        This is a lower bound of the use's share in the tensor's cost. The first use of a copy pays for it, as many
        times as its operator runs.
        """
        maker, slot = self.graph.maker[tensor]
        kind = self._kinds[tensor]
        written = (maker, slot, True)
        if not any(times for times, _ in kind.reads):
            return [self._part(replace(kind, reads=()), (written,))]
        found = []
        for number, (use, (_, again)) in enumerate(zip(self.graph.uses[tensor], kind.reads, strict=True)):
            # The first use of the copy may be this one or an earlier one of the pass, so the smallest of their numbers
            # of runs is the bound.
            before = [times for times, other in kind.reads[: number + 1] if other == again]
            in_pass = sum(other == again for _, other in kind.reads)
            is_least = len(kind.reads) > 1
            own = replace(kind, reads=((min(before), again),), share=1.0 / in_pass, is_least=is_least)
            found.append(self._part(own, (written, (use.op, use.operand, False))))
        return found

    def _number_all(self, rows: Sequence[tuple[Row, ...]]) -> list[int]:
        """Return a number for the rows of each operator, the same for the same rows [o]."""
        # Most operators have their rows in common with others, and the same object stands for them.
        known: dict[int, int] = {}
        found, numbers = [], self._forms.choices
        for own in rows:
            choice = known.get(id(own))
            if choice is None:
                choice = known[id(own)] = numbers.setdefault(own, len(numbers))
            found.append(choice)
        return found

    def _of_op(self, number: int, rows: tuple[Row, ...], choice: int, charge: Charge | None) -> Term:
        """Return the term of an operator's compute, and of its charge if there is one."""
        # Operators of repeated layers have the same work and rows, and share one table.
        key = (self._op_forms[number], choice)
        table = self._compute.get(key)
        if table is None:
            table = self._compute[key] = self._compute_table(number, rows, choice)
        if charge is not None:
            table = self._charged_table(table, charge, number, rows, choice)
        return Term((number,), table) if len(rows) > 1 else Term((), table[0])

    def _charged_table(self, table: Table, charge: Charge, number: int, rows: tuple[Row, ...], choice: int) -> Table:
        """Return a table with a charge of each row; equal tables with equal charges stay one."""
        key = (charge, number, choice)
        if key not in self._charges:
            charges = tuple([charge(number, row) for row in rows])
            self._charges[key] = charges if any(charges) else None
        found = self._charges[key]
        if found is None:
            return table
        of_both = (self._op_forms[number], choice, found)
        if of_both not in self._charged:
            self._charged[of_both] = table + np.array(found)
        return self._charged[of_both]

    def _compute_table(self, number: int, rows: tuple[Row, ...], choice: int) -> Table:
        """Return the time of an operator's compute for each row [s]."""
        rule, sizes = self.graph.ops[number].rule, self.mesh.sizes
        of_rule = self._rules[id(rule)]

        def shares(count: int, *, is_maker: bool) -> list[FloatArray]:
            layouts = [self._forms.layouts(of_rule, rule, slot, is_maker, rows, choice) for slot in range(count)]
            return [_local_shares(own, sizes) for own in layouts]

        traffic = self._roofline.traffic[number]
        read, written = shares(len(traffic.reads), is_maker=False), shares(len(traffic.writes), is_maker=True)
        return self._roofline.seconds_of_all(number, _num_ways(rows, sizes), [*read, *written])

    def _part(self, kind: _Kind, slots: tuple[tuple[int, int, bool], ...]) -> _Part:
        """Return a part, whose slots are operators with a result (True) or an operand (False) each."""
        ops = tuple(sorted({op for op, _, _ in slots}))
        rules = self.graph.ops
        own = tuple([(self._rules[id(rules[op].rule)], number, made, ops.index(op)) for op, number, made in slots])
        kind_number = self._number_of_kind.setdefault(kind, len(self._tabled))
        if kind_number == len(self._tabled):
            reads = Reads(
                of=tuple([(times > 0, again) for times, again in kind.reads]),
                is_least=kind.is_least,
                even=None if kind.is_least else evenness(kind.shape, self.mesh.sizes),
            )
            self._tabled.append((kind, reads))
        return _Part(kind=kind_number, form=self._forms.number_of(own), slots=own, ops=ops, rows_of=itemgetter(*ops))

    def _shapes_of(
        self, parts: Sequence[_Part], rows: Sequence[tuple[Row, ...]], choices: Sequence[int]
    ) -> list[Shape]:
        """Return the operators and layouts that the table of each part depends on."""
        found, known = [], self._forms.shapes
        for part in parts:
            key = (part.form, part.rows_of(choices))
            shape = known.get(key)
            if shape is None:
                shape = known[key] = self._find_shape(part, rows, choices)
            found.append(shape)
        return found

    def _find_shape(self, part: _Part, rows: Sequence[tuple[Row, ...]], choices: Sequence[int]) -> Shape:
        layouts = []
        for rule, number, is_maker, place in part.slots:
            op = part.ops[place]
            layouts.append(self._forms.layouts(rule, self.graph.ops[op].rule, number, is_maker, rows[op], choices[op]))
        return self._forms.shape(part.slots, layouts, [len(rows[op]) for op in part.ops])

    def _table_of(self, part: _Part, shape: Shape) -> Table | None:
        """Return the table of a part; None if all of it is zero."""
        key = (part.kind, shape.number)
        if key not in self._tables:
            table = self._table(*self._tabled[part.kind], shape)
            whole = table if table.shape == shape.lengths else np.broadcast_to(table, shape.lengths)
            self._tables[key] = whole if whole.any() else None
        return self._tables[key]

    def _kind(self, tensor: int) -> _Kind:
        """Return the properties of a tensor that determine its cost."""
        graph, array = self.graph, self.graph.tensors[tensor]
        maker = graph.ops[graph.maker[tensor][0]]
        turn, is_state = graph.first_backward, maker.primitive == STATE
        is_sent = maker.primitive != CONSTANT  # every reader of a constant can make it
        return _Kind(
            num_bytes=array.num_bytes,
            shape=array.shape,
            times=(graph.sums[tensor], whole_sums(graph, self.mesh)[tensor]),
            reads=tuple(
                (use.times if is_sent else 0, is_state and turn is not None and use.op >= turn)
                for use in graph.uses[tensor]
            ),
            latency_share=latency_shares(graph)[tensor],
        )

    def _parts_of(self, tensor: int) -> list[_Part]:
        """Return the parts of a tensor: one with all its uses, or one for each use where there are many."""
        maker, slot = self.graph.maker[tensor]
        kind = self._kinds[tensor]
        written = (maker, slot, True)
        read = [(use.op, use.operand, False) for use in self.graph.uses[tensor]]
        if kind.price is None and not any(times for times, _ in kind.reads):  # nobody reads it, or it is a constant
            return [self._part(replace(kind, reads=()), (written,))]
        if len(read) <= MOST_READERS:
            return [self._part(kind, (written, *read))]
        share = 1.0 / len(read)
        return [
            self._part(replace(kind, reads=(own,), share=share, price=_of_use(kind.price, use)), (written, slot))
            for use, (own, slot) in enumerate(zip(kind.reads, read, strict=True))
        ]

    def _table(self, kind: _Kind, reads: Reads, shape: Shape) -> Table:
        """Compute the cost of moves and of held memory for all rows at once [rows of each operator in scope]."""
        pattern = self._forms.pattern(shape, reads)
        sized = (kind.num_bytes, kind.latency_share)
        known = self._pair_s[sized]
        for pair in pattern.pairs:
            if pair not in known:
                known[pair] = self._move_s.seconds(*self._forms.pairs[pair], *sized)
        seconds = np.array([known[pair] for pair in pattern.pairs])
        tables = []
        for end in pattern.ends:
            table: Any = 0.0 if end.sums is None else np.where(end.is_cut, *kind.times) * seconds[end.sums]
            for use, moves in end.reads:
                table = table + kind.reads[use][0] * seconds[moves]
            table = kind.exposed * table
            if kind.price is not None:
                is_again = [again for _, again in kind.reads]
                held_s = price_table(kind.price, pattern.written, end.lies, pattern.wanted, is_again, self.mesh)
                table = table + kind.num_bytes * held_s
            tables.append(table)
        least_s = tables[0] if len(tables) == 1 else np.minimum.reduce(tables)
        return np.asarray(kind.share * least_s, dtype=np.float64)


def _scope_of(part: _Part, shape: Shape) -> tuple[int, ...]:
    """Return the operators whose rows change a layout in a part."""
    ops = part.ops
    return ops if len(shape.scope) == len(ops) else tuple([ops[place] for place in shape.scope])


@lru_cache(maxsize=2**14)
def _local_shares(layouts: tuple[Layout, ...], sizes: tuple[int, ...]) -> FloatArray:
    """Return the share of a tensor that a device holds in each layout."""
    return np.array([local_share(layout, sizes) for layout in layouts])


@lru_cache(maxsize=2**14)
def _num_ways(rows: tuple[Row, ...], sizes: tuple[int, ...]) -> FloatArray:
    """Return the number of devices that share the work of an operator with each row."""
    found = [math.prod(size for size, factor in zip(sizes, row, strict=True) if factor != NONE) for row in rows]
    return np.array(found, dtype=np.float64)


@lru_cache(maxsize=256)
def _cheapest_order(sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], spared: frozenset[int]) -> Order:
    """Return the order of elimination, which graphs of one model share whatever their sizes are."""
    return cheapest_order(sizes, scopes, most_entries=MOST_ENTRIES, spared=spared)


def _of_use(price: TensorPrice | None, number: int) -> TensorPrice | None:
    return None if price is None else replace(price, uses=price.uses[number : number + 1])


def rows_beside(rule: Rule, sizes: Sequence[int], row: Row, axis: int) -> tuple[Row, ...]:
    """Return the rows of an operator that equal `row` on every axis except perhaps `axis`."""
    found = [NONE]
    for factor in rule.cuttable if sizes[axis] > 1 else ():
        ways = math.prod(size for other, size in enumerate(sizes) if other == axis or row[other] == factor)
        if rule.factors[factor].size % ways == 0:
            found.append(factor)
    return tuple((*row[:axis], factor, *row[axis + 1 :]) for factor in found)
