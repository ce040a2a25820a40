"""Sharding rules of ATen operators that look elements up or write them where indices say.

Their rules partition factors that need masks, as partitioners do. Rows that `embedding`, `index` and `gather` look up:
each device looks up the rows that it has, uses zeros for the others, and the results are added up. Rows that
`index_put`, `scatter` and the like, and `embedding_dense_backward` write: each device writes the values that fall into
its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from costmodels.sharding.dims import FactorKind, Place, Rule
from costmodels.sharding.frontends.rule_parts import Call, Loops, Shape, blocked_rule, broadcast, same_rule
from costmodels.sharding.frontends.torch.calls import Operand, dims_of


def _embedding(call: Call) -> Rule:
    """Return the rule of a lookup of rows, which is a reduction over the table's rows (see the module)."""
    loops = Loops()
    (rows, width), indices = call.operands
    places, hidden = loops.dims(indices), loops.dim(width)
    return loops.rule([(loops.dim(rows, FactorKind.REDUCTION), hidden), places], [(*places, hidden)])


def _embedding_backward(call: Call) -> Rule:
    """Return the rule of an embedding's gradient, which adds up the gradients of all tokens of a row."""
    loops = Loops()
    indices = call.operands[1]
    kind = FactorKind.BLOCKED if call.params["scale_grad_by_freq"] else FactorKind.REDUCTION
    places = loops.dims(indices, kind)
    rows, width = call.results[0]
    hidden = loops.dim(width)
    return loops.rule([(*places, hidden), places], [(loops.dim(rows), hidden)])


def _gather(call: Call) -> Rule:
    """Return the rule of a gather, which reads one element of the operand for each element of the index.

    The index differs from the operand along one dim, and may be shorter along others.
    """
    loops = Loops()
    shape, index = call.operands
    dims = dims_of(call)
    place, operand = _place_index(loops, shape, index, dims)
    operand |= {dim: loops.dim(shape[dim], FactorKind.REDUCTION) for dim in dims}
    return loops.rule([tuple(operand[dim] for dim in range(len(shape))), place], [place])


def _scatter(call: Call) -> Rule:
    """Return the rule of a scatter; without addition, later elements overwrite earlier ones, so their order matters."""
    loops = Loops()
    shape, index, *sources = call.operands
    dims = dims_of(call)
    kind = FactorKind.REDUCTION if call.primitive == "scatter_add" else FactorKind.BLOCKED
    place, operand = _place_index(loops, shape, index, dims, kind)
    operand |= {dim: loops.dim(shape[dim]) for dim in dims}
    whole = tuple(operand[dim] for dim in range(len(shape)))
    # Sources that are larger than the index are only partly read.
    is_alike = all(source in (index, ()) for source in sources)
    if not is_alike:
        return blocked_rule(call)
    return loops.rule([whole, place, *(place if source else () for source in sources)], [whole])


def _bucketize(call: Call) -> Rule:
    """Return the rule of a search in sorted boundaries, which every device has whole.

    Sequences with leading dims are searched for the rows of the values that lie beside them.
    """
    loops = Loops()
    slots = {
        name: call.params[name].slot
        for name in ("self", "boundaries", "sorted_sequence", "sorter")
        if isinstance(call.params.get(name), Operand)
    }
    values = call.operands[slots["self"]]
    place = loops.dims(values)
    places: list[Place] = [()] * len(call.operands)
    places[slots.pop("self")] = place
    for slot in slots.values():
        shape = call.operands[slot]
        lead = place[: len(shape) - 1]
        places[slot] = (*lead, loops.dim(shape[-1], FactorKind.BLOCKED))
    return loops.rule(places, [place])


def _place_index(
    loops: Loops, shape: Shape, index: Shape, dims: Collection[int], kind: FactorKind = FactorKind.MAP
) -> tuple[Place, dict[int, tuple[int, ...]]]:
    """Return the place of an index, and the factors of the operand's other dims, by dim."""
    # A dim on which the index is shorter than the operand reads a prefix, which no equal split covers.
    place: list[tuple[int, ...]] = []
    operand: dict[int, tuple[int, ...]] = {}
    for dim, size in enumerate(index):
        if dim in dims:
            place.append(loops.dim(size, kind))
        elif size == shape[dim]:
            place.append(loops.dim(size))
            operand[dim] = place[-1]
        else:
            place.append(loops.dim(size, FactorKind.BLOCKED))
            operand[dim] = loops.dim(shape[dim], FactorKind.BLOCKED)
    return tuple(place), operand


def _index(call: Call) -> Rule:
    """Return the rule of advanced indexing; the index tensors are broadcast to a common shape."""
    loops = Loops()
    shape, indexed, common = _read_indices(call)
    result = loops.dims(call.results[0])
    # The common shape of the indices replaces the indexed dims in the result.
    lead = _count_leading(indexed)
    spread = result[lead : lead + len(common)]
    rest = iter((*result[:lead], *result[lead + len(common) :]))
    operand = [
        loops.dim(size, FactorKind.REDUCTION) if dim in indexed else next(rest) for dim, size in enumerate(shape)
    ]
    indices = [broadcast(spread, common, call.operands[slot]) for slot in indexed.values()]
    return loops.rule([tuple(operand), *indices], [result])


def _index_put(call: Call) -> Rule:
    """Return the rule of `index_put`.

    Without accumulation, later elements overwrite earlier ones, so their order matters.
    """
    loops = Loops()
    shape, indexed, common = _read_indices(call)
    # All indexed positions together are one list of writes into the operand.
    spread = loops.dims(common, FactorKind.REDUCTION if call.params["accumulate"] else FactorKind.BLOCKED)
    operand = loops.dims(shape)
    rest = [place for dim, place in enumerate(operand) if dim not in indexed]
    sizes = [size for dim, size in enumerate(shape) if dim not in indexed]
    lead = _count_leading(indexed)
    written = (*rest[:lead], *spread, *rest[lead:])
    values = broadcast(written, (*sizes[:lead], *common, *sizes[lead:]), call.operands[-1])
    indices = [broadcast(spread, common, call.operands[slot]) for slot in indexed.values()]
    return loops.rule([operand, *indices, values], [operand])


def _read_indices(call: Call) -> tuple[Shape, dict[int, int], Shape]:
    """Return the operand's shape, the slot of each indexed dim's index tensor, and the indices' common shape."""
    indexed = {dim: one.slot for dim, one in enumerate(call.params["indices"]) if one is not None}
    common = tuple(np.broadcast_shapes(*(call.operands[slot] for slot in indexed.values())))
    return call.operands[0], indexed, common


def _count_leading(indexed: Mapping[int, int]) -> int:
    """Return the number of result dims before the indices' common shape; 0 if the indexed dims are not adjacent."""
    first, last = min(indexed), max(indexed)
    return first if last - first + 1 == len(indexed) else 0


RULES: Mapping[str, Callable[[Call], Rule]] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _gather,
    **same_rule("scatter scatter_add scatter_reduce", _scatter),
    **same_rule("bucketize searchsorted", _bucketize),
    "index": _index,
    "index_put": _index_put,
}
"""Rules of these operators by name."""
