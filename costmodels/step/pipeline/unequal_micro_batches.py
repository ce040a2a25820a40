"""Time that a step waits because its micro-batches are unequal, in micro-batches of mean work.

Sequences of varying length make micro-batches whose attention differs although their tokens do not, and padded ones
differ in tokens too (WLB-LLM, Wang et al. 2025, arXiv 2503.17924, sections 2 and 3). Replicas then wait for the one
with the most work, stages of a pipeline for the stage with the longest micro-batch, and ranks that share the tokens of
a row for the one whose part attends to the most.

All of it is taken from one sample of steps with a fixed seed. Formulas for the largest of several sums exist, but none
for a pipeline whose passes differ. And since every configuration deals out the same rows, two of them differ by how
they group rows, and not by chance.

A step's wait grows with the share of its work that differs: in proportion, but for interleaved pipelines, which hide
some of it. So pipelines are timed with VARYING of the work differing, about the share of attention in a pass over long
rows.

Letters: n configurations, s steps, b rows of a step, d replicas that wait at the end of the step alone, m micro-batches
of a replica, k pipelines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.sequences import PackedRows, Sequences, pack_rows, sample_lengths
from costmodels.job.training_job import TrainingJob
from costmodels.step.pipeline.pass_by_pass import ROUNDS
from costmodels.step.pipeline.schedules import of_round
from costmodels.step.pipeline.timed_order import timed_order
from hardware.arrays import FloatArray, IntArray
from hardware.distinct import distinct_rows

VARYING = 0.3
"""Share of a micro-batch's work that differs in the pipelines that are timed."""
_SAMPLED_ROWS = 2**15
_STEPS = (16, 8192)
"""Least and largest number of sampled steps; between them, all steps together have _SAMPLED_ROWS rows."""
_ROWS_OF_PARTS = 4096
"""Packed rows whose parts are counted for ranks that share rows."""
_PARTS = 2**19
"""Parts of rows in all sampled steps together, where ranks share rows; at least those of one step."""
_PIPELINES = 64
"""Number of pipelines that are timed."""
_PASSES = 8192
"""Passes of a pipeline from which on fewer than ROUNDS rounds of micro-batches are timed, but at least two."""
_SEED = 20250324


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Excess:
    """Time of a step beyond that of equal micro-batches, in micro-batches of mean work.

    Attributes:
        core: Time by which unequal attention makes the step longer, over the attention core's time [n].
        rest: Time by which unequal numbers of tokens make it longer, over the time of all else that grows with tokens
            [n].
    """

    core: FloatArray
    rest: FloatArray

    def take(self, index: IntArray) -> Excess:
        """Select the configurations at the positions `index`."""
        return Excess(core=self.core[index], rest=self.rest[index])


def excess_of(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> Excess | None:
    """Estimate by how much unequal micro-batches make the step of every configuration longer; None if all are equal."""
    sequences = job.sequences
    if sequences is None or len(sequences.lengths) == 1:
        return None
    if sequences.is_packed and not runtime.fused_attention:
        return None  # scores of whole rows are computed, and masked afterwards
    together = ranks_in_step(grid)
    parts = np.ones(len(grid), dtype=np.int64)
    if sequences.is_packed and not runtime.splits_documents:
        parts = grid.cp
    # pipelines of the same passes follow each other, whose order is then found once (see timed_order)
    first, row = distinct_rows([grid.pp, grid.vpp, grid.dp * grid.mbs, grid.mbs, together, parts])
    core, rest = np.zeros(len(first)), np.zeros(len(first))
    of_rows = (sequences, job.sequence_length, job.global_batch_size)
    for number, at in enumerate(first.tolist()):
        dealt = _Dealt(dp=int(grid.dp[at]), mbs=int(grid.mbs[at]), together=int(together[at]), parts=int(parts[at]))
        pipeline = (int(grid.pp[at]), int(grid.vpp[at]))
        core[number] = _excess(*of_rows, dealt, *pipeline, power=2)
        if not sequences.is_packed:
            rest[number] = _excess(*of_rows, dealt, *pipeline, power=1)
    return Excess(core=core[row], rest=rest[row])


def ranks_in_step(grid: ConfigGrid) -> IntArray:
    """Return the number of replicas that wait for each other in every micro-batch [n].

    ZeRO 3 gathers the weights of each layer from all replicas that share them, and experts get their tokens from all
    ranks of their group. All other replicas meet once a step.
    """
    shared = np.where(grid.zero_stage == 3, grid.dp // grid.copies, 1)
    # ranks of an expert group beyond those of one replica
    of_experts = grid.ep * grid.expert_tensor // (grid.tp * grid.cp * grid.up)
    return np.gcd(grid.dp, np.maximum(shared, of_experts))


class _Dealt(NamedTuple):
    """Division of the rows of a step.

    Attributes:
        dp: Number of replicas.
        mbs: Rows of a micro-batch.
        together: Replicas that wait for each other in every micro-batch.
        parts: Ranks that share a row by its tokens, and not each of its sequences.
    """

    dp: int
    mbs: int
    together: int
    parts: int


# a study prices the same candidates under many draws of its constants
@lru_cache(maxsize=16_384)
def _excess(sequences: Sequences, row_tokens: int, rows: int, dealt: _Dealt, pp: int, vpp: int, *, power: int) -> float:
    """Return the mean time of steps beyond that of equal micro-batches.

    Args:
        sequences: Sequences of the job.
        row_tokens: Tokens of a row.
        rows: Rows of a step.
        dealt: Division of these rows.
        pp: Number of stages.
        vpp: Chunks per stage.
        power: 2 for attention; 1 for what grows with tokens, of padded sequences.
    """
    work = _dealt_work(sequences, row_tokens, rows, dealt, power=power)
    number = work.shape[-1]
    waits = float((work.sum(axis=-1).max(axis=1) - number).mean())
    if pp > 1:
        mean, growth = _pipeline_waits(pp, vpp, work.reshape(-1, number)[:_PIPELINES])
        waits = mean + growth * waits
    return max(waits, 0.0)


def _pipeline_waits(pp: int, vpp: int, work: FloatArray) -> tuple[float, float]:
    """Return how much later than with equal micro-batches pipelines of mean work end, and by how much more per work.

    The time grows with the sum of a pipeline's work, and by more than the work itself where stages wait for each other.

    Args:
        pp: Number of stages.
        vpp: Chunks per stage.
        work: Work of each micro-batch over the mean [k, m].
    """
    number = work.shape[1]
    # Without chunks micro-batches are of no round, and any number of them is timed like rounds of pp.
    size = pp if vpp == 1 else int(of_round(np.array(number), pp))
    most = int(np.clip(_PASSES // (2 * pp * vpp * size), 2, ROUNDS))
    timed = min(number, most * size)
    own, late = work[:, :timed].sum(axis=1) - timed, _lateness(pp, vpp, size, work[:, :timed])
    spread = ((own - own.mean()) ** 2).mean()
    growth = float(((late - late.mean()) * (own - own.mean())).mean() / spread) if spread > 0 else 1.0
    mean = float((late - growth * own).mean())
    if number > timed:
        # further micro-batches wait as much as those of the later half of the timed ones
        half = timed // size // 2 * size
        before = 0.0
        if half:
            own, late = work[:, :half].sum(axis=1) - half, _lateness(pp, vpp, size, work[:, :half])
            before = float((late - growth * own).mean())
        mean += (mean - before) / (timed - half) * (number - timed)
    return mean, growth


def _lateness(pp: int, vpp: int, size: int, work: FloatArray) -> FloatArray:
    """Return by how much longer pipelines take than with equal micro-batches, over VARYING [k].

    Stages are alike, and a backward pass takes twice as long as a forward pass.

    Args:
        pp: Number of stages.
        vpp: Chunks per stage.
        size: Number of micro-batches in a round.
        work: Work of each micro-batch over the mean [k, m].
    """
    order = timed_order(pp, vpp, work.shape[1], size)
    share_s = np.where(order.duration < pp * vpp, 1 / 3, 2 / 3)[:, None] / vpp
    lasts = ((1.0 - VARYING) + VARYING * np.concatenate([work, np.ones((1, work.shape[1]))])).T
    end_s = np.zeros((len(order.stage) + pp + 1, lasts.shape[1]))
    for first, last in order.levels:
        at = slice(first, last)
        begin_s = np.maximum(end_s[order.previous[at]], end_s[order.sender[at]])
        end_s[at] = begin_s + share_s[at] * lasts[order.micro_batch[at]]
    whole_s = end_s[order.last_of_stage].max(axis=0)
    return np.asarray((whole_s[:-1] - whole_s[-1]) / VARYING)


def _dealt_work(sequences: Sequences, row_tokens: int, rows: int, dealt: _Dealt, *, power: int) -> FloatArray:
    """Return the work of micro-batches in sampled steps, over the mean [s, d, m]; see `_excess`."""
    dp, mbs, together, parts = dealt
    number = rows // (dp * mbs)
    if sequences.is_packed:
        of_rows = _row_work(sequences, row_tokens, parts)
    else:
        of_rows = sample_lengths(sequences).astype(np.float64)[:, None]
    work = of_rows[_steps(len(of_rows), dp * mbs * number, parts)]
    work = (_balance(work, dp, mbs) if sequences.order == "balanced" else work).reshape(-1, dp, number, mbs, parts)
    if sequences.is_packed:
        work = work / work.sum(axis=-1).mean() * parts
        work = work.mean(axis=3).max(axis=-1)
    else:
        work = work.max(axis=3)[..., 0] ** power
        work = work / work.mean()
    return np.asarray(work.reshape(len(work), dp // together, together, number).max(axis=2))


def _balance(work: FloatArray, dp: int, mbs: int) -> FloatArray:
    """Deal the rows of each step so that micro-batches get alike sums, and so do replicas [s, b, parts].

    Sorted rows are dealt to and fro: to the micro-batches first, which are then dealt to the replicas.
    """
    num_steps, rows, parts = work.shape
    in_order = np.argsort(-work.sum(axis=-1), axis=1, kind="stable")
    dealt = np.take_along_axis(work, in_order[..., None], axis=1).reshape(num_steps, mbs, -1, parts)
    dealt[:, 1::2] = dealt[:, 1::2, ::-1].copy()
    # neighbours among the micro-batches run at the same time on all replicas
    dealt = dealt.reshape(num_steps, mbs, -1, dp, parts)
    dealt[:, :, 1::2] = dealt[:, :, 1::2, ::-1].copy()
    return np.asarray(dealt.transpose(0, 3, 2, 1, 4).reshape(num_steps, rows, parts))


@lru_cache(maxsize=64)
def _steps(available: int, rows: int, parts: int) -> IntArray:
    """Draw the rows of sampled steps out of so many available ones [s, b]; none comes twice before all have come.

    Rows that many ranks share are alike from step to step, and fewer steps of them are drawn.
    """
    number = int(np.clip(_SAMPLED_ROWS // rows, *_STEPS))
    if parts > 1:
        number = int(np.clip(_PARTS // (rows * parts), 1, number))
    rng = np.random.default_rng(_SEED)
    every = [rng.permutation(available) for _ in range(math.ceil(number * rows / available))]
    return np.concatenate(every)[: number * rows].reshape(number, rows)


@lru_cache(maxsize=64)
def _row_work(sequences: Sequences, row_tokens: int, parts: int) -> FloatArray:
    """Return the attention of sampled rows, as the ranks share it that hold parts of them [r, parts].

    A rank of ring attention holds two chunks of a row that lie at equal distances from its ends, which balances a row
    of one sequence under a causal mask (Megatron-LM, megatron/core/utils.py, get_batch_on_this_cp_rank).
    """
    packed = pack_rows(sequences, row_tokens)
    if parts == 1:
        return packed.squares[:, None]
    bounds = np.arange(2 * parts + 1) * row_tokens / (2 * parts)
    rows = np.arange(0, len(packed.tokens), max(len(packed.tokens) // _ROWS_OF_PARTS, 1))
    before = _work_before(packed, rows, bounds)
    of_chunks = np.diff(before, axis=1)
    return np.asarray(of_chunks[:, :parts] + of_chunks[:, : parts - 1 : -1])


def _work_before(packed: PackedRows, rows: IntArray, bounds: FloatArray) -> FloatArray:
    """Return the attention of the tokens of some rows that stand before each bound [len(rows), bounds].

    The first x tokens of a sequence attend to x^2 / 2 keys; the factor is left out, as in `squares`.
    """
    length = packed.length.astype(np.float64)
    first = np.searchsorted(packed.row, rows)
    # positions count the tokens of all rows before, and so do the sums of squares
    ends = np.cumsum(length)
    squares = np.concatenate([[0.0], np.cumsum(length**2)])
    begin_of_row = (ends - length)[first]
    position = np.minimum(begin_of_row[:, None] + bounds, (begin_of_row + packed.tokens[rows])[:, None])
    at = np.minimum(np.searchsorted(ends, position, side="right"), len(ends) - 1)
    inside = position - (ends - length)[at]
    return np.asarray(squares[at] + inside**2 - squares[first][:, None])
