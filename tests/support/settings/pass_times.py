"""Start and end times of passes without shared resources: the oracle of the event simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.step.pipeline.passes import Kind, PassOrder
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassTimes:
    """Times at which the passes of an order run.

    Attributes:
        start_s: Start of each pass [n] [s].
        end_s: End of each pass [n] [s].
    """

    start_s: FloatArray
    end_s: FloatArray

    @property
    def makespan_s(self) -> float:
        """Time from the first start to the last end [s]."""
        return float(self.end_s.max())


def pass_times(
    order: PassOrder, pass_s: FloatArray, transfer_s: FloatArray, *, waits_for_receiver: bool = False
) -> PassTimes:
    """Compute the times of all passes: each starts when its stage is free and its inputs have arrived.

    A forward pass needs the activations of the previous virtual stage. A backward pass needs the gradients of the next
    one, or, on the last stage, its own forward pass. A pass of weight gradients needs its backward pass. Transfers
    overlap with compute, and do not wait for each other.

    Args:
        order: Order of the n passes.
        pass_s: Time of a pass of each kind on each virtual stage [3, v] [s].
        transfer_s: Time of a forward or backward transfer between adjacent virtual stages [2, v - 1] [s].
        waits_for_receiver: Whether a transfer begins only when the receiving stage has nothing else to do.

    Raises:
        ValueError: If the passes wait for each other.
    """
    last = order.pp * order.vpp - 1
    virtual = order.chunk * order.pp + order.stage
    duration_s = pass_s[order.kind, virtual].tolist()
    needs, delay_s = _needs(order, virtual, last, transfer_s)
    end_s = [-1.0] * len(duration_s)
    start_s = [0.0] * len(duration_s)
    ends = np.searchsorted(order.stage, np.arange(order.pp), side="right").tolist()
    following = np.searchsorted(order.stage, np.arange(order.pp)).tolist()
    free_s = [0.0] * order.pp
    waiting: dict[int, int] = {}  # the stage that waits for a pass
    ready = list(range(order.pp))
    while ready:
        stage = ready.pop()
        for at in range(following[stage], ends[stage]):
            needed = needs[at]
            if needed >= 0 and end_s[needed] < 0:
                waiting[needed] = stage
                following[stage] = at
                break
            sent_s = end_s[needed] if needed >= 0 else 0.0
            arrives_s = (max(sent_s, free_s[stage]) if waits_for_receiver else sent_s) + delay_s[at]
            start_s[at] = max(free_s[stage], arrives_s)
            end_s[at] = free_s[stage] = start_s[at] + duration_s[at]
            if at in waiting:
                ready.append(waiting.pop(at))
        else:
            following[stage] = ends[stage]
    if waiting:
        raise ValueError("The passes wait for each other: this is no order in which a pipeline can run.")
    return PassTimes(start_s=np.array(start_s), end_s=np.array(end_s))


def _needs(order: PassOrder, virtual: IntArray, last: int, transfer_s: FloatArray) -> tuple[list[int], list[float]]:
    """Return the pass that each pass waits for, or -1 [n], and the delay after its end [n] [s]."""
    is_forward, is_backward = order.kind == Kind.FORWARD, order.kind == Kind.BACKWARD
    place = np.full((len(Kind), order.num_micro_batches, last + 1), -1)
    place[order.kind, order.micro_batch, virtual] = np.arange(len(virtual))
    turns = is_backward & (virtual == last)
    from_kind = np.where(is_forward | turns, Kind.FORWARD, Kind.BACKWARD)
    comes_before = is_forward & (virtual > 0)
    comes_after = is_backward & ~turns
    from_virtual = virtual - comes_before + comes_after
    needed = place[from_kind, order.micro_batch, from_virtual]
    needed = np.where(is_forward & (virtual == 0), -1, needed)
    delay_s = np.zeros(len(virtual))
    delay_s[comes_before] = transfer_s[0, virtual[comes_before] - 1]
    delay_s[comes_after] = transfer_s[1, virtual[comes_after]]
    return needed.tolist(), delay_s.tolist()
