"""Peak device memory: weights, gradients, optimizer states and activations of every stage; the worst stage decides.

The peak of a stage is the largest of three moments of a backward pass. At its beginning, the loss and the head's
gradient stand beside all activations. In a layer in the middle, that layer's own gradients stand beside them. At its
end, the embedding's gradient stands beside the activations of the other micro-batches.

Measured peaks have different meanings: `allocated` counts the tensors, `reserved` the memory that the allocator holds
for them, and `device` all memory that the process occupies. `peak_as` returns each of them. The memory that the device
needs decides whether a configuration fits.

Training states are those of `training_states.py`, activations those of `activations.py`, with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import unique_shapes
from costmodels.step.error_models import MemoryErrorModel
from costmodels.step.memory.activations import Passes
from costmodels.step.memory.training_states import HeldWeights, UnitBuffers, training_states
from costmodels.step.pipeline.schedules import stage_in_flight
from costmodels.step.placement import Pipeline, StageKinds, pipelines
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
