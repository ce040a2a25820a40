"""Activations that a stage holds, and what stands beside them at the three moments of a backward pass; see `peak.py`.

Korthikanti et al. 2022, section 4: 34 s*b*h per layer without attention scores. They are tallied here tensor by tensor,
so that grouped-query attention, gated MLPs, latent attention and experts come out too. Flash attention keeps q, k, v,
its output and one fp32 number per query and head (Dao 2023) instead of 5 a s / h.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce

import numpy as np

from costmodels.blocks.tally import Tally
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import block_context, local_tokens, residual_tokens
from costmodels.step.changed_layers import kept_ratios
from costmodels.step.memory.training_states import UnitBuffers
from costmodels.step.placement import StageKinds, local_table
from hardware.arrays import FloatArray, IntArray


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
