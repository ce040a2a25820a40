"""The passes of one step through a pipeline: in which order each stage runs them, and when.

A model cut into pp * vpp virtual stages, of which stage s of the pipeline holds those numbered s, s + pp, ...: a
micro-batch goes forward through all of them in order, and backward in the opposite one. What a stage runs next is
fixed beforehand, by the schedule; when, follows from what it waits for. Stages may be unlike: every virtual stage has
times of its own, so that the bubble is not a formula but what is left.

Letters: p stages, v virtual stages in all, m micro-batches, n passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from costmodels.operators import FloatArray
from costmodels.parallel import IntArray


class Kind(IntEnum):
    """What a pass computes."""

    FORWARD = 0
    BACKWARD = 1
    """The gradients of the inputs; those of the weights too, unless the schedule has passes for these."""
    WEIGHTS = 2
    """The gradients of the weights."""


class Pass(NamedTuple):
    """One micro-batch through one chunk of one stage."""

    kind: Kind
    micro_batch: int
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassOrder:
    """What every stage runs, one pass after the other; the arrays hold the first stage's passes first.

    Attributes:
        pp: Stages.
        vpp: Chunks of each.
        num_micro_batches: m.
        stage: Of each pass [n].
        kind: A `Kind` each [n].
        micro_batch: From 0 [n].
        chunk: From 0 [n].
    """

    pp: int
    vpp: int
    num_micro_batches: int
    stage: IntArray
    kind: IntArray
    micro_batch: IntArray
    chunk: IntArray

    @property
    def virtual_stage(self) -> IntArray:
        """Of each pass [n]."""
        return self.chunk * self.pp + self.stage

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of the weights are passes of their own."""
        return bool((self.kind == Kind.WEIGHTS).any())

    def peak_in_flight(self) -> FloatArray:
        """Micro-batches of which a stage holds the activations at its peak, in units of all of its layers [p].

        They are held from the forward pass to the end of the last backward one.
        """
        last = Kind.WEIGHTS if self.splits_backward else Kind.BACKWARD
        change = (self.kind == Kind.FORWARD).astype(np.int64) - (self.kind == last)
        peaks = [np.cumsum(change[self.stage == stage]).max() for stage in range(self.pp)]
        return np.array(peaks, dtype=np.float64) / self.vpp


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassTimes:
    """When the passes of an order run.

    Attributes:
        start_s: [n]
        end_s: [n]
    """

    start_s: FloatArray
    end_s: FloatArray

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return float(self.end_s.max())


def gpipe(pp: int, vpp: int, num_micro_batches: int) -> PassOrder:
    """All forward passes, then all backward passes (Huang et al. 2019, section 2.2)."""

    def of_stage(_: int) -> Iterator[Pass]:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for micro_batch in range(num_micro_batches):
                yield Pass(kind, micro_batch, 0)

    return _order(pp, vpp, num_micro_batches, of_stage)


def one_forward_one_backward(pp: int, vpp: int, num_micro_batches: int) -> PassOrder:
    """1F1B: as many forward passes as stages follow, then one of each in turns (Narayanan et al. 2021, section 2.2.1).

    With chunks it is the interleaved schedule of section 2.2.2, in the order of megatron-core's
    pipeline_parallel/schedules.py (get_pp_rank_microbatches, get_schedule_table): micro-batches go in rounds, each
    round through one chunk after the other. A round has pp of them, or as many more as make the rounds equal.

    Raises:
        ValueError: there are no equal rounds.
    """
    num_rounds = max(num_micro_batches // pp, 1)
    if vpp > 1 and num_micro_batches % num_rounds:
        raise ValueError(
            f"num_micro_batches must be a multiple of pp={pp} where vpp > 1, or less than twice that, "
            f"but got {num_micro_batches}."
        )
    total = num_micro_batches * vpp
    of_round = num_micro_batches // num_rounds

    def at(kind: Kind, number: int) -> Pass:
        """The pass of one kind that a stage runs as its `number`-th."""
        if vpp == 1:
            return Pass(kind, number, 0)
        rounds, within = divmod(number, of_round * vpp)
        chunk, member = divmod(within, of_round)
        return Pass(kind, rounds * of_round + member, chunk if kind == Kind.FORWARD else vpp - 1 - chunk)

    def of_stage(stage: int) -> Iterator[Pass]:
        behind = pp - stage - 1
        warm_up = min(total, behind if vpp == 1 else 2 * behind + (vpp - 1) * of_round)
        for number in range(warm_up):
            yield at(Kind.FORWARD, number)
        for number in range(total - warm_up):
            yield at(Kind.FORWARD, warm_up + number)
            yield at(Kind.BACKWARD, number)
        for number in range(total - warm_up, total):
            yield at(Kind.BACKWARD, number)

    return _order(pp, vpp, num_micro_batches, of_stage)


def zero_bubble(pp: int, vpp: int, num_micro_batches: int) -> PassOrder:
    """ZB-H1: 1F1B whose weight gradients fill what would be bubble (Qi et al. 2023, section 2).

    Stage s runs the weight gradients of a micro-batch s backward passes later, so that no stage holds more activations
    than the first does under 1F1B; what is left at the end runs then.
    """

    def of_stage(stage: int) -> Iterator[Pass]:
        warm_up = min(num_micro_batches, pp - stage - 1)
        for number in range(warm_up):
            yield Pass(Kind.FORWARD, number, 0)
        num_weights = 0
        for number in range(num_micro_batches):
            if warm_up + number < num_micro_batches:
                yield Pass(Kind.FORWARD, warm_up + number, 0)
            yield Pass(Kind.BACKWARD, number, 0)
            if number >= stage:
                yield Pass(Kind.WEIGHTS, num_weights, 0)
                num_weights += 1
        for number in range(num_weights, num_micro_batches):
            yield Pass(Kind.WEIGHTS, number, 0)

    return _order(pp, vpp, num_micro_batches, of_stage)


SCHEDULES: Mapping[str, Callable[[int, int, int], PassOrder]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero-bubble": zero_bubble}
)
"""The schedules by name: functions of pp, vpp and the number of micro-batches."""

ONE_CHUNK = ("gpipe", "zero-bubble")
"""Schedules that know no chunks."""


def pass_order(schedule: str, pp: int, vpp: int, num_micro_batches: int) -> PassOrder:
    """What every stage runs under a schedule.

    Raises:
        ValueError: the schedule can't be had with these sizes.
    """
    if schedule in ONE_CHUNK and vpp > 1:
        raise ValueError(f"vpp must be 1 under {schedule}, but got {vpp}.")
    return SCHEDULES[schedule](pp, vpp, num_micro_batches)


def pass_times(order: PassOrder, pass_s: FloatArray, transfer_s: FloatArray) -> PassTimes:
    """When every pass runs: as soon as its stage has ended the one before, and what it needs has arrived.

    A forward pass needs the activations of the virtual stage before, a backward pass the gradients of the one after,
    or its own forward pass at the last; a pass of weight gradients needs its backward pass. Transfers run beside
    compute, and do not wait for each other.

    Args:
        order: Passes, n of them.
        pass_s: What a pass of each kind takes on each virtual stage [3, v].
        transfer_s: Forward and backward, from one virtual stage to the next, or back [2, v - 1].

    Raises:
        ValueError: the passes wait for each other.
    """
    last = order.pp * order.vpp - 1
    virtual = order.virtual_stage
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
            arrives_s = end_s[needed] + delay_s[at] if needed >= 0 else 0.0
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
    """The pass that each one waits for, -1 for none [n], and how long after its end that is there [n]."""
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


def _order(pp: int, vpp: int, num_micro_batches: int, of_stage: Callable[[int], Iterator[Pass]]) -> PassOrder:
    """The passes of all stages."""
    rows = np.array([(stage, *one) for stage in range(pp) for one in of_stage(stage)], dtype=np.int64)
    stage, kind, micro_batch, chunk = rows.T
    return PassOrder(
        pp=pp,
        vpp=vpp,
        num_micro_batches=num_micro_batches,
        stage=stage,
        kind=kind,
        micro_batch=micro_batch,
        chunk=chunk,
    )
