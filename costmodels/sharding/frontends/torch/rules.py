"""Sharding rules of ATen operators.

Elementwise operators are those that torch tags as pointwise; they share one rule. An operator without a rule gets None,
and the caller blocks all its dims. Parameters are those of the operator's schema. A parameter that is a tensor is an
`Operand`, which holds its index among the operands.

The parameters of a call describe whole tensors. Parameters that depend on shapes (the sizes of a view) must be computed
from local shapes if a factor of the rule is partitioned. An exception is the mean, where every part divides by the
number of all elements, so that the parts add up. If the contraction of an `addmm` is partitioned, only one device adds
the bias.

Some rules partition factors that need masks, as partitioners do. Rows that `embedding`, `index` and `gather` look up:
each device looks up the rows that it has, uses zeros for the others, and the results are added up. Rows that
`index_put`, `scatter` and `embedding_dense_backward` write: each device writes the values that fall into its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from costmodels.sharding.dims import FactorKind, Place, Rule
from costmodels.sharding.frontends.rule_parts import (
    Call,
    Loops,
    Shape,
    along,
    blocked_rule,
    broadcast,
    elementwise,
    fits,
    rearrange_rule,
    replace_factors,
    reshape_rule,
    same_rule,
    slice_rule,
    without,
)
from costmodels.sharding.frontends.torch import matrix_rules


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among an operator's parameters, by its index among the operands."""

    slot: int


def bound(
    op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_tensor: Callable[[Any], bool]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the parameters of a call by name, and the tensors among them in order."""
    # Tensors may stand in nested lists, as those of `cat`.
    tensors: list[Any] = []

    def of(value: Any) -> Any:
        if is_tensor(value):
            tensors.append(value)
            return Operand(len(tensors) - 1)
        return [of(one) for one in value] if isinstance(value, (list, tuple)) else value

    params: dict[str, Any] = {}
    # Fill in the schema's defaults, so that rules find every parameter by name.
    for number, argument in enumerate(op._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        params[argument.name] = of(args[number] if number < len(args) else kwargs.get(argument.name, default))
    return params, tensors


def name_of(op: OpOverload[..., Any]) -> str:
    """Return the name of an operator without its overload; operators outside of ATen keep their namespace."""
    return op._schema.name.removeprefix("aten::").replace("::", ".")


def has_rule(op: OpOverload[..., Any]) -> bool:
    """Return whether an operator has a rule."""
    return torch.Tag.pointwise in op.tags or name_of(op) in RULES


def rule_of_call(call: Call, op: OpOverload[..., Any]) -> Rule | None:
    """Return the rule of a call; None if its operator has no rule, or none for this form of it."""
    rule = RULES.get(call.primitive, elementwise if torch.Tag.pointwise in op.tags else None)
    found = None if rule is None else rule(call)
    return found if found is not None and fits(found, call) else None


def unread(call: Call) -> tuple[int, ...]:
    """Return the operands of a call of which only the shape is read."""
    params = call.params
    if call.primitive == "convolution_backward":
        return (1,) if params["output_mask"][0] else (2,)
    if call.primitive in ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"):
        return (1,)
    return (0,) if call.primitive in ("copy", "copy_") else ()


def flop_of_call(call: Call) -> float:
    """Return the FLOPs of a product, a convolution, attention, a factorization or a transform; 0 for other operators.

    A multiplication and an addition count as two. Attention takes two products of all queries with all keys, and half
    of that if it is causal. Its gradient takes five products for two (Dao 2023, FlashAttention-2, section 4.1).
    """
    name, params, operands = call.primitive, call.params, call.operands
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return float(2 * math.prod(call.results[0]) * operands[-1][-2])
    if name in ("convolution", "convolution_backward"):
        # The backward operator has the output's gradient as operand 0.
        is_forward = name == "convolution"
        image, out = (operands[0], call.results[0]) if is_forward else (operands[1], operands[0])
        weight = operands[1] if is_forward else operands[2]
        return float(2 * math.prod(image if params["transposed"] else out) * math.prod(weight[1:]))
    if name in (_ATTENTION, _ATTENTION_BACKWARD):
        queries, keys, values = (operands[params[key].slot] for key in ("query", "key", "value"))
        products = 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])
        return float(products) * (0.5 if params["is_causal"] else 1.0) * (2.5 if name == _ATTENTION_BACKWARD else 1.0)
    flop = matrix_rules.FLOPS.get(name)
    return 0.0 if flop is None else flop(call)


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
"""Fused attention under the name that torch uses for traces on the CPU."""


def _dims(call: Call, key: str = "dim", *, rank: int | None = None) -> tuple[int, ...]:
    """Return the non-negative dims that a parameter names; all dims if it names none."""
    count = len(call.operands[0]) if rank is None else rank
    named = call.params.get(key)
    if named is None or named == []:
        return tuple(range(count))
    return tuple(one % count for one in (named if isinstance(named, (list, tuple)) else [named])) if count else ()


def _product(call: Call) -> Rule:
    """Return the rule of a matrix product or a batched one, with or without an addend."""
    loops = Loops()
    *added, left, right = call.operands
    batch = [loops.dim(size) for size in left[:-2]]
    row, column = loops.dim(left[-2]), loops.dim(right[-1])
    inner = loops.dim(left[-1], FactorKind.REDUCTION)
    result = (*batch, row, column)
    operands = [broadcast(result, call.results[0], one) for one in added]
    return loops.rule([*operands, (*batch, row, inner), (*batch, inner, column)], [result])


def _view(call: Call) -> Rule:
    return reshape_rule(call.operands[0], call.results[0])


def _permute(call: Call) -> Rule:
    """Return the rule of a permutation of dims, of which `t` and `transpose` are special cases."""
    rank = len(call.operands[0])
    if call.primitive == "permute":
        order = list(_dims(call, "dims"))
    else:
        # `t` swaps the only two dims, `transpose` swaps two named ones.
        order = list(range(rank))
        if rank:
            first, second = (0, rank - 1) if call.primitive == "t" else (*_dims(call, "dim0"), *_dims(call, "dim1"))
            order[first], order[second] = order[second], order[first]
    loops = Loops()
    operand = loops.dims(call.operands[0])
    return loops.rule([operand], [tuple(operand[dim] for dim in order)])


def _squeeze(call: Call) -> Rule:
    loops = Loops()
    operand = loops.dims(call.operands[0])
    gone = [dim for dim in _dims(call) if call.operands[0][dim] == 1]
    return loops.rule([operand], [without(operand, gone)])


def _unsqueeze(call: Call) -> Rule:
    loops = Loops()
    result = loops.dims(call.results[0])
    return loops.rule([without(result, _dims(call, rank=len(result)))], [result])


def _reduce(call: Call) -> Rule:
    return _reduce_dims(call, FactorKind.REDUCTION)


def _reduce_whole(call: Call) -> Rule:
    """Return the rule of reductions whose parts cannot be combined, such as indices without values."""
    return _reduce_dims(call, FactorKind.BLOCKED)


def _reduce_dims(call: Call, kind: FactorKind) -> Rule:
    loops = Loops()
    dims = _dims(call)
    operand = tuple(
        loops.dim(size, kind if dim in dims else FactorKind.MAP) for dim, size in enumerate(call.operands[0])
    )
    is_kept = call.params.get("keepdim", False)
    result = replace_factors(operand, dict.fromkeys(dims, ())) if is_kept else without(operand, dims)
    return loops.rule([operand], [result] * len(call.results))


def _along(call: Call) -> Rule:
    if not call.results[0]:
        return blocked_rule(call)
    return along(call, *_dims(call))


def _cat(call: Call) -> Rule:
    """Return the rule of a concatenation; torch still allows empty operands of another rank."""
    loops = Loops()
    (dim,) = _dims(call, rank=len(call.results[0]))
    place = loops.dims(call.results[0], blocked=(dim,))
    operands: list[Place] = [
        replace_factors(place, {dim: loops.dim(shape[dim], FactorKind.BLOCKED)}) if len(shape) == len(place) else ((),)
        for shape in call.operands
    ]
    return loops.rule(operands, [place])


def _stack(call: Call) -> Rule:
    loops = Loops()
    (dim,) = _dims(call, rank=len(call.results[0]))
    place = loops.dims(call.results[0], blocked=(dim,))
    return loops.rule([without(place, (dim,))] * len(call.operands), [place])


def _select(call: Call) -> Rule:
    """Return the rule of an operator that selects one index along a dim, or each index."""
    loops = Loops()
    dims = _dims(call)
    place = loops.dims(call.operands[0], blocked=dims)
    return loops.rule([place], [without(place, dims)] * len(call.results))


def _select_scatter(call: Call) -> Rule:
    loops = Loops()
    dims = _dims(call)
    place = loops.dims(call.operands[0], blocked=dims)
    return loops.rule([place, without(place, dims)], [place])


def _diagonal(call: Call) -> Rule:
    """Return the rule of a view of diagonals, or of a copy with other diagonals; a diagonal is the last dim."""
    loops = Loops()
    rank = len(call.operands[0])
    dims = [call.params[key] % rank for key in ("dim1", "dim2")]
    whole = loops.dims(call.operands[0], blocked=dims)
    is_view = call.primitive == "diagonal"
    length = (call.results[0] if is_view else call.operands[1])[-1]
    diagonal = (*without(whole, dims), loops.dim(length, FactorKind.BLOCKED))
    return loops.rule([whole], [diagonal]) if is_view else loops.rule([whole, diagonal], [whole])


def _flip(call: Call) -> Rule:
    return rearrange_rule(call, _dims(call, "dims"))


def _pad(call: Call) -> Rule:
    """Return the rule of a padding, whose parameter begins with the last dim."""
    pads = call.params["pad"]
    pairs = [pads[one : one + 2] for one in range(0, len(pads), 2)]
    rank = len(call.operands[0])
    return rearrange_rule(call, [rank - 1 - one for one, pair in enumerate(pairs) if any(pair)])


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
    dims = _dims(call)
    place, operand = _place_index(loops, shape, index, dims)
    operand |= {dim: loops.dim(shape[dim], FactorKind.REDUCTION) for dim in dims}
    return loops.rule([tuple(operand[dim] for dim in range(len(shape))), place], [place])


def _scatter(call: Call) -> Rule:
    """Return the rule of a scatter; without addition, later elements overwrite earlier ones, so their order matters."""
    loops = Loops()
    shape, index, *sources = call.operands
    dims = _dims(call)
    kind = FactorKind.REDUCTION if call.primitive == "scatter_add" else FactorKind.BLOCKED
    place, operand = _place_index(loops, shape, index, dims, kind)
    operand |= {dim: loops.dim(shape[dim]) for dim in dims}
    whole = tuple(operand[dim] for dim in range(len(shape)))
    # Sources that are larger than the index are only partly read.
    is_alike = all(source in (index, ()) for source in sources)
    if not is_alike:
        return blocked_rule(call)
    return loops.rule([whole, place, *(place if source else () for source in sources)], [whole])


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


def _norm(call: Call) -> Rule:
    """Return the rule of norms over the last dims and their gradients.

    Rows are maps, and gradients of scales are sums over the rows.
    """
    loops = Loops()
    inner = tuple(call.params["normalized_shape"])
    shape = call.operands[0]
    rows = loops.dims(shape[: len(shape) - len(inner)])
    # Statistics need whole rows.
    columns = loops.dims(inner, FactorKind.BLOCKED)

    def place(one: Shape) -> Place:
        if one == shape:
            return (*rows, *columns)
        return columns if one == inner else (*rows, *((),) * len(inner))

    return loops.rule([place(one) for one in call.operands], [place(one) for one in call.results])


def _group_norm(call: Call) -> Rule:
    """Return the rule of norms over groups of channels and their gradients.

    Gradients of scales are sums over the batch.
    """
    loops = Loops()
    batch, groups = call.params["N"], call.params["group"]
    shape = call.operands[0]
    # Groups are independent: an axis can serve the group factor, which comes first on the channel dim.
    row, group = loops.dim(batch), loops.dim(groups)
    channels = (*group, *loops.dim(call.params["C"] // groups, FactorKind.BLOCKED))
    whole = (row, channels, *loops.dims(shape[2:], FactorKind.BLOCKED))

    def place(one: Shape) -> Place:
        if one == shape:
            return whole
        return (channels,) if len(one) == 1 else (row, group)

    return loops.rule([place(one) for one in call.operands], [place(one) for one in call.results])


def _images(call: Call, *, space: int = 2) -> Rule:
    """Return the rule of operators on neighbouring elements in space; all dims before the spatial ones are maps."""
    loops = Loops()
    lead = loops.dims(call.operands[0][:-space])

    def place(shape: Shape) -> Place:
        return (*lead, *loops.dims(shape[-space:], FactorKind.BLOCKED))

    return loops.rule([place(shape) for shape in call.operands], [place(shape) for shape in call.results])


def _convolution(call: Call) -> Rule:
    """Return the rule of a convolution or its gradient: a matrix product over batch and features, perhaps in groups.

    `_space` gives the factors of the spatial dims. One of image, weight and output is computed, possibly as a gradient,
    from the other two.
    """
    loops = Loops()
    params = call.params
    if call.primitive == "convolution":
        image, weight, *bias = call.operands
        out, computed = call.results[0], "out"
    else:
        out, image, weight = call.operands
        computed = "image" if params["output_mask"][0] else "weight"
    groups = params["groups"]
    low, high = weight[1], weight[0] // groups  # a transposed one has its inputs in front
    # Factor that is summed over, by the computed tensor: input channels for the output, output channels for the image's
    # gradient, and the batch for the weight's gradient.
    sums = {"out": "high" if params["transposed"] else "low", "image": "low" if params["transposed"] else "high"}

    def kind(of: str) -> FactorKind:
        return FactorKind.REDUCTION if sums.get(computed, "batch") == of else FactorKind.MAP

    # The computed tensor decides which factor is summed over.
    batch, group = loops.dim(image[0], kind("batch")), loops.dim(groups)
    low_channels, high_channels = loops.dim(low, kind("low")), loops.dim(high, kind("high"))
    # A transposed convolution exchanges the roles of input and output channels.
    into, outof = (high_channels, low_channels) if params["transposed"] else (low_channels, high_channels)
    places: dict[str, list[tuple[int, ...]]] = {
        "image": [batch, group + into],
        "weight": [group + high_channels, low_channels],
        "out": [batch, group + outof],
    }
    for number, sizes in enumerate(zip(image[2:], weight[2:], out[2:], strict=True)):
        for name, factors in zip(places, _space(loops, params, number, sizes, computed), strict=True):
            places[name].append(factors)
    whole = {name: tuple(place) for name, place in places.items()}
    if call.primitive == "convolution":
        return loops.rule([whole["image"], whole["weight"], *((group + outof,) for _ in bias)], [whole["out"]])
    return loops.rule([whole["out"], whole["image"], whole["weight"]], [whole[computed]])


def _space(
    loops: Loops, params: Mapping[str, Any], number: int, sizes: tuple[int, int, int], computed: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the factors of one spatial dim of image, window and output.

    A window of one element is a map, or a reduction for the weight's gradient. Any other window reads neighbours.
    """
    image, window, out = sizes
    # A single value stands for all spatial dims.
    padding, stride = (params[key][number % len(params[key])] for key in ("padding", "stride"))
    if window == 1 and padding == 0 and stride == 1 and image == out:
        factor = loops.dim(image, FactorKind.REDUCTION if computed == "weight" else FactorKind.MAP)
        return factor, (), factor
    if image == out:
        factor = loops.dim(image, FactorKind.PERMUTATION)
        return factor, loops.dim(window, FactorKind.BLOCKED), factor
    first, second, third = (loops.dim(size, FactorKind.BLOCKED) for size in sizes)
    return first, second, third


def _attention(call: Call) -> Rule:
    """Return the rule of fused attention or its gradient; only the queries can be partitioned along the sequence.

    See `layers.attention_core` for the reasons.
    """
    loops = Loops()
    params = call.params
    slots = {name: params[name].slot for name in ("query", "key", "value")}
    queries, keys, values = (call.operands[slot] for slot in slots.values())
    batch, key_heads = loops.dim(queries[0]), loops.dim(keys[1])
    # Several query heads share a key head. The key heads come first, so that both sides can be partitioned alike.
    heads = (*key_heads, *loops.dim(queries[1] // keys[1]))
    rows, columns = loops.dim(queries[2]), loops.dim(keys[2], FactorKind.BLOCKED)
    width = loops.dim(queries[3], FactorKind.BLOCKED)
    value_width = width if values[3] == queries[3] else loops.dim(values[3], FactorKind.BLOCKED)
    places: dict[str, Place] = {
        "query": (batch, heads, rows, width),
        "key": (batch, key_heads, columns, width),
        "value": (batch, key_heads, columns, value_width),
        "out": (batch, heads, rows, value_width),
        "grad_out": (batch, heads, rows, value_width),
        "logsumexp": (batch, heads, rows),
    }
    # Places follow the operands' order in this particular call.
    by_slot = {one.slot: places[name] for name, one in params.items() if isinstance(one, Operand) and name in places}
    if params["attn_mask"] is not None:
        slot = params["attn_mask"].slot
        whole, shape = (batch, heads, rows, columns), (*queries[:3], keys[2])
        by_slot[slot] = broadcast(whole, shape, call.operands[slot])
    is_forward = call.primitive == _ATTENTION
    results = ("out", "logsumexp") if is_forward else ("query", "key", "value")
    return loops.rule(
        [by_slot[slot] for slot in range(len(call.operands))], [places[name] for name in results[: len(call.results)]]
    )


VIEWS = frozenset(("_unsafe_view", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"))
"""Operators whose result has the operand's elements in new positions; `expand` repeats them."""

RULES: Mapping[str, Callable[[Call], Rule]] = {
    **same_rule("_conj _neg_view _to_copy copy copy_ expand resolve_conj resolve_neg", elementwise),
    **same_rule("mm bmm addmm baddbmm", _product),
    **same_rule("view _unsafe_view reshape", _view),
    **same_rule("permute transpose t", _permute),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    **same_rule("sum mean amax amin any all prod", _reduce),
    **same_rule("argmax argmin max min median", _reduce_whole),
    **same_rule("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data", _along),
    **same_rule("cumsum cumprod _cumsum logcumsumexp topk sort split split_with_sizes slice_scatter", _along),
    "cat": _cat,
    "stack": _stack,
    **same_rule("select unbind", _select),
    "select_scatter": _select_scatter,
    "slice": slice_rule,
    "constant_pad_nd": _pad,
    "flip": _flip,
    **same_rule("diagonal diagonal_scatter", _diagonal),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _gather,
    **same_rule("scatter scatter_add", _scatter),
    "index": _index,
    "index_put": _index_put,
    **same_rule("native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward", _norm),
    **same_rule("native_group_norm native_group_norm_backward", _group_norm),
    **same_rule(
        """
        max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward
        """,
        _images,
    ),
    **same_rule("avg_pool1d upsample_nearest1d upsample_nearest1d_backward", partial(_images, space=1)),
    **same_rule("convolution convolution_backward", _convolution),
    **same_rule(f"{_ATTENTION} {_ATTENTION_BACKWARD}", _attention),
    **matrix_rules.RULES,
}
"""Rules of operators that torch does not tag as pointwise."""
