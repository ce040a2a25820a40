"""Shapes of layers to plan among the candidates of a study; `layer_plans.py` plans them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.step.changed_layers import shape_keys
from hardware.cluster import Cluster
from tuner.planners.sharding.layer_axes import layer_axes
from tuner.plans.layer_planning import LayerPlanning


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTask:
    """Shape of layers to plan.

    Attributes:
        job: Training job with the model.
        cluster: Cluster on which the job runs.
        config: One candidate of that shape.
        num_micro_batches: Number of micro-batches of one step.
        planning: Planner and pins.
    """

    job: TrainingJob
    cluster: Cluster
    config: ParallelConfig
    num_micro_batches: int
    planning: LayerPlanning


def layer_tasks(job: TrainingJob, cluster: Cluster, grid: ConfigGrid, planning: LayerPlanning) -> list[LayerTask]:
    """Create a task for each shape among the candidates that has something to plan."""
    at: dict[tuple[int, ...], list[int]] = {}
    for position, key in enumerate(shape_keys(grid)):
        at.setdefault(key, []).append(position)
    # Candidates of one shape differ in their number of micro-batches; their median represents them.
    micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    found = []
    for positions in at.values():
        config = grid.config(positions[0])
        axes = layer_axes(config)
        # a layout that leaves hosts idle may have a shape that does not divide the cluster
        if axes and cluster.num_devices % math.prod(axes.values()) == 0:
            count = max(int(np.median(micro_batches[positions])), 1)
            found.append(LayerTask(job=job, cluster=cluster, config=config, num_micro_batches=count, planning=planning))
    return found


def sharing_key(task: LayerTask) -> tuple[int, ...]:
    """Return a key that is equal for tasks of one job that share their graph and cost tables.

    They are planned fastest one after the other.
    """
    sizes = tuple((layer_axes(task.config) or {}).values())
    return (task.num_micro_batches, sequences_of(task), *sizes)


def sequences_of(task: LayerTask) -> int:
    """Return the number of sequences in the micro-batches that the devices of the mesh work on together."""
    return task.config.mbs * (layer_axes(task.config) or {}).get("dp", 1)


def freeze(value: Any) -> Any:
    """Convert nested lists to nested tuples, as a LayerChange needs them."""
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value
