"""Time of a pipeline whose stages are unlike: all passes of a step in the order of their schedule.

Stages of unlike devices, with unequal layers or unequal links, wait for each other in ways that no formula of ours
covers. So their passes are timed one after the other: a pass begins when the one before it on its stage has ended and
its message has come. Many configurations are timed at once. Of a long step only some rounds of micro-batches are timed;
the others take as long as the last of these. What the event simulator knows besides, such as traffic of weights on the
same links, is left out.

Letters: p stages, v virtual stages (all chunks of all stages), k configurations, n passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from costmodels.step.passes import Kind, one_forward_one_backward
from costmodels.step.schedules import of_round
from hardware.arrays import FloatArray, IntArray

ROUNDS = 4
"""Rounds of micro-batches that are timed. Filling and emptying the pipeline take less than two rounds each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTimes:
    """Passes and messages of configurations of one pp and vpp.

    Attributes:
        forward_s: Time of one micro-batch's forward pass through each virtual stage [s], [v, k].
        backward_s: Time of its backward pass [s], [v, k].
        forward_hop_s: Time of a message from each stage to the next, or from the last to the first [s], [p, k].
        backward_hop_s: Time of a message from each stage to the one before [s], [p, k].
        begin_s: Time for which each pass waits until its message begins [s], [k].
    """

    forward_s: FloatArray
    backward_s: FloatArray
    forward_hop_s: FloatArray
    backward_hop_s: FloatArray
    begin_s: FloatArray

    def silent(self) -> ChunkTimes:
        """Return the same passes with messages that take no time."""
        none = np.zeros_like(self.forward_hop_s)
        return replace(self, forward_hop_s=none, backward_hop_s=none, begin_s=np.zeros_like(self.begin_s))


def join_times(times: Sequence[ChunkTimes]) -> ChunkTimes:
    """Return all configurations of several batches, one after the other."""
    by_name = {f.name: np.concatenate([getattr(each, f.name) for each in times], axis=-1) for f in fields(ChunkTimes)}
    return ChunkTimes(**by_name)


def pipeline_time_s(
    pp: int, vpp: int, num_micro_batches: int, times: ChunkTimes, *, overlaps_messages: bool
) -> FloatArray:
    """Compute the time from the first pass of a step to the end of its last one [s], [k].

    Args:
        pp: Number of stages.
        vpp: Chunks per stage.
        num_micro_batches: Number of micro-batches of every configuration.
        times: Passes and messages.
        overlaps_messages: Whether messages leave at once and run beside passes. Otherwise they wait until the receiver
            has nothing else to do.
    """
    # Without chunks micro-batches are of no round, and any number of them is timed like rounds of pp.
    size = pp if vpp == 1 else int(of_round(np.array(num_micro_batches), pp))
    rounds = num_micro_batches // size
    timed = num_micro_batches if vpp == 1 and rounds < ROUNDS else min(rounds, ROUNDS) * size
    order = _timed_order(pp, vpp, timed)
    begin_s, end_s = _run(order, times, overlaps_messages=overlaps_messages)
    longest = np.asarray(end_s.max(axis=0))
    if timed == num_micro_batches:
        return longest
    # The first stage's forward passes of the last two rounds show how long a round takes.
    last, before = (order.forward_of_first[timed - back * size] for back in (1, 2))
    return np.asarray(longest + (begin_s[last] - begin_s[before]) * ((num_micro_batches - timed) / size))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TimedOrder:
    """Passes of all stages, sorted into levels: a pass depends on passes of earlier levels only.

    Attributes:
        levels: Positions of the passes of each level.
        previous: Position of the pass before on the same stage; n where there is none [n].
        sender: Position of the pass whose result each pass needs; n where it needs none [n].
        duration: Row of the pass among the forward passes [v] and the backward passes [v] of all virtual stages [n].
        sent: Row of the pass's own message among the messages forward [p] and back [p]; 2p where it sends none [n].
        received: Row of the message that the pass waits for; 2p where it waits for none [n].
        forward_of_first: Position of the first virtual stage's forward pass of each micro-batch.
    """

    levels: tuple[IntArray, ...]
    previous: IntArray
    sender: IntArray
    duration: IntArray
    sent: IntArray
    received: IntArray
    forward_of_first: tuple[int, ...]


@lru_cache(maxsize=256)
def _timed_order(pp: int, vpp: int, num_micro_batches: int) -> _TimedOrder:
    """Return the passes of 1F1B, or of the interleaved schedule, with what each of them waits for."""
    order = one_forward_one_backward(pp, vpp, num_micro_batches)
    num_virtual, number = pp * vpp, len(order.stage)
    rows = list(
        zip(*(part.tolist() for part in (order.stage, order.kind, order.micro_batch, order.chunk)), strict=True)
    )
    position = {(kind, micro, chunk * pp + stage): at for at, (stage, kind, micro, chunk) in enumerate(rows)}
    previous, sender = np.full(number, number), np.full(number, number)
    duration = np.empty(number, dtype=np.int64)
    sent, received = np.full(number, 2 * pp), np.full(number, 2 * pp)
    for at, (stage, kind, micro, chunk) in enumerate(rows):
        virtual, is_forward = chunk * pp + stage, kind == Kind.FORWARD
        if at and rows[at - 1][0] == stage:
            previous[at] = at - 1
        duration[at] = virtual if is_forward else num_virtual + virtual
        before, after = (virtual - 1, virtual + 1) if is_forward else (virtual + 1, virtual - 1)
        if 0 <= after < num_virtual:
            sent[at] = stage if is_forward else pp + stage
        if before == num_virtual:
            sender[at] = position[Kind.FORWARD, micro, virtual]  # the last virtual stage turns round
        elif before >= 0:
            sender[at] = position[kind, micro, before]
            received[at] = before % pp if is_forward else pp + before % pp
    return _TimedOrder(
        levels=_levels(previous.tolist(), sender.tolist()),
        previous=previous,
        sender=sender,
        duration=duration,
        sent=sent,
        received=received,
        forward_of_first=tuple(position[Kind.FORWARD, micro, 0] for micro in range(num_micro_batches)),
    )


def _levels(previous: list[int], sender: list[int]) -> tuple[IntArray, ...]:
    """Sort passes into levels, each one above all that a pass waits for."""
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
    by_level = np.array(level[:number])
    in_order = np.argsort(by_level, kind="stable")
    return tuple(np.split(in_order, np.cumsum(np.bincount(by_level)[1:])[:-1]))


def _run(order: _TimedOrder, times: ChunkTimes, *, overlaps_messages: bool) -> tuple[FloatArray, FloatArray]:
    """Return begin and end of every pass [s], each [n, k]."""
    number, width = len(order.previous), times.forward_s.shape[1]
    none = np.zeros((1, width))
    durations = np.concatenate([times.forward_s, times.backward_s])
    hops = np.concatenate([times.forward_hop_s, times.backward_hop_s, none])
    begin, end = np.zeros((number, width)), np.zeros((number + 1, width))
    sent_end = np.zeros((number + 1, width))  # end of the last message that the stage has sent
    for level in order.levels:
        free, sender = end[order.previous[level]], order.sender[level]
        if overlaps_messages:
            come = np.where((order.received[level] < len(hops) - 1)[:, None], sent_end[sender], end[sender])
            begin[level] = np.maximum(free, come)
            end[level] = begin[level] + durations[order.duration[level]] + times.begin_s
            # A stage's messages leave one after the other.
            before = sent_end[order.previous[level]]
            sends = order.sent[level]
            leaves = np.maximum(end[level], before) + hops[sends]
            sent_end[level] = np.where((sends < len(hops) - 1)[:, None], leaves, before)
        else:
            hop = hops[order.received[level]]
            begin[level] = np.maximum(free, end[sender]) + hop
            end[level] = begin[level] + durations[order.duration[level]]
    return begin, end
