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
from typing import Any

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import CONSTANT, STATE, Graph
from costmodels.sharding.joining import latency_shares
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout
from costmodels.sharding.loop_sums import whole_sums
from costmodels.sharding.plan import NONE, MoveTimes, Plan, Roofline, wanted_layout, written_layout
from hardware.arrays import FloatArray
from tuner.planners.engine.elimination import Known, Order, Table, Term, cheapest_order, least
from tuner.planners.sharding.byte_prices import BytePrices, TensorPrice, price_table, tensor_prices

Row = tuple[int, ...]
"""Factor of an operator that each mesh axis divides, or NONE."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """Result or operand of an operator.

    Attributes:
        op: Number of the operator.
        number: Index of the result or of the operand.
        is_maker: Whether the operator writes the tensor.
    """

    op: int
    number: int
    is_maker: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Maker and readers of a tensor that share one table.

    Attributes:
        kind: Properties of the tensor that determine its cost.
        slots: Place of its maker, followed by the places of its readers.
        ops: Operators of the slots in ascending order.
        form: Number of the part's form. Parts of one form have the same table if their operators have the same rows.
    """

    kind: _Kind
    slots: tuple[_Slot, ...]
    ops: tuple[int, ...]
    form: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Operators and layouts that a part's table depends on.

    Attributes:
        scope: Operators whose rows change a layout, counted among those of the part.
        places: Place of each slot's operator among them, or -1 if the slot has one layout only.
        layouts: Layouts of each slot.
        lengths: Number of rows of each operator of the scope.
    """

    scope: tuple[int, ...]
    places: tuple[int, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    lengths: tuple[int, ...]


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

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        """Prepare the tables of a graph on a mesh."""
        self.graph, self.mesh = graph, mesh
        self.byte_s: BytePrices = {}
        self._roofline = Roofline(graph, mesh)
        # Operators, rows and parts are numbered once, because numbers are faster keys than what they stand for.
        self._forms: dict[object, int] = {}
        self._choices: dict[tuple[Row, ...], int] = {}
        traffic = self._roofline.traffic
        self._op_forms = [
            self._number_of((id(op.rule), op.is_free, op.flop, op.times, op.precision, traffic[number]))
            for number, op in enumerate(graph.ops)
        ]
        tensors = range(len(graph.tensors))
        self._kinds = [self._kind(tensor) for tensor in tensors]
        self._parts = [part for tensor in tensors for part in self._parts_of(tensor)]
        self.is_exact = all(part.kind.share == 1.0 for part in self._parts)
        self._rows_beside: dict[tuple[int, Row, int], tuple[Row, ...]] = {}
        self._compute: dict[tuple[int, int], Table] = {}
        self._layouts: dict[tuple[int, int, bool, int], tuple[Layout, ...]] = {}
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._tables: dict[tuple[int, ...], Table | None] = {}
        self._tables_by_layout: dict[tuple[object, ...], Table] = {}
        self._eliminated: Known = {}
        self._move_s = MoveTimes(graph, mesh)
        self._pair_s: defaultdict[tuple[int, float, float], dict[int, float]] = defaultdict(dict)
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
        # Numbers of forms are only unique together with the tables of the same copy.
        found._forms, found._shapes = dict(self._forms), dict(self._shapes)
        found._tables, found._tables_by_layout = dict(self._tables), dict(self._tables_by_layout)
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
        keys = [_key_of(part, choices) for part in self._parts]
        scopes = [self._scope_of(part, key, rows, choices) for part, key in zip(self._parts, keys, strict=True)]
        # Operators whose elimination would need too large tables keep their row. All tables are then made for the
        # rows that are left.
        order = _cheapest_order(tuple(sizes), tuple(scopes), spared)
        if order.fixed:
            rows = [(now[op],) if op in order.fixed else own for op, own in enumerate(rows)]
            sizes, choices = [len(own) for own in rows], self._number_all(rows)
            keys = [_key_of(part, choices) for part in self._parts]
            scopes = [self._scope_of(part, key, rows, choices) for part, key in zip(self._parts, keys, strict=True)]
        terms = [
            self._of_op(op, own, choice, charge) for op, (own, choice) in enumerate(zip(rows, choices, strict=True))
        ]
        for part, key, scope in zip(self._parts, keys, scopes, strict=True):
            table = self._table_of(part, key)
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
            for part in self._shares_of(tensor):
                key = _key_of(part, choices)
                scope, table = self._scope_of(part, key, rows, choices), self._table_of(part, key)
                if table is not None:
                    terms.append(Term(scope, table))
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
        written = _Slot(op=maker, number=slot, is_maker=True)
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
            found.append(self._part(own, (written, _Slot(op=use.op, number=use.operand, is_maker=False))))
        return found

    def _number_of(self, form: object) -> int:
        """Return the number of a form."""
        return self._forms.setdefault(form, len(self._forms))

    def _number_all(self, rows: Sequence[tuple[Row, ...]]) -> list[int]:
        """Return a number for the rows of each operator, the same for the same rows [o]."""
        # Most operators have their rows in common with others, and the same object stands for them.
        known: dict[int, int] = {}
        found = []
        for own in rows:
            choice = known.get(id(own))
            if choice is None:
                choice = known[id(own)] = self._choices.setdefault(own, len(self._choices))
            found.append(choice)
        return found

    def _of_op(self, number: int, rows: tuple[Row, ...], choice: int, charge: Charge | None) -> Term:
        """Return the term of an operator's compute, and of its charge if there is one."""
        # Operators of repeated layers have the same work and rows, and share one table.
        key = (self._op_forms[number], choice)
        table = self._compute.get(key)
        if table is None:
            table = self._compute[key] = np.array([self._roofline.seconds(number, row) for row in rows])
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

    def _part(self, kind: _Kind, slots: tuple[_Slot, ...]) -> _Part:
        """Return a part with the number of its form."""
        ops = tuple(sorted({slot.op for slot in slots}))
        rules = self.graph.ops
        places = tuple([(id(rules[slot.op].rule), slot.number, slot.is_maker, ops.index(slot.op)) for slot in slots])
        return _Part(kind=kind, slots=slots, ops=ops, form=self._number_of((kind, places)))

    def _scope_of(
        self, part: _Part, key: tuple[int, ...], rows: Sequence[tuple[Row, ...]], choices: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the operators whose rows change a layout in a part."""
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._find_shape(part, rows, choices)
        ops = part.ops
        return ops if len(shape.scope) == len(ops) else tuple([ops[place] for place in shape.scope])

    def _find_shape(self, part: _Part, rows: Sequence[tuple[Row, ...]], choices: Sequence[int]) -> _Shape:
        layouts = []
        for slot in part.slots:
            own = self._layouts_of(slot, rows[slot.op], choices[slot.op])
            # A layout that no row changes needs no axis in the table.
            layouts.append(own[:1] if own.count(own[0]) == len(own) else own)
        ops = sorted({slot.op for slot, own in zip(part.slots, layouts, strict=True) if len(own) > 1})
        return _Shape(
            scope=tuple(part.ops.index(op) for op in ops),
            places=tuple(
                ops.index(slot.op) if len(own) > 1 else -1 for slot, own in zip(part.slots, layouts, strict=True)
            ),
            layouts=tuple(layouts),
            lengths=tuple(len(rows[op]) for op in ops),
        )

    def _table_of(self, part: _Part, key: tuple[int, ...]) -> Table | None:
        """Return the table of a part whose scope is known; None if all of it is zero."""
        if key not in self._tables:
            shape = self._shapes[key]
            of_layouts = (part.kind, shape.places, shape.layouts)
            if of_layouts not in self._tables_by_layout:
                table = self._table(part.kind, shape.places, shape.layouts, len(shape.scope))
                self._tables_by_layout[of_layouts] = (
                    table if table.shape == shape.lengths else np.broadcast_to(table, shape.lengths)
                )
            table = self._tables_by_layout[of_layouts]
            self._tables[key] = table if table.any() else None
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
        written = _Slot(op=maker, number=slot, is_maker=True)
        read = [_Slot(op=use.op, number=use.operand, is_maker=False) for use in self.graph.uses[tensor]]
        if kind.price is None and not any(times for times, _ in kind.reads):  # nobody reads it, or it is a constant
            return [self._part(replace(kind, reads=()), (written,))]
        if len(read) <= MOST_READERS:
            return [self._part(kind, (written, *read))]
        share = 1.0 / len(read)
        return [
            self._part(replace(kind, reads=(own,), share=share, price=_of_use(kind.price, use)), (written, slot))
            for use, (own, slot) in enumerate(zip(kind.reads, read, strict=True))
        ]

    def _layouts_of(self, slot: _Slot, rows: tuple[Row, ...], choice: int) -> tuple[Layout, ...]:
        """Return the layout in which a slot writes or reads its tensor, for each row."""
        rule = self.graph.ops[slot.op].rule
        key = (id(rule), slot.number, slot.is_maker, choice)
        if key not in self._layouts:
            layout_of = written_layout if slot.is_maker else wanted_layout
            self._layouts[key] = tuple([layout_of(rule, slot.number, row) for row in rows])
        return self._layouts[key]

    def _table(
        self, kind: _Kind, places: Sequence[int], layouts: Sequence[tuple[Layout, ...]], num_places: int
    ) -> Table:
        """Compute the cost of moves and of held memory for all rows at once [rows of each operator in scope].

        Layouts follow the rules of `costmodels.sharding.plan.reduce_partial_sums` and `Plan.copies`.
        """
        num_axes = len(self.mesh.sizes)

        def lay_out(place: int, own: tuple[Layout, ...]) -> Any:
            """Return the layouts of a slot, with its rows along the axis of its operator."""
            digits = np.array(own, dtype=np.int64).reshape(len(own), num_axes)
            return digits.reshape(*(len(own) if at == place else 1 for at in range(num_places)), num_axes)

        written, *wanted = (lay_out(place, own) for place, own in zip(places, layouts, strict=True))
        sizes = self.mesh.sizes
        tables = [
            self._moved_and_held(kind, written, lies, wanted) for lies in _where_it_lies(kind, written, wanted, sizes)
        ]
        return kind.share * np.asarray(np.minimum.reduce(tables), dtype=np.float64)

    def _moved_and_held(self, kind: _Kind, written: Any, lies: Any, wanted: Sequence[Any]) -> Table:
        """Compute the seconds of moves and the prices of held memory, for arrays of layouts [..., axes]."""
        # Without partial sums the tensor lies as it is written.
        table: Any = 0.0
        if lies is not written:
            is_cut = ((written == PARTIAL) & (lies >= 0)).any(axis=-1)
            table = np.where(is_cut, *kind.times) * self._seconds(written, lies, kind)
        for number, (times, again) in enumerate(kind.reads):
            if not times:
                continue
            own_s = times * self._seconds(lies, wanted[number], kind)
            for earlier in range(number):
                if kind.reads[earlier][1] == again:
                    # A use pays nothing if an earlier use of the pass reads the same copy.
                    own_s = own_s * (wanted[earlier] != wanted[number]).any(axis=-1)
            table = table + own_s
        table = kind.exposed * table
        if kind.price is not None:
            is_again = [again for _, again in kind.reads]
            held_s = price_table(kind.price, written, lies, wanted, is_again, self.mesh)
            table = table + kind.num_bytes * held_s
        found: Table = np.asarray(table, dtype=np.float64)
        return found

    def _seconds(self, before: Any, after: Any, kind: _Kind) -> Table:
        """Compute the time of moves between layouts, for arrays of layouts [..., axes] that broadcast [s]."""
        # Encode each pair of layouts as one integer, so that each distinct pair is priced once. A digit is the dim plus
        # two, because REPLICATED is -1 and PARTIAL is -2.
        num_axes, digits = len(self.mesh.sizes), len(kind.shape) + 2
        radix = digits ** np.arange(num_axes)
        many = digits**num_axes
        pairs = ((before + 2) @ radix) * many + (after + 2) @ radix
        known = self._pair_s[digits, kind.num_bytes, kind.latency_share]
        flat = pairs.ravel().tolist()
        for pair in set(flat).difference(known):
            old, new = (_digits(code, digits, num_axes) for code in divmod(pair, many))
            known[pair] = self._move_s[old, new, kind.num_bytes, kind.latency_share]
        found: Table = np.array([known[pair] for pair in flat]).reshape(pairs.shape)
        return found


def _key_of(part: _Part, choices: Sequence[int]) -> tuple[int, ...]:
    """Return what the table of a part depends on, in numbers: its form, and the rows of its operators."""
    return (part.form, *[choices[op] for op in part.ops])


@lru_cache(maxsize=64)
def _cheapest_order(sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], spared: frozenset[int]) -> Order:
    """Return the order of elimination, which graphs of one model share whatever their sizes are."""
    return cheapest_order(sizes, scopes, most_entries=MOST_ENTRIES, spared=spared)


def _digits(code: int, base: int, count: int) -> Layout:
    """Decode a layout, whose digits are its dims plus two, the lowest first."""
    found = []
    for _ in range(count):
        code, digit = divmod(code, base)
        found.append(digit - 2)
    return tuple(found)


def _where_it_lies(kind: _Kind, written: Any, wanted: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Return the layouts [..., axes] that a tensor may have once its partial sums are added up.

    There is one, that of `reduce_partial_sums`, unless there are readers outside the table (`kind.is_least`). Then each
    axis with partial sums may cut the dim that this reader wants (if all others want it too) or none. Both are
    returned, because the second is sometimes cheaper: for a short message, one all-reduce along two axes costs less
    latency than an all-reduce along the first and a reduce-scatter along the second.
    """
    is_partial = written == PARTIAL
    if not is_partial.any():
        return [written]
    agreed: Any = np.array(REPLICATED)
    if wanted:
        # A dim is agreed on where all readers want the same one.
        is_one: Any = True
        for other in wanted[1:]:
            is_one = is_one & (other == wanted[0])
        agreed = np.where(is_one, wanted[0], REPLICATED)
    lies = np.where(is_partial, agreed, written)
    partial = np.flatnonzero(is_partial.any(axis=tuple(range(written.ndim - 1)))).tolist()
    if not kind.is_least:
        return [_cut_evenly(lies, is_partial, partial, kind.shape, sizes)]
    found = [lies]
    for axis in partial:
        is_open = is_partial & (np.arange(written.shape[-1]) == axis)
        found += [np.where(is_open, REPLICATED, lies) for lies in found]
    return found


def _cut_evenly(lies: Any, is_partial: Any, partial: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> Any:
    """Replicate what axes with partial sums can't cut evenly, in the order of the mesh, for layouts [..., axes]."""
    if all(size % math.prod(sizes) == 0 for size in shape):
        return lies
    found = np.where(is_partial, REPLICATED, lies)
    for axis in partial:
        dim = lies[..., axis]
        ways: Any = sizes[axis]
        for other, size in enumerate(sizes):
            ways = ways * np.where((found[..., other] == dim) & (other != axis), size, 1)
        # A layout without a dim for this axis (REPLICATED) reads the 1 at the end, which its ways divide or not.
        is_even = np.array([*shape, 1])[dim] % ways == 0
        found[..., axis] = np.where(is_even, dim, found[..., axis])
    return found


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
