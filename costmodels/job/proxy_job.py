"""Proxy job with fewer layers, hosts and sequences, whose devices run the same shapes as those of the full job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.job.model_spec import ModelSpec
from costmodels.job.training_job import TrainingJob
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
    return max(model.moe_layer_period, 2) if model.num_dense_layers else model.moe_layer_period


def with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """Return the model with fewer layers, at least `least_layers`; at most half of them are leading dense layers.

    Raises:
        ConfigError: the number of layers is too small for the model's experts.
    """
    if layers == model.num_layers:
        return model
    return replace(
        model,
        name=f"{model.name} of {layers} layer{'s' if layers > 1 else ''}",
        num_layers=layers,
        num_dense_layers=min(model.num_dense_layers, layers // 2),
    )
