"""Costs of plans in which all operators of a class are served alike: thousands of plans in a second.

A step is a sum of terms: each operator's compute, and the moves of each tensor. Operators of one class with the same
work are one term, and so are tensors whose makers and readers have the same classes. Repeated layers are therefore
charged once. A term depends on the rows of a few classes and keeps what it has computed. The time equals
`costmodels.sharding.plan.cost_of`, and so does the peak of memory, which needs every tensor at its place in the order
of operators.

A row, the factor that each axis serves, is encoded as one number with digits of base `BASE`, the first axis lowest. A
digit is the factor plus one, and 0 for none.

Letters: o operators, t tensors, k classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from scipy.sparse import coo_array

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.fusion import fused_on, lifetimes
from costmodels.sharding.graph import CONSTANT, STATE, Graph
from costmodels.sharding.joining import latency_shares
from costmodels.sharding.layouts import Layout, local_share, moves
from costmodels.sharding.loop_sums import sums_under, whole_sums
from costmodels.sharding.plan import NONE, MoveTimes, Roofline, reduce_partial_sums, wanted_layout, written_layout
from hardware.arrays import FloatArray
from tuner.planners.sharding.table_forms import Row

BASE = 64
"""Base of the encoded rows: more than the number of factors of any operator, plus one."""


def encode_rows(row: Sequence[int]) -> int:
    """Encode a row as a number."""
    code = 0
    for factor in reversed(row):
        code = code * BASE + factor + 1
    return code


def decode_rows(code: int, num_axes: int) -> Row:
    """Decode a number to a row."""
    found = []
    for _ in range(num_axes):
        code, digit = divmod(code, BASE)
        found.append(digit - 1)
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Time and memory of a plan.

    Attributes:
        step_time_s: Time of one step [s].
        peak_memory_bytes: Most memory that a device holds at a time [bytes].
    """

    step_time_s: float
    peak_memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Term:
    """Operators or tensors that cost the same in every plan.

    Attributes:
        count: Number of these operators or tensors.
        classes: Classes whose rows determine the cost.
        of: Function that selects the rows of `classes` from the rows of all classes.
        charge: Function from these rows to the cost of one operator or tensor.
        known: Numbers of the costs computed so far, by the encoded rows.
    """

    count: int
    classes: tuple[int, ...]
    of: Callable[[Sequence[int]], Any]
    charge: Callable[[dict[int, Row]], _Charge]
    known: dict[Any, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Charge:
    """Cost of one operator or tensor.

    Attributes:
        seconds: Time of its compute or of its moves [s].
        held_bytes: Memory that a device holds for it during its lifetime [bytes].
        own_bytes: Memory that its maker needs beside that [bytes].
        copies: Copies in further layouts: the bytes, the uses that read the copy, and whether it is kept from the first
            to the last of these or made anew for each.
    """

    seconds: float
    held_bytes: float = 0.0
    own_bytes: float = 0.0
    copies: tuple[tuple[float, tuple[int, ...], bool], ...] = ()


class ClassCosts:
    """Terms of a graph on a mesh.

    Attributes:
        graph: Graph of the training step.
        mesh: Mesh of devices that it is planned on.
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh, classes: Sequence[int]) -> None:
        """Prepare the terms.

        Args:
            graph: Graph of the training step.
            mesh: Mesh of devices that it is planned on.
            classes: Class of each operator [o]; operators of one class have rules of the same shape.
        """
        self.graph, self.mesh = graph, mesh
        self._classes = classes
        self._roofline = Roofline(graph, mesh)
        self._move_s = MoveTimes(graph, mesh)
        self._terms: list[_Term] = []
        self._add_operators()
        first_tensor_term = len(self._terms)
        self._term_of = np.zeros(len(graph.tensors), dtype=np.int64)
        self._uses: list[Any] = [None] * first_tensor_term
        self._add_tensors()
        self._lives = self._life_matrix()
        self._makers = np.array([maker for maker, _ in graph.maker], dtype=np.int64)
        # Rows are the seconds, the held bytes and the own bytes of all costs computed so far.
        self._known = np.zeros((3, 1024))
        self._copies: list[tuple[FloatArray, ...] | None] = []
        self._terms_of: list[list[int]] = [[] for _ in range(max(classes, default=-1) + 1)]
        for position, term in enumerate(self._terms):
            for own in term.classes:
                self._terms_of[own].append(position)
        # No code is negative, so that the first call looks up all terms.
        self._last_codes = [-1] * len(self._terms_of)
        self._last_numbers = np.zeros(len(self._terms), dtype=np.int64)

    def figures(self, codes: Sequence[int]) -> Figures:
        """Return the cost of a plan, given by the encoded rows of its classes [k]."""
        numbers = self._numbers(codes)
        return Figures(step_time_s=float(self._known[0, numbers].sum()), peak_memory_bytes=self._peak_bytes(numbers))

    def _numbers(self, codes: Sequence[int]) -> Any:
        """Return the number of each term's cost; only terms with a row changed since the last call are looked up."""
        # A search changes few classes at a time, so that most terms keep their number.
        changed = [own for own, (now, last) in enumerate(zip(codes, self._last_codes, strict=True)) if now != last]
        positions = set().union(*map(self._terms_of.__getitem__, changed)) if changed else set()
        for position in positions:
            term = self._terms[position]
            key = term.of(codes)
            number = term.known.get(key)
            self._last_numbers[position] = self._learn(position, key) if number is None else number
        self._last_codes = list(codes)
        return self._last_numbers

    def _learn(self, position: int, key: Any) -> int:
        """Compute the cost of a term for new rows, and return its number."""
        term = self._terms[position]
        codes = key if len(term.classes) > 1 else (key,)
        num_axes = len(self.mesh.sizes)
        charge = term.charge({own: decode_rows(code, num_axes) for own, code in zip(term.classes, codes, strict=False)})
        number = len(self._copies)
        # Double the table when it is full.
        if number == self._known.shape[1]:
            self._known = np.pad(self._known, ((0, 0), (0, number)))
        self._known[:, number] = term.count * charge.seconds, charge.held_bytes, charge.own_bytes
        self._copies.append(self._place_copies(position, charge) if charge.copies else None)
        term.known[key] = number
        return number

    def _place_copies(self, position: int, charge: _Charge) -> tuple[FloatArray, ...]:
        """Place the begin and the end of copies at operators, for all tensors of a term.

        Returns:
            Operators at which kept copies begin or end, the change of bytes there, operators that make a copy for
                themselves, and the bytes of that copy.
        """
        # Every tensor of the term has these copies, at its own operators: a row of `uses` for each tensor.
        uses = self._uses[position]
        kept = [(num_bytes, readers) for num_bytes, readers, is_kept in charge.copies if is_kept]
        made = [(num_bytes, at) for num_bytes, readers, is_kept in charge.copies if not is_kept for at in readers]
        begun = uses[:, [readers[0] for _, readers in kept]].T.ravel()
        ended = uses[:, [readers[-1] for _, readers in kept]].T.ravel() + 1
        own = uses[:, [at for _, at in made]].T.ravel()
        kept_bytes, own_bytes = (
            np.repeat(np.array([num_bytes for num_bytes, _ in copies], dtype=np.float64), len(uses))
            for copies in (kept, made)
        )
        # Kept copies add bytes at their first reader and remove them behind the last. Others count at their readers
        # only.
        return np.concatenate([begun, ended]), np.concatenate([kept_bytes, -kept_bytes]), own, own_bytes

    def _peak_bytes(self, numbers: Any) -> float:
        """Compute the peak of memory as `costmodels.sharding.plan.live_bytes` does [bytes]."""
        # The memory at an operator is the running sum of all begins and ends of lifetimes and kept copies, plus what
        # the operator needs for itself.
        of_tensors = numbers[self._term_of]
        num_ops = len(self.graph.ops)
        _, held_bytes, own_bytes = self._known[:, of_tensors]
        change = self._lives @ held_bytes
        own = np.bincount(self._makers, weights=own_bytes, minlength=num_ops)
        placed = [copies for copies in map(self._copies.__getitem__, numbers.tolist()) if copies is not None]
        if placed:
            at, change_bytes, own_at, copy_bytes = (np.concatenate(parts) for parts in zip(*placed, strict=True))
            change += np.bincount(at, weights=change_bytes, minlength=num_ops + 1)
            own += np.bincount(own_at, weights=copy_bytes, minlength=num_ops)
        return float((np.cumsum(change[:-1]) + own).max(initial=0.0))

    def _add(self, count: int, classes: set[int], charge: Callable[[dict[int, Row]], _Charge]) -> None:
        scope = tuple(sorted(classes))
        self._terms.append(_Term(count=count, classes=scope, of=itemgetter(*scope), charge=charge, known={}))

    def _add_operators(self) -> None:
        """Add a term for each group of operators with the same class and work."""
        graph = self.graph
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for number, op in enumerate(graph.ops):
            if not op.is_free:
                alike[self._classes[number], op.flop, op.times, op.precision, self._roofline.traffic[number]].append(
                    number
                )
        for several in alike.values():
            first = several[0]
            self._add(len(several), {self._classes[first]}, self._compute(first))

    def _compute(self, number: int) -> Callable[[dict[int, Row]], _Charge]:
        own = self._classes[number]
        return lambda rows: _Charge(seconds=self._roofline.seconds(number, rows[own]))

    def _add_tensors(self) -> None:
        """Add a term for each group of tensors with the same makers, readers and size."""
        graph = self.graph
        alike: dict[Hashable, list[int]] = defaultdict(list)
        turn, shares, whole = graph.first_backward, latency_shares(graph), whole_sums(graph, self.mesh)
        for tensor, uses in enumerate(graph.uses):
            maker, slot = graph.maker[tensor]
            # Only states and constants are charged by rules of their own.
            kind = graph.ops[maker].primitive if graph.ops[maker].primitive in (STATE, CONSTANT) else ""
            # Two uses by the same operator share a copy, so that the key tells which uses have a common operator.
            places: dict[int, int] = {}
            key = (
                self._classes[maker],
                slot,
                kind,
                graph.tensors[tensor].num_bytes,
                graph.tensors[tensor].shape,
                graph.sums[tensor],
                whole[tensor],
                shares[tensor],
                tuple(
                    (
                        self._classes[use.op],
                        use.operand,
                        use.times,
                        use.is_back,
                        kind == STATE and turn is not None and use.op >= turn,
                        places.setdefault(use.op, len(places)),
                    )
                    for use in uses
                ),
            )
            alike[key].append(tensor)
        for several in alike.values():
            self._term_of[several] = len(self._terms)
            first = several[0]
            classes = {self._classes[graph.maker[first][0]], *(self._classes[use.op] for use in graph.uses[first])}
            self._add(len(several), classes, self._movement(first))
            ops = [[use.op for use in graph.uses[tensor]] for tensor in several]
            self._uses.append(np.array(ops, dtype=np.int64).reshape(len(several), -1))

    def _movement(self, tensor: int) -> Callable[[dict[int, Row]], _Charge]:
        """Return the function that charges a tensor's moves and memory, as `costmodels.sharding.plan` counts them."""
        graph, sizes = self.graph, self.mesh.sizes
        maker, slot = graph.maker[tensor]
        uses, num_bytes, shape = graph.uses[tensor], graph.tensors[tensor].num_bytes, graph.tensors[tensor].shape
        made_by, own = graph.ops[maker], self._classes[maker]
        is_constant, is_state = made_by.primitive == CONSTANT, made_by.primitive == STATE
        turn, share = graph.first_backward, latency_shares(graph)[tensor]

        def charge(rows: dict[int, Row]) -> _Charge:
            written = written_layout(made_by.rule, slot, rows[own])
            wanted = [wanted_layout(graph.ops[use.op].rule, use.operand, rows[self._classes[use.op]]) for use in uses]
            lies = reduce_partial_sums(written, () if is_constant else list(dict.fromkeys(wanted)), shape, sizes)
            seconds = (
                sums_under(graph, self.mesh, tensor, written, lies) * self._move_s[written, lies, num_bytes, share]
            )
            # Readers of one layout share a copy, but a state is gathered again in the backward pass.
            readers: dict[tuple[Layout, bool], list[int]] = defaultdict(list)
            for number, (use, layout) in enumerate(zip(uses, wanted, strict=True)):
                if layout != lies:
                    readers[layout, is_state and turn is not None and use.op >= turn].append(number)
            copies = []
            for (layout, _), numbers in readers.items():
                if not is_constant:
                    seconds += uses[numbers[0]].times * self._move_s[lies, layout, num_bytes, share]
                held = [number for number in numbers if not uses[number].is_back]
                is_kept = not is_constant and bool(moves(lies, layout, num_bytes, sizes))
                if not is_kept:
                    # A copy that costs no message is made once for each operator that reads it.
                    held = list({uses[number].op: number for number in reversed(held)}.values())
                if held:
                    copies.append((num_bytes * local_share(layout, sizes), tuple(held), is_kept))
            held_bytes = num_bytes * local_share(lies, sizes)
            return _Charge(
                seconds=seconds,
                held_bytes=held_bytes,
                own_bytes=num_bytes * local_share(written, sizes) - held_bytes,
                copies=tuple(copies),
            )

        return charge

    def _life_matrix(self) -> Any:
        """Return the sparse matrix that adds bytes as a lifetime begins and removes them behind its end [o + 1, t]."""
        at: list[int] = []
        of: list[int] = []
        signs: list[float] = []
        for tensor, life in enumerate(lifetimes(fused_on(self.graph, self.mesh))):
            if life is not None:
                at += [life.first, life.last + 1]
                of += [tensor, tensor]
                # The running sum of a column is 1 during the tensor's lifetime.
                signs += [1.0, -1.0]
        shape = (len(self.graph.ops) + 1, len(self.graph.tensors))
        return coo_array((signs, (at, of)), shape=shape).tocsr()


def rows_served(codes: Sequence[int], classes: Sequence[int], num_axes: int) -> Any:
    """Decode the factors that the axes serve in each operator [o, axes]."""
    rows = np.array([decode_rows(code, num_axes) for code in codes], dtype=np.int64).reshape(-1, num_axes)
    assert (rows >= NONE).all(), "a digit is a factor plus one"
    return rows[np.asarray(classes, dtype=np.int64)]
