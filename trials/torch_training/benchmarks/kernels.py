"""Benchmarks of single operators on arbitrary data, with the kernels that the trainer calls.

Letters of products: x [m, k] is multiplied by a weight [n, k], which torch keeps transposed; g [m, n] is the gradient
of the output. The shape of a backward product gives its own sizes: m rows of the result, k the length of its sums, n
columns. Fractional sizes, which occur in uneven splits, are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from costmodels.blocks.operator import OpKind, Phase
from costmodels.operators.isolated import IsolatedCall, isolated_operator
from trials.torch_training.benchmarks.messages import Timing
from trials.torch_training.benchmarks.timing import time_runs
from trials.torch_training.model.attention_kernels import attend_whole, block_backward, block_forward
from trials.torch_training.model.blocks import NORM_EPSILON, apply_activation, rotate_pairs

Run = Callable[[], object]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}

RANDOM_ELEMENTS = 2**20
"""Number of random values that large tensors repeat; new ones would take longer than most operators."""

COLUMNS = 1024
"""Row length of elementwise operators, which their shape does not contain."""

VOCABULARY = 8192
"""Row length of the cross entropy's logits."""

HEAD_SIZE = 64
"""Head size of the rotary embedding."""

ROTATED_BYTES = 2**24
"""Total size of the data sets that take turns on a CPU.

In training, inputs that a layer has kept for its backward pass and its weights are no longer in the inner caches.
"""

MOST_SETS = 8


def time_call(call: IsolatedCall, device: torch.device) -> Timing:
    """Run the operator until its time is known."""
    torch.backends.cuda.matmul.allow_tf32 = call.precision == "tf32"
    make = _MAKERS[call.kind]
    sets = 1
    if device.type == "cpu":
        # Use as many data sets as fill ROTATED_BYTES.
        moved_bytes = float(isolated_operator(call).moved_bytes[0])
        sets = max(1, min(MOST_SETS, round(ROTATED_BYTES / moved_bytes)))
    return time_runs([make(call, device) for _ in range(sets)], device)


def matmul(call: IsolatedCall, device: torch.device) -> Callable[[], Tensor]:
    """Return a product as `functional.linear` and its backward pass compute it."""
    m, k, n = _round_sizes(call.shape)
    make = partial(_make_data, dtype=DTYPES[call.precision], device=device)
    match call.role:
        case "forward":
            x, weight = make(m, k), make(n, k)
            return lambda: functional.linear(x, weight)
        case "data_gradient":  # g [m, k] times the weight [k, n]
            g, weight = make(m, k), make(k, n)
            return lambda: g @ weight
        case "weight_gradient":  # the weight's gradient [m, n] sums over k tokens
            g, x = make(k, n), make(k, m)
            return lambda: g.t() @ x
    raise AssertionError(f"unknown role of a product: {call.role}")


def grouped_matmul(call: IsolatedCall, device: torch.device) -> Callable[[], Tensor]:
    """Return a product with several weights, each of which has an equal share of the tokens."""
    groups, m, k, n = _round_sizes(call.shape)
    make = partial(_make_data, dtype=DTYPES[call.precision], device=device)
    tokens = k if call.role == "weight_gradient" else m
    # Ends of the groups' rows, in equal shares up to rounding.
    ends = torch.linspace(0, tokens, groups + 1, device=device).round()[1:].int()
    match call.role:
        case "forward":
            x, weights = make(m, k), make(groups, n, k)
            return lambda: torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
        case "data_gradient":
            g, weights = make(m, k), make(groups, k, n)
            return lambda: torch._grouped_mm(g, weights, offs=ends)
        case "weight_gradient":
            g, x = make(k, n), make(k, m)
            return lambda: torch._grouped_mm(g.t(), x, offs=ends)
    raise AssertionError(f"unknown role of a product: {call.role}")


def attention(call: IsolatedCall, device: torch.device) -> Run:
    """Return causal attention; for a part of the queries in a ring, attention to all blocks of keys."""
    batch, heads, queries, keys, size = _round_sizes(call.shape)
    dtype = DTYPES[call.precision]
    q, k, v, g = (_make_data(batch, queries, heads, size, dtype=dtype, device=device) for _ in range(4))
    if keys == queries:
        if call.phase is Phase.FORWARD:
            return lambda: attend_whole(q, k, v)
        leaves = tuple(x.requires_grad_() for x in (q, k, v))
        return _gradients(attend_whole(*leaves), leaves, g)
    # In a balanced ring, the own block is causal, and half of every other block is visible.
    half = max(1, queries // 2)
    passed = [(k, v, True), *[(k[:, :half], v[:, :half], False)] * (round(keys / queries) - 1)]

    def forward() -> None:
        for keys_in, values_in, causal in passed:
            block_forward(q, keys_in, values_in, causal=causal)

    out, lse = block_forward(q, k, v, causal=True)

    def backward() -> None:
        for keys_in, values_in, causal in passed:
            block_backward(g, q, keys_in, values_in, out, lse, causal=causal)

    return forward if call.phase is Phase.FORWARD else backward


def norm(call: IsolatedCall, device: torch.device) -> Run:
    """Return RMSNorm or LayerNorm over the columns."""
    rows, columns = _round_sizes(call.shape)
    dtype = DTYPES[call.precision]
    x = _make_data(rows, columns, dtype=dtype, device=device)
    # only LayerNorm has a bias
    weight, bias = (_make_data(columns, dtype=dtype, device=device) for _ in range(2))

    def forward() -> Tensor:
        if call.role == "rms_norm":
            return functional.rms_norm(x, (columns,), weight, NORM_EPSILON)
        return functional.layer_norm(x, (columns,), weight, bias, NORM_EPSILON)

    leaves = (x, weight) if call.role == "rms_norm" else (x, weight, bias)
    return _choose_phase(call, forward, leaves)


def elementwise(call: IsolatedCall, device: torch.device) -> Run:
    """Return an activation, the residual's addition, the rotary embedding or the loss."""
    (elements,) = _round_sizes(call.shape)
    dtype = DTYPES[call.precision]
    # The shape gives only the number of elements; choose a typical row length.
    columns = min(elements, VOCABULARY if call.role == "cross_entropy" else COLUMNS)
    rows = max(1, round(elements / columns))
    gates = 2 if call.role == "swiglu" else 1
    x = _make_data(rows, gates * columns, dtype=dtype, device=device)
    match call.role:
        case "swiglu" | "gelu":
            return _choose_phase(call, lambda: apply_activation(x, gates), (x,))
        case "residual":  # its gradient is the output's gradient, added to that of the block
            y = _make_data(rows, columns, dtype=dtype, device=device)
            return lambda: x + y
        case "rotary":
            size = min(columns, HEAD_SIZE)
            heads = x.view(1, rows, -1, size)
            angles = _make_data(rows, 1, size // 2, dtype=torch.float32, device=device)
            cosine, sine = angles.cos(), angles.sin()
            return _choose_phase(call, lambda: rotate_pairs(heads, cosine, sine), (heads,))
        case "cross_entropy":
            target = torch.arange(rows, device=device) % columns
            return _choose_phase(call, lambda: functional.cross_entropy(x.float(), target, reduction="sum"), (x,))
    raise AssertionError(f"unknown role of an elementwise operator: {call.role}")


_MAKERS: dict[OpKind, Callable[[IsolatedCall, torch.device], Run]] = {
    OpKind.MATMUL: matmul,
    OpKind.GROUPED_MATMUL: grouped_matmul,
    OpKind.ATTENTION: attention,
    OpKind.NORM: norm,
    OpKind.ELEMENTWISE: elementwise,
}


def _choose_phase(call: IsolatedCall, forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Run:
    """Return the forward function, or the computation of its gradients with respect to the leaves."""
    if call.phase is Phase.FORWARD:
        return forward
    for leaf in leaves:
        leaf.requires_grad_()
    out = forward()
    return _gradients(out, leaves, torch.ones_like(out))


def _gradients(out: Tensor, leaves: tuple[Tensor, ...], g: Tensor) -> Run:
    # the forward pass has run once; its graph is kept, so that each run computes the gradients alone
    return lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)


def _round_sizes(shape: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(max(1, round(size)) for size in shape)


def _make_data(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    elements = math.prod(shape)
    some = torch.randn(min(elements, RANDOM_ELEMENTS), device=device).to(dtype)
    return some.repeat(-(-elements // len(some)))[:elements].view(shape)
