"""Sharding rules and FLOPs of primitives on matrices: factorizations, solves, transforms, and products of groups.

All but the products need the last dims whole and map over the dims before them.

A product of groups (`ragged_dot_general`) multiplies each group of consecutive rows with a matrix of its own. Its rules
need masks, as partitioners do. With a part of the rows, a device multiplies those that fall into the part, each with
the matrix of its group. With a part of the groups, it multiplies the rows of these groups, uses zeros for the others,
and the results are added up. The sizes of the groups are few, and every device needs all of them to know where its rows
begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from costmodels.sharding.dims import FactorKind, Rule
from costmodels.sharding.frontends import matrix_flops
from costmodels.sharding.frontends.rule_parts import Call, Loops, Shape, batched, same_rule


def _matrices(call: Call) -> Rule:
    """Return the rule of a function of matrices, which stand in the last two dims of the first operand."""
    return batched(call, len(call.operands[0]) - 2)


def _vectors(call: Call) -> Rule:
    """Return the rule of a function of vectors, which stand in the last dim of the first operand."""
    return batched(call, len(call.operands[0]) - 1)


def _whole(call: Call) -> Rule:
    return batched(call, 0)


def _solve(call: Call) -> Rule:
    """Return the rule of a solve, whose right-hand sides are independent of each other.

    They are columns of the last operand, or rows if the matrix stands on the right.
    """
    *matrices, sides = call.operands
    dim = len(sides) - (1 if call.params.get("left_side", True) else 2)
    loops = Loops()
    batch = loops.dims(sides[:-2])
    place = tuple(
        loops.dim(size, FactorKind.MAP if at == dim else FactorKind.BLOCKED)
        for at, size in enumerate(sides[-2:], len(batch))
    )
    return loops.rule(
        [(*batch, *loops.dims(shape[len(batch) :], FactorKind.BLOCKED)) for shape in matrices] + [(*batch, *place)],
        [(*batch, *place)],
    )


def _fft(call: Call) -> Rule:
    return batched(call, len(call.operands[0]) - len(call.params["fft_lengths"]))


def _ragged_dot_general(call: Call) -> Rule:
    """Return the rule of a product of groups, whose groups are parts of a dim of the left operand.

    If that is a free dim, the right operand has a matrix for each group, and the groups are a reduction. If it is
    contracted, the result has a matrix for each group, and the groups are a map. A batch dim makes it a plain product.
    """
    loops = Loops()
    numbers = call.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    left_shape, right_shape, *sizes = call.operands
    (ragged,), grouped = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    left: list[tuple[int, ...]] = [()] * len(left_shape)
    right: list[tuple[int, ...]] = [()] * len(right_shape)
    for one, other in zip(left_batch, right_batch, strict=True):
        left[one] = right[other] = loops.dim(left_shape[one])
    for one, other in zip(left_sum, right_sum, strict=True):
        left[one] = right[other] = loops.dim(left_shape[one], FactorKind.REDUCTION)
    result = [left[dim] for dim in left_batch]
    for dims, shape, taken in (
        (left, left_shape, (*left_batch, *left_sum)),
        (right, right_shape, (*right_batch, *right_sum, *grouped)),
    ):
        for dim, size in enumerate(shape):
            if dim not in taken:
                dims[dim] = loops.dim(size)
                result.append(dims[dim])
    for dim in grouped:
        right[dim] = loops.dim(right_shape[dim], FactorKind.REDUCTION)
    if ragged in left_sum:
        result.insert(0, loops.dim(call.results[0][0]))
    return loops.rule(
        [tuple(left), tuple(right), *(loops.dims(shape, FactorKind.BLOCKED) for shape in sizes)], [tuple(result)]
    )


RULES: Mapping[str, Callable[[Call], Rule]] = {
    **same_rule(
        "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd tridiagonal", _matrices
    ),
    **same_rule("cholesky_update symmetric_product", _whole),
    "fft": _fft,
    "lu_pivots_to_permutation": _vectors,
    "ragged_dot_general": _ragged_dot_general,
    **same_rule("triangular_solve tridiagonal_solve", _solve),
}
"""Rules of primitives on matrices."""

COMPUTED_WHOLE_BY_XLA = frozenset(RULES) - {"cholesky_update", "ragged_dot_general", "symmetric_product"}
"""Primitives that XLA's partitioner does not cut on every platform; most of them are calls of a library."""


def _matrix_of(call: Call) -> tuple[int, int]:
    rows, columns = call.operands[0][-2:]
    return rows, columns


def _has_vectors(call: Call, *keys: str) -> bool:
    return any(call.params.get(key, True) for key in keys)


def _flop_of_reflectors(call: Call) -> float:
    rows, columns = _matrix_of(call)
    return matrix_flops.reflectors(rows, columns, call.operands[1][-1])


def _flop_of_qr(call: Call) -> float:
    rows, columns = _matrix_of(call)
    width = call.results[0][-1]
    return matrix_flops.qr(rows, columns) + matrix_flops.reflectors(rows, width, min(rows, columns))


def _flop_of_solve(call: Call) -> float:
    sides = call.operands[-1]
    count = sides[-1] if call.params["left_side"] else sides[-2]
    return matrix_flops.triangular_solve(call.operands[0][-1], count)


def _per_matrix(flop: Callable[[Call], float]) -> Callable[[Call], float]:
    """Return the FLOPs of a call from those of one matrix of its batch."""
    return lambda call: math.prod(call.operands[0][:-2]) * flop(call)


def _flop_of_fft(call: Call) -> float:
    lengths = call.params["fft_lengths"]
    batch: Shape = call.operands[0][: len(call.operands[0]) - len(lengths)]
    is_real = call.operands[0] != call.results[0] or int(call.params["fft_type"]) > 1
    return math.prod(batch) * matrix_flops.fourier(lengths, is_real=is_real)


def _flop_of_groups(call: Call) -> float:
    """Return the FLOPs of a product of groups, in which each row is multiplied with one matrix."""
    numbers = call.params["ragged_dot_dimension_numbers"]
    (_, right_sum), (_, right_batch) = numbers.dot_dimension_numbers
    right = call.operands[1]
    taken = (*right_sum, *right_batch, *numbers.rhs_group_dimensions)
    free = math.prod(size for dim, size in enumerate(right) if dim not in taken)
    return 2.0 * math.prod(call.operands[0]) * free


FLOPS: Mapping[str, Callable[[Call], float]] = {
    "cholesky": _per_matrix(lambda call: matrix_flops.cholesky(_matrix_of(call)[0])),
    "eig": _per_matrix(
        lambda call: matrix_flops.eig(
            _matrix_of(call)[0],
            has_vectors=_has_vectors(call, "compute_left_eigenvectors", "compute_right_eigenvectors"),
        )
    ),
    "eigh": _per_matrix(lambda call: matrix_flops.eigh(_matrix_of(call)[0])),
    "fft": _flop_of_fft,
    **dict.fromkeys(("geqp3", "geqrf"), _per_matrix(lambda call: matrix_flops.qr(*_matrix_of(call)))),
    "hessenberg": _per_matrix(lambda call: matrix_flops.hessenberg(_matrix_of(call)[0])),
    "householder_product": _per_matrix(_flop_of_reflectors),
    "lu": _per_matrix(lambda call: matrix_flops.lu(*_matrix_of(call))),
    "qr": _per_matrix(_flop_of_qr),
    "ragged_dot_general": _flop_of_groups,
    "schur": _per_matrix(
        lambda call: matrix_flops.eig(_matrix_of(call)[0], has_vectors=_has_vectors(call, "compute_schur_vectors"))
    ),
    "svd": _per_matrix(lambda call: matrix_flops.svd(*_matrix_of(call), has_vectors=_has_vectors(call, "compute_uv"))),
    "triangular_solve": _per_matrix(_flop_of_solve),
    "tridiagonal": _per_matrix(lambda call: matrix_flops.tridiagonal(_matrix_of(call)[0])),
    "tridiagonal_solve": lambda call: (
        math.prod(call.operands[0][:-1]) * matrix_flops.tridiagonal_solve(call.operands[0][-1], call.operands[-1][-1])
    ),
}
"""FLOPs of primitives on matrices; those without an entry only move data."""
