"""Peak device memory: weights, gradients, optimizer states and activations of every stage; the worst stage decides.

The peak of a stage is the largest of three moments of a backward pass. At its beginning, the loss and the head's
gradient stand beside all activations. In a layer in the middle, that layer's own gradients stand beside them. At its
end, the embedding's gradient stands beside the activations of the other micro-batches.

Measured peaks have different meanings: `allocated` counts the tensors, `reserved` the memory that the allocator holds
for them, and `device` all memory that the process occupies. `peak_as` returns each of them. The memory that the device
needs decides whether a configuration fits.

Sources: ZeRO (Rajbhandari et al. 2020, sections 3 and 5) for training states. Korthikanti et al. 2022, section 4, for
activations: 34 s*b*h per layer without attention scores. They are tallied here tensor by tensor, so that grouped-query
attention, gated MLPs, latent attention and experts come out too. Flash attention keeps q, k, v, its output and one fp32
number per query and head (Dao 2023) instead of 5 a s / h.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from costmodels.blocks.tally import Tally
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import block_context, local_tokens, residual_tokens, unique_shapes
from costmodels.optimizers.contract import Widths
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.step.changed_layers import kept_ratios
from costmodels.step.error_models import MemoryErrorModel
from costmodels.step.pipeline.schedules import stage_in_flight
from costmodels.step.placement import (
    BlockParameters,
    Pipeline,
    StageKinds,
    block_parameters,
    local_parameters,
    local_table,
    pipelines,
    sharded_parameters,
)
from costmodels.step.weights.kept_parts import KeptParts
from hardware.arrays import FloatArray, IntArray

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation", "overhead")
MemoryMeaning = Literal["allocated", "reserved", "device"]
WhichStage = Literal["fullest", "first", "last"]

NOT_COUNTED: dict[MemoryMeaning, tuple[str, ...]] = {
    "allocated": ("fragmentation", "overhead"),
    "reserved": ("overhead",),
    "device": (),
}
"""Parts that a peak of each meaning leaves out."""

LEAST_CHANCE = 0.1
"""Least probability of fit worth a trial (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryEstimate:
    """Memory of n configurations.

    Attributes:
        peak_bytes: Peak of the stage that is fullest relative to its devices, as the device sees it [bytes], [n].
        parts_bytes: Parts of the same peak by MEMORY_PARTS [bytes], each [n].
        capacity_bytes: Memory of the smallest device of that stage [bytes], [n].
    """

    peak_bytes: FloatArray
    parts_bytes: dict[str, FloatArray]
    capacity_bytes: FloatArray

    def take(self, index: IntArray) -> MemoryEstimate:
        """Select the estimates at the positions `index`."""
        return MemoryEstimate(
            peak_bytes=self.peak_bytes[index],
            parts_bytes={part: values[index] for part, values in self.parts_bytes.items()},
            capacity_bytes=self.capacity_bytes[index],
        )

    def joined(self, other: MemoryEstimate) -> MemoryEstimate:
        """Return these estimates and then those of `other`."""
        parts = {part: np.concatenate([own, other.parts_bytes[part]]) for part, own in self.parts_bytes.items()}
        return MemoryEstimate(
            peak_bytes=np.concatenate([self.peak_bytes, other.peak_bytes]),
            parts_bytes=parts,
            capacity_bytes=np.concatenate([self.capacity_bytes, other.capacity_bytes]),
        )

    def peak_as(self, meaning: MemoryMeaning) -> FloatArray:
        """Return the peak in a source's meaning [bytes], [n].

        `allocated` counts the tensors, `reserved` the memory held for them, and `device` everything on the device.
        """
        left_out = [self.parts_bytes[part] for part in NOT_COUNTED[meaning]]
        return np.asarray(self.peak_bytes - np.sum(left_out, axis=0)) if left_out else self.peak_bytes

    @property
    def needed_bytes(self) -> FloatArray:
        """Memory that the device must have [bytes], [n]: the peak, with what its allocator fragments.

        An allocator may give up blocks of which nothing is in use, but of 640 published runs that failed, 78 would have
        fitted only by that. Segments that grow have no such blocks (`RuntimeProfile.expandable_segments`).
        """
        return self.peak_bytes

    def fits(self, headroom: float) -> np.ndarray:
        """Return whether the needed memory leaves the share `headroom` of the device free [n]."""
        return np.asarray(self.needed_bytes <= (1 - headroom) * self.capacity_bytes)

    def may_fit(self, headroom: float, error: MemoryErrorModel) -> np.ndarray:
        """Return whether `probability_of_fit` is at least LEAST_CHANCE [n].

        A study should drop no such configuration untried.
        """
        return np.asarray(self.probability_of_fit(headroom, error) >= LEAST_CHANCE)

    def probability_of_fit(self, headroom: float, error: MemoryErrorModel) -> FloatArray:
        """Compute P(needed memory <= (1 - headroom) * capacity) [n].

        Args:
            headroom: Share of the device that must stay free.
            error: Distribution of log(true / predicted), `memory_error_of` the runtime.
        """
        return probability_of_fit(self.needed_bytes, self.capacity_bytes, headroom, error)


def probability_of_fit(
    needed_bytes: FloatArray, capacity_bytes: FloatArray | float, headroom: float, error: MemoryErrorModel
) -> FloatArray:
    """Compute P(needed memory <= (1 - headroom) * capacity) [n]; see `MemoryEstimate.probability_of_fit`."""
    return error.probability_below(np.log((1 - headroom) * capacity_bytes / needed_bytes))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerActivations:
    """Activation memory of one micro-batch in each piece of a model on one rank [bytes], each array [P, u].

    Attributes:
        kept: Tensors that a layer keeps until its backward pass.
        working: Tensors that are computed again before a layer's backward pass.
        gradient: Gradients of activations that are alive at once in a layer's backward pass.
        gathered: Inputs that a layer's sequence-parallel products gather and then need no longer, one per product.
    """

    kept: FloatArray
    working: FloatArray
    gradient: FloatArray
    gathered: FloatArray

    def take(self, row: IntArray) -> LayerActivations:
        """Select the activations of configurations by their shape rows."""
        return LayerActivations(**{f.name: getattr(self, f.name).take(row, axis=1) for f in fields(self)})


def layer_activations(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> LayerActivations:
    """Compute the activation memory of one layer of each kind and micro-batch for every shape row [u]; ends have none.

    Full recomputation keeps a layer's input alone. Everything else is working memory of the layer at work.
    """
    model = job.model
    tally = Tally(block_context(job, runtime, shapes), model.hidden_size)
    blocks = [block.memory(tally) for block in model.blocks]
    of_blocks, of_entry = kept_ratios(runtime.layer_changes, shapes, model.planned_names)
    blocks = [
        replace(block, kept=block.kept * ratio, dropped=block.dropped * ratio)
        for block, ratio in zip(blocks, of_blocks, strict=True)
    ]
    full = shapes.recompute == RECOMPUTE_MODES.index("full")
    selective = shapes.recompute == RECOMPUTE_MODES.index("selective")
    unit, none = job.recompute_unit, np.zeros(len(shapes))
    kept, working, gradient = ([none] * len(model.pieces) for _ in range(3))
    ends = (len(model.pieces) - 2, len(model.pieces) - 1)
    for at, piece in enumerate(model.pieces):
        if at in ends:
            continue
        own = [blocks[block] for block in piece.blocks]
        whole = reduce(np.add, [block.kept for block in own])
        if not piece.is_layer:  # a tower, of which nothing is computed again
            kept[at], gradient[at] = whole, reduce(np.maximum, [block.gradient for block in own])
            continue
        dropped = np.where(selective, reduce(np.add, [block.dropped for block in own]), 0.0)
        kept[at] = np.where(full, of_entry * tally.hidden / unit, whole - dropped)
        working[at] = np.where(full, unit * whole, dropped)
        gradient[at] = reduce(np.maximum, [block.gradient for block in own])
    gathered = np.where(full, 0.0, tally.gathered) * runtime.gathers_inputs_again
    return LayerActivations(
        kept=np.stack(kept),
        working=np.stack(working),
        gradient=np.stack(gradient),
        gathered=model.is_layer_piece[:, None] * gathered,
    )


def estimate_memory(
    setting: Setting, grid: ConfigGrid, *, stage: WhichStage = "fullest", schedule: str = "1f1b"
) -> MemoryEstimate:
    """Estimate the peak memory of every configuration, by part.

    Args:
        setting: Job, cluster and runtime.
        grid: Configurations [n].
        stage: Stage to report: the fullest one, or the one that a source measures.
        schedule: Pipeline schedule, one of `passes.SCHEDULES`.
    """
    parts = {part: np.zeros(len(grid)) for part in MEMORY_PARTS}
    capacity = np.zeros(len(grid))
    for hosts, at in grid.by_host_order():
        # Configurations with one order of hosts are estimated together, on the cluster in that order.
        ordered = setting.cluster.reordered(hosts)
        own = grid if len(at) == len(grid) else grid.take(at)
        for part, values in _parts_bytes(replace(setting, cluster=ordered), own, stage, schedule).items():
            (capacity if part == _CAPACITY else parts[part])[at] = values
    return MemoryEstimate(peak_bytes=np.asarray(sum(parts.values())), parts_bytes=parts, capacity_bytes=capacity)


def stage_memory(setting: Setting, config: ParallelConfig) -> MemoryEstimate:
    """Estimate the peak memory of every stage of one configuration [pp]."""
    grid = ConfigGrid.from_configs([config])
    # Every stage becomes a kind of its own, so that none is merged with its equals.
    ordered = setting.cluster.reordered(config.assignment.hosts)
    (pipeline,) = pipelines(replace(setting, cluster=ordered), grid).each
    stages = pipeline.stages.apart()
    shapes, shape_of = unique_shapes(grid)
    passes = Passes.of(setting.job, setting.runtime, shapes, has_recomputed=grid.has_recomputed)
    num_micro_batches = busiest_micro_batches(setting.job, grid)
    pipeline = replace(pipeline, stages=stages)
    needed = _compute_needs(setting, passes, pipeline, grid, shape_of, num_micro_batches, "1f1b")
    parts = {part: np.broadcast_to(needed.get(part, 0.0), (config.pp, 1))[:, 0] for part in MEMORY_PARTS}
    return MemoryEstimate(
        peak_bytes=np.asarray(sum(parts.values())),
        parts_bytes=parts,
        capacity_bytes=stages.smallest([float(device.memory_bytes) for device in ordered.devices]),
    )


_CAPACITY = "capacity"


def _parts_bytes(setting: Setting, grid: ConfigGrid, stage: WhichStage, schedule: str) -> dict[str, FloatArray]:
    """Compute the parts of the fullest stage, and the memory of its smallest device as _CAPACITY, each [n].

    The hosts of the cluster stand in the order of the ranks. If replicas run unequal numbers of micro-batches, the
    busiest ones hold the most.
    """
    shapes, shape_of = unique_shapes(grid)
    passes = Passes.of(setting.job, setting.runtime, shapes, has_recomputed=grid.has_recomputed)
    num_micro_batches = busiest_micro_batches(setting.job, grid)
    memory_bytes = [float(device.memory_bytes) for device in setting.cluster.devices]
    parts = {part: np.zeros(len(grid)) for part in (*MEMORY_PARTS, _CAPACITY)}
    for pipeline in pipelines(setting, grid).each:
        stages, at = pipeline.stages, pipeline.at
        needed = _compute_needs(setting, passes, pipeline, grid, shape_of, num_micro_batches, schedule)
        smallest = stages.smallest(memory_bytes)[:, None]
        # The fullest stage is the one with the largest share of its smallest device.
        share = sum(needed.values()) / smallest * _is_wanted(stages, stage)
        fullest = share.argmax(axis=0)
        chosen = np.ravel_multi_index((fullest, np.arange(len(at))), share.shape)
        for part, values in needed.items():
            parts[part][at] = values.take(chosen)
        parts[_CAPACITY][at] = smallest[fullest, 0]
    return parts


def busiest_micro_batches(job: TrainingJob, grid: ConfigGrid) -> IntArray:
    """Return the number of micro-batches of the busiest replica of every configuration [n]."""
    even = job.global_batch_size // (grid.dp * grid.mbs)
    if grid.is_even:
        return even
    most = np.array([max(one.micro_batches, default=0) for one in grid.assignments])[grid.assignment]
    return np.where(most > 0, most, even)


def _compute_needs(
    setting: Setting,
    passes: Passes,
    pipeline: Pipeline,
    grid: ConfigGrid,
    shape_of: IntArray,
    num_micro_batches: IntArray,
    schedule: str,
) -> dict[str, FloatArray]:
    """Compute the memory that every kind of stage of one pipeline needs, by part [bytes], each [c, k]."""
    stages, at = pipeline.stages, pipeline.at
    # The first stage of each kind holds the most micro-batches.
    in_flight = stage_in_flight(stages.first[:, None], pipeline.pp, grid.vpp[at], num_micro_batches[at], schedule)
    held = HeldWeights.of(setting.job, pipeline.weights, stages, pipeline.held)
    buffers = UnitBuffers.of(setting.job, setting.runtime, held)
    buffers = None if buffers is None else buffers.take(pipeline.weights_of)
    needed = passes.parts(stages, in_flight, shape_of[at], buffers)
    for part, values in training_states(setting.job, setting.runtime, held).items():
        needed[part] = needed.get(part, 0.0) + values.take(pipeline.weights_of, axis=1)
    return needed


def stage_needed_bytes(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, stages: StageKinds, in_flight: FloatArray
) -> FloatArray:
    """Compute the memory that stages with the given layers need of their devices [bytes], [c, k], each on its own.

    Args:
        job: Training job.
        runtime: Runtime profile; it says how weights and activations are kept.
        grid: Configurations of one pp [k].
        stages: Stages and the blocks that they hold [c].
        in_flight: Number of micro-batches whose activations they hold [c, k].
    """
    shapes, shape_of = unique_shapes(grid)
    passes = Passes.of(job, runtime, shapes, has_recomputed=bool(stages.again.any()))
    held = HeldWeights.of(job, grid, stages)
    needed = passes.parts(stages, in_flight, shape_of, UnitBuffers.of(job, runtime, held))
    states = training_states(job, runtime, held)
    return np.asarray(sum(needed.values()) + sum(states.values()))


def _is_wanted(stages: StageKinds, stage: WhichStage) -> NDArray[np.bool_]:
    """Select the kinds of stages that the measured stage may be [c, 1]."""
    ends = {"first": stages.embeddings, "last": stages.heads}
    return ends[stage] > 0 if stage in ends else np.ones((len(stages.count), 1), dtype=np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldWeights:
    """Parameters that one rank of every kind of stage holds, whatever the runtime, each array [c, w].

    Attributes:
        zero_stage: ZeRO stage [w].
        is_offloaded: Whether the optimizer states are kept on the host [w].
        whole: Parameters before ZeRO shards them.
        shard: Parameters whose states the rank keeps if ZeRO shards them.
        layer: Parameters of the largest layer.
        embedding: Parameters of the embedding.
        head: Parameters of the output head, which may be the embedding.
        is_piped: Whether there are several stages.
        shapes: Parameters of one weight of each shape in the layers.
        frozen: Further parameters that no step changes, as the rank keeps them.
        kept: Parameters whose states the rank keeps, by parts; None if the optimizer treats all parts alike.
    """

    zero_stage: IntArray
    is_offloaded: NDArray[np.bool_]
    whole: FloatArray
    shard: FloatArray
    layer: FloatArray
    embedding: FloatArray
    head: FloatArray
    is_piped: bool
    shapes: FloatArray
    frozen: FloatArray | float
    kept: KeptParts | None

    @classmethod
    def of(
        cls, job: TrainingJob, weights: ConfigGrid, stages: StageKinds, each: BlockParameters | None = None
    ) -> HeldWeights:
        """Count the parameters of rows that differ in the way weights are kept [w]; `each` are those of every block."""
        model = job.model
        each = block_parameters(model, weights) if each is None else each
        local = local_parameters(job, weights, stages.pieces, each)
        in_layers = model.is_layer_block
        # A stage with several kinds of layers needs room for the largest one.
        of_piece = (model.blocks_of_piece * in_layers) @ (each.dense + each.expert)
        layer = np.max(of_piece * (stages.pieces > 0)[:, :, None], axis=1)
        # Of each shape of weight one counts, and one expert of many.
        has_block = (stages.pieces @ (model.blocks_of_piece * in_layers)) > 0
        return cls(
            zero_stage=weights.zero_stage,
            is_offloaded=weights.is_offloaded,
            whole=local.dense + local.expert,
            shard=sharded_parameters(weights, local),
            layer=layer,
            embedding=local_table(model, weights) * stages.embeddings,
            head=local_table(model, weights) * stages.heads,
            is_piped=bool(stages.count.sum() > 1),
            shapes=has_block @ (each.dense + each.one_expert),
            frozen=local.frozen / np.where(weights.zero_stage == 3, weights.dp * weights.cp * weights.up, 1),
            kept=KeptParts.of(job, weights, stages.pieces, local),
        )

    @property
    def gathered(self) -> FloatArray:
        """Parameters of single layers that stand beside those that ZeRO-3 shards.

        They are the weights of the current layer and of the next, a layer's gradient before it is scattered, and the
        tables.
        """
        return 3 * self.layer + self.embedding + self.head


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitBuffers:
    """Weights and gradients of single layers and tables that stand beside the shards at three moments [bytes], [c, k].

    Attributes:
        in_layer: In a layer in the middle of the backward pass.
        at_head: At the beginning of the backward pass.
        at_end: At its end.
    """

    in_layer: FloatArray
    at_head: FloatArray
    at_end: FloatArray

    @classmethod
    def of(cls, job: TrainingJob, runtime: RuntimeProfile, held: HeldWeights) -> UnitBuffers | None:
        """Compute those of FSDP2's mixed precision; other runtimes have constant ones (`training_states`).

        A unit is gathered in the width of the products, and the next one with it. Its gradient is copied into fp32,
        and reduced; that copy lasts until the next unit is reduced. A pipeline keeps its gradients to the last
        micro-batch, so that they are no buffers (torch/distributed/fsdp/_fully_shard, _fsdp_param_group.py and
        _fsdp_collectives.py, foreach_reduce). A loss in parts reduces the head for each of them all the same, while the
        copy of the one before is still there (torchtitan components/loss.py, ChunkedLossWrapper).
        """
        if not runtime.fsdp2_mixed:
            return None
        width, again = job.element_bytes, held.zero_stage == 3
        reduced = 0 if held.is_piped else runtime.gradient_bytes
        is_pending = held.is_piped and runtime.loss_chunks > 1
        return cls(
            in_layer=(width * (1 + 2 * again) + reduced) * held.layer,
            at_head=(width * again + runtime.gradient_bytes * is_pending) * held.head,
            at_end=(width * again + reduced) * held.embedding + reduced * held.layer * (held.embedding > 0),
        )

    def take(self, row: IntArray) -> UnitBuffers:
        """Select the buffers of configurations by their rows of weights."""
        return UnitBuffers(**{f.name: getattr(self, f.name).take(row, axis=1) for f in fields(self)})


def training_states(job: TrainingJob, runtime: RuntimeProfile, held: HeldWeights) -> dict[str, FloatArray]:
    """Compute weights, gradients, optimizer states and the buffers of single layers, each [c, w].

    ZeRO shards the states one after the other (ZeRO, section 5). Where weight gradients are added up inside the matrix
    product, Transformer Engine hands autograd an empty gradient of each shape of weight, that of the head too, and
    keeps it (transformer_engine module/base.py, get_dummy_wgrad; megatron-core tensor_parallel/layers.py since 0.14).
    """
    # ZeRO stages from which weights, gradients and optimizer states are sharded.
    sharded_from = (3, 1 if runtime.shards_gradients else 2, 1)
    kept, gradients, optimizer = (np.where(held.zero_stage >= first, held.shard, held.whole) for first in sharded_from)
    weight_bytes = 4 if runtime.fp32_weights else job.element_bytes
    # The bf16 weights may be halves of the fp32 copies of the states that a rank keeps (MindSpeed
    # docs/features/reuse-fp32-param.md: saves 2 bytes per parameter, over dp with the distributed optimizer).
    shared = job.element_bytes if job.shared_master_weights and not runtime.fp32_weights else 0
    shapes = held.shapes + held.head * (runtime.keeps_empty_gradients is True)
    empty = shapes * bool(runtime.fused_accumulation and runtime.keeps_empty_gradients)
    single_layers = np.where(held.zero_stage == 3, held.gathered, empty)
    if runtime.fsdp2_mixed:
        # fp32 shards, and beside them the gathered weights that stay until the backward pass; without a pipeline the
        # gradients of each micro-batch are reduced, in a pipeline they add up in fp32 (torch/distributed/pipelining
        # stage.py, backward_maybe_with_nosync)
        kept = np.where(held.zero_stage >= 1, held.shard, held.whole)
        kept = kept + np.where(held.zero_stage == 3, 0.0, job.element_bytes / weight_bytes) * held.whole
        single_layers = np.zeros_like(single_layers)
        if held.is_piped:
            gradients = held.whole - held.head * (runtime.loss_chunks > 1)
    # Offloaded states leave nothing on the device: tensors are converted on the host and copied into the weights.
    optimizer = np.where(held.is_offloaded, 1.0 - runtime.offload_share, 1.0) * optimizer
    return {
        "weights": weight_bytes * (kept + held.frozen),
        "gradients": max(runtime.gradient_bytes, job.element_bytes) * gradients,
        "optimizer": (_state_bytes(job, runtime, held.kept, optimizer) - shared + runtime.step_bytes) * optimizer,
        "buffers": job.element_bytes * single_layers,
    }


def _state_bytes(
    job: TrainingJob, runtime: RuntimeProfile, kept: KeptParts | None, parameters: FloatArray
) -> FloatArray | float:
    """Return the bytes of the optimizer's states per parameter, or the mean over those that a rank keeps [c, w].

    A runtime that trains in 16 bits keeps a copy of the weights among them. If it keeps fp32 weights instead, that copy
    is the weight itself. Source: ZeRO (Rajbhandari et al. 2020), section 3.1: K = 12 for mixed-precision Adam.
    """
    copy = 0 if job.is_single or runtime.fp32_weights else runtime.main_weight_bytes
    widths = Widths(copy, runtime.first_moment_bytes, runtime.second_moment_bytes)
    if kept is None:
        return widths.weight + OPTIMIZERS[job.optimizer].state_bytes("matrix", widths)
    return np.asarray(kept.state_bytes(job, runtime, widths) / np.maximum(parameters, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ends:
    """Memory of one micro-batch at the ends of a pipeline and between its stages [bytes], each array [u].

    Attributes:
        logits: Logits, their copies and their gradients that are alive at once.
        beside_logits: Input of the head, its gradient, and the gradient of the head's weight.
        table_gradient: Gradient of the embedding.
        handed_on: Message that a stage hands to the next.
    """

    logits: FloatArray
    beside_logits: FloatArray
    table_gradient: FloatArray
    handed_on: FloatArray

    def take(self, row: IntArray) -> Ends:
        """Select the memory of configurations by their shape rows."""
        return Ends(**{f.name: getattr(self, f.name).take(row) for f in fields(self)})


def pipeline_ends(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> Ends:
    """Compute the head's memory at the loss or at the head's backward pass, whichever needs more.

    A fused loss overwrites the logits with their gradient. Otherwise fp32 copies stand beside the logits. They are gone
    once the gradient is back in the width of the logits and the weight's gradient is computed.
    """
    width, tokens, residual = job.element_bytes, local_tokens(job, shapes), residual_tokens(job, shapes)
    # The head works on the whole sequence with its share of the vocabulary, so it gathers a sequence-parallel input.
    elements = tokens * job.model.vocab_size / shapes.tp
    handed_on = width * residual * job.model.hidden_size
    inputs = 3 * handed_on + np.where(residual < tokens, 2 * width * tokens * job.model.hidden_size, 0.0)
    table_gradient = width * local_table(job.model, shapes)
    # A loss in parts has the logits of one part at a time, which last until the next. Beside them stand the head's
    # gradient, to which every part adds, copies of the parts of its input, and that input's gradient in fp32
    # (torchtitan components/loss.py, ChunkedLossWrapper and GradAccumulator). FSDP2 adds up in fp32, and copies the sum
    # once more to reduce it.
    elements = elements / runtime.loss_chunks
    logit_bytes = runtime.logit_bytes + 4 * runtime.copies_softmax
    if runtime.loss_chunks > 1:
        added = runtime.gradient_bytes / width * table_gradient if runtime.fsdp2_mixed else table_gradient
        inputs = inputs + (4 + width) * tokens * job.model.hidden_size + added
        table_left = added if runtime.fsdp2_mixed else np.zeros_like(table_gradient)
        logit_bytes = logit_bytes + width
    else:
        table_left = table_gradient
    logits_at_loss = elements * (width if runtime.fused_cross_entropy else logit_bytes)
    later = width * elements + table_left > logits_at_loss
    return Ends(
        logits=np.where(later, width * elements, logits_at_loss),
        beside_logits=inputs + np.where(later, table_left, 0.0),
        table_gradient=table_gradient,
        handed_on=handed_on,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Moments:
    """Memory of stages that passes keep, and what each of three moments adds to it [bytes], each [c, k].

    Attributes:
        kept: Activations of all micro-batches in flight.
        released: Part of them that is gone at the end of a backward pass.
        working: Tensors that are computed again in a layer.
        gradient: Gradients of activations in a layer.
        logits: Logits at the head.
        beside_logits: Further buffers at the head.
        table: Gradient of the embedding.
        constant: Buffers at every moment.
    """

    kept: FloatArray
    released: FloatArray
    working: FloatArray
    gradient: FloatArray
    logits: FloatArray
    beside_logits: FloatArray
    table: FloatArray
    constant: FloatArray

    @property
    def in_layer(self) -> FloatArray:
        """Memory beside the kept one in a layer in the middle of the backward pass [c, k]."""
        return self.working + self.gradient

    @property
    def at_head(self) -> FloatArray:
        """Memory beside the kept one at the beginning of the backward pass [c, k]."""
        return self.logits + self.beside_logits

    @property
    def at_end(self) -> FloatArray:
        """Memory beside the kept one at the end of the backward pass; it may be negative [c, k]."""
        return self.table - self.released

    def total(self) -> FloatArray:
        """Return the memory at the fullest moment [bytes], [c, k]."""
        most = np.maximum(np.maximum(self.in_layer, self.at_head), self.at_end)
        return np.asarray(self.kept + most + self.constant)

    def parts(self) -> dict[str, FloatArray]:
        """Return activations, logits and buffers at the fullest moment [bytes], each [c, k]."""
        in_layer, at_head, at_end = self.in_layer, self.at_head, self.at_end
        # Only the winning moment's logits, buffers and working memory count towards the peak.
        head_wins = (at_head > in_layer) & (at_head >= at_end)
        end_wins = ~head_wins & (at_end > in_layer)
        layer_wins = ~head_wins & ~end_wins
        return {
            "activations": self.kept + self.working * layer_wins - self.released * end_wins,
            "logits": self.logits * head_wins,
            "buffers": self.beside_logits * head_wins
            + self.table * end_wins
            + self.gradient * layer_wins
            + self.constant,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passes:
    """Memory that the passes of micro-batches keep, computed once per shape row [u].

    Attributes:
        runtime: Runtime profile.
        layers: Activations of one layer and micro-batch.
        again: The same where everything is recomputed.
        ends: Memory at the ends of a pipeline and between its stages.
    """

    runtime: RuntimeProfile
    layers: LayerActivations
    again: LayerActivations
    ends: Ends

    @classmethod
    def of(cls, job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid, *, has_recomputed: bool) -> Passes:
        """Compute the memory of shape rows [u], which the largest micro-batches of the job need.

        `has_recomputed` says whether some layers are always recomputed.
        """
        job = job.largest
        layers = layer_activations(job, runtime, shapes)
        full = np.full(len(shapes), RECOMPUTE_MODES.index("full"))
        one_by_one = replace(job, recompute_unit=1)
        again = layer_activations(one_by_one, runtime, replace(shapes, recompute=full)) if has_recomputed else layers
        return cls(runtime=runtime, layers=layers, again=again, ends=pipeline_ends(job, runtime, shapes))

    def parts(
        self, stages: StageKinds, in_flight: FloatArray, row: IntArray, buffers: UnitBuffers | None = None
    ) -> dict[str, FloatArray]:
        """Compute the parts that are no training states, each [c, k]; `row` is the shape row of each configuration."""
        dynamic = self.moments(stages, in_flight, row, buffers).parts()
        slack = self.fragmentation(np.asarray(sum(dynamic.values())), stages, in_flight, row)
        overhead = np.full(slack.shape, float(self.runtime.memory_overhead_bytes))
        return dynamic | {"fragmentation": slack, "overhead": overhead}

    def fragmentation(
        self, dynamic: FloatArray, stages: StageKinds, in_flight: FloatArray, row: IntArray
    ) -> FloatArray:
        """Compute what the allocator holds beyond activations, logits and buffers, `dynamic` in all [bytes], [c, k].

        The slack grows with all short-lived tensors. Gathered inputs of several micro-batches fragment the memory in
        addition.
        """
        # segments that grow leave no holes of unlike sizes between short-lived tensors (PyTorch CUDACachingAllocator,
        # expandable_segments)
        slack = (0.0 if self.runtime.expandable_segments else self.runtime.activation_slack) * dynamic
        if not self.runtime.gathered_share:
            return slack
        once, again = stages.pieces - stages.again, stages.again
        gathered = once @ self.layers.gathered[:, row] + again @ self.again.gathered[:, row]
        return np.asarray(slack + self.runtime.gathered_share * (gathered * in_flight))

    def moments(
        self, stages: StageKinds, in_flight: FloatArray, row: IntArray, buffers: UnitBuffers | None = None
    ) -> _Moments:
        """Compute the memory of the three moments that compete for the peak [c, k]; see `parts`.

        They are a layer in the middle of the backward pass, the head at its beginning, and the embedding at its end,
        when one micro-batch's activations are released already.
        """
        layers, ends = self.layers.take(row), self.ends.take(row)
        once, again = stages.pieces - stages.again, stages.again
        # Activations of one micro-batch on the stage: layers that recompute in full are counted with their own figures.
        one = once @ layers.kept
        working = _largest(layers.working, once)
        if again.any():
            in_full = self.again.take(row)
            one = one + again @ in_full.kept
            working = np.maximum(working, _largest(in_full.working, again))
        kept = one * in_flight
        # The logits of prediction modules stand beside those of the main model until their loss is differentiated.
        predicting = stages.pieces[:, [-3]] if stages.model.num_mtp_layers else np.zeros_like(stages.heads)
        handed_on = ends.handed_on if stages.count.sum() > 1 else np.zeros(1)
        in_layer, at_head, at_end = (
            (0.0, 0.0, 0.0) if buffers is None else (buffers.in_layer, buffers.at_head, buffers.at_end)
        )
        return _Moments(
            kept=kept,
            released=np.minimum(one, kept),
            working=working,
            gradient=_largest(layers.gradient, stages.pieces) + in_layer,
            logits=ends.logits * (stages.heads + predicting),
            beside_logits=ends.beside_logits * ((stages.heads + predicting) > 0) + at_head,
            table=ends.table_gradient * stages.embeddings + at_end,
            constant=handed_on + self.runtime.workspace_bytes,
        )


def _largest(figures: FloatArray, held: FloatArray) -> FloatArray:
    """Return the largest figure [P, k] of the pieces that each kind of stage holds some of [c, P], as [c, k]."""
    if len(figures) == 1:
        return np.asarray(figures * (held > 0))
    return np.asarray(np.max(figures * (held > 0)[:, :, None], axis=1))
