"""The iteration space of every primitive of a jaxpr that Meshtune knows: how its factors lie on operands and results.

A rule is read from shapes and parameters alone. Elementwise primitives share one; a primitive that nobody wrote a rule
for has none, and its caller blocks all its dims. Dims of size 1 carry no factor. An operand of another rank than the
result of an elementwise primitive is a scalar, as JAX has it.

What `jax.lax` counts from shapes must be counted from the local ones where a rule's factor is cut (`slice_sizes` of a
gather, the `shape` of a broadcast): the parameters here are those of whole tensors.

Three rules cut what only masks make cuttable, as partitioners do it: rows of a gather's table (each device looks up
what it has, zeros elsewhere, and all add up), rows of a scatter's operand, and the dim that a dynamic_update_slice
writes to (each device writes what falls into its part).

Sources: the semantics of StableHLO's specification; the factors of Shardy (OpenXLA), which the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.dims import Factor, FactorKind, Place, Rule
from costmodels.graph import CARRY, NEXT, STACK, UNSTACK

Shape = tuple[int, ...]

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh
    threefry2x32 xor
    """.split()  # noqa: SIM905  # ninety words, a line each, would hide the rules below
)
"""Primitives whose result at a place depends on the operands at that place alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A primitive as it is called.

    Attributes:
        primitive: Its name.
        operands: Shapes of what it reads.
        results: Shapes of what it writes.
        params: Its parameters, as jax.lax has them.
    """

    primitive: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    params: Mapping[str, Any]


def rule_of_call(call: Call) -> Rule | None:
    """The rule of a call; None where nobody wrote one for its primitive."""
    if call.primitive in ELEMENTWISE:
        return _elementwise(call)
    rule = RULES.get(call.primitive)
    return None if rule is None else rule(call)


def blocked_rule(call: Call) -> Rule:
    """A rule under which nothing can be cut."""
    loops = _Loops()
    return loops.rule(
        [loops.dims(shape, FactorKind.BLOCKED) for shape in call.operands],
        [loops.dims(shape, FactorKind.BLOCKED) for shape in call.results],
    )


def flop_of_call(call: Call) -> float:
    """Floating-point operations of a matrix product or a convolution, a multiplication and an addition apart; else 0.

    Products with the zeros that dilation puts between elements aren't counted, those with padding are.
    """
    if call.primitive == "dot_general":
        (contracted, _), _ = call.params["dimension_numbers"]
        return float(2 * math.prod(call.results[0]) * math.prod(call.operands[0][dim] for dim in contracted))
    if call.primitive == "conv_general_dilated":
        numbers, weight = call.params["dimension_numbers"], call.operands[1]
        products = math.prod(weight[dim] for dim in numbers.rhs_spec[1:])
        return float(2 * math.prod(call.results[0]) * products / math.prod(call.params["lhs_dilation"]))
    return 0.0


@dataclass(slots=True)
class _Loops:
    """The factors of a rule under construction."""

    factors: list[Factor] = field(default_factory=list)

    def dim(self, size: int, kind: FactorKind = FactorKind.MAP) -> tuple[int, ...]:
        """A dim with a factor of its own; with none where there is nothing to loop over."""
        if size <= 1:
            return ()
        self.factors.append(Factor(size=size, kind=kind))
        return (len(self.factors) - 1,)

    def dims(self, shape: Shape, kind: FactorKind = FactorKind.MAP, *, blocked: Collection[int] = ()) -> Place:
        """A tensor whose dims have a factor each."""
        return tuple(self.dim(size, FactorKind.BLOCKED if dim in blocked else kind) for dim, size in enumerate(shape))

    def rule(self, operands: Sequence[Place], results: Sequence[Place]) -> Rule:
        """What has come together."""
        return Rule(factors=tuple(self.factors), operands=tuple(operands), results=tuple(results))


def _replaced(place: Place, changes: Mapping[int, tuple[int, ...]]) -> Place:
    return tuple(changes.get(dim, factors) for dim, factors in enumerate(place))


def _elementwise(call: Call) -> Rule:
    loops = _Loops()
    shape = call.results[0]
    place = loops.dims(shape)
    operands = [
        tuple(place[dim] if size == shape[dim] else () for dim, size in enumerate(operand)) for operand in call.operands
    ]
    return loops.rule(operands, [place] * len(call.results))


def _pairwise(call: Call) -> Rule:
    """Of what hands each operand on as the result in its place."""
    loops = _Loops()
    places = [loops.dims(shape) for shape in call.operands]
    return loops.rule(places, places)


def _broadcast_in_dim(call: Call) -> Rule:
    loops = _Loops()
    result = loops.dims(call.results[0])
    shape, *sizes = call.operands  # sizes only where shapes are dynamic
    targets = call.params["broadcast_dimensions"]
    operand = tuple(result[target] if size > 1 else () for size, target in zip(shape, targets, strict=True))
    return loops.rule([operand, *((),) * len(sizes)], [result])


def _reshape(call: Call) -> Rule:
    """Elements keep their order, so that a factor that both sides have in front is cut alike.

    Dims are walked from the slowest; what two of them have in common is a factor of both. Where they have nothing in
    common before their products meet again, all up to there is blocked.
    """
    loops = _Loops()
    order = call.params["dimensions"] or range(len(call.operands[0]))  # some reshapes transpose first
    before, after = tuple(call.operands[0][dim] for dim in order), call.results[0]
    if math.prod(before) == 0:
        return loops.rule([((),) * len(before)], [((),) * len(after)])
    places: list[list[tuple[int, ...]]] = [[() for _ in before], [() for _ in after]]
    left = [list(before), list(after)]
    at = [0, 0]
    while True:
        for side in (0, 1):
            while at[side] < len(left[side]) and left[side][at[side]] == 1:
                at[side] += 1
        if at[0] == len(before):
            break
        common = math.gcd(left[0][at[0]], left[1][at[1]])
        if common > 1:
            factor = loops.dim(common)
            for side in (0, 1):
                places[side][at[side]] += factor
                left[side][at[side]] //= common
        else:
            _block_until_even(loops, places, left, at)
    operand = dict(zip(order, places[0], strict=True))
    return loops.rule([tuple(operand[dim] for dim in range(len(before)))], [tuple(places[1])])


def _block_until_even(loops: _Loops, places: list[list[tuple[int, ...]]], left: list[list[int]], at: list[int]) -> None:
    """Blocks dims from where a reshape stands until as many elements lie behind it on both sides."""
    done = [1, 1]
    while done[0] != done[1] or done[0] == 1:
        side = 0 if done[0] <= done[1] else 1
        dim = at[side]
        done[side] *= left[side][dim]
        places[side][dim] += loops.dim(left[side][dim], FactorKind.BLOCKED)
        left[side][dim] = 1
        at[side] += 1


def _transpose(call: Call) -> Rule:
    loops = _Loops()
    operand = loops.dims(call.operands[0])
    return loops.rule([operand], [tuple(operand[dim] for dim in call.params["permutation"])])


def _squeeze(call: Call) -> Rule:
    loops = _Loops()
    operand = loops.dims(call.operands[0])
    dropped = call.params["dimensions"]
    return loops.rule([operand], [tuple(place for dim, place in enumerate(operand) if dim not in dropped)])


def _expand_dims(call: Call) -> Rule:
    loops = _Loops()
    result = loops.dims(call.results[0])
    added = call.params["dimensions"]
    return loops.rule([tuple(place for dim, place in enumerate(result) if dim not in added)], [result])


def _dot_general(call: Call) -> Rule:
    loops = _Loops()
    (left_sum, right_sum), (left_batch, right_batch) = call.params["dimension_numbers"]
    left_shape, right_shape = call.operands
    left: list[tuple[int, ...]] = [()] * len(left_shape)
    right: list[tuple[int, ...]] = [()] * len(right_shape)
    for one, other in zip(left_batch, right_batch, strict=True):
        left[one] = right[other] = loops.dim(left_shape[one])
    result = [left[dim] for dim in left_batch]
    for dims, shape, taken in (
        (left, left_shape, (*left_batch, *left_sum)),
        (right, right_shape, (*right_batch, *right_sum)),
    ):
        for dim, size in enumerate(shape):
            if dim not in taken:
                dims[dim] = loops.dim(size)
                result.append(dims[dim])
    for one, other in zip(left_sum, right_sum, strict=True):
        left[one] = right[other] = loops.dim(left_shape[one], FactorKind.REDUCTION)
    return loops.rule([tuple(left), tuple(right)], [tuple(result)])


def _conv_general_dilated(call: Call) -> Rule:
    """Batch and features are those of a matrix product, in groups or not; space is what `_space_of_conv` says.

    The gradients of a convolution are convolutions, whose numbers of dimensions say which is batch and which feature.
    """
    loops = _Loops()
    params = call.params
    numbers = params["dimension_numbers"]
    (image, weight), (out,) = call.operands, call.results
    image_batch, image_feature, *image_space = numbers.lhs_spec
    weight_out, weight_in, *weight_space = numbers.rhs_spec
    out_batch, out_feature, *out_space = numbers.out_spec
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]

    batch = loops.dim(out[out_batch])
    group = loops.dim(feature_groups * batch_groups)
    feature = loops.dim(out[out_feature] // (feature_groups * batch_groups))
    summed = loops.dim(weight[weight_in], FactorKind.REDUCTION)
    places: list[dict[int, tuple[int, ...]]] = [{}, {}, {}]
    places[0][image_batch] = group + batch if batch_groups > 1 else batch
    places[0][image_feature] = group + summed if feature_groups > 1 else summed
    places[1][weight_out] = group + feature
    places[1][weight_in] = summed
    places[2][out_batch] = batch
    places[2][out_feature] = group + feature
    for number, dims in enumerate(zip(image_space, weight_space, out_space, strict=True)):
        sizes = (image[dims[0]], weight[dims[1]], out[dims[2]])
        for place, dim, factor in zip(places, dims, _space_of_conv(loops, params, number, sizes), strict=True):
            place[dim] = factor
    left, right, result = (tuple(place[dim] for dim in range(len(out))) for place in places)
    return loops.rule([left, right], [result])


def _space_of_conv(
    loops: _Loops, params: Mapping[str, Any], number: int, sizes: tuple[int, int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The factors of one dim in space of image, window and result.

    A window of one element is a map; one as large as the image, in one place only, a sum over both. Any other looks
    at neighbours.
    """
    image, window, out = sizes
    is_plain = (
        tuple(params["padding"][number]) == (0, 0)
        and params["window_strides"][number] == params["lhs_dilation"][number] == 1
    )
    if is_plain and window == 1:
        factor = loops.dim(image)
        return factor, (), factor
    if is_plain and out == 1 and window == image and params["rhs_dilation"][number] == 1:
        factor = loops.dim(image, FactorKind.REDUCTION)
        return factor, factor, ()
    if image == out:
        factor = loops.dim(image, FactorKind.PERMUTATION)
        return factor, loops.dim(window, FactorKind.BLOCKED), factor
    if image == window:
        factor = loops.dim(image, FactorKind.PERMUTATION)
        return factor, factor, loops.dim(out, FactorKind.BLOCKED)
    first, second, third = (loops.dim(size, FactorKind.BLOCKED) for size in sizes)
    return first, second, third


def _reduce(call: Call) -> Rule:
    return _without(call, FactorKind.REDUCTION)


def _arg_reduce(call: Call) -> Rule:
    """Indices of parts can't be put together without the values, which are no result."""
    return _without(call, FactorKind.BLOCKED)


def _without(call: Call, kind: FactorKind) -> Rule:
    """Of what drops some dims."""
    loops = _Loops()
    axes = call.params["axes"]
    operand = tuple(
        loops.dim(size, kind if dim in axes else FactorKind.MAP) for dim, size in enumerate(call.operands[0])
    )
    return loops.rule([operand], [tuple(place for dim, place in enumerate(operand) if dim not in axes)])


def _along(call: Call, dim: int) -> Rule:
    """Of what needs one dim whole and has equal results for equal elements of the others; sizes differ there alone."""
    loops = _Loops()
    place = loops.dims(call.operands[0], blocked=(dim,))
    known = {call.operands[0][dim]: place[dim]}

    def of(shape: Shape) -> Place:
        size = shape[dim]
        if size not in known:
            known[size] = loops.dim(size, FactorKind.BLOCKED)
        return _replaced(place, {dim: known[size]})

    return loops.rule([of(shape) for shape in call.operands], [of(shape) for shape in call.results])


def _cumulative(call: Call) -> Rule:
    return _along(call, call.params["axis"])


def _sort(call: Call) -> Rule:
    return _along(call, call.params["dimension"])


def _top_k(call: Call) -> Rule:
    return _along(call, call.params.get("axis", -1) % len(call.operands[0]))


def _split(call: Call) -> Rule:
    return _along(call, call.params["axis"])


def _concatenate(call: Call) -> Rule:
    return _along(call, call.params["dimension"])


def _changed(call: Call, changed: Collection[int]) -> Rule:
    """Of one operand and one result of its rank, some dims of which are made anew; further operands are scalars.

    Elements move along such a dim where it keeps its size; else the operator needs all of it.
    """
    loops = _Loops()
    shape, *scalars = call.operands
    operand, result = [], []
    for dim, (size, new_size) in enumerate(zip(shape, call.results[0], strict=True)):
        if dim in changed and size != new_size:
            operand.append(loops.dim(size, FactorKind.BLOCKED))
            result.append(loops.dim(new_size, FactorKind.BLOCKED))
        else:
            factor = loops.dim(size, FactorKind.PERMUTATION if dim in changed else FactorKind.MAP)
            operand.append(factor)
            result.append(factor)
    return loops.rule([tuple(operand), *((),) * len(scalars)], [tuple(result)])


def _resized(call: Call) -> Rule:
    """Of a slice: what is as large as before is whole."""
    sizes = zip(call.operands[0], call.results[0], strict=True)
    return _changed(call, [dim for dim, (size, new_size) in enumerate(sizes) if size != new_size])


def _pad(call: Call) -> Rule:
    padding = call.params["padding_config"]
    return _changed(call, [dim for dim, (low, high, inner) in enumerate(padding) if low or high or inner])


def _rev(call: Call) -> Rule:
    return _changed(call, call.params["dimensions"])


def _reduce_window(call: Call) -> Rule:
    return _changed(call, _windowed(call))


def _windowed(call: Call) -> list[int]:
    """The dims along which a window looks at more than one element."""
    params = call.params
    window, strides, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    return [
        dim
        for dim, (size, stride, pads) in enumerate(zip(window, strides, padding, strict=True))
        if size > 1 or stride > 1 or any(pads) or call.operands[0][dim] != call.results[0][dim]
    ]


def _select_and_scatter_add(call: Call) -> Rule:
    """The gradient of pooling: what a window made goes back to the element that it took."""
    loops = _Loops()
    windowed = _windowed(call)
    whole = loops.dims(call.operands[1], blocked=windowed)
    source = {dim: loops.dim(call.operands[0][dim], FactorKind.BLOCKED) for dim in windowed}
    return loops.rule([_replaced(whole, source), whole], [whole])


def _dynamic_update_slice(call: Call) -> Rule:
    loops = _Loops()
    shape, update_shape, *starts = call.operands
    place = loops.dims(shape)
    update = tuple(
        place[dim] if size == shape[dim] else loops.dim(size, FactorKind.BLOCKED)
        for dim, size in enumerate(update_shape)
    )
    return loops.rule([place, update, *((),) * len(starts)], [place])


def _gather(call: Call) -> Rule:
    """A slice of the operand for each place of the result's batch dims.

    Dims of slices are maps where a slice is as long as the operand. Looked-up dims of slices of one are a sum of what
    each part of the operand has.
    """
    loops = _Loops()
    numbers, slice_sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    (shape, indices_shape), (result_shape,) = call.operands, call.results
    result = loops.dims(result_shape, blocked=_short_slices(numbers, slice_sizes, shape))
    batch = [place for dim, place in enumerate(result) if dim not in numbers.offset_dims]
    indices = (*batch, loops.dim(indices_shape[-1], FactorKind.BLOCKED))
    operand: dict[int, tuple[int, ...]] = {
        dim: indices[index_dim]
        for dim, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    }
    kept = [dim for dim in range(len(shape)) if dim not in (*numbers.collapsed_slice_dims, *operand)]
    for dim, result_dim in zip(kept, numbers.offset_dims, strict=True):
        is_whole = slice_sizes[dim] == shape[dim]
        operand[dim] = result[result_dim] if is_whole else loops.dim(shape[dim], FactorKind.BLOCKED)
    for dim in numbers.collapsed_slice_dims:
        operand[dim] = loops.dim(shape[dim], FactorKind.REDUCTION)
    return loops.rule([tuple(operand[dim] for dim in range(len(shape))), indices], [result])


def _short_slices(numbers: Any, slice_sizes: Sequence[int], shape: Shape) -> list[int]:
    """The dims of a gather's result along which its slices are shorter than the operand."""
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    return [result for dim, result in zip(kept, numbers.offset_dims, strict=True) if slice_sizes[dim] != shape[dim]]


def _scatter(call: Call) -> Rule:
    """A gather's mirror: each window of the updates goes to a place of the operand.

    Places of updates are a sum into the operand, which then counts once; where a later update overwrites an earlier
    one, their order matters.
    """
    loops = _Loops()
    numbers = call.params["dimension_numbers"]
    shape, indices_shape, updates_shape = call.operands
    kind = FactorKind.BLOCKED if call.primitive == "scatter" else FactorKind.REDUCTION
    updates: dict[int, tuple[int, ...]] = {}
    operand: dict[int, tuple[int, ...]] = {}
    places = [dim for dim in range(len(updates_shape)) if dim not in numbers.update_window_dims]
    pairs = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for index_dim, dim in enumerate(places):
        if index_dim in pairs:
            operand[pairs[index_dim]] = updates[dim] = loops.dim(updates_shape[dim])
        else:
            updates[dim] = loops.dim(updates_shape[dim], kind)
    indices = (*(updates[dim] for dim in places), loops.dim(indices_shape[-1], FactorKind.BLOCKED))
    windowed = [dim for dim in range(len(shape)) if dim not in (*numbers.inserted_window_dims, *operand)]
    for dim, update_dim in zip(windowed, numbers.update_window_dims, strict=True):
        is_whole = updates_shape[update_dim] == shape[dim]
        operand[dim] = loops.dim(shape[dim], FactorKind.MAP if is_whole else FactorKind.BLOCKED)
        updates[update_dim] = operand[dim] if is_whole else loops.dim(updates_shape[update_dim], FactorKind.BLOCKED)
    for dim in numbers.inserted_window_dims:
        operand[dim] = loops.dim(shape[dim])
    whole = tuple(operand[dim] for dim in range(len(shape)))
    return loops.rule([whole, indices, tuple(updates[dim] for dim in range(len(updates_shape)))], [whole])


def _bitcast(call: Call) -> Rule:
    """Bits as another type: of a smaller one there are several, in a last dim of their own."""
    loops = _Loops()
    shorter = min(call.operands[0], call.results[0], key=len)
    place = loops.dims(shorter)
    operand, result = (
        (*place, *(loops.dim(size, FactorKind.BLOCKED) for size in shape[len(shorter) :]))
        for shape in (call.operands[0], call.results[0])
    )
    return loops.rule([operand], [result])


def _stack(call: Call) -> Rule:
    """Of a loop that fills a stack of its iterations' results."""
    loops = _Loops()
    part = loops.dims(call.operands[0])
    return loops.rule([part], [(loops.dim(call.results[0][0], FactorKind.BLOCKED), *part)])


def _unstack(call: Call) -> Rule:
    """Of a loop whose iterations take a part of a stack each."""
    loops = _Loops()
    part = loops.dims(call.results[0])
    return loops.rule([(loops.dim(call.operands[0][0], FactorKind.BLOCKED), *part)], [part])


def _random(call: Call) -> Rule:
    """Numbers drawn from a key, which every device has: each draws those of its part.

    That is what `jax_threefry_partitionable` promises, which is JAX's default.
    """
    loops = _Loops()
    keys = [loops.dims(shape, FactorKind.BLOCKED) for shape in call.operands]
    return loops.rule(keys, [loops.dims(shape) for shape in call.results])


RULES: Mapping[str, Callable[[Call], Rule]] = {
    CARRY: _elementwise,
    NEXT: _elementwise,
    STACK: _stack,
    UNSTACK: _unstack,
    "argmax": _arg_reduce,
    "argmin": _arg_reduce,
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv_general_dilated,
    "cumlogsumexp": _cumulative,
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumprod": _cumulative,
    "cumsum": _cumulative,
    "device_put": _pairwise,
    "dot_general": _dot_general,
    "dynamic_slice": _resized,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _expand_dims,
    "gather": _gather,
    "optimization_barrier": _pairwise,
    "pad": _pad,
    "random_bits": _random,
    "random_fold_in": blocked_rule,  # keys are small, and every device wants them
    "random_seed": blocked_rule,
    "random_split": blocked_rule,
    "random_unwrap": blocked_rule,
    "random_wrap": blocked_rule,
    "reduce_and": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_or": _reduce,
    "reduce_prod": _reduce,
    "reduce_sum": _reduce,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    "reduce_window_sum": _reduce_window,
    "reduce_xor": _reduce,
    "reshape": _reshape,
    "rev": _rev,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    "select_and_scatter_add": _select_and_scatter_add,
    "slice": _resized,
    "sort": _sort,
    "split": _split,
    "squeeze": _squeeze,
    "top_k": _top_k,
    "transpose": _transpose,
}
"""The rule of each primitive that isn't elementwise. Loops, branches and foreign kernels have none."""
