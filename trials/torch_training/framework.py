"""torch as the framework of trials: one rank per device, on CPUs with gloo or on GPUs with NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from trials.backend import OperatorSample
from trials.profiling.operator_profile import RankProfile, merge_pipeline, mismatches
from trials.torch_training.planned.traffic import traffic_mismatches
from trials.torch_training.profiling.call_profile import call_mismatches
from trials.torch_training.profiling.rank_recording import RankRecording
from trials.torch_training.profiling.virtual_clock import virtual_step
from trials.torch_training.rank_setup import TORCH_RANKS
from trials.torch_training.trainer_work import TrainerWork
from trials.training.framework import Framework
from trials.training.messages import Finished, StepTaken
from trials.training.work import AbstractWork, PlannedWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """Profile of a rank's last step.

    Attributes:
        profile: Operator times; None of planned steps, whose operators are those of their graph.
        recording: Operations of the rank; only on CPUs.
    """

    profile: RankProfile | None = None
    recording: RankRecording | None = None


def _virtual_step(taken: Sequence[StepTaken], cluster: Cluster) -> float:
    """Replay the recordings of all ranks."""
    return virtual_step([step.detail for step in taken], cluster).step_time_s


def _compare(
    work: AbstractWork, cluster: Cluster, finished: Sequence[Finished]
) -> tuple[tuple[OperatorSample, ...], list[str]]:
    """Compare communication with that of the plan, or operators and communication with those of the cost model."""
    found: list[Profiled] = [each.detail for each in finished if each.detail is not None]
    recordings = [each.recording for each in found if each.recording is not None]
    if isinstance(work, PlannedWork):
        return (), list(traffic_mismatches(work.plan, recordings))
    assert isinstance(work, TrainerWork), "ranks in torch run plans or the trainer"
    if not work.profiles:
        return (), []
    profiles = [each.profile for each in found if each.profile is not None]
    samples = merge_pipeline([profile.samples for profile in profiles], work.config)
    differences = list(mismatches(work.job, work.runtime, work.config, profiles))
    if recordings:
        setting = Setting(job=work.job, cluster=cluster, runtime=work.runtime)
        differences += call_mismatches(setting, work.config, recordings)
    return samples, differences


TORCH = Framework(
    name="torch",
    title="torch",
    ranks=TORCH_RANKS,
    program="trials.torch_training.rank_program:run_rank",
    lost_peer=(
        "Connection closed by peer",
        "Connection reset",
        "Connection was likely closed",
        "Broken pipe",
        "Socket Timeout",
        "recvValue failed",
    ),
    virtual_step=_virtual_step,
    compare=_compare,
    devices=("cpu", "cuda"),
    has_rank_per_host=False,
    limits_memory=True,
    accumulates=False,
)
"""torch."""
