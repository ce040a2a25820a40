"""Operators of a mixture of experts on the parts of one rank: routing, dispatch into slots, combination.

Tokens reach experts in slots (`costmodels/sharding/frontends/transformer/experts.py`). The sequence is divided into
chunks; an expert has the same number of slots in each, which the chunk's tokens fill in their order. Tokens beyond the
slots are dropped, and slots beyond the tokens hold zeros. A rank has whole chunks. Each token's slots
are a mask, with which products copy tokens to slots and back, as in GShard (Lepikhin et al. 2020, arXiv 2006.16668).

Letters: b sequences, c chunks, t tokens of a chunk, s slots of an expert in a chunk, e experts, h hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trials.torch_training.planned.local_op import Compute, LocalOp


def _weights(logits: Tensor, top_k: int) -> Tensor:
    """Return the softmax over the largest logits of each token, and zeros for the others (Mixtral)."""
    values, chosen = logits.topk(top_k, dim=-1)
    return torch.zeros_like(logits).scatter(-1, chosen, values.softmax(dim=-1))


def _routing(op: LocalOp, logits: Tensor) -> tuple[Tensor, ...]:
    return (_weights(logits, op.top_k),)


def _routing_gradient(op: LocalOp, logits: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(_weights(leaf, op.top_k), leaf, given)


def _dispatch(op: LocalOp, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    fills, (tokens, _) = _fills(op, weights)
    return (torch.einsum("bctes,bcth->ebcsh", fills, torch.unflatten(x, 1, (-1, tokens))).flatten(2, 3),)


def _dispatch_gradient(op: LocalOp, given: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    fills, (_, slots) = _fills(op, weights)
    return (torch.einsum("bctes,ebcsh->bcth", fills, torch.unflatten(given, 2, (-1, slots))).flatten(1, 2),)


def _combine(op: LocalOp, made: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    fills, (tokens, slots) = _fills(op, weights)
    weighted = fills * torch.unflatten(weights, 1, (-1, tokens))[..., None]
    return (torch.einsum("bctes,ebcsh->bcth", weighted, torch.unflatten(made, 2, (-1, slots))).flatten(1, 2),)


def _combine_gradient(op: LocalOp, given: Tensor, made: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    fills, (tokens, slots) = _fills(op, weights)
    by_token, by_slot = torch.unflatten(given, 1, (-1, tokens)), torch.unflatten(made, 2, (-1, slots))
    weighted = fills * torch.unflatten(weights, 1, (-1, tokens))[..., None]
    to_slots = torch.einsum("bctes,bcth->ebcsh", weighted, by_token).flatten(2, 3)
    # what each token's gradient says of each slot that it fills
    back = torch.einsum("bctes,bcth->ebcsh", fills, by_token).mul_(by_slot).sum(dim=-1)
    return to_slots, torch.einsum("bctes,ebcs->bcte", fills, back).flatten(1, 2)


def _fills(op: LocalOp, weights: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return 1 where a token fills a slot of an expert [b, c, t, e, s], and the tokens and slots of a chunk.

    Args:
        op: The operator.
        weights: Weights of the rank's tokens for its experts [b, c*t, e], zeros for experts that were not chosen.
    """
    sizes = {factor.name: factor.size for factor in op.rule.factors}
    tokens, slots = sizes["chunk_tokens"], sizes["chunk_slots"]
    is_chosen = torch.unflatten(weights, 1, (-1, tokens)) > 0
    turn = is_chosen.cumsum(dim=2) - 1
    fills = is_chosen[..., None] & (turn[..., None] == torch.arange(slots))
    return fills.to(weights.dtype), (tokens, slots)


def _scale(_: LocalOp, x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    return (x * gate.sigmoid()[..., None],)


def _scale_gradient(_: LocalOp, x: Tensor, gate: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    opened = gate.sigmoid()
    return given * opened[..., None], (given * x).sum(dim=-1) * opened * (1 - opened)


EXPERT_OPERATORS: Mapping[str, Compute] = {
    "routing": _routing,
    "routing_gradient": _routing_gradient,
    "dispatch": _dispatch,
    "dispatch_gradient": _dispatch_gradient,
    "combine": _combine,
    "combine_gradient": _combine_gradient,
    "sigmoid_scale": _scale,
    "sigmoid_scale_gradient": _scale_gradient,
}
"""What each primitive of a mixture of experts computes."""
