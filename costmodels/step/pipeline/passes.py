"""Schedules of the passes of one step: the order in which each stage of a pipeline runs them.

A model is cut into pp * vpp virtual stages; stage s of the pipeline holds those numbered s, s + pp, and so on. A
micro-batch goes forward through all of them in order, and backward in the opposite order. The schedule fixes the order
of each stage's passes. Their times follow from the tasks that they wait for (see simulated_step.py).

Letters: p stages, v virtual stages in all, m micro-batches, n passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from costmodels.step.pipeline.schedules import of_round
from hardware.arrays import IntArray


class Kind(IntEnum):
    """Kind of pass, by what it computes."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of the inputs, and those of the weights too unless the schedule has separate passes for them."""
    WEIGHTS = 2
    """The gradients of the weights."""


class Pass(NamedTuple):
    """Pass of one micro-batch through one chunk of one stage."""

    kind: Kind
    micro_batch: int
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassOrder:
    """Order of the passes that every stage runs; the arrays hold the first stage's passes first.

    Attributes:
        pp: Number of stages.
        vpp: Number of chunks per stage.
        num_micro_batches: Number of micro-batches m.
        stage: Stage of each pass [n].
        kind: Kind of each pass, as a `Kind` [n].
        micro_batch: Micro-batch of each pass, from 0 [n].
        chunk: Chunk of each pass, from 0 [n].
    """

    pp: int
    vpp: int
    num_micro_batches: int
    stage: IntArray
    kind: IntArray
    micro_batch: IntArray
    chunk: IntArray


def gpipe(pp: int, vpp: int, num_micro_batches: int, _: int | None = None) -> PassOrder:
    """Order all forward passes before all backward passes (Huang et al. 2019, section 2.2)."""

    def of_stage(_: int) -> Iterator[Pass]:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for micro_batch in range(num_micro_batches):
                yield Pass(kind, micro_batch, 0)

    return _order(pp, vpp, num_micro_batches, of_stage)


def one_forward_one_backward(pp: int, vpp: int, num_micro_batches: int, size: int | None = None) -> PassOrder:
    """Order passes by 1F1B: as many forward passes as stages follow, then one of each in turns.

    Source: Narayanan et al. 2021, section 2.2.1. With chunks it is the interleaved schedule of section 2.2.2, in the
    order of megatron-core's pipeline_parallel/schedules.py (get_pp_rank_microbatches, get_schedule_table):
    micro-batches go in rounds of `size`, each round through one chunk after the other; the last round may be shorter.
    Without a size it is that of `schedules.of_round`.
    """
    size = int(of_round(np.array(num_micro_batches), pp)) if size is None else size
    total = num_micro_batches * vpp

    kinds, numbers = [], []
    for behind in range(pp - 1, -1, -1):
        # Warm-up fills the stages behind; with chunks it covers both ways and all chunks but the last.
        warm_up = min(total, behind if vpp == 1 else 2 * behind + (vpp - 1) * size)
        turns = np.arange(total - warm_up)
        kinds += [np.full(warm_up, Kind.FORWARD), np.tile([Kind.FORWARD, Kind.BACKWARD], len(turns))]
        numbers += [np.arange(warm_up), np.stack([warm_up + turns, turns], axis=1).ravel()]
        kinds.append(np.full(warm_up, Kind.BACKWARD))
        numbers.append(np.arange(len(turns), total))
    # Each round goes through all chunks; backward passes take the chunks in the opposite order.
    kind = np.concatenate(kinds)
    rounds, within = np.divmod(np.concatenate(numbers), size * vpp)
    chunk, member = np.divmod(within, np.minimum(size, num_micro_batches - rounds * size))
    return PassOrder(
        pp=pp,
        vpp=vpp,
        num_micro_batches=num_micro_batches,
        stage=np.repeat(np.arange(pp), 2 * total),
        kind=kind,
        micro_batch=rounds * size + member,
        chunk=np.where(kind == Kind.FORWARD, chunk, vpp - 1 - chunk),
    )


def zero_bubble(pp: int, vpp: int, num_micro_batches: int, _: int | None = None) -> PassOrder:
    """Order passes by ZB-H1: 1F1B that fills its bubble with weight gradients (Qi et al. 2023, section 2).

    Stage s runs the weight gradients of a micro-batch s backward passes later, so that no stage holds more activations
    than the first does under 1F1B. The remaining weight gradients run at the end.
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
        # The remaining weight gradients fill the end of the step.
        for number in range(num_weights, num_micro_batches):
            yield Pass(Kind.WEIGHTS, number, 0)

    return _order(pp, vpp, num_micro_batches, of_stage)


SCHEDULES: Mapping[str, Callable[[int, int, int, int | None], PassOrder]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero-bubble": zero_bubble}
)
"""Schedules by name: functions of pp, vpp, the number of micro-batches, and how many of them a round has."""

ONE_CHUNK = ("gpipe", "zero-bubble")
"""Schedules that support one chunk per stage only."""

SPLIT_BACKWARD = ("zero-bubble",)
"""Schedules whose gradients of the weights have passes of their own."""


def pass_order(schedule: str, pp: int, vpp: int, num_micro_batches: int, size: int | None = None) -> PassOrder:
    """Return the passes of every stage under a schedule; `size` is the number of micro-batches in a round.

    Raises:
        ValueError: the schedule does not support these sizes.
    """
    if schedule in ONE_CHUNK and vpp > 1:
        raise ValueError(f"vpp must be 1 under {schedule}, but got {vpp}.")
    return SCHEDULES[schedule](pp, vpp, num_micro_batches, size)


def _order(pp: int, vpp: int, num_micro_batches: int, of_stage: Callable[[int], Iterator[Pass]]) -> PassOrder:
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
