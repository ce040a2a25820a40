"""Sharding rules of jaxpr primitives.

Elementwise primitives share one rule. A primitive without a rule gets None, and the caller blocks all its dims. If an
operand of an elementwise primitive has another rank than the result, it is a scalar, as in JAX.

The parameters of a call describe whole tensors. Parameters that depend on shapes (`slice_sizes` of a gather, the
`shape` of a broadcast) must be computed from local shapes if a factor of the rule is partitioned.

Three rules partition factors that need masks, as partitioners do. Rows of a gather's table: each device looks up the
rows that it has, uses zeros for the others, and the results are added up. Rows of a scatter's operand, and the dim that
a dynamic_update_slice writes to: each device writes the values that fall into its part.

Sources: the semantics in StableHLO's specification; the factors of Shardy (OpenXLA), against which the tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from costmodels.sharding.dims import FactorKind, Rule
from costmodels.sharding.frontends.jax import matrix_rules
from costmodels.sharding.frontends.jax.shard_maps import SHARD_MAP, shard_map_rule
from costmodels.sharding.frontends.rule_parts import (
    Call,
    Loops,
    Shape,
    along,
    blocked_rule,
    elementwise,
    fits,
    rearrange_rule,
    replace_factors,
    reshape_rule,
    same_rule,
    slice_rule,
    without,
)
from costmodels.sharding.graph import CARRY, MERGE, NEXT, STACK, UNSTACK

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite layout_constraint le lgamma log log1p logistic lt max min mul mulhi
    name ne neg nextafter not or polygamma population_count pow real reciprocal reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
    """.split()  # noqa: SIM905  # ninety words, a line each, would hide the rules below
)
"""Primitives that compute each element from the operands' elements at the same index."""


def has_rule(primitive: str) -> bool:
    """Return whether a primitive has a rule."""
    return primitive in ELEMENTWISE or primitive in RULES


def rule_of_call(call: Call) -> Rule | None:
    """Return the rule of a call; None if its primitive has no rule, or none for this form of it."""
    rule = elementwise if call.primitive in ELEMENTWISE else RULES.get(call.primitive)
    found = None if rule is None else rule(call)
    return found if found is not None and fits(found, call) else None


def flop_of_call(call: Call) -> float:
    """Return the FLOPs of a product, a convolution, a factorization, a solve or a transform; 0 for other primitives.

    A multiplication and an addition count as two. Products with zeros from dilation are not counted; those with padding
    are.
    """
    if call.primitive == "dot_general":
        (contracted, _), _ = call.params["dimension_numbers"]
        return float(2 * math.prod(call.results[0]) * math.prod(call.operands[0][dim] for dim in contracted))
    if call.primitive == "conv_general_dilated":
        numbers, weight = call.params["dimension_numbers"], call.operands[1]
        # Products per output element: window size times input channels per group.
        products = math.prod(weight[dim] for dim in numbers.rhs_spec[1:])
        return float(2 * math.prod(call.results[0]) * products / math.prod(call.params["lhs_dilation"]))
    flop = matrix_rules.FLOPS.get(call.primitive)
    return 0.0 if flop is None else flop(call)


def _pairwise(call: Call) -> Rule:
    """Return the rule of a primitive that returns each operand unchanged as the result in the same position."""
    loops = Loops()
    places = [loops.dims(shape) for shape in call.operands]
    return loops.rule(places, places)


def _broadcast_in_dim(call: Call) -> Rule:
    """Return the rule of a broadcast, which names the result dim of each operand dim."""
    loops = Loops()
    result = loops.dims(call.results[0])
    shape, *sizes = call.operands  # sizes only where shapes are dynamic
    targets = call.params["broadcast_dimensions"]
    operand = tuple(result[target] if size > 1 else () for size, target in zip(shape, targets, strict=True))
    return loops.rule([operand, *((),) * len(sizes)], [result])


def _reshape(call: Call) -> Rule:
    """Return the rule of a reshape, some of which transpose first."""
    # `reshape_rule` sees the operand after the transposition; its factors are put back into the operand's own order.
    order = call.params["dimensions"] or range(len(call.operands[0]))
    rule = reshape_rule(tuple(call.operands[0][dim] for dim in order), call.results[0])
    operand = dict(zip(order, rule.operands[0], strict=True))
    return Rule(
        factors=rule.factors, operands=(tuple(operand[dim] for dim in range(len(operand))),), results=rule.results
    )


def _transpose(call: Call) -> Rule:
    loops = Loops()
    operand = loops.dims(call.operands[0])
    return loops.rule([operand], [tuple(operand[dim] for dim in call.params["permutation"])])


def _squeeze(call: Call) -> Rule:
    loops = Loops()
    operand = loops.dims(call.operands[0])
    dropped = call.params["dimensions"]
    return loops.rule([operand], [without(operand, dropped)])


def _expand_dims(call: Call) -> Rule:
    loops = Loops()
    result = loops.dims(call.results[0])
    added = call.params["dimensions"]
    return loops.rule([without(result, added)], [result])


def _dot_general(call: Call) -> Rule:
    """Return the rule of a product: batch dims and free dims are maps, contracted dims are reductions."""
    loops = Loops()
    (left_sum, right_sum), (left_batch, right_batch) = call.params["dimension_numbers"]
    left_shape, right_shape = call.operands
    left: list[tuple[int, ...]] = [()] * len(left_shape)
    right: list[tuple[int, ...]] = [()] * len(right_shape)
    for one, other in zip(left_batch, right_batch, strict=True):
        left[one] = right[other] = loops.dim(left_shape[one])
    # The result has the batch dims first, then the left operand's free dims, then the right operand's.
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
    """Return the rule of a convolution: a matrix product over batch and features, with or without groups.

    `_space_of_conv` gives the factors of the spatial dims. Gradients of a convolution are convolutions, too; their
    dimension numbers tell which dims are batch and features.
    """
    loops = Loops()
    params = call.params
    numbers = params["dimension_numbers"]
    (image, weight), (out,) = call.operands, call.results
    image_batch, image_feature, *image_space = numbers.lhs_spec
    weight_out, weight_in, *weight_space = numbers.rhs_spec
    out_batch, out_feature, *out_space = numbers.out_spec
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]

    # Five kinds of factors: batch, groups, output channels, input channels, and space.
    batch = loops.dim(out[out_batch])
    group = loops.dim(feature_groups * batch_groups)
    feature = loops.dim(out[out_feature] // (feature_groups * batch_groups))
    summed = loops.dim(weight[weight_in], FactorKind.REDUCTION)
    places: list[dict[int, tuple[int, ...]]] = [{}, {}, {}]
    # Group factors come first on a dim, so that an axis can partition them.
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
    loops: Loops, params: Mapping[str, Any], number: int, sizes: tuple[int, int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the factors of one spatial dim of image, window and result.

    A window of one element is a map. A window as large as the image, with a single position, is a reduction over both.
    Any other window reads neighbouring elements.
    """
    image, window, out = sizes
    # Without padding, strides and dilation, positions of image and result correspond.
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
    return _drop_axes(call, FactorKind.REDUCTION)


def _arg_reduce(call: Call) -> Rule:
    """Return the rule of argmax and argmin.

    Partial indices cannot be combined without the values, which are not part of the result.
    """
    return _drop_axes(call, FactorKind.BLOCKED)


def _reduce_by(call: Call) -> Rule:
    """Return the rule of a reduction by a function of the user: first the operands, then as many initial values.

    Parts could be combined by the function alone, which no collective does.
    """
    loops = Loops()
    axes = call.params["dimensions"]
    place = loops.dims(call.operands[0], blocked=axes)
    count = len(call.operands) // 2
    return loops.rule([*[place] * count, *[()] * count], [without(place, axes)] * count)


def _drop_axes(call: Call, kind: FactorKind) -> Rule:
    loops = Loops()
    axes = call.params["axes"]
    operand = tuple(
        loops.dim(size, kind if dim in axes else FactorKind.MAP) for dim, size in enumerate(call.operands[0])
    )
    return loops.rule([operand], [without(operand, axes)])


def _along(key: str) -> Callable[[Call], Rule]:
    """Return the rule of primitives that need one dim whole, which this parameter names."""
    return lambda call: along(call, call.params[key])


def _top_k(call: Call) -> Rule:
    return along(call, call.params.get("axis", -1) % len(call.operands[0]))


def _approx_top_k(call: Call) -> Rule:
    return along(call, call.params["reduction_dimension"] % len(call.operands[0]))


def _pad(call: Call) -> Rule:
    padding = call.params["padding_config"]
    return rearrange_rule(call, [dim for dim, (low, high, inner) in enumerate(padding) if low or high or inner])


def _rev(call: Call) -> Rule:
    return rearrange_rule(call, call.params["dimensions"])


def _reduce_window(call: Call) -> Rule:
    return rearrange_rule(call, _find_windowed(call))


def _find_windowed(call: Call) -> list[int]:
    """Return the dims along which a window covers more than one element."""
    params = call.params
    window, strides, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    return [
        dim
        for dim, (size, stride, pads) in enumerate(zip(window, strides, padding, strict=True))
        if size > 1 or stride > 1 or any(pads) or call.operands[0][dim] != call.results[0][dim]
    ]


def _select_and_scatter_add(call: Call) -> Rule:
    """Return the rule of a pooling gradient, which adds each window's value to the element that the window selected."""
    loops = Loops()
    # The source has windows, the operand elements; both are whole along windowed dims.
    windowed = _find_windowed(call)
    whole = loops.dims(call.operands[1], blocked=windowed)
    source = {dim: loops.dim(call.operands[0][dim], FactorKind.BLOCKED) for dim in windowed}
    return loops.rule([replace_factors(whole, source), whole], [whole])


def _dynamic_update_slice(call: Call) -> Rule:
    """Return the rule of a write at a runtime position, which uses masks along shorter dims (see the module)."""
    loops = Loops()
    shape, update_shape, *starts = call.operands
    place = loops.dims(shape)
    # An update shorter than the operand starts at a runtime position, so its dim is blocked.
    update = tuple(
        place[dim] if size == shape[dim] else loops.dim(size, FactorKind.BLOCKED)
        for dim, size in enumerate(update_shape)
    )
    return loops.rule([place, update, *((),) * len(starts)], [place])


def _gather(call: Call) -> Rule:
    """Return the rule of a gather: one slice of the operand for each position of the result's batch dims.

    Slice dims are maps if the slice is as long as the operand. Collapsed dims, with slices of one element, are
    reductions over the parts of the operand.
    """
    loops = Loops()
    numbers, slice_sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    (shape, indices_shape), (result_shape,) = call.operands, call.results
    result = loops.dims(result_shape, blocked=_short_slices(numbers, slice_sizes, shape))
    batch = [place for dim, place in enumerate(result) if dim not in numbers.offset_dims]
    indices = (*batch, loops.dim(indices_shape[-1], FactorKind.BLOCKED))
    # Batching dims of the operand share their factors with the indices.
    operand: dict[int, tuple[int, ...]] = {
        dim: indices[index_dim]
        for dim, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    }
    # Offset dims of the result are the operand's dims that are neither collapsed nor batched.
    kept = [dim for dim in range(len(shape)) if dim not in (*numbers.collapsed_slice_dims, *operand)]
    for dim, result_dim in zip(kept, numbers.offset_dims, strict=True):
        is_whole = slice_sizes[dim] == shape[dim]
        operand[dim] = result[result_dim] if is_whole else loops.dim(shape[dim], FactorKind.BLOCKED)
    for dim in numbers.collapsed_slice_dims:
        operand[dim] = loops.dim(shape[dim], FactorKind.REDUCTION)
    return loops.rule([tuple(operand[dim] for dim in range(len(shape))), indices], [result])


def _short_slices(numbers: Any, slice_sizes: Sequence[int], shape: Shape) -> list[int]:
    """Return the dims of a gather's result along which its slices are shorter than the operand."""
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    return [result for dim, result in zip(kept, numbers.offset_dims, strict=True) if slice_sizes[dim] != shape[dim]]


def _scatter(call: Call) -> Rule:
    """Return the rule of a scatter: each window of the updates goes to a position of the operand.

    The positions of updates are a reduction into the operand, which must then count only once. A plain scatter
    overwrites, so its updates are ordered and blocked.
    """
    loops = Loops()
    numbers = call.params["dimension_numbers"]
    shape, indices_shape, updates_shape = call.operands
    # Only a commutative scatter can combine updates from several devices.
    kind = FactorKind.BLOCKED if call.primitive == "scatter" else FactorKind.REDUCTION
    updates: dict[int, tuple[int, ...]] = {}
    operand: dict[int, tuple[int, ...]] = {}
    places = [dim for dim in range(len(updates_shape)) if dim not in numbers.update_window_dims]
    # Batching dims are shared by operand, indices and updates.
    pairs = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for index_dim, dim in enumerate(places):
        if index_dim in pairs:
            operand[pairs[index_dim]] = updates[dim] = loops.dim(updates_shape[dim])
        else:
            updates[dim] = loops.dim(updates_shape[dim], kind)
    indices = (*(updates[dim] for dim in places), loops.dim(indices_shape[-1], FactorKind.BLOCKED))
    # Window dims are maps if the window covers the whole operand dim.
    windowed = [dim for dim in range(len(shape)) if dim not in (*numbers.inserted_window_dims, *operand)]
    for dim, update_dim in zip(windowed, numbers.update_window_dims, strict=True):
        is_whole = updates_shape[update_dim] == shape[dim]
        operand[dim] = loops.dim(shape[dim], FactorKind.MAP if is_whole else FactorKind.BLOCKED)
        updates[update_dim] = operand[dim] if is_whole else loops.dim(updates_shape[update_dim], FactorKind.BLOCKED)
    # Rows of the operand: a device writes the updates that fall into its part.
    for dim in numbers.inserted_window_dims:
        operand[dim] = loops.dim(shape[dim])
    whole = tuple(operand[dim] for dim in range(len(shape)))
    return loops.rule([whole, indices, tuple(updates[dim] for dim in range(len(updates_shape)))], [whole])


def _bitcast(call: Call) -> Rule:
    """Return the rule of a cast of bits; several elements of a smaller dtype form a last dim of their own."""
    loops = Loops()
    # The longer shape has an additional last dim for the parts of an element.
    shorter = min(call.operands[0], call.results[0], key=len)
    place = loops.dims(shorter)
    operand, result = (
        (*place, *(loops.dim(size, FactorKind.BLOCKED) for size in shape[len(shorter) :]))
        for shape in (call.operands[0], call.results[0])
    )
    return loops.rule([operand], [result])


def _stack(call: Call) -> Rule:
    """Return the rule of a stack of equal operands along a new dim."""
    loops = Loops()
    result = loops.dims(call.results[0], blocked=(call.params["axis"],))
    return loops.rule([without(result, (call.params["axis"],))] * len(call.operands), [result])


def _unstack(call: Call) -> Rule:
    """Return the rule of the parts of an operand along a dim, which the results lack."""
    loops = Loops()
    operand = loops.dims(call.operands[0], blocked=(call.params["axis"],))
    return loops.rule([operand], [without(operand, (call.params["axis"],))] * len(call.results))


def _tile(call: Call) -> Rule:
    """Return the rule of an operand that is repeated along its dims; repetitions come first on a dim of the result."""
    loops = Loops()
    operand = loops.dims(call.operands[0])
    repeated = (loops.dim(count) for count in call.params["reps"])
    return loops.rule([operand], [tuple((*one, *other) for one, other in zip(repeated, operand, strict=True))])


def _loop_stack(call: Call) -> Rule:
    """Return the rule of a loop that stacks the results of its iterations."""
    loops = Loops()
    part = loops.dims(call.operands[0])
    return loops.rule([part], [(loops.dim(call.results[0][0], FactorKind.BLOCKED), *part)])


def _loop_unstack(call: Call) -> Rule:
    """Return the rule of a loop whose iterations each take a part of a stack."""
    loops = Loops()
    part = loops.dims(call.results[0])
    return loops.rule([(loops.dim(call.operands[0][0], FactorKind.BLOCKED), *part)], [part])


def _random(call: Call) -> Rule:
    """Return the rule of random numbers drawn from a key: every device has the key and draws the numbers of its part.

    This holds under `jax_threefry_partitionable`, which is JAX's default.
    """
    loops = Loops()
    keys = [loops.dims(shape, FactorKind.BLOCKED) for shape in call.operands]
    return loops.rule(keys, [loops.dims(shape) for shape in call.results])


RULES: Mapping[str, Callable[[Call], Rule]] = {
    CARRY: elementwise,
    MERGE: elementwise,
    NEXT: elementwise,
    STACK: _loop_stack,
    UNSTACK: _loop_unstack,
    **same_rule("argmax argmin", _arg_reduce),
    "approx_top_k": _approx_top_k,
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _conv_general_dilated,
    **same_rule("cumlogsumexp cummax cummin cumprod cumsum split", _along("axis")),
    **same_rule("concatenate sort", _along("dimension")),
    **same_rule("device_put optimization_barrier", _pairwise),
    "dot_general": _dot_general,
    **same_rule("dynamic_slice slice", slice_rule),
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _expand_dims,
    "gather": _gather,
    "pad": _pad,
    "random_bits": _random,
    # keys are small, and every device needs them whole
    **same_rule("random_clone random_fold_in random_seed random_split random_unwrap random_wrap", blocked_rule),
    **same_rule("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor", _reduce),
    "reduce": _reduce_by,
    **same_rule("reduce_window_max reduce_window_min reduce_window_sum", _reduce_window),
    "reshape": _reshape,
    "rev": _rev,
    **same_rule("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub", _scatter),
    SHARD_MAP: shard_map_rule,
    "select_and_scatter_add": _select_and_scatter_add,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
    **matrix_rules.RULES,
}
"""Rules of primitives that are not elementwise. Foreign kernels have none."""
