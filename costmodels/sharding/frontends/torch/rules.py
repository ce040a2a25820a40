"""The iteration space of every ATen operator that Meshtune knows: how its factors lie on operands and results.

Elementwise operators are those that torch tags so, and share one rule. An operator that nobody wrote a rule for has
none, and its caller blocks all its dims. Parameters are those of the operator's schema; one that is a tensor is an
`Operand`, which says which of the operands it is.

What an operator counts from shapes must be counted from the local ones where a rule's factor is cut (the sizes of a
view): the parameters here are those of whole tensors. Only a mean divides by the number of all elements in every part,
so that parts add up. Where the sum of a product is cut, one device adds the bias of an `addmm`.

Some rules cut what only masks make cuttable, as partitioners do it: rows that `embedding`, `index` and `gather` look
up (each device looks up what it has, zeros elsewhere, and all add up), and rows that `index_put`, `scatter` and
`embedding_dense_backward` write (each device writes what falls into its part).
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
    changed,
    elementwise,
    replaced,
    reshaped,
    resized,
    without,
)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among an operator's parameters, by its position among the operands."""

    slot: int


def bound(
    op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_tensor: Callable[[Any], bool]
) -> tuple[dict[str, Any], list[Any]]:
    """The parameters of a call by their names, and the tensors among them in their order."""
    tensors: list[Any] = []

    def of(value: Any) -> Any:
        if is_tensor(value):
            tensors.append(value)
            return Operand(len(tensors) - 1)
        return [of(one) for one in value] if isinstance(value, (list, tuple)) else value

    params: dict[str, Any] = {}
    for number, argument in enumerate(op._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        params[argument.name] = of(args[number] if number < len(args) else kwargs.get(argument.name, default))
    return params, tensors


def name_of(op: OpOverload[..., Any]) -> str:
    """What rules call an operator, whatever its overload; one that isn't ATen's with its namespace."""
    return op._schema.name.removeprefix("aten::").replace("::", ".")


def has_rule(op: OpOverload[..., Any]) -> bool:
    """Whether an operator has one."""
    return torch.Tag.pointwise in op.tags or name_of(op) in RULES


def rule_of_call(call: Call, op: OpOverload[..., Any]) -> Rule | None:
    """The rule of a call; None where nobody wrote one for its operator."""
    rule = RULES.get(call.primitive)
    if rule is not None:
        return rule(call)
    return elementwise(call) if torch.Tag.pointwise in op.tags else None


def unread(call: Call) -> tuple[int, ...]:
    """The operands of a call of which only the shape is read."""
    params = call.params
    if call.primitive == "convolution_backward":
        return (1,) if params["output_mask"][0] else (2,)
    if call.primitive in ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"):
        return (1,)
    return (0,) if call.primitive in ("copy", "copy_") else ()


def flop_of_call(call: Call) -> float:
    """Floating-point operations of a product, a convolution or attention, multiplications and additions apart; else 0.

    Attention takes two products of all queries with all keys, half of it where it is causal; its gradient five for two
    (Dao 2023, FlashAttention-2, section 4.1).
    """
    name, params, operands = call.primitive, call.params, call.operands
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return float(2 * math.prod(call.results[0]) * operands[-1][-2])
    if name in ("convolution", "convolution_backward"):
        is_forward = name == "convolution"
        image, out = (operands[0], call.results[0]) if is_forward else (operands[1], operands[0])
        weight = operands[1] if is_forward else operands[2]
        return float(2 * math.prod(image if params["transposed"] else out) * math.prod(weight[1:]))
    if name in (_ATTENTION, _ATTENTION_BACKWARD):
        queries, keys, values = (operands[params[key].slot] for key in ("query", "key", "value"))
        products = 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])
        return float(products) * (0.5 if params["is_causal"] else 1.0) * (2.5 if name == _ATTENTION_BACKWARD else 1.0)
    return 0.0


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
"""Fused attention as torch calls it where nothing says which device it is for."""


def _dims(call: Call, key: str = "dim", *, rank: int | None = None) -> tuple[int, ...]:
    """The dims that a parameter names, counted from the first; none named are all."""
    count = len(call.operands[0]) if rank is None else rank
    named = call.params.get(key)
    if named is None or named == []:
        return tuple(range(count))
    return tuple(one % count for one in (named if isinstance(named, (list, tuple)) else [named])) if count else ()


def _product(call: Call) -> Rule:
    """Of matrices or of batches of them, perhaps with something added."""
    loops = Loops()
    *added, left, right = call.operands
    batch = [loops.dim(size) for size in left[:-2]]
    row, column = loops.dim(left[-2]), loops.dim(right[-1])
    inner = loops.dim(left[-1], FactorKind.REDUCTION)
    result = (*batch, row, column)
    operands = [broadcast(result, call.results[0], one) for one in added]
    return loops.rule([*operands, (*batch, row, inner), (*batch, inner, column)], [result])


def _view(call: Call) -> Rule:
    return reshaped(call.operands[0], call.results[0])


def _permute(call: Call) -> Rule:
    rank = len(call.operands[0])
    if call.primitive == "permute":
        order = list(_dims(call, "dims"))
    else:
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
    return _over(call, FactorKind.REDUCTION)


def _reduce_whole(call: Call) -> Rule:
    """Of what parts say nothing about: indices without values, say."""
    return _over(call, FactorKind.BLOCKED)


def _over(call: Call, kind: FactorKind) -> Rule:
    loops = Loops()
    dims = _dims(call)
    operand = tuple(
        loops.dim(size, kind if dim in dims else FactorKind.MAP) for dim, size in enumerate(call.operands[0])
    )
    is_kept = call.params.get("keepdim", False)
    result = replaced(operand, dict.fromkeys(dims, ())) if is_kept else without(operand, dims)
    return loops.rule([operand], [result] * len(call.results))


def _along(call: Call) -> Rule:
    if not call.results[0]:
        return blocked_rule(call)
    return along(call, *_dims(call))


def _cat(call: Call) -> Rule:
    """Of tensors that stand behind each other; an old rule of torch's lets empty ones have another rank."""
    loops = Loops()
    (dim,) = _dims(call, rank=len(call.results[0]))
    place = loops.dims(call.results[0], blocked=(dim,))
    operands: list[Place] = [
        replaced(place, {dim: loops.dim(shape[dim], FactorKind.BLOCKED)}) if len(shape) == len(place) else ((),)
        for shape in call.operands
    ]
    return loops.rule(operands, [place])


def _stack(call: Call) -> Rule:
    loops = Loops()
    (dim,) = _dims(call, rank=len(call.results[0]))
    place = loops.dims(call.results[0], blocked=(dim,))
    return loops.rule([without(place, (dim,))] * len(call.operands), [place])


def _select(call: Call) -> Rule:
    """Of one place along a dim, or of each."""
    loops = Loops()
    dims = _dims(call)
    place = loops.dims(call.operands[0], blocked=dims)
    return loops.rule([place], [without(place, dims)] * len(call.results))


def _select_scatter(call: Call) -> Rule:
    loops = Loops()
    dims = _dims(call)
    place = loops.dims(call.operands[0], blocked=dims)
    return loops.rule([place, without(place, dims)], [place])


def _flip(call: Call) -> Rule:
    return changed(call, _dims(call, "dims"))


def _pad(call: Call) -> Rule:
    """Pads are told from the last dim."""
    pads = call.params["pad"]
    pairs = [pads[one : one + 2] for one in range(0, len(pads), 2)]
    rank = len(call.operands[0])
    return changed(call, [rank - 1 - one for one, pair in enumerate(pairs) if any(pair)])


def _embedding(call: Call) -> Rule:
    loops = Loops()
    (rows, width), indices = call.operands
    places, hidden = loops.dims(indices), loops.dim(width)
    return loops.rule([(loops.dim(rows, FactorKind.REDUCTION), hidden), places], [(*places, hidden)])


def _embedding_backward(call: Call) -> Rule:
    loops = Loops()
    indices = call.operands[1]
    kind = FactorKind.BLOCKED if call.params["scale_grad_by_freq"] else FactorKind.REDUCTION
    places = loops.dims(indices, kind)
    rows, width = call.results[0]
    hidden = loops.dim(width)
    return loops.rule([(*places, hidden), places], [(loops.dim(rows), hidden)])


def _gather(call: Call) -> Rule:
    """A place of the operand for each place of the index; they differ along one dim, and may be fewer along others."""
    loops = Loops()
    shape, index = call.operands
    dims = _dims(call)
    place, operand = _beside(loops, shape, index, dims)
    operand |= {dim: loops.dim(shape[dim], FactorKind.REDUCTION) for dim in dims}
    return loops.rule([tuple(operand[dim] for dim in range(len(shape))), place], [place])


def _scatter(call: Call) -> Rule:
    """A gather's mirror; where a later place overwrites an earlier one, their order matters."""
    loops = Loops()
    shape, index, *sources = call.operands
    dims = _dims(call)
    kind = FactorKind.REDUCTION if call.primitive == "scatter_add" else FactorKind.BLOCKED
    place, operand = _beside(loops, shape, index, dims, kind)
    operand |= {dim: loops.dim(shape[dim]) for dim in dims}
    whole = tuple(operand[dim] for dim in range(len(shape)))
    is_alike = all(source in (index, ()) for source in sources)
    if not is_alike:
        return blocked_rule(call)
    return loops.rule([whole, place, *(place if source else () for source in sources)], [whole])


def _beside(
    loops: Loops, shape: Shape, index: Shape, dims: Collection[int], kind: FactorKind = FactorKind.MAP
) -> tuple[Place, dict[int, tuple[int, ...]]]:
    """Where an index lies, and where the other dims of the operand that it is for do."""
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
    """Of each looked-up dim the places that a tensor says; these tensors are broadcast to each other."""
    loops = Loops()
    shape, indexed, common = _indices(call)
    result = loops.dims(call.results[0])
    lead = _lead(indexed)
    spread = result[lead : lead + len(common)]
    rest = iter((*result[:lead], *result[lead + len(common) :]))
    operand = [
        loops.dim(size, FactorKind.REDUCTION) if dim in indexed else next(rest) for dim, size in enumerate(shape)
    ]
    indices = [broadcast(spread, common, call.operands[slot]) for slot in indexed.values()]
    return loops.rule([tuple(operand), *indices], [result])


def _index_put(call: Call) -> Rule:
    """An index's mirror; where a later place overwrites an earlier one, their order matters."""
    loops = Loops()
    shape, indexed, common = _indices(call)
    spread = loops.dims(common, FactorKind.REDUCTION if call.params["accumulate"] else FactorKind.BLOCKED)
    operand = loops.dims(shape)
    rest = [place for dim, place in enumerate(operand) if dim not in indexed]
    sizes = [size for dim, size in enumerate(shape) if dim not in indexed]
    lead = _lead(indexed)
    written = (*rest[:lead], *spread, *rest[lead:])
    values = broadcast(written, (*sizes[:lead], *common, *sizes[lead:]), call.operands[-1])
    indices = [broadcast(spread, common, call.operands[slot]) for slot in indexed.values()]
    return loops.rule([operand, *indices, values], [operand])


def _indices(call: Call) -> tuple[Shape, dict[int, int], Shape]:
    """The shape that is looked up in, the operand that indexes each dim of it, and what these are broadcast to."""
    indexed = {dim: one.slot for dim, one in enumerate(call.params["indices"]) if one is not None}
    common = tuple(np.broadcast_shapes(*(call.operands[slot] for slot in indexed.values())))
    return call.operands[0], indexed, common


def _lead(indexed: Mapping[int, int]) -> int:
    """How many dims stand before the places; these come first where what they index isn't side by side."""
    first, last = min(indexed), max(indexed)
    return first if last - first + 1 == len(indexed) else 0


def _normalised(call: Call) -> Rule:
    """Of norms over the last dims and their gradients: rows are maps, and gradients of scales are sums over them."""
    loops = Loops()
    inner = tuple(call.params["normalized_shape"])
    shape = call.operands[0]
    rows = loops.dims(shape[: len(shape) - len(inner)])
    columns = loops.dims(inner, FactorKind.BLOCKED)

    def place(one: Shape) -> Place:
        if one == shape:
            return (*rows, *columns)
        return columns if one == inner else (*rows, *((),) * len(inner))

    return loops.rule([place(one) for one in call.operands], [place(one) for one in call.results])


def _group_norm(call: Call) -> Rule:
    """Of norms over groups of channels and their gradients: those of scales are sums over the batch."""
    loops = Loops()
    batch, groups = call.params["N"], call.params["group"]
    shape = call.operands[0]
    row, group = loops.dim(batch), loops.dim(groups)
    channels = (*group, *loops.dim(call.params["C"] // groups, FactorKind.BLOCKED))
    whole = (row, channels, *loops.dims(shape[2:], FactorKind.BLOCKED))

    def place(one: Shape) -> Place:
        if one == shape:
            return whole
        return (channels,) if len(one) == 1 else (row, group)

    return loops.rule([place(one) for one in call.operands], [place(one) for one in call.results])


def _images(call: Call, *, space: int = 2) -> Rule:
    """Of what looks at neighbours in space: all before it are maps."""
    loops = Loops()
    lead = loops.dims(call.operands[0][:-space])

    def place(shape: Shape) -> Place:
        return (*lead, *loops.dims(shape[-space:], FactorKind.BLOCKED))

    return loops.rule([place(shape) for shape in call.operands], [place(shape) for shape in call.results])


def _convolution(call: Call) -> Rule:
    """Batch and features are those of a matrix product, in groups or not; space is what `_space` says.

    One of image, weight and outcome is what is computed, whose gradient or not; it has the two others as operands.
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
    sums = {"out": "high" if params["transposed"] else "low", "image": "low" if params["transposed"] else "high"}

    def kind(of: str) -> FactorKind:
        return FactorKind.REDUCTION if sums.get(computed, "batch") == of else FactorKind.MAP

    batch, group = loops.dim(image[0], kind("batch")), loops.dim(groups)
    low_channels, high_channels = loops.dim(low, kind("low")), loops.dim(high, kind("high"))
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
    """The factors of one dim in space of image, window and outcome: maps if the window is one element.

    Any other looks at neighbours.
    """
    image, window, out = sizes
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
    """Fused attention and its gradient: of the sequence the queries can be cut, as `layers.attention_core` has it."""
    loops = Loops()
    params = call.params
    slots = {name: params[name].slot for name in ("query", "key", "value")}
    queries, keys, values = (call.operands[slot] for slot in slots.values())
    batch, key_heads = loops.dim(queries[0]), loops.dim(keys[1])
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


def _named(words: str, rule: Callable[[Call], Rule]) -> dict[str, Callable[[Call], Rule]]:
    return dict.fromkeys(words.split(), rule)


VIEWS = frozenset(("_unsafe_view", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"))
"""Operators whose result has the elements of the operand, each in a place of its own or, of `expand`, in several."""

RULES: Mapping[str, Callable[[Call], Rule]] = {
    **_named("_to_copy copy copy_ expand", elementwise),
    **_named("mm bmm addmm baddbmm", _product),
    **_named("view _unsafe_view reshape", _view),
    **_named("permute transpose t", _permute),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    **_named("sum mean amax amin any all prod", _reduce),
    **_named("argmax argmin max min median", _reduce_whole),
    **_named("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data", _along),
    **_named("cumsum cumprod _cumsum logcumsumexp topk sort split split_with_sizes slice_scatter", _along),
    "cat": _cat,
    "stack": _stack,
    **_named("select unbind", _select),
    "select_scatter": _select_scatter,
    "slice": resized,
    "constant_pad_nd": _pad,
    "flip": _flip,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _gather,
    **_named("scatter scatter_add", _scatter),
    "index": _index,
    "index_put": _index_put,
    **_named(
        "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
        _normalised,
    ),
    **_named("native_group_norm native_group_norm_backward", _group_norm),
    **_named(
        """
        max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward
        """,
        _images,
    ),
    **_named("avg_pool1d upsample_nearest1d upsample_nearest1d_backward", partial(_images, space=1)),
    **_named("convolution convolution_backward", _convolution),
    **_named(f"{_ATTENTION} {_ATTENTION_BACKWARD}", _attention),
}
"""The rule of each operator that torch doesn't tag as elementwise."""
