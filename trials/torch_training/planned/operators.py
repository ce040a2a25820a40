"""Operators of the transformer frontend in torch, by primitive: what each computes on the parts of one rank.

`costmodels/sharding/frontends/transformer` describes a training step as a graph of operators, gradients and update
included. Where an axis serves a factor of an operator, a rank has the same part of that factor in all operands, and
computes the results from it: parts of them, or partial sums where results lack the factor. Only a few operators need to
know which indices their part has: those that look up rows, positions or labels.

A function takes the operator as this rank runs it and its operands, and returns its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from costmodels.sharding.dims import Place
from trials.torch_training.planned.attention import attend, attend_gradient
from trials.torch_training.planned.experts import EXPERT_OPERATORS
from trials.torch_training.planned.local_op import Compute, LocalOp
from trials.training.numerics import EPSILON, ROTARY_BASE, einsum_equation


def _einsum(operands: Sequence[tuple[Tensor, Place]], result: Place) -> Tensor:
    """Multiply operands and sum over all factors that the result lacks."""
    equation = einsum_equation([place for _, place in operands], result)
    found: Tensor = torch.einsum(equation, *(tensor for tensor, _ in operands))
    return found


def _products(op: LocalOp, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Multiply a tensor by each weight."""
    rule = op.rule
    return tuple(
        _einsum([(x, rule.operands[0]), (weight, place)], result)
        for weight, place, result in zip(weights, rule.operands[1:], rule.results, strict=True)
    )


def _product_data_gradient(op: LocalOp, *operands: Tensor) -> tuple[Tensor, ...]:
    """Return the sum of the gradients of all products: the first half of the operands, each times its weight."""
    places, half = op.rule.operands, len(operands) // 2
    parts = [
        _einsum([(operands[at], places[at]), (operands[half + at], places[half + at])], op.rule.results[0])
        for at in range(half)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return (total,)


def _bias(op: LocalOp, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    # dims that the bias lacks get the size 1
    own = dict(zip(op.rule.operands[1], bias.shape, strict=True))
    return (x + bias.reshape([own.get(dim, 1) for dim in op.rule.operands[0]]),)


def _sum_out(op: LocalOp, given: Tensor) -> tuple[Tensor, ...]:
    """Sum over the dims that the result lacks."""
    return (_einsum([(given, op.rule.operands[0])], op.rule.results[0]),)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPSILON)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, EPSILON)


def _layer_gradient(op: LocalOp, x: Tensor, weight: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    # the gradients do not depend on the bias, which the operator does not read
    return _gradients_of(_layer)(op, x, weight, torch.zeros_like(weight), given)


def _rotary(op: LocalOp, x: Tensor, *, sign: float) -> tuple[Tensor, ...]:
    """Rotate x [b, s, heads, d] by its positions, where the first half of d is paired with the second half."""
    half = x.shape[-1] // 2
    rates = ROTARY_BASE ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = sign * op.indices(0, 1)[:, None, None].to(x.dtype) * rates
    cosine, sine = torch.cos(angles), torch.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return (torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1),)


def _gated(x: Tensor) -> Tensor:
    """Multiply the SiLU of the first of two inputs [..., 2, f] by the second."""
    return functional.silu(x[..., 0, :]) * x[..., 1, :]


def _positions(_: LocalOp, x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    # a table is cut along the sequence only if it has as many rows
    return (x + table[: x.shape[1]],)


def _positions_gradient(op: LocalOp, given: Tensor) -> tuple[Tensor, ...]:
    total, (rows, _) = given.sum(dim=0), op.rule.result_shape(0)
    # a table that is longer than the sequence is never cut
    is_longer = rows > op.rule.operand_shape(0)[1]
    return (functional.pad(total, (0, 0, 0, rows - len(total))) if is_longer else total,)


def _embedding(op: LocalOp, tokens: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    rows = op.places(1, 0)[tokens]
    # a rank yields zeros for rows of the table that others have
    return (functional.embedding(rows.clamp(min=0), table).mul_((rows >= 0)[..., None]),)


def _embedding_gradient(op: LocalOp, tokens: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    rows = op.result_places(0, 0)[tokens].flatten()
    found = given.new_zeros(len(op.result_indices(0, 0)), given.shape[-1])
    is_own = rows >= 0
    return (found.index_add_(0, rows[is_own], given.flatten(0, 1)[is_own]),)


def _maximum(_: LocalOp, logits: Tensor) -> tuple[Tensor, ...]:
    return (logits.amax(dim=-1),)


def _exponential_sum(_: LocalOp, logits: Tensor, largest: Tensor) -> tuple[Tensor, ...]:
    return ((logits - largest[..., None]).exp_().sum(dim=-1),)


def _label_logit(op: LocalOp, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    own = op.places(0, 2)[labels][..., None]
    return (logits.gather(-1, own.clamp(min=0)).mul_(own >= 0)[..., 0],)


def _mean_loss(op: LocalOp, largest: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    rows, length = op.rule.operand_shape(0)
    return (((largest + torch.log(total) - chosen).sum() / (rows * length)).reshape(1),)


def _cross_entropy_gradient(
    op: LocalOp, logits: Tensor, largest: Tensor, total: Tensor, labels: Tensor
) -> tuple[Tensor, ...]:
    rows, length = op.rule.operand_shape(1)
    found = (logits - largest[..., None]).exp_().div_(total[..., None])
    own = op.places(0, 2)[labels][..., None]
    found.scatter_add_(-1, own.clamp(min=0), -(own >= 0).to(found.dtype))
    return (found.div_(rows * length),)


def _add(_: LocalOp, *parts: Tensor) -> tuple[Tensor, ...]:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total.add_(part)
    return (total,)


def _attend(op: LocalOp, *operands: Tensor, causal: bool) -> tuple[Tensor, ...]:
    return attend(*operands, positions=op.indices(0, 1) if causal else None)


def _attend_gradient(op: LocalOp, *operands: Tensor, causal: bool) -> tuple[Tensor, ...]:
    return attend_gradient(*operands, positions=op.indices(0, 1) if causal else None)


def _plain(function: Callable[..., Tensor]) -> Compute:
    """Return a function of tensors as one of an operator and its operands."""
    return lambda _, *operands: (function(*operands),)


def _gradients_of(function: Callable[..., Tensor]) -> Compute:
    """Return the gradients of a function: its operands are those of the function, and the gradient of its result."""

    def gradients(_: LocalOp, *operands: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [operand.detach().requires_grad_() for operand in operands[:-1]]
            return torch.autograd.grad(function(*leaves), leaves, operands[-1])

    return gradients


OPERATORS: Mapping[str, Compute] = {
    "embedding": _embedding,
    "embedding_gradient": _embedding_gradient,
    "positions": _positions,
    "positions_gradient": _positions_gradient,
    "matmul": _products,
    "matmul_data_gradient": _product_data_gradient,
    "matmul_weight_gradient": _products,
    "batch_matmul": _products,
    "batch_matmul_data_gradient": _product_data_gradient,
    "batch_matmul_weight_gradient": _products,
    "bias": _bias,
    "bias_gradient": _sum_out,
    "rms_norm": _plain(_rms),
    "rms_norm_gradient": _gradients_of(_rms),
    "layer_norm": _plain(_layer),
    "layer_norm_gradient": _layer_gradient,
    "rotary": partial(_rotary, sign=1.0),
    "rotary_gradient": partial(_rotary, sign=-1.0),  # the gradient of a rotation turns back
    "attention": partial(_attend, causal=True),
    "attention_gradient": partial(_attend_gradient, causal=True),
    "full_attention": partial(_attend, causal=False),
    "full_attention_gradient": partial(_attend_gradient, causal=False),
    "activation": _plain(functional.gelu),
    "activation_gradient": _gradients_of(functional.gelu),
    "gated_activation": _plain(_gated),
    "gated_activation_gradient": _gradients_of(_gated),
    "add": _add,
    "maximum": _maximum,
    "exponential_sum": _exponential_sum,
    "label_logit": _label_logit,
    "mean_loss": _mean_loss,
    "cross_entropy_gradient": _cross_entropy_gradient,
    **EXPERT_OPERATORS,
}
"""What each primitive of a forward or backward pass computes."""
