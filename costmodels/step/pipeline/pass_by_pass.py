"""Time of a pipeline whose stages are unlike: all passes of a step in the order of their schedule.

Stages of unlike devices, with unequal layers or unequal links, wait for each other in ways that no formula of ours
covers. So their passes are timed one after the other: a pass begins when the one before it on its stage has ended and
its message has come. Traffic of weights runs beside the first and the last passes (see beside_passes.py), and messages
share links with each other and with that traffic. Many configurations are timed at once. Of a long step only some
rounds of micro-batches are timed; the others take as long as the last of these.

Letters: p stages, v virtual stages (all chunks of all stages), k configurations, n passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from costmodels.step.pipeline.beside_passes import BesidePasses, WeightStreams
from costmodels.step.pipeline.schedules import of_round
from costmodels.step.pipeline.timed_order import TimedOrder, timed_order
from hardware.arrays import FloatArray, IntArray

ROUNDS = 6
"""Rounds of micro-batches that are timed: filling and emptying the pipeline take less than two rounds each."""
_NEIGHBOURS = 3
"""Number of messages before and after each on its link with which it may share the link."""
_RELAXED = 0.5
"""Share of the delays by shared links that is applied: a delayed message meets fewer others than it did undelayed.

Set by hand; all of the delays, or iterating, came no closer to the simulator (benchmarks/judges/two_fidelities.py).
"""

_NOTICEABLE = 0.01
"""Share of a chunk's passes that a message takes from which on delays by shared links are looked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTimes:
    """Passes and messages of configurations of one pp and vpp.

    Attributes:
        forward_s: Time of one micro-batch's forward pass through each virtual stage [s], [v, k].
        backward_s: Time of its backward pass [s], [v, k].
        hop_s: Time of a message from each stage to the next, or from the last to the first, and then of a message from
            each stage to the one before [s], [2p, k].
        hop_leaves_host: Whether these messages go from host to host [2p, k].
        begin_s: Time for which each pass waits until its message begins [s], [k].
        beside: Traffic of weights beside the passes.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    hop_s: FloatArray
    hop_leaves_host: NDArray[np.bool_]
    begin_s: FloatArray
    beside: BesidePasses

    def take(self, index: IntArray) -> Self:
        """Select the configurations at the positions `index`."""
        names = ("forward_s", "backward_s", "hop_s", "hop_leaves_host", "begin_s")
        return replace(
            self, beside=self.beside.take(index), **{name: getattr(self, name).take(index, axis=-1) for name in names}
        )

    def silent(self) -> Self:
        """Return the same passes with messages that take no time."""
        return replace(self, hop_s=np.zeros_like(self.hop_s), begin_s=np.zeros_like(self.begin_s))

    def without_weights(self) -> Self:
        """Return the same passes and messages without traffic of weights."""
        return replace(self, beside=self.beside.none())


def join_times(times: Sequence[ChunkTimes]) -> ChunkTimes:
    """Return all configurations of several batches, one after the other."""
    arrays = {
        f.name: np.concatenate([getattr(one, f.name) for one in times], axis=-1)
        for f in fields(ChunkTimes)
        if f.name != "beside"
    }
    return ChunkTimes(**arrays, beside=BesidePasses.join([one.beside for one in times]))


def pipeline_time_s(
    pp: int, vpp: int, num_micro_batches: int, times: ChunkTimes, *, overlaps_messages: bool
) -> tuple[FloatArray, FloatArray]:
    """Compute the time from the first pass of a step until the last gradient is reduced [s], [k].

    The second result is how much longer the exchange of a tied table's gradients takes [s], [k].

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
    timed = num_micro_batches if num_micro_batches < ROUNDS * size else ROUNDS * size
    order = timed_order(pp, vpp, timed, size)
    run = _Run(order, times, overlaps_messages=overlaps_messages)
    run.time(None)
    done_s, round_s = run.done_s(), run.round_s(timed, size)
    passes_s = (times.forward_s + times.backward_s).mean(axis=0)
    noticed = np.flatnonzero((times.hop_s > _NOTICEABLE * passes_s).any(axis=0))
    if overlaps_messages and len(noticed):
        delayed = run.take(noticed)
        delayed.time(_RELAXED * delayed.delays_s())
        done_s[:, noticed], round_s[noticed] = delayed.done_s(), delayed.round_s(timed, size)
    done_s += round_s * ((num_micro_batches - timed) / size)
    reduced_s = done_s.max(axis=0)
    with_tied_s = np.maximum(reduced_s, np.maximum(done_s[0], done_s[-1]) + times.beside.tied_s)
    return reduced_s, with_tied_s - reduced_s


class _Run:
    """Begin and end of every pass [n, k], which are in the order of their levels."""

    def __init__(self, order: TimedOrder, times: ChunkTimes, *, overlaps_messages: bool) -> None:
        self.order, self.times, self.overlaps_messages = order, times, overlaps_messages
        self.number, width = len(order.stage), times.forward_s.shape[1]
        # Rows behind those of the passes: one per stage for the time before its first pass, and one for no pass.
        rows = self.number + order.pp + 1
        self.pass_s = np.concatenate([times.forward_s, times.backward_s])[order.duration]
        hop_s = np.concatenate([times.hop_s, np.zeros((1, width))])
        self.received_s, self.sent_s = hop_s[order.received], hop_s[order.sent]
        self.begin_s = np.zeros((self.number, width))
        self.end_s = np.zeros((rows, width))
        # End of each message at its sender's end of the link, and whether it delays those of the other direction.
        self.left_s = np.zeros((rows, width))
        forward, backward = np.split(times.hop_leaves_host, 2)
        self.shares_link = (forward == backward)[order.stage] if overlaps_messages else np.zeros(0)

    def time(self, delay_s: FloatArray | None) -> None:
        """Time all passes, with a further delay of the message that each receives [s], [n, k]."""
        order, times = self.order, self.times
        begin_s, end_s, left_s, pass_s = self.begin_s, self.end_s, self.left_s, self.pass_s
        end_s[self.number : self.number + order.pp] = times.beside.first_layer_s
        self.streams = streams = WeightStreams(times.beside, order)
        if self.overlaps_messages:
            pass_s = pass_s + times.begin_s
        for first, last in order.levels:
            at = slice(first, last)
            free, sender = end_s[order.previous[at]], order.sender[at]
            if self.overlaps_messages:
                come = left_s[sender] if delay_s is None else left_s[sender] + delay_s[at]
            else:
                come = np.maximum(free, end_s[sender]) + self.received_s[at]
            if streams.is_active or order.moves_weights[first]:
                come = come + streams.shared_s(at, come, self.received_s[at], times.hop_leaves_host)
                np.maximum(free, come, out=begin_s[at])
                end_s[at] = streams.end_s(at, begin_s[at], pass_s[at])
            else:
                np.maximum(free, come, out=begin_s[at])
                np.add(begin_s[at], pass_s[at], out=end_s[at])
            if self.overlaps_messages:
                # The messages that a stage sends over the same link leave one after the other.
                before = np.maximum(left_s[order.sent_before[at]], left_s[order.sent_back[at]] * self.shares_link[at])
                sends = order.sends[at]
                left_s[at] = np.where(sends, np.maximum(end_s[at], before) + self.sent_s[at], end_s[at])

    def take(self, index: IntArray) -> _Run:
        """Return the run of the configurations at the positions `index`, as far as it is timed."""
        found = _Run(self.order, self.times.take(index), overlaps_messages=self.overlaps_messages)
        found.begin_s, found.end_s, found.left_s = (
            array.take(index, axis=-1) for array in (self.begin_s, self.end_s, self.left_s)
        )
        return found

    def round_s(self, timed: int, size: int) -> FloatArray:
        """Return how long a round of `size` micro-batches takes at the end of `timed` ones [s], [k]; 0 in short steps.

        The first stage's forward passes of the last rounds show it; unlike ones may alternate.
        """
        if timed < 3 * size:
            return np.zeros(self.begin_s.shape[1])
        last, before = (self.order.forward_of_first[timed - back * size] for back in (1, 3))
        return np.asarray((self.begin_s[last] - self.begin_s[before]) / 2)

    def done_s(self) -> FloatArray:
        """Return when each stage has reduced its gradients [s], [p, k]."""
        last = self.order.last_of_stage
        reduced_s = self.streams.stream_s[last]
        return np.asarray(np.maximum(self.end_s[last], reduced_s) + self.times.beside.after_s)

    def delays_s(self) -> FloatArray:
        """Compute by how much shared links delay the message that each pass receives [s], [n, k].

        Two messages at the same time take as long as both, one after the other. They meet where they leave a stage, or
        where they come to one.
        """
        order, none = self.order, self.number + self.order.pp
        crosses = np.concatenate([self.times.hop_leaves_host, np.zeros_like(self.times.hop_leaves_host[:1])])
        # at the sender the messages of a stage leave one after the other; a later one slows down the one before
        wanted_s, left_s = self.end_s[: self.number], self.left_s[: self.number]
        leaving = _overlap_s(order, wanted_s, left_s, crosses[order.sent], order.sends[:, 0], looks_back=False)
        come_s = self.left_s[order.sender]
        is_sent = order.received < 2 * order.pp
        coming = _overlap_s(order, come_s - self.received_s, come_s, crosses[order.received], is_sent, looks_back=True)
        leaving = np.concatenate([leaving, np.zeros((order.pp + 1, leaving.shape[1]))])
        delays = np.maximum(leaving[np.where(is_sent, order.sender, none)], coming)
        return np.asarray(np.minimum(delays, self.received_s))


def _overlap_s(
    order: TimedOrder,
    from_s: FloatArray,
    to_s: FloatArray,
    leaves_host: NDArray[np.bool_],
    is_sent: NDArray[np.bool_],
    *,
    looks_back: bool,
) -> FloatArray:
    """Compute for how long each message of a stage is under way together with its neighbours on the same link [n, k].

    Args:
        order: Order of the passes.
        from_s: Time at which the message of each pass sets out [s], [n, k].
        to_s: Time at which it has come [s], [n, k].
        leaves_host: Whether it goes from host to host [n, k].
        is_sent: Whether the pass has a message [n].
        looks_back: Whether messages before delay it too; otherwise those behind it alone.
    """
    at = order.by_stage[is_sent[order.by_stage]]
    stage = order.stage[at]
    begin, end, crosses = from_s[at], to_s[at], leaves_host[at]
    in_order = np.zeros_like(begin)
    for distance in range(1, _NEIGHBOURS + 1):
        earlier, later = slice(None, -distance), slice(distance, None)
        together = np.minimum(end[earlier], end[later])
        together -= np.maximum(begin[earlier], begin[later])
        both = crosses[earlier] == crosses[later]
        both &= (stage[earlier] == stage[later])[:, None]
        both &= together > 0
        together *= both
        in_order[earlier] += together
        if looks_back:
            in_order[later] += together
    found = np.zeros_like(from_s)
    found[at] = in_order
    return found
