"""Data parallel traffic: what reducing the gradients and gathering the weights of a pipeline's stages exposes.

Sources: gradients leave bucket by bucket beside the last micro-batch's backward pass, the last bucket after it (Li et
al. 2020, PyTorch Distributed, section 3.2.3). ZeRO 1 and 2 scatter the gradients and gather the weights once per step,
ZeRO 3 does both for every micro-batch (ZeRO, Rajbhandari et al. 2020, section 7.2). Where dp_shard leaves copies of the
shards, they add up their gradients once per step (HSDP, PyTorch FSDP2).

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`), k configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from costmodels.communication import exposed_s
from costmodels.job import TrainingJob
from costmodels.operators import FloatArray
from costmodels.parallel import ConfigGrid, IntArray
from costmodels.placement import Groups, LocalParameters, expert_shards
from costmodels.runtime import RuntimeProfile
from hardware.cluster import GroupLinks
from hardware.collectives import all_gather_s, all_reduce_s, reduce_scatter_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightTraffic:
    """Seconds of each stage's collectives, hidden or not, each [c, w].

    Attributes:
        each_gather: Gathering the weights before a pass, under ZeRO 3.
        each_scatter: Scattering the gradients after a backward pass, under ZeRO 3.
        once_reduce: Reducing the gradients once per step.
        once_gather: Gathering the weights once per step, under ZeRO 1 and 2.
        one_layer: ZeRO 3's gathering and scattering of one layer, which no compute of a step's begin and end hides.
    """

    each_gather: FloatArray
    each_scatter: FloatArray
    once_reduce: FloatArray
    once_gather: FloatArray
    one_layer: FloatArray

    def take(self, row: IntArray) -> WeightTraffic:
        """The traffic of configurations whose weights are those rows [c, k]."""
        return WeightTraffic(**{f.name: getattr(self, f.name).take(row, axis=1) for f in fields(self)})

    def per_micro_batch_s(self, runtime: RuntimeProfile, forward: FloatArray, backward: FloatArray) -> FloatArray:
        """What each micro-batch waits for its stage's traffic [c, k], beside passes of those lengths [c, k]."""
        if not self.each_gather.any():
            return np.zeros(forward.shape)
        after = self.each_gather + self.each_scatter
        if runtime.overlaps_weight_gather:
            return exposed_s(runtime, self.each_gather, forward) + exposed_s(runtime, after, backward)
        return self.each_gather + after

    def per_step_s(
        self,
        runtime: RuntimeProfile,
        forward: FloatArray,
        backward: FloatArray,
        head_start: FloatArray,
        layers: int,
    ) -> FloatArray:
        """What a step waits once [k]; of `layers` the last one's gradients leave after the backward pass.

        A later stage ends its last backward pass earlier, by its `head_start` [c, k].
        """
        reduction, gather = self.once_reduce, self.once_gather
        if runtime.overlaps_gradients:
            reduction = np.maximum(exposed_s(runtime, reduction, backward), reduction / layers)
        if runtime.overlaps_weight_gather:
            gather = np.maximum(exposed_s(runtime, gather, forward), self.one_layer)
        return np.asarray(np.maximum(reduction - head_start, 0.0).max(axis=0) + gather.max(axis=0))


def weight_traffic(
    job: TrainingJob, runtime: RuntimeProfile, weights: ConfigGrid, groups: Groups, local: LocalParameters
) -> WeightTraffic:
    """The collectives of a pipeline's stages, for every row of `weights`; `local` are the parameters on one rank."""
    pp, stage = int(weights.pp[0]), weights.zero_stage
    messages = _Messages(job, runtime, weights, groups, local)
    gather = messages.seconds(all_gather_s, job.element_bytes, runtime.weight_bucket)
    scatter = messages.seconds(reduce_scatter_s, runtime.gradient_message_bytes, runtime.gradient_bucket)
    between_copies = messages.between_copies_s()
    scattered = scatter + between_copies
    whole = messages.seconds(all_reduce_s, runtime.gradient_message_bytes, None)
    return WeightTraffic(
        each_gather=np.where(stage == 3, gather, 0.0),
        each_scatter=np.where(stage == 3, scatter, 0.0),
        once_reduce=np.select([stage == 0, stage < 3], [whole, scattered], between_copies),
        once_gather=np.where((stage == 1) | (stage == 2), gather, 0.0),
        one_layer=np.where(stage == 3, (gather + scattered) / max(job.model.num_layers // pp, 1), 0.0),
    )


class _Messages:
    """Collectives over all parameters of each stage [c, w]."""

    def __init__(
        self, job: TrainingJob, runtime: RuntimeProfile, weights: ConfigGrid, groups: Groups, local: LocalParameters
    ) -> None:
        self.runtime, self.weights, self.groups, self.local = runtime, weights, groups, local
        self.is_moe = job.model.is_moe
        self.layers = job.model.num_layers / int(weights.pp[0])

    def seconds(
        self, collective: Callable[[FloatArray, GroupLinks], FloatArray], width: int, bucket: int | None
    ) -> FloatArray:
        """Time of a collective over the parameters, `width` bytes each, in messages of `bucket` of them."""
        total = self._in_messages(collective, self.local.dense, self.groups.weights, width, bucket)
        if self.is_moe:
            total = total + self._in_messages(collective, self.local.expert, self.groups.expert_weights, width, bucket)
        return total

    def between_copies_s(self) -> FloatArray:
        """Time in which the copies of each shard sum up their scattered gradients."""
        scale = self.runtime.gradient_message_bytes / self.runtime.network_efficiency
        shards = self.weights.dp * self.weights.cp * self.weights.up // self.weights.copies
        total = all_reduce_s(self.local.dense / shards * scale, self.groups.weight_copies)
        if self.is_moe:
            expert = self.local.expert / expert_shards(self.weights)
            total = total + all_reduce_s(expert * scale, self.groups.expert_copies)
        return np.where(self.weights.copies > 1, total, 0.0)

    def _in_messages(
        self,
        collective: Callable[[FloatArray, GroupLinks], FloatArray],
        parameters: FloatArray,
        group: GroupLinks,
        width: int,
        bucket: int | None,
    ) -> FloatArray:
        """Each message beyond the first costs its latency again."""
        whole = collective(parameters * (width / self.runtime.network_efficiency), group)
        return whole + self._further_messages(parameters, bucket) * collective(np.zeros(1), group)

    def _further_messages(self, parameters: FloatArray, bucket: int | None) -> FloatArray:
        """Messages beyond the first; without a bucket all is one, with a bucket of 0 or under ZeRO 3 a layer is one."""
        per_layer = max(self.layers - 1.0, 0.0)
        if bucket is None:
            further = np.zeros(parameters.shape)
        elif bucket:
            further = np.maximum(np.ceil(parameters / bucket) - 1.0, 0.0)
        else:
            further = np.full(parameters.shape, per_layer)
        return np.where(self.weights.zero_stage == 3, per_layer, further)
