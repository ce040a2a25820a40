"""A smaller job that runs what a device of the full job runs: fewer layers, hosts and sequences, the same shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.job.model_spec import ModelSpec
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """What is left of a job on a cluster of equal hosts.

    Attributes:
        hosts: Hosts.
        layers: Layers of the model.
        global_batch_size: Sequences per optimizer step.
    """

    hosts: int
    layers: int
    global_batch_size: int

    def job(self, job: TrainingJob) -> TrainingJob:
        """The smaller job."""
        return replace(job, model=with_layers(job.model, self.layers), global_batch_size=self.global_batch_size)

    def cluster(self, cluster: Cluster) -> Cluster:
        """The hosts that it runs on."""
        return cluster.with_hosts(self.hosts)


def least_layers(model: ModelSpec) -> int:
    """The smallest number of layers that has every kind of layer that the model has."""
    return max(model.moe_layer_period, 2) if model.num_dense_layers else model.moe_layer_period


def with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """The model with fewer layers, at least `least_layers`; the dense ones before the experts are half of them at most.

    Raises:
        ConfigError: these are too few for the model's experts.
    """
    if layers == model.num_layers:
        return model
    return replace(
        model,
        name=f"{model.name} of {layers} layer{'s' if layers > 1 else ''}",
        num_layers=layers,
        num_dense_layers=min(model.num_dense_layers, layers // 2),
    )
