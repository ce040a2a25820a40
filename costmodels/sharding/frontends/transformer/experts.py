"""Operators of a mixture of experts: routing, dispatch of tokens to their experts, and combination of the results.

Tokens reach experts in slots, as in GShard (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2 and algorithm 1). Every
expert has a fixed number of slots for each sequence, its balanced share. The sequence is divided into `chunks`, and the
tokens of a chunk fill only slots of the same chunk. So batch and chunks can be partitioned: each device fills the slots
of its own tokens. Inside a chunk, tokens and slots stay whole. An all-to-all moves slots from a partition by batch to a
partition by expert.
"""

from __future__ import annotations

from costmodels.sharding.frontends.transformer.training_step import Result, TrainingStep

TOKENS, SLOTS = "batch (chunks chunk_tokens)", "experts batch (chunks chunk_slots)"
ROUTING = "batch (chunks chunk_tokens) experts"
_WHOLE = ("chunk_tokens", "chunk_slots")


def routing(step: TrainingStep, name: str, logits: int, *, scored: str = "experts") -> int:
    """Add the routing: weights of the chosen experts, zeros for the others. It needs all experts of a token.

    Args:
        step: Training step under construction.
        name: Name of the operator.
        logits: Scores of the router.
        scored: Factor of the experts that the router scores; beyond `experts`, some of them compute nothing.
    """
    of_logits, of_weights = f"batch sequence {scored}", "batch sequence experts"
    blocked = tuple(dict.fromkeys((scored, "experts")))
    (made,) = step.op(name, "routing", f"{of_logits} -> {of_weights}", (logits,), blocked=blocked)

    pattern = f"{of_logits}, {of_weights} -> {of_logits}"
    step.on_backward_of(
        made,
        lambda each: step.op(f"{name}.gradient", "routing_gradient", pattern, each, blocked=blocked),
        (logits, None),
        (logits,),
    )
    return made


def dispatch(step: TrainingStep, name: str, x: int, weights: int, *, width: str = "hidden") -> int:
    """Add the copy of tokens of a width into the slots of their experts; the routing alone determines the slots."""
    tokens, slots = f"{TOKENS} {width}", f"{SLOTS} {width}"
    (made,) = step.op(name, "dispatch", f"{tokens}, {ROUTING} -> {slots}", (x, weights), blocked=_WHOLE)

    pattern = f"{slots}, {ROUTING} -> {tokens}"
    step.on_backward_of(
        made,
        lambda operands: step.op(f"{name}.gradient", "dispatch_gradient", pattern, operands, blocked=_WHOLE),
        (None, weights),
        (x,),
    )
    return made


def combine(step: TrainingStep, name: str, slots: int, weights: int, *, width: str = "hidden") -> int:
    """Add the sum of each token's expert outputs of a width, weighted by the routing."""
    of_tokens, of_slots = f"{TOKENS} {width}", f"{SLOTS} {width}"
    (made,) = step.op(name, "combine", f"{of_slots}, {ROUTING} -> {of_tokens}", (slots, weights), blocked=_WHOLE)

    pattern = f"{of_tokens}, {of_slots}, {ROUTING} -> {of_slots}, {ROUTING}"
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


def sigmoid_scale(step: TrainingStep, name: str, x: int, gate: int) -> int:
    """Add the scaling of a tensor by the sigmoid of a gate, which may have fewer dims."""
    (made,) = step.along(name, "sigmoid_scale", (x, gate), (x,))

    results = (Result(label="data"), Result(label="gate"))
    step.on_backward_of(
        made,
        lambda operands: step.along(f"{name}.gradient", "sigmoid_scale_gradient", operands, (x, gate), results=results),
        (x, gate, None),
        (x, gate),
    )
    return made
