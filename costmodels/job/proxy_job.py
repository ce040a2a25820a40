"""Proxy job with fewer layers, hosts and sequences, whose devices run the same shapes as those of the full job."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodels.job.model_spec import ModelSpec
from costmodels.job.training_job import TrainingJob
from hardware.arrays import IntArray
from hardware.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """Size of a proxy job on a cluster of equal hosts.

    Attributes:
        hosts: Number of hosts that the proxy job occupies.
        layers: Number of layers of its model.
        global_batch_size: Sequences per optimizer step.
    """

    hosts: int
    layers: int
    global_batch_size: int

    def job(self, job: TrainingJob) -> TrainingJob:
        """Return the proxy job of a full job."""
        return replace(job, model=with_layers(job.model, self.layers), global_batch_size=self.global_batch_size)

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return the cluster of the proxy job's hosts."""
        return cluster.with_hosts(self.hosts)


def least_layers(model: ModelSpec) -> int:
    """Return the smallest number of layers that includes every kind of layer of the model."""
    if model.is_plain:
        period = model.plain.moe_layer_period
        return max(period, 2) if model.plain.num_dense_layers else period
    kinds = len(np.unique(model.piece_of_layer))
    sampled = (model.piece_of_layer[_sample(model.num_layers, layers)] for layers in range(1, model.num_layers + 1))
    return next(len(pieces) for pieces in sampled if len(np.unique(pieces)) == kinds)


def with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """Return the model with fewer layers, at least `least_layers`.

    At most half of them are leading dense layers. Of a model of other blocks evenly spread layers are kept.

    Raises:
        ConfigError: the number of layers is too small for the model's experts.
    """
    if layers == model.num_layers:
        return model
    name = f"{model.name} of {layers} layer{'s' if layers > 1 else ''}"
    if model.decoder is None:
        return replace(model, name=name, layers=tuple(model.layers[at] for at in _sample(model.num_layers, layers)))
    dense = min(model.decoder.num_dense_layers, layers // 2)
    decoder = ModelSpec.of(replace(model.decoder, name=name, num_layers=layers, num_dense_layers=dense))
    if model.is_plain:
        return decoder
    masks = model.masks
    return replace(decoder, towers=model.towers).with_masks([masks[at] for at in _sample(model.num_layers, layers)])


def planned_layers(model: ModelSpec) -> ModelSpec:
    """Return the model with the few layers that stand for all of them in a plan.

    Of a plain decoder these are two layers, or the fewest that include every kind of layer. Of any other model there is
    one layer of each kind, in the order in which they first appear, and two where there is one kind.
    """
    if model.is_plain:
        # Larger graphs would only repeat these.
        fewest = 2 // model.plain.moe_layer_period if model.is_moe else 2
        return with_layers(model, min(max(least_layers(model), fewest), model.num_layers))
    kinds = tuple(dict.fromkeys(model.layers))
    layers = (kinds * 2)[: min(max(len(kinds), 2), model.num_layers)]
    if len(layers) == model.num_layers:
        return model
    return replace(model, name=f"{model.name} of {len(layers)} layers", layers=layers, decoder=None)


def _sample(num_layers: int, layers: int) -> IntArray:
    """Return the positions of so many of the layers, spread evenly."""
    return ((np.arange(layers) + 0.5) * num_layers / layers).astype(np.int64)
