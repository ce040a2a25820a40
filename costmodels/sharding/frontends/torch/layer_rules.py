"""Sharding rules of the ATen operators behind layers: products, norms, convolutions, pooling and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from costmodels.sharding.dims import FactorKind, Place, Rule
from costmodels.sharding.frontends.rule_parts import Call, Loops, Shape, blocked_rule, broadcast, same_rule
from costmodels.sharding.frontends.torch.calls import Operand

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
"""Fused attention under the name that torch uses for traces on the CPU."""


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


def _distances(call: Call) -> Rule:
    """Return the rule of distances between all pairs of vectors."""
    loops = Loops()
    left, right = call.operands
    result = call.results[0]
    batch = loops.dims(result[:-2])
    rows, columns = loops.dim(left[-2]), loops.dim(right[-2])
    width = loops.dim(left[-1], FactorKind.BLOCKED)
    leads = (broadcast(batch, result[:-2], shape[:-2]) for shape in (left, right))
    return loops.rule(
        [(*lead, own, width) for lead, own in zip(leads, (rows, columns), strict=True)], [(*batch, rows, columns)]
    )


def _distances_backward(call: Call) -> Rule:
    """Return the rule of the gradient of distances by the left vectors, a sum over the right ones."""
    loops = Loops()
    grad, left, right, known = call.operands
    batch = loops.dims(left[:-2])
    if not left[:-2] == right[:-2] == grad[:-2] == known[:-2]:
        return blocked_rule(call)
    rows, columns = loops.dim(left[-2]), loops.dim(right[-2], FactorKind.REDUCTION)
    width = loops.dim(left[-1])
    pairs = (*batch, rows, columns)
    own, others = (*batch, rows, width), (*batch, columns, width)
    return loops.rule([pairs, own, others, pairs], [own])


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
    is_forward = call.primitive == ATTENTION
    results = ("out", "logsumexp") if is_forward else ("query", "key", "value")
    return loops.rule(
        [by_slot[slot] for slot in range(len(call.operands))], [places[name] for name in results[: len(call.results)]]
    )


RULES: Mapping[str, Callable[[Call], Rule]] = {
    **same_rule("mm bmm addmm baddbmm", _product),
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
    "_cdist_forward": _distances,
    "_cdist_backward": _distances_backward,
    **same_rule(f"{ATTENTION} {ATTENTION_BACKWARD}", _attention),
}
"""Rules of these operators by name."""
