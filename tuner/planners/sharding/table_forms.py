"""Forms of cost tables: what tables of many tensors, graphs and meshes have in common, whatever anything costs.

Rows of operators bring about layouts, and a table has an entry for each combination of them. Which moves an entry pays
follows from the layouts alone. Sizes of tensors, numbers of micro-batches and links only say what a move costs. So
forms are found once, and every table is priced by looking up its moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.sharding.dims import Rule
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout
from costmodels.sharding.plan import wanted_layout, written_layout

Row = tuple[int, ...]
"""Factor of an operator that each mesh axis divides, or NONE."""

Moves = NDArray[np.intp]
"""Place in `Pattern.pairs` of the move that each combination of rows pays [rows of each operator in scope]."""

Slot = tuple[int, int, bool, int]
"""Number of a rule, index of its result or operand, whether it is a result, and the operator among those of a part."""

Even = tuple[tuple[bool, ...], ...] | None
"""Whether axes cut each dim of a tensor evenly, by the set of axes as bits; None where all axes together cut all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shape:
    """Operators and layouts that a table depends on; equal ones are one object.

    Attributes:
        number: Number of the shape.
        scope: Operators whose rows change a layout, counted among those of the part.
        places: Place of each slot's operator among them, or -1 if the slot has one layout only.
        layouts: Layouts of each slot.
        lengths: Number of rows of each operator of the scope.
        summed: Dims that a reader wants to be cut by an axis along which some rows leave partial sums.
    """

    number: int
    scope: tuple[int, ...]
    places: tuple[int, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    lengths: tuple[int, ...]
    summed: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What tensors of one pattern have in common.

    Attributes:
        of: For each use whether it pays moves, and whether it reads a state in the backward pass.
        is_least: Whether partial sums may end in any layout that a reader outside the table could want.
        even: Which axes cut which dims evenly.
    """

    of: tuple[tuple[bool, bool], ...]
    is_least: bool
    even: Even


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class End:
    """Layout in which the partial sums of a tensor may end, and the moves to there and from there.

    Attributes:
        lies: Layouts [..., axes].
        sums: Moves that add up partial sums; None if there are none.
        is_cut: Whether an axis cuts partial sums that it adds up.
        reads: Moves of each use that pays any.
    """

    lies: Any
    sums: Moves | None
    is_cut: NDArray[np.bool_]
    reads: tuple[tuple[int, Moves], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pattern:
    """Moves of a table.

    Attributes:
        pairs: Numbers of the changes of layout that occur (`Forms.pairs`).
        written: Layouts in which the tensor is written [..., axes].
        wanted: Layouts in which each use reads it.
        ends: Layouts in which its partial sums may end, of which the cheapest counts.
    """

    pairs: tuple[int, ...]
    written: Any
    wanted: tuple[Any, ...]
    ends: tuple[End, ...]


class Forms:
    """Forms of tables on meshes of any sizes, found on first use and kept.

    Numbers stand for what is compared often, because they are faster keys.

    Attributes:
        choices: Numbers of rows that an operator may take.
        pairs: Changes of layout, by their numbers.
        shapes: Shapes of parts, by the number of a part's slots and those of its operators' rows.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.choices: dict[tuple[Row, ...], int] = {}
        self.pairs: list[tuple[Layout, Layout]] = []
        self.shapes: dict[tuple[int, Any], Shape] = {}
        self._number_of_pair: dict[tuple[Layout, Layout], int] = {}
        self._numbers: dict[object, int] = {}
        self._layouts: dict[tuple[int, int, bool, int], tuple[Layout, ...]] = {}
        self._known_shapes: dict[tuple[object, ...], Shape] = {}
        self._patterns: dict[tuple[object, ...], Pattern] = {}

    def number_of(self, form: object) -> int:
        """Return the number of anything that can be compared."""
        return self._numbers.setdefault(form, len(self._numbers))

    def number_of_rule(self, rule: Rule) -> int:
        """Return the number of a rule, the same for rules that differ in sizes and names alone."""
        return self.number_of((rule.operand_dims, rule.result_dims))

    def layouts(
        self, number: int, rule: Rule, slot: int, is_maker: bool, rows: tuple[Row, ...], choice: int
    ) -> tuple[Layout, ...]:
        """Return the layout in which a slot of a rule writes or reads its tensor, for each row."""
        key = (number, slot, is_maker, choice)
        found = self._layouts.get(key)
        if found is None:
            layout_of = written_layout if is_maker else wanted_layout
            found = self._layouts[key] = tuple([layout_of(rule, slot, row) for row in rows])
        return found

    def shape(self, slots: Sequence[Slot], layouts: Sequence[tuple[Layout, ...]], lengths: Sequence[int]) -> Shape:
        """Return the shape of a part.

        Args:
            slots: Its maker, followed by its readers.
            layouts: Layouts of each of them.
            lengths: Number of rows of each of its operators.
        """
        # A layout that no row changes needs no axis in the table.
        kept = tuple([own[:1] if own.count(own[0]) == len(own) else own for own in layouts])
        scope = tuple(sorted({op for (_, _, _, op), own in zip(slots, kept, strict=True) if len(own) > 1}))
        at = {op: place for place, op in enumerate(scope)}
        places = tuple([at[op] if len(own) > 1 else -1 for (_, _, _, op), own in zip(slots, kept, strict=True)])
        key = (scope, places, kept, tuple([lengths[op] for op in scope]))
        found = self._known_shapes.get(key)
        if found is None:
            found = self._known_shapes[key] = Shape(
                number=len(self._known_shapes),
                scope=scope,
                places=places,
                layouts=kept,
                lengths=key[3],
                summed=_summed(kept),
            )
        return found

    def pattern(self, shape: Shape, reads: Reads) -> Pattern:
        """Return the moves of a table."""
        # Only dims along which sums may be scattered ask which axes cut them evenly.
        even = None if reads.even is None else tuple([reads.even[dim] for dim in shape.summed])
        key = (shape.number, reads.of, reads.is_least, None if even is None or all(map(all, even)) else even)
        found = self._patterns.get(key)
        if found is None:
            found = self._patterns[key] = self._find_pattern(shape, reads)
        return found

    def _find_pattern(self, shape: Shape, reads: Reads) -> Pattern:
        """Find the moves for all rows at once.

        Layouts follow the rules of `costmodels.sharding.plan.reduce_partial_sums` and `Plan.copies`.
        """
        num_axes, num_places = len(shape.layouts[0][0]), len(shape.scope)

        def lay_out(place: int, own: tuple[Layout, ...]) -> Any:
            """Return the layouts of a slot, with its rows along the axis of its operator."""
            digits = np.array(own, dtype=np.int64).reshape(len(own), num_axes)
            return digits.reshape(*(len(own) if at == place else 1 for at in range(num_places)), num_axes)

        written, *wanted = map(lay_out, shape.places, shape.layouts)
        # A pair of layouts is a number, too. A digit is the dim plus two, because REPLICATED is -1 and PARTIAL is -2.
        base = max(REPLICATED, *(dim for own in shape.layouts for layout in own for dim in layout)) + 3
        radix = base ** np.arange(num_axes)
        many = base**num_axes
        places: dict[int, int] = {}

        def moves(before: Any, after: Any) -> Any:
            codes = ((before + 2) @ radix) * many + (after + 2) @ radix
            flat = [places.setdefault(code, len(places)) for code in codes.ravel().tolist()]
            return np.array(flat, dtype=np.intp).reshape(codes.shape)

        stays = places.setdefault(0, 0)
        ends = []
        for lies in _where_it_lies(written, wanted, reads):
            paid = []
            for use, (is_paid, again) in enumerate(reads.of):
                if not is_paid:
                    continue
                own = moves(lies, wanted[use])
                for earlier in range(use):
                    if reads.of[earlier][1] == again:
                        # A use pays nothing if an earlier use of the pass reads the same copy.
                        own = np.where((wanted[earlier] != wanted[use]).any(axis=-1), own, stays)
                paid.append((use, own))
            # Without partial sums the tensor lies as it is written.
            sums = None if lies is written else moves(written, lies)
            is_cut = ((written == PARTIAL) & (lies >= 0)).any(axis=-1)
            ends.append(End(lies=lies, sums=sums, is_cut=is_cut, reads=tuple(paid)))
        pairs = [tuple(_digits(code, base, num_axes) for code in divmod(pair, many)) for pair in places]
        return Pattern(
            pairs=tuple([self._pair(before, after) for before, after in pairs]),
            written=written,
            wanted=tuple(wanted),
            ends=tuple(ends),
        )

    def _pair(self, before: Layout, after: Layout) -> int:
        number = self._number_of_pair.setdefault((before, after), len(self.pairs))
        if number == len(self.pairs):
            self.pairs.append((before, after))
        return number


def _summed(layouts: Sequence[tuple[Layout, ...]]) -> tuple[int, ...]:
    written, *wanted = layouts
    partial = {axis for layout in written for axis, dim in enumerate(layout) if dim == PARTIAL}
    return tuple(sorted({layout[axis] for own in wanted for layout in own for axis in partial} - {REPLICATED}))


def evenness(shape: Sequence[int], sizes: tuple[int, ...]) -> Even:
    """Return for each dim of a tensor the sets of mesh axes that cut it into equal parts; see `Even`."""
    count = math.prod(sizes)
    if all(size % count == 0 for size in shape):
        return None
    return tuple([_even_by_axes(math.gcd(size, count), sizes) for size in shape])


@lru_cache(maxsize=2**12)
def _even_by_axes(size: int, sizes: tuple[int, ...]) -> tuple[bool, ...]:
    ways = [1]
    for own in sizes:
        ways += [own * others for others in ways]
    return tuple([size % each == 0 for each in ways])


def _digits(code: int, base: int, count: int) -> Layout:
    """Decode a layout, whose digits are its dims plus two, the lowest first."""
    found = []
    for _ in range(count):
        code, digit = divmod(code, base)
        found.append(digit - 2)
    return tuple(found)


def _where_it_lies(written: Any, wanted: Sequence[Any], reads: Reads) -> list[Any]:
    """Return the layouts [..., axes] that a tensor may have once its partial sums are added up.

    There is one, that of `reduce_partial_sums`, unless there are readers outside the table (`Reads.is_least`). Then
    each axis with partial sums may cut the dim that this reader wants (if all others want it too) or none. Both are
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
    if not reads.is_least:
        return [lies if reads.even is None else _cut_evenly(lies, is_partial, partial, reads.even)]
    found = [lies]
    for axis in partial:
        is_open = is_partial & (np.arange(written.shape[-1]) == axis)
        found += [np.where(is_open, REPLICATED, lies) for lies in found]
    return found


def _cut_evenly(lies: Any, is_partial: Any, partial: Sequence[int], even: Sequence[tuple[bool, ...]]) -> Any:
    """Replicate what axes with partial sums can't cut evenly, in the order of the mesh, for layouts [..., axes]."""
    # A layout without a dim for this axis (REPLICATED) reads the last row, whose answer changes nothing.
    is_even = np.array([*even, even[0]])
    found = np.where(is_partial, REPLICATED, lies)
    for axis in partial:
        dim = lies[..., axis]
        together: Any = 1 << axis
        for other in range(lies.shape[-1]):
            if other != axis:
                together = together + np.where(found[..., other] == dim, 1 << other, 0)
        found[..., axis] = np.where(is_even[dim, together], dim, found[..., axis])
    return found
