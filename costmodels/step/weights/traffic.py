"""Data parallel traffic: exposed time of reducing the gradients and gathering the weights of a pipeline's stages.

Sources: gradients leave bucket by bucket beside the last micro-batch's backward pass, the last bucket after it (Li et
al. 2020, PyTorch Distributed, section 3.2.3). ZeRO 1 and 2 scatter the gradients and gather the weights once per step;
ZeRO 3 does both for every micro-batch (ZeRO, Rajbhandari et al. 2020, section 7.2). A runtime may scatter as often at
ZeRO 2 (`reduces_each_micro_batch`). Where dp_shard leaves copies of the shards, they add up their gradients once per
step (HSDP, PyTorch FSDP2). If the head is the embedding's table, the first and the last stage add up the gradients of
their copies once per step, after everything else (Megatron-LM, allreduce_word_embedding_grads; DeepSpeed
runtime/pipe/module.py, allreduce_tied_weight_gradients).

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`), k configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import Collective
from costmodels.step.communication import exposed_s
from costmodels.step.placement import Groups, LocalParameters, expert_shards
from costmodels.step.weights.buckets import WHOLE_RULE_SETS, num_buckets
from hardware.arrays import FloatArray, IntArray
from hardware.group_links import GroupLinks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OuterPasses:
    """Passes beside which weights come at the begin of a step and gradients leave at its end.

    Attributes:
        forward_s: Time of one micro-batch's forward passes on each kind of stage [s], [c, k].
        backward_s: Time of one micro-batch's backward passes on each kind of stage [s], [c, k].
        vpp: Chunks per stage [k].
        of_round: Micro-batches that go through a chunk before the stage turns to its next one [k].
        embedding: Share of the stage's weights that the embedding holds [c, k].
        layer: Share of the stage's weights that one layer holds [c, k].
    """

    forward_s: FloatArray
    backward_s: FloatArray
    vpp: IntArray
    of_round: IntArray
    embedding: FloatArray
    layer: FloatArray

    def exposed_s(self, runtime: RuntimeProfile, message_s: FloatArray, passes_s: FloatArray) -> FloatArray:
        """Compute what is exposed of messages about all weights of a stage, beside these passes of one micro-batch.

        The gradients of the first piece, which is the embedding or a layer, leave after all passes. With chunks, those
        of all but the first chunk leave while the round's micro-batches run backward through the chunks before it.
        Those of the first chunk have only its last pass, like those of a stage without chunks.
        """
        first_chunk = self.embedding + (1.0 - self.embedding) / self.vpp
        own = exposed_s(runtime, message_s * first_chunk, passes_s / self.vpp)
        beside = passes_s / self.vpp * (1 + (self.vpp - 1) * self.of_round)
        first_piece = np.where(self.embedding > 0, self.embedding, self.layer)
        return np.maximum(np.maximum(exposed_s(runtime, message_s, beside), own), first_piece * message_s)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightTraffic:
    """Time of each stage's collectives over weights [s], hidden or not, each array [c, w].

    Attributes:
        each_gather: Gathering of the weights before a pass, under ZeRO 3.
        each_scatter: Scattering of the gradients after a backward pass, under ZeRO 3 and perhaps 2.
        once_reduce: Reduction of the gradients once per step.
        once_gather: Gathering of the weights once per step, under ZeRO 1 and 2.
        once_tied: Addition of the gradients of a tied table once per step; nothing hides it.
        one_layer: Gathering and scattering of one layer under ZeRO 3, which no compute hides at a step's begin and end.
        once_more: Further traffic of a sharding plan once per step; nothing hides it.
    """

    each_gather: FloatArray
    each_scatter: FloatArray
    once_reduce: FloatArray
    once_gather: FloatArray
    once_tied: FloatArray
    one_layer: FloatArray
    once_more: FloatArray

    def changed(self, once_s: FloatArray) -> WeightTraffic:
        """Return the traffic with the time that sharding plans add once per step [c, w].

        Savings are subtracted from the reductions and gathers of once per step; the rest of these is hidden as before.
        """
        if not once_s.any():
            return self
        # A saving is a share of the plain traffic, and cannot exceed it.
        once = self.once_reduce + self.once_gather
        saved = np.divide(-once_s, once, out=np.zeros_like(once), where=(once > 0) & (once_s < 0))
        left = np.maximum(1.0 - saved, 0.0)
        return replace(
            self,
            once_reduce=left * self.once_reduce,
            once_gather=left * self.once_gather,
            once_more=self.once_more + np.maximum(once_s, 0.0),
        )

    def take(self, row: IntArray) -> WeightTraffic:
        """Select the traffic of configurations by their rows of weights [c, k]."""
        return WeightTraffic(**{f.name: getattr(self, f.name).take(row, axis=1) for f in fields(self)})

    def per_micro_batch_s(self, runtime: RuntimeProfile, forward: FloatArray, backward: FloatArray) -> FloatArray:
        """Compute the wait of each micro-batch for its stage's traffic beside passes of given lengths, all [c, k]."""
        if not (self.each_gather.any() or self.each_scatter.any()):
            return np.zeros(forward.shape)
        after = self.each_gather + self.each_scatter
        if runtime.overlaps_weight_gather:
            return exposed_s(runtime, self.each_gather, forward) + exposed_s(runtime, after, backward)
        return self.each_gather + after

    def after_step_s(self, runtime: RuntimeProfile) -> FloatArray:
        """Return the time of gathering weights where a runtime does so after its optimizer's step [s], [k]."""
        gather_s = self.once_gather.max(axis=0)
        return np.zeros_like(gather_s) if runtime.overlaps_weight_gather else np.asarray(gather_s)

    def per_step_s(
        self, runtime: RuntimeProfile, passes: OuterPasses, before: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Compute the time that a step waits once, and the additional wait for a tied table [k].

        A later stage begins its first forward pass later, and ends its last backward pass earlier, by those of the
        stages `before` it [c, c].
        """
        reduction, gather = self.once_reduce, self.once_gather
        if runtime.overlaps_gradients:
            reduction = passes.exposed_s(runtime, reduction, passes.backward_s)
        if runtime.overlaps_weight_gather:
            gather = np.maximum(passes.exposed_s(runtime, gather, passes.forward_s), self.one_layer)
            gather = np.maximum(gather - before @ passes.forward_s / passes.vpp, 0.0)
        reduction = reduction + self.once_more
        # The step ends with the last stage whose reduction ends. A head start hides that much of a stage's reduction.
        head_start = before @ passes.backward_s / passes.vpp
        waits = np.maximum(reduction - head_start, 0.0).max(axis=0)
        with_tied = np.maximum(reduction + self.once_tied - head_start, 0.0).max(axis=0)
        return np.asarray(waits + gather.max(axis=0)), np.asarray(with_tied - waits)


def weight_collectives(
    job: TrainingJob, runtime: RuntimeProfile, weights: ConfigGrid, groups: Groups, local: LocalParameters
) -> dict[str, Collective]:
    """Return every collective over all parameters of each stage, by its name, for every row of `weights` [c, w]."""
    efficiency = runtime.network_efficiency
    layers = job.model.num_layers / int(weights.pp[0])
    found: dict[str, Collective] = {}

    def add(
        name: str, kind: OpKind, wire_bytes: FloatArray, group: GroupLinks, further: FloatArray | None = None
    ) -> None:
        found[name] = Collective(
            name=name,
            kind=kind,
            wire_bytes=wire_bytes,
            network_efficiency=efficiency,
            group=group,
            further_messages=further,
        )

    def add_all(prefix: str, parameters: FloatArray, whole: GroupLinks, shards: IntArray, copies: GroupLinks) -> None:
        gathered = parameters * (job.element_bytes / efficiency)
        reduced = parameters * (runtime.gradient_message_bytes / efficiency)

        def further(bucket: int) -> FloatArray:
            if bucket and runtime.rule_set in WHOLE_RULE_SETS:
                part: Literal["matrix", "expert"] = "expert" if prefix else "matrix"
                once = num_buckets(job, weights, local, part, bucket, shards) - 1.0
                return np.where(weights.zero_stage == 3, max(layers - 1.0, 0.0), once)
            return _further_messages(weights, parameters, layers, bucket)

        gathers, scatters = further(runtime.weight_bucket), further(runtime.gradient_bucket)
        add(f"{prefix}weights.all_gather", OpKind.ALL_GATHER, gathered, whole, gathers)
        add(f"{prefix}weights.reduce_scatter", OpKind.REDUCE_SCATTER, reduced, whole, scatters)
        in_buckets = scatters if runtime.rule_set in WHOLE_RULE_SETS else None
        add(f"{prefix}weights.all_reduce", OpKind.ALL_REDUCE, reduced, whole, in_buckets)
        between_copies = parameters / shards * (runtime.gradient_message_bytes / efficiency)
        add(f"{prefix}copies.all_reduce", OpKind.ALL_REDUCE, between_copies, copies, in_buckets)

    # Dense weights are reduced over dp, cp and up together, experts over the ranks that hold the same experts.
    shards = weights.dp * weights.cp * weights.up // weights.copies
    add_all("", local.dense, groups.weights, shards, groups.weight_copies)
    if job.model.is_moe:
        add_all("expert_", local.expert, groups.expert_weights, expert_shards(weights), groups.expert_copies)
    if job.model.tied_embeddings:
        # A runtime may exchange a tied table's gradients after they were scattered, so that each rank sends its shard.
        is_sharded = runtime.shards_tied_gradients & (weights.zero_stage > 0)
        added = local.tied * (runtime.gradient_bytes / efficiency) / np.where(is_sharded, shards, 1)
        add("tied.all_reduce", OpKind.ALL_REDUCE, added, groups.ends)
    return found


def weight_executions(
    runtime: RuntimeProfile, weights: ConfigGrid, num_micro_batches: IntArray
) -> tuple[tuple[str, Phase, FloatArray], ...]:
    """Count the executions of each collective over weights in one step: name without `expert_`, phase and number [w].

    Stages that send nothing do not execute it.
    """
    stage = weights.zero_stage
    each = np.where(stage == 3, num_micro_batches, 0).astype(np.float64)
    once = ((stage == 1) | (stage == 2)).astype(np.float64)
    scatters = np.where(_scatters_each(runtime, weights), num_micro_batches, once)
    return (
        ("weights.all_gather", Phase.FORWARD, each + once),
        ("weights.all_gather", Phase.BACKWARD, each),
        ("weights.reduce_scatter", Phase.BACKWARD, scatters),
        ("weights.all_reduce", Phase.BACKWARD, (stage == 0).astype(np.float64)),
        ("copies.all_reduce", Phase.BACKWARD, (weights.copies > 1).astype(np.float64)),
        ("tied.all_reduce", Phase.BACKWARD, (weights.pp > 1).astype(np.float64)),
    )


def weight_traffic(
    job: TrainingJob,
    runtime: RuntimeProfile,
    weights: ConfigGrid,
    groups: Groups,
    local: LocalParameters,
    collective_time: CollectiveTime = collective_s,
) -> WeightTraffic:
    """Compute the traffic of a pipeline's stages, for every row of `weights`.

    `local` holds the parameters on one rank.
    """
    pp, stage, each = int(weights.pp[0]), weights.zero_stage, _scatters_each(runtime, weights)
    collectives = weight_collectives(job, runtime, weights, groups, local)
    alone_s = {site: collective_time(collective) for site, collective in collectives.items()}
    gather = _dense_and_expert_s(alone_s, "weights.all_gather")
    scatter = _dense_and_expert_s(alone_s, "weights.reduce_scatter")
    between_copies = np.where(weights.copies > 1, _dense_and_expert_s(alone_s, "copies.all_reduce"), 0.0)
    scattered = scatter + between_copies
    whole = _dense_and_expert_s(alone_s, "weights.all_reduce")
    return WeightTraffic(
        each_gather=np.where(stage == 3, gather, 0.0),
        each_scatter=np.where(each, scatter, 0.0),
        once_reduce=np.where(stage == 0, whole, np.where(each, between_copies, scattered)),
        once_gather=np.where((stage == 1) | (stage == 2), gather, 0.0),
        once_tied=_sent_s(collectives, alone_s, "tied.all_reduce", whole),
        one_layer=np.where(stage == 3, (gather + scattered) / max(job.model.num_layers // pp, 1), 0.0),
        once_more=np.zeros(gather.shape),
    )


def _scatters_each(runtime: RuntimeProfile, weights: ConfigGrid) -> NDArray[np.bool_]:
    """Return whether the gradients of every micro-batch are scattered [w]."""
    return np.asarray(weights.zero_stage >= (2 if runtime.reduces_each_micro_batch else 3))


def _sent_s(
    collectives: Mapping[str, Collective], alone_s: Mapping[str, FloatArray], site: str, like: FloatArray
) -> FloatArray:
    """Return the time of a collective that only some stages execute [c, w]; `like` has the shape of the result."""
    if site not in collectives:
        return np.zeros(like.shape)
    return np.where(collectives[site].wire_bytes > 0, alone_s[site], 0.0)


def _dense_and_expert_s(alone_s: Mapping[str, FloatArray], site: str) -> FloatArray:
    """Add up the time of a collective over the dense weights and the one over the experts [c, w]."""
    expert = f"expert_{site}"
    return alone_s[site] + alone_s[expert] if expert in alone_s else alone_s[site]


def _further_messages(weights: ConfigGrid, parameters: FloatArray, layers: float, bucket: int) -> FloatArray:
    """Return the number of messages beyond the first, of `bucket` parameters each [c, w].

    With a bucket of 0 or under ZeRO 3 each layer is one message.
    """
    # Each message pays its latency: many small buckets cost more than one large message.
    per_layer = max(layers - 1.0, 0.0)
    further = np.maximum(np.ceil(parameters / bucket) - 1.0, 0.0) if bucket else per_layer
    return np.where(weights.zero_stage == 3, per_layer, further)
