"""Operators of StableHLO and CHLO as functions of `jax.lax`.

A function takes an operator and the values of its operands, and returns the values of its results. It gives the values
that the specification asks for, and where JAX has a primitive of its own for what a region computes, that primitive.

Sources: the StableHLO specification (https://openxla.org/stablehlo/spec), and JAX's lowering of its primitives, of
which this is the inverse.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jaxlib.mlir import ir

from costmodels.sharding.frontends.jax.stablehlo.files import attribute
from costmodels.sharding.frontends.jax.stablehlo.types import constant_of

Function = Callable[..., Any]


class Unreadable(Exception):  # noqa: N818 # it is a statement about an operator, made into an error where its place is known
    """Statement that an operator cannot be read, to be completed by its name."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Called:
    """An operator with the values of its operands.

    Attributes:
        op: Operator.
        operands: Values of its operands.
        results: Shapes and types of its results.
        region: Function that runs one of the operator's regions.
    """

    op: ir.Operation
    operands: Sequence[Any]
    results: Sequence[jax.ShapeDtypeStruct]
    region: Callable[[int], Function]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute as Python's own value."""
        return attribute(self.op, name, default)


def read_operator(called: Called) -> Sequence[Any]:
    """Return the values of an operator's results.

    Raises:
        Unreadable: The operator, or this form of it, is not known.
    """
    name = called.op.name
    if name in ELEMENTWISE:
        return [ELEMENTWISE[name](*_narrowed(called))]
    if name not in OPERATORS:
        raise Unreadable("is an operator that Meshtune does not know")
    found = OPERATORS[name](called)
    return found if isinstance(found, (list, tuple)) else [found]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spread:
    """A tensor that has one element along some dims, and is repeated along them.

    Operators of two operands do so by themselves in JAX, which lowers this to an operator of its own.

    Attributes:
        narrow: The tensor with one element along these dims, or a scalar.
        shape: Shape with all of them.
    """

    narrow: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """Type of the elements."""
        return self.narrow.dtype

    @property
    def whole(self) -> Any:
        """The repeated tensor."""
        return lax.broadcast_in_dim(self.narrow, self.shape, range(len(self.narrow.shape)))


def _narrowed(called: Called) -> Sequence[Any]:
    """Return an elementwise operator's operands, without repetitions that JAX's operator makes by itself."""
    operands, shape = list(called.operands), called.results[0].shape
    for number, operand in enumerate(operands):
        if isinstance(operand, Spread):
            others = [each.shape for at, each in enumerate(_narrow_all(operands)) if at != number]
            is_spread = len(operands) == 2 and np.broadcast_shapes(operand.narrow.shape, *others) == shape
            operands[number] = operand.narrow if is_spread else operand.whole
    return operands


def _narrow_all(operands: Sequence[Any]) -> list[Any]:
    return [each.narrow if isinstance(each, Spread) else each for each in operands]


STABLEHLO = """
    abs add and=bitwise_and atan2 cbrt ceil clamp complex cosine=cos count_leading_zeros=clz divide=div exponential=exp
    exponential_minus_one=expm1 floor imag is_finite log log_plus_one=log1p logistic maximum=max minimum=min
    multiply=mul negate=neg not=bitwise_not or=bitwise_or popcnt=population_count power=pow real remainder=rem rsqrt
    select shift_left shift_right_arithmetic shift_right_logical sign sine=sin sqrt subtract=sub tan tanh
    xor=bitwise_xor
"""
"""Elementwise operators of StableHLO, with their names in `jax.lax` where these are others."""
CHLO = """
    acos acosh asin asinh atan atanh bessel_i1e cosh digamma erf erf_inv erfc lgamma next_after=nextafter polygamma
    sinh square tan zeta
"""
"""Those of CHLO, its client dialect."""


def _of_lax(dialect: str, words: str) -> dict[str, Function]:
    pairs = (word.partition("=") for word in words.split())
    return {f"{dialect}.{name}": getattr(lax, own or name) for name, _, own in pairs}


ELEMENTWISE: Mapping[str, Function] = {
    **_of_lax("stablehlo", STABLEHLO),
    **_of_lax("chlo", CHLO),
    "stablehlo.round_nearest_afz": functools.partial(lax.round, rounding_method=lax.RoundingMethod.AWAY_FROM_ZERO),
    "stablehlo.round_nearest_even": functools.partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN),
}
"""Operators that compute each element from the operands' elements at the same index."""


def _compare(called: Called) -> Any:
    direction, kind = called.get("comparison_direction"), called.get("compare_type")
    if kind == "TOTALORDER":
        compare = {"EQ": lax.eq_to_p, "LT": lax.lt_to_p, "LE": lax.le_to_p}.get(direction)
        if compare is None:
            raise Unreadable(f"compares by {direction} in the total order of floats, which JAX cannot")
        return compare.bind(*called.operands)
    compare = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}[direction]
    return compare(*_narrowed(called))


def _dot_general(called: Called) -> Any:
    numbers = called.get("dot_dimension_numbers")
    one, two = called.operands
    return lax.dot_general(
        one,
        two,
        dimension_numbers=(
            (tuple(numbers.lhs_contracting_dimensions), tuple(numbers.rhs_contracting_dimensions)),
            (tuple(numbers.lhs_batching_dimensions), tuple(numbers.rhs_batching_dimensions)),
        ),
        precision=_precision(called),
        preferred_element_type=called.results[0].dtype,
    )


def _precision(called: Called) -> Any:
    words = called.get("precision_config")
    return None if not words or set(words) == {"DEFAULT"} else tuple(lax.Precision[word] for word in words)


def _convolution(called: Called) -> Any:
    data, weight = called.operands
    numbers, rank = called.get("dimension_numbers"), len(data.shape) - 2
    spatial = tuple(numbers.kernel_spatial_dimensions)
    reversed_dims = [
        dim for dim, is_reversed in zip(spatial, called.get("window_reversal", ()), strict=False) if is_reversed
    ]
    if reversed_dims:
        weight = lax.rev(weight, reversed_dims)
    ones = [1] * rank
    return lax.conv_general_dilated(
        data,
        weight,
        window_strides=called.get("window_strides", ones),
        padding=_padding(called, rank),
        lhs_dilation=called.get("lhs_dilation", ones),
        rhs_dilation=called.get("rhs_dilation", ones),
        dimension_numbers=lax.ConvDimensionNumbers(
            (numbers.input_batch_dimension, numbers.input_feature_dimension, *numbers.input_spatial_dimensions),
            (numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension, *spatial),
            (numbers.output_batch_dimension, numbers.output_feature_dimension, *numbers.output_spatial_dimensions),
        ),
        feature_group_count=called.get("feature_group_count", 1),
        batch_group_count=called.get("batch_group_count", 1),
        precision=_precision(called),
        preferred_element_type=called.results[0].dtype,
    )


def _padding(called: Called, rank: int) -> list[tuple[int, int]]:
    """Return the elements before and behind each dim of a window."""
    given = called.get("padding")
    return (
        [(0, 0)] * rank if given is None else [(int(one), int(two)) for one, two in np.asarray(given).reshape(rank, 2)]
    )


def _gather(called: Called) -> Any:
    numbers = called.get("dimension_numbers")
    operand, indices = called.operands
    return lax.gather(
        operand,
        _index_vectors_last(indices, numbers.index_vector_dim),
        lax.GatherDimensionNumbers(
            offset_dims=tuple(numbers.offset_dims),
            collapsed_slice_dims=tuple(numbers.collapsed_slice_dims),
            start_index_map=tuple(numbers.start_index_map),
            operand_batching_dims=tuple(numbers.operand_batching_dims),
            start_indices_batching_dims=_without_dim(numbers.start_indices_batching_dims, numbers.index_vector_dim),
        ),
        slice_sizes=tuple(called.get("slice_sizes")),
        indices_are_sorted=called.get("indices_are_sorted", False),
        mode=lax.GatherScatterMode.CLIP,
    )


def _index_vectors_last(indices: Any, dim: int) -> Any:
    """Return indices with the dim of their vectors as the last one, where JAX has it."""
    rank = len(indices.shape)
    if dim == rank:
        return lax.expand_dims(indices, [rank])
    if dim == rank - 1:
        return indices
    return lax.transpose(indices, [*(other for other in range(rank) if other != dim), dim])


def _without_dim(dims: Sequence[int], moved: int) -> tuple[int, ...]:
    """Return the numbers of dims once the dim `moved` is the last."""
    return tuple(dim - (dim > moved) for dim in dims)


SCATTERS: Mapping[str, Function] = {
    "": lax.scatter,
    "add": lax.scatter_add,
    "multiply": lax.scatter_mul,
    "minimum": lax.scatter_min,
    "maximum": lax.scatter_max,
    "subtract": lax.scatter_sub,
}
"""Scatters by what they do with an old and a new value; a new value replaces the old one if they do nothing."""


def _scatter(called: Called) -> Any:
    if len(called.operands) != 3:
        raise Unreadable("scatters into several tensors at once")
    numbers, role = called.get("scatter_dimension_numbers"), _role_of(called.op.regions[0])
    if role not in SCATTERS:
        raise Unreadable("combines values by a function of its own")
    operand, indices, updates = called.operands
    return SCATTERS[role](
        operand,
        _index_vectors_last(indices, numbers.index_vector_dim),
        updates,
        lax.ScatterDimensionNumbers(
            update_window_dims=tuple(numbers.update_window_dims),
            inserted_window_dims=tuple(numbers.inserted_window_dims),
            scatter_dims_to_operand_dims=tuple(numbers.scattered_dims_to_operand_dims),
            operand_batching_dims=tuple(numbers.input_batching_dims),
            scatter_indices_batching_dims=_without_dim(numbers.scatter_indices_batching_dims, numbers.index_vector_dim),
        ),
        indices_are_sorted=called.get("indices_are_sorted", False),
        unique_indices=called.get("unique_indices", False),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _role_of(region: ir.Region) -> str:
    """Return the operator that a function of two values is; empty if it returns the second, OTHER if it is another."""
    (block,) = region.blocks
    one, two = block.arguments
    *steps, end = (each.operation for each in block.operations)
    if not steps and list(end.operands) == [two]:
        return ""
    if len(steps) == 1 and list(end.operands) == list(steps[0].results) and set(steps[0].operands) == {one, two}:
        is_turned = list(steps[0].operands) == [two, one]
        name = str(steps[0].name).removeprefix("stablehlo.")
        return OTHER if is_turned and name not in COMMUTATIVE else name
    return OTHER


OTHER = "other"
COMMUTATIVE = frozenset({"add", "multiply", "minimum", "maximum", "and", "or", "xor"})

REDUCTIONS: Mapping[str, Function] = {
    "add": lax.add,
    "multiply": lax.mul,
    "minimum": lax.min,
    "maximum": lax.max,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}
"""Functions for which JAX has reductions of their own."""


def _identity(role: str, dtype: Any) -> np.ndarray[Any, Any]:
    """Return the value that changes nothing in a reduction."""
    dtype = np.dtype(dtype)
    if role in ("add", "or", "xor"):
        return np.zeros((), dtype)
    if role == "multiply":
        return np.ones((), dtype)
    if dtype == np.bool_ or role == "and":
        return np.array(role != "maximum") if dtype == np.bool_ else ~np.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(math.inf if role == "minimum" else -math.inf, dtype)
    limits = jnp.iinfo(dtype)  # type: ignore[no-untyped-call] # JAX's own, which knows int4
    return np.array(limits.max if role == "minimum" else limits.min, dtype)


def _reduce(called: Called) -> Any:
    half = len(called.operands) // 2
    operands, begins = called.operands[:half], called.operands[half:]
    dims, role = tuple(called.get("dimensions")), _role_of(called.op.regions[0]) if half == 1 else OTHER
    if role in REDUCTIONS:
        (operand,), (begin,) = operands, begins
        found = lax.reduce(operand, _identity(role, operand.dtype), REDUCTIONS[role], dims)
        return found if _is_identity(begin, role) else REDUCTIONS[role](lax.broadcast(begin, found.shape), found)
    run = called.region(0)
    if half == 1:
        return lax.reduce(operands[0], begins[0], lambda one, two: run(one, two)[0], dims)
    return lax.reduce(list(operands), list(begins), lambda one, two: run(*one, *two), dims)


def _is_identity(begin: Any, role: str) -> bool:
    return isinstance(begin, np.ndarray) and begin.ndim == 0 and bool(begin == _identity(role, begin.dtype))


def _reduce_window(called: Called) -> Any:
    if len(called.operands) != 2:
        raise Unreadable("reduces windows of several tensors at once")
    operand, begin = called.operands
    rank = len(operand.shape)
    ones, role = [1] * rank, _role_of(called.op.regions[0])
    window = called.get("window_dimensions")
    padding = _padding(called, rank)
    others = [called.get(name, ones) for name in ("window_strides", "base_dilations", "window_dilations")]
    if role in REDUCTIONS and _is_identity(begin, role):
        cumulative = {"add": lax.cumsum, "multiply": lax.cumprod, "minimum": lax.cummin, "maximum": lax.cummax}
        along = [dim for dim in range(rank) if window[dim] > 1]
        if (
            role in cumulative
            and others == [ones] * 3
            and len(along) == 1
            and window[along[0]] == operand.shape[along[0]]
        ):
            before, after = padding[along[0]]
            if {before, after} == {0, window[along[0]] - 1}:  # each element sees all before it, or all behind it
                return cumulative[role](operand, axis=along[0], reverse=before == 0)
        combine, begin = REDUCTIONS[role], _identity(role, operand.dtype)
    else:
        run = called.region(0)

        def combine(one: Any, two: Any) -> Any:
            return run(one, two)[0]

    return lax.reduce_window(
        operand, begin, combine, window, others[0], padding, base_dilation=others[1], window_dilation=others[2]
    )


def _select_and_scatter(called: Called) -> Any:
    operand, source, begin = called.operands
    select, scatter = called.op.regions
    is_greatest = [each.operation.name for each in select.blocks[0].operations] == [
        "stablehlo.compare",
        "stablehlo.return",
    ]
    compare = select.blocks[0].operations[0].operation
    is_greatest = is_greatest and attribute(compare, "comparison_direction") == "GE"
    if not is_greatest or _role_of(scatter) != "add" or not _is_identity(begin, "add"):
        raise Unreadable("selects otherwise than the greatest, or does not add")
    rank = len(operand.shape)
    window, strides = tuple(called.get("window_dimensions")), tuple(called.get("window_strides", [1] * rank))
    padding = _padding(called, rank)
    # This is the gradient of the windows' maxima, as JAX makes it.
    greatest = functools.partial(
        lax.reduce_window,
        init_value=_identity("maximum", operand.dtype),
        computation=lax.max,
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )
    return jax.vjp(greatest, operand)[1](source)[0]


def _sort(called: Called) -> Any:
    operands, dim = list(called.operands), called.get("dimension", -1)
    num_keys, is_descending = _order_of(called)
    if not is_descending:
        return lax.sort(operands, dimension=dim, is_stable=called.get("is_stable", False), num_keys=num_keys)
    # Turned around before and behind, equal elements keep their order.
    dim %= len(operands[0].shape)
    turned = lax.sort([lax.rev(each, [dim]) for each in operands], dimension=dim, num_keys=num_keys)
    return [lax.rev(each, [dim]) for each in turned]


def _order_of(called: Called) -> tuple[int, bool]:
    """Return the number of keys by which a comparator sorts, and whether it sorts them in descending order.

    The comparator is run on samples of values, zeros of both signs among them.
    """
    dtypes = [each.dtype for each in called.operands]
    random = np.random.default_rng(0)
    columns = [_samples(dtype, random) for dtype in (dtype for dtype in dtypes for _ in range(2))]
    with jax.ensure_compile_time_eval():
        before = np.asarray(jax.vmap(lambda *values: called.region(0)(*values)[0])(*columns))
    ones, twos = columns[::2], columns[1::2]
    for num_keys, is_descending in itertools.product(range(1, len(dtypes) + 1), (False, True)):
        expected, is_equal = np.zeros(len(before), bool), np.ones(len(before), bool)
        for one, two in zip(ones[:num_keys], twos[:num_keys], strict=True):
            expected |= is_equal & ((one > two) if is_descending else (one < two))
            is_equal &= one == two
        if (before == expected).all():
            return num_keys, is_descending
    raise Unreadable("sorts by a comparison of its own")


def _samples(dtype: Any, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return values of which many are equal."""
    if dtype == np.bool_:
        return random.integers(0, 2, 256).astype(bool)
    values = [0, 1, 2, 3, 5] if np.dtype(dtype).kind == "u" else [-3, -1, 0, 1, 4]
    found = np.asarray(random.choice(values, 256), dtype)
    return found * np.asarray(random.choice([-1, 1], 256), dtype) if np.dtype(dtype).kind == "f" else found


def _case(called: Called) -> Any:
    (which,), num_branches = called.operands, len(called.op.regions)
    branches = [called.region(number) for number in range(num_branches)]
    # a number that belongs to no branch takes the last one
    is_known = (which >= 0) & (which < num_branches)
    return lax.switch(lax.select(is_known, which, np.asarray(num_branches - 1, which.dtype)), branches)


def _if(called: Called) -> Any:
    return lax.cond(called.operands[0], called.region(0), called.region(1))


def _rng_bit_generator(called: Called) -> Any:
    state, bits = called.results
    algorithms = {
        "DEFAULT": lax.RandomAlgorithm.RNG_DEFAULT,
        "PHILOX": lax.RandomAlgorithm.RNG_PHILOX,
        "THREE_FRY": lax.RandomAlgorithm.RNG_THREE_FRY,
    }
    key = called.operands[0]
    if bits.dtype not in (np.uint8, np.uint16, np.uint32, np.uint64) or state.dtype != np.uint32:
        raise Unreadable(f"makes {bits.dtype} from a state of {state.dtype}, which JAX cannot")
    return lax.rng_bit_generator(key, bits.shape, bits.dtype, algorithms[called.get("rng_algorithm")])


def _cholesky(called: Called) -> Any:
    (matrix,) = called.operands
    if not called.get("lower", False):
        raise Unreadable("returns the upper triangle, which JAX's does not")
    return lax.linalg.cholesky(matrix, symmetrize_input=False)


def _triangular_solve(called: Called) -> Any:
    transpose = called.get("transpose_a")
    return lax.linalg.triangular_solve(
        *called.operands,
        left_side=called.get("left_side"),
        lower=called.get("lower"),
        transpose_a=transpose in ("TRANSPOSE", "ADJOINT"),
        conjugate_a=transpose == "ADJOINT",
        unit_diagonal=called.get("unit_diagonal"),
    )


def _slice(called: Called) -> Any:
    return lax.slice(*called.operands, *(called.get(name) for name in ("start_indices", "limit_indices", "strides")))


def _broadcast_in_dim(called: Called) -> Any:
    (operand,), shape, dims = called.operands, called.results[0].shape, called.get("broadcast_dimensions")
    if operand.shape == shape and dims == list(range(len(shape))):
        return operand  # a constant stays one, for reductions that begin with it
    uses = [use.owner.operation for use in called.op.results[0].uses]
    if not all(len(use.operands) == 2 and (use.name in ELEMENTWISE or use.name == "stablehlo.compare") for use in uses):
        return lax.broadcast_in_dim(operand, shape, dims)
    inner = [1] * len(shape)
    for dim, size in zip(dims, operand.shape, strict=True):
        inner[dim] = size
    if operand.shape and dims != list(range(len(shape))):
        operand = lax.broadcast_in_dim(operand, inner, dims)
    return operand if operand.shape == shape else Spread(narrow=operand, shape=shape)


def _pad(called: Called) -> Any:
    edges = [called.get(name) for name in ("edge_padding_low", "edge_padding_high", "interior_padding")]
    operand, padding = called.operands
    return lax.pad(operand, padding, list(zip(*edges, strict=True)))


def _custom_call(called: Called) -> Any:
    target = called.get("call_target_name")
    if target in MARKS:
        return list(called.operands)
    if target == "mhlo.erf":
        return lax.erf(*called.operands)
    raise Unreadable("calls a kernel that Meshtune does not know")


MARKS = frozenset({"Sharding", "annotate_device_placement", "xla.sdy.FuncResultSharding"})
"""Targets of custom calls that only mark a value for a compiler."""

OPERATORS: Mapping[str, Callable[[Called], Any]] = {
    "chlo.top_k": lambda called: lax.top_k(called.operands[0], called.get("k")),
    "sdy.sharding_constraint": lambda called: called.operands[0],
    "stablehlo.bitcast_convert": lambda called: lax.bitcast_convert_type(called.operands[0], called.results[0].dtype),
    "stablehlo.broadcast_in_dim": _broadcast_in_dim,
    "stablehlo.case": _case,
    "stablehlo.cholesky": _cholesky,
    "stablehlo.compare": _compare,
    "stablehlo.concatenate": lambda called: lax.concatenate(called.operands, called.get("dimension")),
    "stablehlo.constant": lambda called: constant_of(called.op, called.results[0]),
    "stablehlo.convert": lambda called: lax.convert_element_type(called.operands[0], called.results[0].dtype),
    "stablehlo.convolution": _convolution,
    "stablehlo.custom_call": _custom_call,
    "stablehlo.dot_general": _dot_general,
    # the clamping of lax.dynamic_slice would stand in the program a second time
    "stablehlo.dynamic_slice": lambda called: lax.dynamic_slice_p.bind(
        *called.operands, slice_sizes=tuple(called.get("slice_sizes"))
    ),
    "stablehlo.dynamic_update_slice": lambda called: lax.dynamic_update_slice_p.bind(*called.operands),
    "stablehlo.fft": lambda called: lax.fft(
        called.operands[0], called.get("fft_type"), tuple(called.get("fft_length"))
    ),
    "stablehlo.gather": _gather,
    "stablehlo.if": _if,
    "stablehlo.iota": lambda called: lax.broadcasted_iota(
        called.results[0].dtype, called.results[0].shape, called.get("iota_dimension")
    ),
    "stablehlo.map": lambda called: called.region(0)(*called.operands),
    "stablehlo.optimization_barrier": lambda called: lax.optimization_barrier(list(called.operands)),
    "stablehlo.pad": _pad,
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_precision": lambda called: lax.reduce_precision(
        called.operands[0], called.get("exponent_bits"), called.get("mantissa_bits")
    ),
    "stablehlo.reduce_window": _reduce_window,
    "stablehlo.reshape": lambda called: lax.reshape(called.operands[0], called.results[0].shape),
    "stablehlo.reverse": lambda called: lax.rev(called.operands[0], called.get("dimensions")),
    "stablehlo.rng_bit_generator": _rng_bit_generator,
    "stablehlo.scatter": _scatter,
    "stablehlo.select_and_scatter": _select_and_scatter,
    "stablehlo.slice": _slice,
    "stablehlo.sort": _sort,
    "stablehlo.transpose": lambda called: lax.transpose(called.operands[0], called.get("permutation")),
    "stablehlo.triangular_solve": _triangular_solve,
}
"""Operators that are not elementwise, without loops and calls."""
