"""Tables of the time and memory of every stage by its number of layers; planners cut layers by them.

A table knows how many layers a stage holds, but not which. Therefore layers of unlike kinds count as so many mean
layers.

Letters: p stages, L layers, k configurations of one pp and vpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import cached_kernel_s, collective_s
from costmodels.operators.layer_operators import unique_shapes
from costmodels.step.block_costs import BlockCosts, block_costs
from costmodels.step.memory.peak import stage_needed_bytes
from costmodels.step.pipeline.schedules import stage_in_flight
from costmodels.step.pipeline.stage_pricing import StagePricing
from costmodels.step.placement import Pipeline, StageKinds, alternatives, block_parameters, place, stage_devices
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageTables:
    """Figures of every stage by the number of layers that it holds, from zero to all.

    Attributes:
        time_s: Time of one micro-batch, forward and backward [s], [p, L + 1, k].
        again_s: Time of one micro-batch if all of the stage's layers are recomputed in full [s], [p, L + 1, k].
        needed_bytes: Memory that the stage needs of its devices [bytes], [p, L + 1, k].
        first_bytes: Memory that it needs if one of its layers is recomputed in full [bytes], [p, L + 1, k].
        again_bytes: Memory that it needs if all of its layers are recomputed in full [bytes], [p, L + 1, k].
        capacity_bytes: Memory of the smallest device of each stage [bytes], [p].
    """

    time_s: FloatArray
    again_s: FloatArray
    needed_bytes: FloatArray
    first_bytes: FloatArray
    again_bytes: FloatArray
    capacity_bytes: FloatArray


def plain_and_again(setting: Setting, grid: ConfigGrid) -> BlockCosts:
    """Compute the costs of the blocks of each configuration, and behind them those of blocks that run again in full."""
    shapes, shape_of = unique_shapes(grid)
    full = np.full(len(shapes), RECOMPUTE_MODES.index("full"))
    kernel_time = cached_kernel_s()
    once = block_costs(setting, shapes, kernel_time, collective_s)
    again = block_costs(setting, replace(shapes, recompute=full), kernel_time, collective_s)
    return once.beside(again).take(shape_of)


def stage_tables(
    setting: Setting, grid: ConfigGrid, has_device: NDArray[np.bool_] | None = None, *, costs: BlockCosts | None = None
) -> StageTables:
    """Tabulate the stages of configurations of one pp and vpp, all their work in equal shares.

    Args:
        setting: Job, cluster and runtime. The cluster's hosts stand in the order of the ranks.
        grid: Configurations [k].
        has_device: Devices of the stages [p, d], if they are those of some replicas alone.
        costs: Their `plain_and_again`, where the caller has it.
    """
    num_layers = setting.job.model.num_layers
    has_device = stage_devices(setting.cluster, int(grid.pp[0])) if has_device is None else has_device
    stages = _every_stage(setting.job, has_device)
    times_s, needed = stage_figures(setting, grid, stages, costs=costs)
    shape = (3, len(has_device), num_layers + 1, len(grid))
    time_s, _, again_s = times_s.reshape(shape)
    needed_bytes, first_bytes, again_bytes = needed.reshape(shape)
    smallest = stages.smallest([float(device.memory_bytes) for device in setting.cluster.devices])
    return StageTables(
        time_s=time_s,
        again_s=again_s,
        needed_bytes=needed_bytes,
        first_bytes=first_bytes,
        again_bytes=again_bytes,
        capacity_bytes=smallest.reshape(shape[:3])[0, :, 0],
    )


def stage_figures(
    setting: Setting, grid: ConfigGrid, stages: StageKinds, *, costs: BlockCosts | None = None
) -> tuple[FloatArray, FloatArray]:
    """Compute the time of one micro-batch, forward and backward, and the needed memory of given stages, both [c, k].

    Args:
        setting: Job, cluster and runtime. The cluster's hosts stand in the order of the ranks.
        grid: Configurations of one pp and vpp [k].
        stages: Any stages [c], with the blocks that they hold and their numbers in a pipeline.
        costs: Their `plain_and_again`, where the caller has it.
    """
    pp = int(grid.pp[0])
    assert (grid.pp == pp).all(), "all configurations have one pp"
    assert (grid.vpp == grid.vpp[0]).all(), "all configurations have one vpp"
    # A pipeline of these stages is priced as if every configuration had weights of its own.
    everyone = np.arange(len(grid))
    pipeline = Pipeline(
        pp=pp,
        stages=stages,
        at=everyone,
        weights=grid,
        weights_at=everyone,
        weights_of=everyone,
        held=block_parameters(setting.job.model, grid),
    )
    pricing = StagePricing(setting, pipeline, place(setting.cluster, grid), collective_s)
    costs = plain_and_again(setting, grid) if costs is None else costs
    parts = pricing.times(costs, grid.vpp).parts_s
    num_micro_batches = setting.job.global_batch_size // (grid.dp * grid.mbs)
    # A stage's number decides how many micro-batches it holds.
    in_flight = stage_in_flight(stages.first[:, None], pp, grid.vpp, num_micro_batches)
    needed = stage_needed_bytes(setting.job, setting.runtime, grid, stages, in_flight)
    return np.sum(list(parts.values()), axis=0), needed


def _every_stage(job: TrainingJob, has_device: NDArray[np.bool_]) -> StageKinds:
    """Return every stage with every number of layers, of which none, one or all are recomputed [3 * pp * (L + 1)]."""
    # The mean layer is a mix of all kinds of layers.
    model, pp, mean = job.model, len(has_device), job.model.mean_layer
    numbers = np.arange(model.num_layers + 1.0)
    layers = np.broadcast_to(numbers[:, None] * mean, (pp, len(numbers), len(mean))).copy()
    held = layers.copy()
    held[0, :, -2] = held[-1, :, -1] = 1.0  # the embedding and the head
    held[0][:, model.tower_pieces] = 1.0
    if model.num_mtp_layers:
        held[-1, :, -3] = model.num_mtp_layers
    # Rows: first all plain stages, then the same stages with one layer recomputed, then with all.
    each = np.tile(held.reshape(-1, len(mean)), (3, 1))
    first = np.minimum(layers, mean)
    again = np.stack([np.zeros_like(layers), first, layers]).reshape(-1, len(mean))
    stage = np.tile(np.repeat(np.arange(pp), len(numbers)), 3)
    return alternatives(model, each, again, has_device[stage], stage)
