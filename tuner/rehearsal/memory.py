"""Memory that a device must have for a rehearsed candidate: its tensors, and what the device adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import stage_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedMemory:
    """Memory of the stage that is fullest relative to its devices.

    Attributes:
        stage: Number of the stage.
        peak_bytes: Bytes of its tensors at its peak, as rehearsed.
        predicted_bytes: The same by the cost model.
        needed_bytes: Rehearsed bytes, and what the device adds: the context, buffers of NCCL, workspaces, and what the
            allocator fragments, as the runtime's profile has them.
        capacity_bytes: Memory of its smallest device.
    """

    stage: int
    peak_bytes: int
    predicted_bytes: int
    needed_bytes: int
    capacity_bytes: int


def rehearsed_memory(
    setting: Setting, config: ParallelConfig, peaks_bytes: Sequence[int | None]
) -> RehearsedMemory | None:
    """Return the memory of a candidate's fullest stage; None where some stage has no rehearsed peak.

    Args:
        setting: Job, cluster and runtime.
        config: Configuration of the candidate.
        peaks_bytes: Bytes of all tensors at the peak of each stage [pp].
    """
    peaks = [peak for peak in peaks_bytes if peak is not None]
    if len(peaks) != config.pp:
        return None
    predicted = stage_memory(setting, config)
    allocated = predicted.peak_as("allocated")
    needed = np.array(peaks) + predicted.peak_bytes - allocated
    stage = int(np.argmax(needed / predicted.capacity_bytes))
    return RehearsedMemory(
        stage=stage,
        peak_bytes=peaks[stage],
        predicted_bytes=round(float(allocated[stage])),
        needed_bytes=round(float(needed[stage])),
        capacity_bytes=round(float(predicted.capacity_bytes[stage])),
    )
