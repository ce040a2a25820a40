"""Traffic of weights beside the first and the last passes of a pipeline that is timed pass by pass.

Weights are gathered from the begin of the step, chunk by chunk; the first forward pass through a chunk needs its
weights, piece by piece. Gradients leave beside the last backward pass through each chunk, piece by piece, and those of
the chunk's first piece after it. Traffic and passes slow each other down, on the device and on links that both use, and
so do messages between stages on the same links (Li et al. 2020, PyTorch Distributed, section 3.2.3).

Letters: p stages, v virtual stages, k configurations, n passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from costmodels.step.pipeline.timed_order import TimedOrder
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BesidePasses:
    """Traffic of weights of configurations of one pp and vpp.

    Attributes:
        gather_s: Time to gather the weights of each virtual stage beside passes [s], [v, k].
        reduce_s: Time to reduce the gradients of each virtual stage beside passes [s], [v, k].
        first_share: Share of the virtual stage's weights that its first piece holds [v, k].
        piece_share: Share of a pass through the virtual stage that one piece takes [v, k].
        slowing: Time by which one second of this traffic beside a pass delays both [p, k].
        leaves_domain: Whether the traffic goes from domain to domain [p, k].
        first_layer_s: Time for which the first pass of a stage waits for its first layer's weights [s], [p, k].
        after_s: Time of the traffic that begins after a stage's last pass [s], [p, k].
        tied_s: Time to exchange the gradients of a tied table when the end stages have reduced theirs [s], [k].
    """

    gather_s: FloatArray
    reduce_s: FloatArray
    first_share: FloatArray
    piece_share: FloatArray
    slowing: FloatArray
    leaves_domain: NDArray[np.bool_]
    first_layer_s: FloatArray
    after_s: FloatArray
    tied_s: FloatArray

    def take(self, index: IntArray) -> Self:
        """Select the configurations at the positions `index`."""
        return replace(self, **{f.name: getattr(self, f.name).take(index, axis=-1) for f in fields(self)})

    def none(self) -> Self:
        """Return the same with traffic that takes no time."""
        times = ("gather_s", "reduce_s", "first_layer_s", "after_s", "tied_s")
        return replace(self, **{name: np.zeros_like(getattr(self, name)) for name in times})

    @classmethod
    def join(cls, each: Sequence[Self]) -> Self:
        """Return the traffic of several batches of configurations, one after the other."""
        return cls(**{f.name: np.concatenate([getattr(one, f.name) for one in each], axis=-1) for f in fields(cls)})


class WeightStreams:
    """Stream of weights of each stage while its passes are timed level by level.

    Attributes:
        stream_s: End of the stage's traffic so far, as it is known after each pass [s], [n + p + 1, k].
    """

    def __init__(self, beside: BesidePasses, order: TimedOrder) -> None:
        self.beside, self.order = beside, order
        pp, width = order.pp, beside.gather_s.shape[1]
        of_chunks = beside.gather_s.reshape(-1, pp, width)
        gathered = np.cumsum(of_chunks, axis=0)
        self.all_gathered_s, self.gathered_s = gathered[-1], gathered.reshape(-1, width)
        self.stream_s = np.zeros((len(order.stage) + pp + 1, width))
        self.stream_s[len(order.stage) : -1] = self.all_gathered_s
        self.gathers, self.reduces = bool(of_chunks.any()), bool(beside.reduce_s.any())
        self.has_traffic = [self.gathers] * pp

    @property
    def is_active(self) -> bool:
        """Whether passes may still meet traffic on some stage."""
        return any(self.has_traffic)

    def shared_s(
        self, at: slice, come_s: FloatArray, hop_s: FloatArray, hop_leaves_domain: NDArray[np.bool_]
    ) -> FloatArray:
        """Compute by how much traffic on the same links delays messages to some passes, and delay the traffic [s].

        Args:
            at: Passes that wait for the messages.
            come_s: Time at which the messages would have come [s], [passes, k].
            hop_s: Time of the messages alone [s], [passes, k].
            hop_leaves_domain: Whether messages go from domain to domain [2p, k].
        """
        order, leaves_domain = self.order, self.beside.leaves_domain
        received, sender = order.received[at], order.sender[at]
        is_sent = (received < 2 * order.pp)[:, None]
        crosses = hop_leaves_domain[np.minimum(received, 2 * order.pp - 1)]
        sends_from = order.stage[np.minimum(sender, len(order.stage) - 1)]
        begin_s = come_s - hop_s

        def meets(stage: NDArray[np.int64], stream_s: FloatArray) -> FloatArray:
            is_shared = is_sent & (crosses == leaves_domain[stage])
            return np.where(is_shared, np.minimum(np.maximum(stream_s - begin_s, 0.0), hop_s), 0.0)

        previous = order.previous[at]
        at_receiver = meets(order.stage[at], self.stream_s[previous])
        at_sender = meets(sends_from, self.stream_s[sender])
        self.stream_s[previous] += at_receiver
        return np.maximum(at_receiver, at_sender)

    def end_s(self, at: slice, begin_s: FloatArray, pass_s: FloatArray) -> FloatArray:
        """Compute when some passes end, and take the traffic beside them into account [s], [passes, k]."""
        order, beside = self.order, self.beside
        stage, virtual = order.stage[at], order.virtual[at]
        slowing = beside.slowing[stage]
        stream_s = self.stream_s[order.previous[at]]
        slowed_s = slowing * np.minimum(np.maximum(stream_s - begin_s, 0.0), pass_s)
        end_s, stream_s = begin_s + pass_s + slowed_s, stream_s + slowed_s
        is_first, is_last = order.is_first[at], order.is_last[at]
        if self.gathers and is_first.any():
            of = virtual[is_first]
            # What delayed the stream so far delays all that is still to come.
            late_s = stream_s[is_first] - self.all_gathered_s[stage[is_first]]
            gathered_s, gather_s = self.gathered_s[of] + late_s, beside.gather_s[of]
            own_s = pass_s[is_first]
            after_first = gathered_s - gather_s * (1.0 - beside.first_share[of]) + own_s
            after_last = gathered_s + own_s * beside.piece_share[of]
            waits = np.where(gather_s > 0, np.maximum(after_first, after_last), 0.0)
            end_s[is_first] = np.maximum(end_s[is_first], waits)
        if self.reduces and is_last.any():
            of = virtual[is_last]
            reduce_s = beside.reduce_s[of]
            first_ready_s = begin_s[is_last] + pass_s[is_last] * beside.piece_share[of]
            starts_s = np.maximum(stream_s[is_last], first_ready_s)
            beside_s = np.maximum(np.minimum(starts_s + reduce_s, end_s[is_last]) - starts_s, 0.0)
            slowed_s = slowing[is_last] * beside_s
            end_s[is_last] += slowed_s
            reduced_s = np.maximum(starts_s + reduce_s + slowed_s, end_s[is_last] + reduce_s * beside.first_share[of])
            stream_s[is_last] = np.where(reduce_s > 0, reduced_s, stream_s[is_last])
        self.stream_s[at] = stream_s
        for row, one in enumerate(stage.tolist()):
            self.has_traffic[one] = bool((stream_s[row] > end_s[row]).any())
        return end_s
