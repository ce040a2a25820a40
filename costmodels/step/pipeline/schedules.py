"""Pipeline schedules: layers of each stage, bubble time, and micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.job.model_spec import ModelSpec
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.uneven_work import EVEN, Assignment
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageLayers:
    """Pieces that each of `pp` stages holds, or each of its virtual stages.

    Attributes:
        model: Model whose pieces they are.
        held: Number of each piece; the first stage has the embedding, the last the head [pp, P].
        again: Number of layers among them whose forward pass runs again in full, whatever the configuration recomputes
            [pp, P].
    """

    model: ModelSpec
    held: IntArray
    again: IntArray

    @property
    def layers(self) -> IntArray:
        """Number of layers of the main model that each stage holds [pp]."""
        return np.asarray(self.held @ (self.model.mean_layer > 0))


def assign_layers(
    model: ModelSpec,
    runtime: RuntimeProfile,
    pp: int,
    vpp: int,
    assignment: Assignment = EVEN,
    *,
    recompute_layers: int = 0,
    by_chunk: bool = False,
) -> StageLayers:
    """Assign the layers to stages or, by chunk, to virtual stages.

    The first layers of each virtual stage run again in full, as many as `assignment.recomputed` says or, without it,
    `recompute_layers` (megatron-core transformer_block.py, _checkpointed_forward: the method `block`).

    "even": the layer count, padded with no-op layers to the runtime's multiple, is cut into pp*vpp equal chunks, and
    chunk c stands on stage c % pp (Narayanan et al. 2021, section 2.2). "balanced": contiguous blocks of about equal
    compute (nanotron models/base.py: a stage ends with the block that takes the cumulative cost past its share).
    "least-bottleneck": contiguous blocks of which the largest is as small as possible (AMP, Li et al. 2022, section
    3.4). A count that cannot be cut evenly is spread as evenly as possible: over the stages and then over their chunks,
    if the runtime balances stages, and else over the chunks. Of more chunks than layers the last holds none, of two
    more the first does not either, and of three more the last two do not.
    """
    virtual = chunk_of_layer(model, runtime, pp, vpp, assignment.layers)
    piece, again = model.piece_of_layer, np.zeros(len(virtual), dtype=np.bool_)
    if assignment.recomputed or recompute_layers:
        # Layers of a virtual stage are contiguous, so the first of them is found by search.
        place = np.arange(len(virtual)) - np.searchsorted(virtual, virtual)  # position within its virtual stage
        again = place < (np.array(assignment.recomputed)[virtual] if assignment.recomputed else recompute_layers)
    number, num_pieces = pp * vpp if by_chunk else pp, len(model.pieces)

    def count(chosen: NDArray[np.bool_]) -> IntArray:
        cells = virtual[chosen] % number * num_pieces + piece[chosen]
        return np.bincount(cells, minlength=number * num_pieces).reshape(number, num_pieces)

    held = count(np.ones(len(virtual), dtype=np.bool_))
    held[0, -2] = held[-1, -1] = 1  # the embedding and the head
    held[0, model.tower_pieces] = 1  # beside the embedding, whose result they fill in
    if model.num_mtp_layers:
        of_part = np.bincount(virtual, minlength=pp * vpp).tolist()
        held[mtp_part(of_part) % number, -3] = model.num_mtp_layers
    return StageLayers(model=model, held=held, again=count(again))


def chunk_of_layer(
    model: ModelSpec, runtime: RuntimeProfile, pp: int, vpp: int, layers: tuple[int, ...] = ()
) -> IntArray:
    """Return the virtual stage of each layer [num_layers]; virtual stage c stands on stage c % pp.

    See `assign_layers` for the rules.
    """
    if layers:
        assert (len(layers), sum(layers)) == (pp * vpp, model.num_layers), "every layer is in a virtual stage"
        return np.repeat(np.arange(pp * vpp), layers)
    # Without a layout by hand, the runtime's own rule cuts the layers.
    if runtime.layer_split == "balanced":
        return _balanced_stages(model, pp * vpp)
    if runtime.layer_split == "least-bottleneck":
        return _least_bottleneck_stages(model, pp * vpp)
    return _equal_chunks(model.num_layers, runtime, pp, vpp)


def _equal_chunks(num_layers: int, runtime: RuntimeProfile, pp: int, vpp: int) -> IntArray:
    """Return the virtual stage of each layer [num_layers] if they are as equal as can be, no-op layers included."""
    padded = -(-num_layers // runtime.layer_padding) * runtime.layer_padding
    layer, chunks = np.arange(num_layers), pp * vpp
    if padded % chunks == 0:
        return layer // (padded // chunks)
    if chunks > num_layers:
        return layer + (chunks > num_layers + 1)
    if vpp > 1 and runtime.balances_stages:
        return np.repeat(np.arange(chunks), _balanced_chunks(num_layers, pp, vpp))
    return layer * chunks // num_layers


def _balanced_chunks(num_layers: int, pp: int, vpp: int) -> IntArray:
    """Return the layers of each chunk [pp * vpp] so that stages differ by one layer at most, and so do their chunks.

    Stages in the middle have the layer more, and the first and the last chunk have none, because the ends also hold the
    embedding and the loss.
    """
    stage, chunk = np.arange(pp), np.arange(vpp)[:, None]
    # the last stage is the last to get a layer more, the first the one before
    turn = np.where(stage == 0, max(pp - 2, 0), np.where(stage == pp - 1, pp - 1, stage - 1))
    of_stage = num_layers // pp + (turn < num_layers % pp)
    place = np.where(stage == 0, (chunk - 1) % vpp, chunk)
    return np.asarray(of_stage // vpp + (place < of_stage % vpp)).ravel()


def mtp_part(layers_of_part: Sequence[int]) -> int:
    """Return the number of the virtual stage with the modules of multi-token prediction.

    It is the last, with the loss; or the one before, where both are without layers (megatron-core
    pipeline_parallel_layer_layout.py allows both).
    """
    last = len(layers_of_part) - 1
    return last - 1 if last > 1 and not any(layers_of_part[-2:]) else last


@lru_cache(maxsize=64)
def _balanced_stages(model: ModelSpec, pp: int) -> IntArray:
    """Return the stage of each layer [num_layers] by cuts at equal shares of the compute, including the head's."""
    cumulative = np.cumsum(_block_costs(model))
    thresholds = cumulative[-1] * (np.arange(1, pp + 1) / pp)
    stages = np.zeros(model.num_layers, dtype=np.int64)
    stage = 0
    for layer in range(model.num_layers):
        stages[layer] = stage
        if cumulative[layer] > thresholds[stage] and stage < pp - 1:
            stage += 1
    return stages


def _block_costs(model: ModelSpec) -> FloatArray:
    """Return the compute of each layer and of the head, in active parameters per token [num_layers + 1]."""
    layers = [sum(block.active_parameters for block in layer) for layer in model.layers]
    return np.array([*layers, model.head.table], dtype=np.float64)


@lru_cache(maxsize=64)
def _least_bottleneck_stages(model: ModelSpec, pp: int) -> IntArray:
    """Return the stage of each layer [num_layers] if the costliest stage costs as little as possible.

    Among such cuts, choose the one whose stages differ least, by their squares. The last stage may hold the head alone.
    """
    ends = np.concatenate([[0.0], np.cumsum(_block_costs(model))])
    # Entry cost[i, j] belongs to a stage that holds the blocks from i to j - 1. A stage must hold at least one block.
    cost = np.where(np.tri(len(ends), k=-1, dtype=np.bool_).T, ends - ends[:, None], np.inf)
    largest = _cut(cost, pp, np.maximum)[0]
    _, cuts = _cut(np.where(cost <= largest * (1 + 1e-9), cost**2, np.inf), pp, np.add)
    return np.asarray(np.searchsorted(cuts, np.arange(model.num_layers), side="right"))


def _cut(cost: FloatArray, pp: int, joined: np.ufunc) -> tuple[float, list[int]]:
    """Find the least cost of `pp` stages, joined by sum or maximum, and the ends of all stages but the last."""
    best, chosen = cost[0], []
    for _ in range(pp - 1):
        # Bellman step of the dynamic program.
        through = joined(best[:, None], cost)  # all stages up to the row's block, then one stage up to the column's
        chosen.append(through.argmin(axis=0))
        best = through.min(axis=0)
    # The choices are read backwards: each one names the end of the stage before.
    cuts, end = [], len(best) - 1
    for at in reversed(chosen):
        end = int(at[end])
        cuts.append(end)
    return float(best[-1]), cuts[::-1]


def idle_time_s(
    forward_s: FloatArray,
    backward_s: FloatArray,
    hops_s: tuple[FloatArray, FloatArray] | None,
    num_micro_batches: IntArray,
    vpp: IntArray,
) -> FloatArray:
    """Compute for how long every stage is idle while the pipeline fills and empties [s], [pp, k].

    A stage waits for the first micro-batch to come through the stages before it, and for the last gradients to go
    back through them. While its first micro-batch is on the way through the stages behind it, it runs the forward
    passes of its warm-up; while its last one is, it runs as many backward passes. What these do not fill is idle. The
    step takes as long as the stage whose work and idle time are the longest. If all stages are equal, that gives (p-1)
    of them (Narayanan et al. 2021, section 2.2.1), and with chunks (p-1)/vpp (section 2.2.2).

    Args:
        forward_s: Time of one micro-batch's forward passes on each stage [s], [pp, k].
        backward_s: Time of one micro-batch's backward passes on each stage [s], [pp, k].
        hops_s: Time of a message over each boundary between stages, forward and back [s], each [pp - 1, k]; None
            stands for no time.
        num_micro_batches: Number of micro-batches [k].
        vpp: Chunks per stage [k].
    """
    pp = len(forward_s)
    stage_s = chunk_s = (forward_s + backward_s) / vpp
    if hops_s is not None:
        none = np.zeros((1, len(vpp)))
        behind_s = np.concatenate([hops_s[0] + hops_s[1], none])
        stage_s = chunk_s + behind_s
    before = _running_sums(stage_s)
    before -= chunk_s
    if hops_s is not None:
        before -= behind_s
    after = _running_sums(stage_s[::-1])[::-1]
    after -= chunk_s
    # Warm-up passes are run until the first gradients come: one for each stage behind, with chunks two.
    warm_up = np.minimum((pp - 1 - np.arange(pp))[:, None] * np.where(vpp == 1, 1, 2), num_micro_batches * vpp - 1)
    waits = []
    for at, passes_s in enumerate((forward_s, backward_s)):
        filled = passes_s / vpp
        if hops_s is not None:
            # without chunks each of these passes waits for a message, too
            hop_s = hops_s[at]
            filled += np.maximum(np.concatenate([none, hop_s]), np.concatenate([hop_s, none])) * (vpp == 1)
        filled *= warm_up
        waits.append(np.maximum(np.subtract(after, filled, out=filled), 0.0, out=filled))
    # If the last forward pass comes before all backward passes, both waits are the same one.
    is_short = num_micro_batches * vpp < warm_up + 2
    before += np.where(is_short, np.maximum(*waits), np.add(*waits))
    return before


def _running_sums(rows: FloatArray) -> FloatArray:
    """Return the sum of the rows up to each one [pp, k]; cumsum over the first axis is up to ten times slower."""
    sums = np.empty_like(rows)
    sums[0] = rows[0]
    for at in range(1, len(rows)):
        np.add(sums[at - 1], rows[at], out=sums[at])
    return sums


def of_round(num_micro_batches: IntArray, pp: IntArray | int) -> IntArray:
    """Return how many micro-batches go through one chunk after the other before the next ones begin [k].

    They are the fewest from pp on after which the last round has none or at least pp too, because fewer would leave
    stages idle (megatron-core pipeline_parallel/schedules.py, microbatch_group_size_per_vp_stage). Where rounds can be
    equal, as torch's interleaved schedule wants them, these are equal.
    """
    whole, pp = np.broadcast_arrays(num_micro_batches, pp)
    size = np.where(whole < 2 * pp, np.maximum(whole, 1), pp)
    # the last round of the sizes tried so far may be too short
    while (short := (whole % size > 0) & (whole % size < pp)).any():
        size = size + short
    return np.asarray(size)


def stage_in_flight(
    stage: IntArray, pp: IntArray | int, vpp: IntArray | int, num_micro_batches: IntArray, schedule: str = "1f1b"
) -> FloatArray:
    """Return the peak number of micro-batches whose activations a stage holds, in units of all its layers.

    All arguments are broadcast elementwise. 1F1B: stage i (from 0) holds min(m, pp - i). Interleaved: 2(pp - i - 1) +
    (vpp - 1) r + 1 chunks of a vpp-th of the stage, with r micro-batches in a round. Sources: Narayanan et al. 2021,
    section 2.2; megatron-core pipeline_parallel/schedules.py, get_pp_rank_microbatches (warm-up count). Where r is pp,
    stage 0 gives Korthikanti et al. 2022, section 4.2.3: L(1 + (p-1)/(p m)).

    The other schedules of `passes.py` have no chunks: gpipe holds all m on every stage, zero-bubble as many as 1F1B's
    first stage (Qi et al. 2023, section 2).
    """
    if schedule != "1f1b":
        held = num_micro_batches if schedule == "gpipe" else np.minimum(num_micro_batches, pp)
        return np.asarray(held + np.zeros_like(stage), dtype=np.float64)
    # Without chunks, a stage holds one micro-batch for each stage behind it, and its own.
    behind = pp - stage - 1
    ahead = (np.asarray(vpp) - 1) * of_round(np.asarray(num_micro_batches), pp)
    chunks = np.where(np.asarray(vpp) == 1, behind + 1, 2 * behind + ahead + 1)
    return np.asarray(np.minimum(num_micro_batches * vpp, chunks) / vpp, dtype=np.float64)
