"""Operators of a mixture of experts: routing, dispatch of tokens to their experts, and combination of the results.

Tokens reach experts in slots, as in GShard (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2 and algorithm 1). Every
expert has a fixed number of slots for each sequence, its balanced share. The sequence is divided into `chunks`, and the
tokens of a chunk fill only slots of the same chunk. So batch and chunks can be partitioned: each device fills the slots
of its own tokens. Inside a chunk, tokens and slots stay whole. An all-to-all moves slots from a partition by batch to a
partition by expert.
"""

from __future__ import annotations

import math

from costmodels.sharding.frontends.transformer.training_step import Result, TrainingStep

TOKENS, SLOTS = "batch (chunks chunk_tokens) hidden", "experts batch (chunks chunk_slots) hidden"
ROUTING = "batch (chunks chunk_tokens) experts"
_WHOLE = ("chunk_tokens", "chunk_slots")

_LARGEST_SURPLUS = 8
"""Slots are rounded up by less than an eighth, so that the sequence can be partitioned further (assumed)."""


def slots_per_expert(sequence_length: int, *, top_k: int, num_experts: int) -> int:
    """Return the number of slots that one expert has for the tokens of one sequence.

    It is the balanced share, rounded up to a multiple of a divisor of the sequence length, so that slots and sequence
    divide into many common chunks.
    """
    # Balanced share of one expert, rounded up.
    share = -(-sequence_length * top_k // num_experts)
    # Largest divisor of the sequence length that adds less than an eighth to the share.
    multiple = max(each for each in range(1, max(share // _LARGEST_SURPLUS, 1) + 1) if sequence_length % each == 0)
    return -(-share // multiple) * multiple


def chunk_sizes(sequence_length: int, *, top_k: int, num_experts: int) -> dict[str, int]:
    """Return the sizes of the factors that divide a sequence and its slots into chunks, by name."""
    slots = slots_per_expert(sequence_length, top_k=top_k, num_experts=num_experts)
    # Tokens and slots of a chunk must both be whole numbers, so the chunks are their greatest common divisor.
    chunks = math.gcd(sequence_length, slots)
    return {"slots": slots, "chunks": chunks, "chunk_tokens": sequence_length // chunks, "chunk_slots": slots // chunks}


def routing(step: TrainingStep, name: str, logits: int) -> int:
    """Add the routing: weights of the chosen experts, zeros for the others. It needs all experts of a token."""
    (made,) = step.along(name, "routing", (logits,), (logits,), blocked=("experts",))

    step.on_backward_of(
        made,
        lambda each: step.along(f"{name}.gradient", "routing_gradient", each, (logits,), blocked=("experts",)),
        (logits, None),
        (logits,),
    )
    return made


def dispatch(step: TrainingStep, name: str, x: int, weights: int) -> int:
    """Add the copy of tokens into the slots of their experts; the routing alone determines the slots."""
    (made,) = step.op(name, "dispatch", f"{TOKENS}, {ROUTING} -> {SLOTS}", (x, weights), blocked=_WHOLE)

    pattern = f"{SLOTS}, {ROUTING} -> {TOKENS}"
    step.on_backward_of(
        made,
        lambda operands: step.op(f"{name}.gradient", "dispatch_gradient", pattern, operands, blocked=_WHOLE),
        (None, weights),
        (x,),
    )
    return made


def combine(step: TrainingStep, name: str, slots: int, weights: int) -> int:
    """Add the sum of each token's expert outputs, weighted by the routing."""
    (made,) = step.op(name, "combine", f"{SLOTS}, {ROUTING} -> {TOKENS}", (slots, weights), blocked=_WHOLE)

    pattern = f"{TOKENS}, {SLOTS}, {ROUTING} -> {SLOTS}, {ROUTING}"
    results = (Result(label="slots"), Result(label="weights"))
    # The gradient of the weights needs the experts' outputs again.
    step.on_backward_of(
        made,
        lambda operands: step.op(
            f"{name}.gradient", "combine_gradient", pattern, operands, results=results, blocked=_WHOLE
        ),
        (None, slots, weights),
        (slots, weights),
    )
    return made


def shared_gate(step: TrainingStep, name: str, x: int, gate: int) -> int:
    """Add the scaling of each token's vector by the sigmoid of its gate's logit."""
    (made,) = step.along(name, "sigmoid_scale", (x, gate), (x,))

    results = (Result(label="data"), Result(label="gate"))
    step.on_backward_of(
        made,
        lambda operands: step.along(f"{name}.gradient", "sigmoid_scale_gradient", operands, (x, gate), results=results),
        (x, gate, None),
        (x, gate),
    )
    return made
