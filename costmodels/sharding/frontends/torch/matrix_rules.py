"""Sharding rules and FLOPs of ATen operators on matrices: factorizations, solves, transforms, and products of groups.

All but the products need the matrices whole and map over the dims before them.

A product of groups (`_grouped_mm`) multiplies each group of consecutive rows with a matrix of its own. Its rules need
masks, as those of JAX's product do (`frontends/jax/matrix_rules.py`); `exports/torch_groups.py` runs them on parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from costmodels.sharding.dims import FactorKind, Rule
from costmodels.sharding.frontends import matrix_flops
from costmodels.sharding.frontends.rule_parts import Call, Loops, Shape, batched, same_rule


def _matrices(call: Call) -> Rule:
    """Return the rule of a function of matrices, which stand in the last two dims of the first operand."""
    return batched(call, max(len(call.operands[0]) - 2, 0))


def _solve(call: Call) -> Rule:
    """Return the rule of a solve, with the batch of the result; right-hand sides may lack it."""
    return batched(call, max(max(map(len, call.operands)) - 2, 0))


def _fft(call: Call) -> Rule:
    """Return the rule of a Fourier transform, which needs whole the dims that it transforms."""
    loops = Loops()
    shape, result = call.operands[0], call.results[0]
    dims = {dim % len(shape) for dim in call.params["dim"]}
    place = loops.dims(shape, blocked=dims)
    after = tuple(loops.dim(size, FactorKind.BLOCKED) if dim in dims else place[dim] for dim, size in enumerate(result))
    return loops.rule([place], [after])


def _pairs(call: Call) -> Rule:
    """Return the rule of a view of complex numbers as pairs of real ones, or the other way round."""
    loops = Loops()
    shorter = min(call.operands[0], call.results[0], key=len)
    place = loops.dims(shorter)
    operand, result = (
        (*place, *loops.dims(shape[len(shorter) :], FactorKind.BLOCKED))
        for shape in (call.operands[0], call.results[0])
    )
    return loops.rule([operand], [result])


def _histogram(call: Call) -> Rule:
    """Return the rule of a histogram: elements are counted, unless their range sets the bins."""
    loops = Loops()
    is_fixed = call.params["min"] < call.params["max"]
    operand = loops.dims(call.operands[0], FactorKind.REDUCTION if is_fixed else FactorKind.BLOCKED)
    return loops.rule([operand], [loops.dims(call.results[0], FactorKind.BLOCKED)])


def _groups(call: Call) -> Rule:
    """Return the rule of a product of groups, which end at the offsets.

    Groups are rows of the left operand, columns of the right one, or parts of the contracted dim if both have two dims.
    They are a reduction where an operand has a matrix for each, and a map where the result has. Without offsets both
    operands have one for each, and the product is a batched one.
    """
    left_shape, right_shape, *further = call.operands
    loops = Loops()
    rows, inner, columns = left_shape[-2], left_shape[-1], right_shape[-1]
    place = (loops.dim(rows), loops.dim(columns))
    summed = loops.dim(inner, FactorKind.REDUCTION)
    left, right = (place[0], summed), (summed, place[1])
    count = call.results[0][0] if len(call.results[0]) == 3 else max(left_shape, right_shape, key=len)[0]
    group = loops.dim(count, FactorKind.MAP if len(call.results[0]) == 3 else FactorKind.REDUCTION)
    return loops.rule(
        [
            (group, *left) if len(left_shape) == 3 else left,
            (group, *right) if len(right_shape) == 3 else right,
            *(loops.dims(shape, FactorKind.BLOCKED) for shape in further),
        ],
        [(group, *place) if len(call.results[0]) == 3 else place],
    )


RULES: Mapping[str, Callable[[Call], Rule]] = {
    **same_rule(
        """
        _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_svd cholesky cholesky_inverse geqrf
        linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lu
        linalg_lu_factor_ex linalg_matrix_exp linalg_pinv linalg_qr lu_unpack
        """,
        _matrices,
    ),
    **same_rule(
        """
        _linalg_solve_ex cholesky_solve linalg_ldl_solve linalg_lu_solve linalg_solve_triangular ormqr triangular_solve
        """,
        _solve,
    ),
    **same_rule("_fft_c2c _fft_c2r _fft_r2c", _fft),
    **same_rule("view_as_complex view_as_real", _pairs),
    "_grouped_mm": _groups,
    "histc": _histogram,
}
"""Rules of operators on matrices."""


def _flop_of_groups(call: Call) -> float:
    """Return the FLOPs of a product of groups, in which each row, or each column, is multiplied with one matrix."""
    left, right = call.operands[:2]
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2.0 * batch * left[-2] * left[-1] * right[-1]


def _flop_of_fft(call: Call) -> float:
    # The longer side of a transform to or from real numbers is the real one.
    shape: Shape = max(call.operands[0], call.results[0], key=math.prod)
    dims = {dim % len(shape) for dim in call.params["dim"]}
    lengths = [shape[dim] for dim in dims]
    count = math.prod(shape) // math.prod(lengths)
    return float(count) * matrix_flops.fourier(lengths, is_real=call.primitive != "_fft_c2c")


def _per_matrix(flop: Callable[[Call, int, int], float]) -> Callable[[Call], float]:
    """Return the FLOPs of a call from those of one matrix of its batch, given its rows and columns."""
    return lambda call: math.prod(call.operands[0][:-2]) * flop(call, *call.operands[0][-2:])


def _flop_of_qr(call: Call, rows: int, columns: int) -> float:
    width = call.results[0][-1]
    return matrix_flops.qr(rows, columns) + matrix_flops.reflectors(rows, width, min(rows, columns))


def _with_lu(_: Call, rows: int, columns: int) -> float:
    return matrix_flops.lu(rows, columns)


def _flop_of_solve(call: Call) -> float:
    """Return the FLOPs of a triangular solve, or of the two that follow a factorization, and of the factorization."""
    matrix, sides = call.operands[0], call.operands[-1]
    if call.primitive in ("cholesky_solve", "triangular_solve"):
        matrix, sides = sides, matrix
    size = matrix[-1]
    count = math.prod(call.results[0]) // size
    solves = 1 if call.primitive in ("linalg_solve_triangular", "triangular_solve") else 2
    made = math.prod(matrix[:-2]) * matrix_flops.lu(size, size) if call.primitive == "_linalg_solve_ex" else 0.0
    return made + solves * matrix_flops.triangular_solve(size, count)


FLOPS: Mapping[str, Callable[[Call], float]] = {
    "_grouped_mm": _flop_of_groups,
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _flop_of_fft),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "linalg_lu", "linalg_lu_factor_ex"), _per_matrix(_with_lu)),
    **dict.fromkeys(("cholesky", "linalg_cholesky_ex"), _per_matrix(lambda _, rows, __: matrix_flops.cholesky(rows))),
    "_linalg_eigh": _per_matrix(lambda call, rows, _: matrix_flops.eigh(rows, has_vectors=call.params["compute_v"])),
    "_linalg_svd": _per_matrix(
        lambda call, rows, columns: matrix_flops.svd(rows, columns, has_vectors=call.params["compute_uv"])
    ),
    "linalg_pinv": _per_matrix(lambda _, rows, columns: matrix_flops.svd(rows, columns)),
    "linalg_eig": _per_matrix(lambda _, rows, __: matrix_flops.eig(rows)),
    "_linalg_eigvals": _per_matrix(lambda _, rows, __: matrix_flops.eig(rows, has_vectors=False)),
    "geqrf": _per_matrix(lambda _, rows, columns: matrix_flops.qr(rows, columns)),
    "linalg_householder_product": _per_matrix(
        lambda call, rows, columns: matrix_flops.reflectors(rows, columns, call.operands[1][-1])
    ),
    "linalg_inv_ex": _per_matrix(
        lambda _, rows, columns: matrix_flops.lu(rows, columns) + 2 * matrix_flops.triangular_solve(rows, columns)
    ),
    "linalg_qr": _per_matrix(_flop_of_qr),
    **dict.fromkeys(
        ("_linalg_solve_ex", "cholesky_solve", "linalg_lu_solve", "linalg_solve_triangular", "triangular_solve"),
        _flop_of_solve,
    ),
}
"""FLOPs of operators on matrices; those without an entry only move data."""
