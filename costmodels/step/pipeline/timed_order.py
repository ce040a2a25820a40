"""Order in which the passes of a step are timed: level by level, each above all that its passes wait for.

Letters: p stages, v virtual stages, n passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.step.pipeline.passes import Kind, one_forward_one_backward
from hardware.arrays import IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimedOrder:
    """Passes of all stages in the order of their levels: a pass depends on passes of earlier levels only.

    Positions of passes are below n; n + s stands for the time before the first pass of stage s, and n + p for no pass.

    Attributes:
        pp: Number of stages.
        levels: First position of each level, and the one behind its last.
        stage: Stage of each pass [n].
        virtual: Virtual stage of each pass [n].
        micro_batch: Micro-batch of each pass [n].
        previous: Position of the pass before on the same stage [n].
        sender: Position of the pass whose result each pass needs [n].
        duration: Row of the pass among the forward passes [v] and the backward passes [v] of all virtual stages [n].
        sent: Row of the pass's own message among the messages forward [p] and back [p]; 2p where it sends none [n].
        received: Row of the message that the pass waits for; 2p where it waits for none [n].
        sends: Whether the pass sends a message [n, 1].
        sent_before: Position of the last pass before on the same stage that sends in the same direction [n].
        sent_back: Position of the last pass before on the same stage that sends in the other direction [n].
        is_first: Whether the pass is the first through its chunk [n].
        is_last: Whether the pass is the last through its chunk, which completes the gradients [n].
        moves_weights: Whether a pass of the level of each pass is the first or the last through its chunk [n].
        by_stage: Positions of the passes of the first stage in their order, then those of the next [n].
        last_of_stage: Position of each stage's last pass [p].
        forward_of_first: Position of the first virtual stage's forward pass of each micro-batch.
    """

    pp: int
    levels: tuple[tuple[int, int], ...]
    stage: IntArray
    virtual: IntArray
    micro_batch: IntArray
    previous: IntArray
    sender: IntArray
    duration: IntArray
    sent: IntArray
    received: IntArray
    sends: NDArray[np.bool_]
    sent_before: IntArray
    sent_back: IntArray
    is_first: NDArray[np.bool_]
    is_last: NDArray[np.bool_]
    moves_weights: tuple[bool, ...]
    by_stage: IntArray
    last_of_stage: IntArray
    forward_of_first: tuple[int, ...]


@lru_cache(maxsize=256)
def timed_order(pp: int, vpp: int, num_micro_batches: int, size: int) -> TimedOrder:
    """Return the passes of 1F1B, or of the interleaved schedule in rounds of `size`, with what each waits for."""
    order = one_forward_one_backward(pp, vpp, num_micro_batches, size)
    num_virtual, number = pp * vpp, len(order.stage)
    columns = (order.stage, order.kind, order.micro_batch, order.chunk)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    position = {(kind, micro, chunk * pp + stage): at for at, (stage, kind, micro, chunk) in enumerate(rows)}
    previous, sender = number + order.stage, np.full(number, number + pp)
    virtual = order.chunk * pp + order.stage
    sent, received = np.full(number, 2 * pp), np.full(number, 2 * pp)
    # Last pass of the current stage that sends forward, and the last that sends back.
    sent_before, sent_back = np.full(number, number + pp), np.full(number, number + pp)
    last_sent = [number + pp, number + pp]
    for at, (stage, kind, micro, _) in enumerate(rows):
        if at and rows[at - 1][0] == stage:
            previous[at] = at - 1
        else:
            last_sent = [number + pp, number + pp]
        is_forward = kind == Kind.FORWARD
        before, after = (virtual[at] - 1, virtual[at] + 1) if is_forward else (virtual[at] + 1, virtual[at] - 1)
        sent_before[at], sent_back[at] = last_sent[not is_forward], last_sent[is_forward]
        if 0 <= after < num_virtual:
            sent[at] = stage if is_forward else pp + stage
            last_sent[not is_forward] = at
        if before == num_virtual:
            sender[at] = position[Kind.FORWARD, micro, virtual[at]]  # the last virtual stage turns round
        elif before >= 0:
            sender[at] = position[kind, micro, before]
            received[at] = before % pp if is_forward else pp + before % pp
    level = _levels(np.minimum(previous, number).tolist(), np.minimum(sender, number).tolist())
    in_order = np.argsort(level, kind="stable")
    # Position of each pass in the order of the levels; those that stand for no pass stay as they are.
    moved = np.concatenate([np.argsort(in_order), number + np.arange(pp + 1)])
    ends = np.cumsum(np.bincount(level)).tolist()
    is_first = (order.kind == Kind.FORWARD) & (order.micro_batch == 0)
    is_last = (order.kind == Kind.BACKWARD) & (order.micro_batch == num_micro_batches - 1)
    special = np.zeros(len(ends), dtype=np.bool_)
    special[level[is_first | is_last]] = True
    return TimedOrder(
        pp=pp,
        levels=tuple(zip([0, *ends[:-1]], ends, strict=True)),
        stage=order.stage[in_order],
        virtual=virtual[in_order],
        micro_batch=order.micro_batch[in_order],
        previous=moved[previous][in_order],
        sender=moved[sender][in_order],
        duration=np.where(order.kind == Kind.FORWARD, virtual, num_virtual + virtual)[in_order],
        sent=sent[in_order],
        received=received[in_order],
        sends=(sent < 2 * pp)[in_order, None],
        sent_before=moved[sent_before][in_order],
        sent_back=moved[sent_back][in_order],
        is_first=is_first[in_order],
        is_last=is_last[in_order],
        moves_weights=tuple(special[level[in_order]].tolist()),
        by_stage=moved[:number],
        last_of_stage=moved[np.searchsorted(order.stage, np.arange(pp), side="right") - 1],
        forward_of_first=tuple(int(moved[position[Kind.FORWARD, micro, 0]]) for micro in range(num_micro_batches)),
    )


def _levels(previous: list[int], sender: list[int]) -> IntArray:
    """Return the level of each pass, which is above those of all that it waits for [n]."""
    number = len(previous)
    level = [-1] * number + [0]
    for first in range(number):
        # A stack in place of recursion: the passes that one waits for come first.
        stack = [first]
        while stack:
            at = stack[-1]
            open_ones = [other for other in (previous[at], sender[at]) if level[other] < 0]
            if open_ones:
                stack += open_ones
                continue
            level[at] = 1 + max(level[previous[at]], level[sender[at]])
            stack.pop()
    levels = np.array(level[:number])
    return np.asarray(levels - levels.min())
