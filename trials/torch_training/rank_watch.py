"""Watch the ranks of one trial until they have ended, and turn their messages into an observation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from trials.backend import Clock, Observation, OnStep, OperatorSample, Status, tail_of
from trials.processor_time import MachineLoad, load_remark
from trials.profiling.operator_profile import RankProfile, merge_pipeline, mismatches
from trials.rank_endings import GRACE_S, Begun, Endings, Failed
from trials.ranks.contract import AbstractRanks
from trials.ranks.listening import listen
from trials.ranks.messages import Exit, Told
from trials.torch_training.planned.traffic import traffic_mismatches
from trials.torch_training.profiling.call_profile import call_mismatches
from trials.torch_training.profiling.virtual_clock import virtual_step
from trials.torch_training.rank_plan import Finished, OwnRankPlan, RankPlan, Ready, StepTaken

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Connection was likely closed",
    "Broken pipe",
    "Socket Timeout",
    "recvValue failed",
)


def watch_ranks(
    ranks: AbstractRanks,
    plan: RankPlan | OwnRankPlan,
    cluster: Cluster,
    *,
    cores: int | None,
    hang_limit_s: float,
    on_step: OnStep,
) -> Observation:
    """Watch the ranks that were just launched, and return their observation; the caller ends those that still run.

    Args:
        ranks: Launched ranks of the trial.
        plan: Plan that the ranks execute.
        cluster: Cluster whose links the virtual clock uses.
        cores: Number of cores of the machine that all ranks share; None if they run on several machines.
        hang_limit_s: Silence of all ranks that means a hang [s].
        on_step: Callback that is given the time of each step [s].
    """
    watch = _Watch(plan, cluster, cores, on_step)
    listen(ranks, watch, hang_limit_s=hang_limit_s, grace_s=GRACE_S)
    return watch.observation(ranks.printed, hang_limit_s)


class _Watch:
    """Messages of the ranks so far, and what follows from them."""

    def __init__(self, plan: RankPlan | OwnRankPlan, cluster: Cluster, cores: int | None, on_step: OnStep) -> None:
        self.plan, self.cluster, self.cores, self.on_step = plan, cluster, cores, on_step
        self.num_ranks = plan.config.num_devices
        self.ready: dict[int, Ready] = {}
        self.open_steps: dict[int, dict[int, StepTaken]] = {}
        self.step_times_s: list[float] = []
        self.walls_s: list[float] = []
        self.cpus_s: list[float] = []
        self.loss = 0.0
        self.finished: dict[int, Finished] = {}
        self.endings = Endings(num_ranks=self.num_ranks, lost_peer=_LOST_PEER)
        self.load = MachineLoad(cores)

    @property
    def is_enough(self) -> bool:
        """Whether the trial needs no further events: never, because every rank reports its own end."""
        return False

    @property
    def is_ending(self) -> bool:
        """Whether a rank has failed, which the others soon will too."""
        return self.endings.is_ending

    def take(self, event: Told | Exit) -> None:
        if isinstance(event, Exit):
            self.endings.take_exit(event)
            return
        match event.value:
            case Begun() as begun:
                self.endings.begun[event.rank] = begun
            case Ready() as ready:
                self.ready[event.rank] = ready
                if len(self.ready) == self.num_ranks:
                    self.load.begin()
            case StepTaken() as taken:
                together = self.open_steps.setdefault(taken.number, {})
                together[event.rank] = taken
                if len(together) == self.num_ranks:
                    self._end_step([together[rank] for rank in range(self.num_ranks)])
                    del self.open_steps[taken.number]
            case Finished() as finished:
                self.finished[event.rank] = finished
                self.endings.finished[event.rank] = finished.peak_bytes
            case Failed() as failed:
                self.endings.failed[event.rank] = failed

    def _end_step(self, taken: Sequence[StepTaken]) -> None:
        self.load.note()
        self.walls_s.append(taken[0].wall_s)
        self.cpus_s.append(taken[0].cpu_s)
        self.loss = taken[0].loss
        step_time_s = self._step_time_s(taken, self.plan.clock)
        self.step_times_s.append(step_time_s)
        self.on_step(step_time_s)

    def _step_time_s(self, taken: Sequence[StepTaken], clock: Clock) -> float:
        if clock == "virtual":
            recordings = [step.recording for step in taken if step.recording is not None]
            return virtual_step(recordings, self.cluster).step_time_s
        return taken[0].wall_s if clock == "wall" else taken[0].cpu_s

    def observation(self, printed: Callable[[], str], hang_limit_s: float) -> Observation:
        status, reason, text = self.endings.outcome(printed, hang_limit_s)
        samples: tuple[OperatorSample, ...] = ()
        if status is Status.OK and self.plan.profiles and self.plan.sharding is None:
            samples = merge_pipeline([profile.samples for profile in self._profiles()], self.plan.config)
        if status is Status.OK:
            reason = "; ".join(self._remarks())
        return Observation(
            status=status,
            step_times_s=tuple(self.step_times_s),
            peak_memory_bytes=max(self.endings.peaks_bytes(), default=None),
            operator_samples=samples,
            log_tail=tail_of(text or printed()) if status is not Status.OK else "",
            reason=reason,
            killed_by=self.endings.killed_by if status is Status.INCIDENT else "",
            origin="measured",
            clock=self.plan.clock,
            conditions=self._conditions(),
        )

    def _profiles(self) -> list[RankProfile]:
        """Return the profiles of all ranks in their order; none if the trial does not profile."""
        found = [self.finished[rank].profile for rank in range(self.num_ranks)]
        return [profile for profile in found if profile is not None]

    def _remarks(self) -> list[str]:
        """Return sentences on unusual conditions, and on differences from the cost model."""
        remarks = load_remark(self.load.others_share(sum(self.cpus_s)))
        is_crowded = self.plan.device == "cpu" and self.cores is not None and self.num_ranks > self.cores
        if self.plan.clock == "wall" and is_crowded:
            remarks.append(f"wall clock of {self.num_ranks} ranks on {self.cores} cores tells their total work only")
        recordings = [self.finished[rank].recording for rank in range(self.num_ranks)]
        plan = self.plan
        if plan.sharding is not None:
            remarks += [] if plan.is_by_hand else ["ran as the study's planner shards it"]
            remarks += traffic_mismatches(plan.sharding, [found for found in recordings if found is not None])
        elif isinstance(plan, RankPlan) and plan.profiles:
            remarks += mismatches(plan.job, plan.runtime, plan.config, self._profiles())
            told = [recording for recording in recordings if recording is not None]
            if told:
                setting = Setting(job=plan.job, cluster=self.cluster, runtime=plan.runtime)
                remarks += call_mismatches(setting, plan.config, told)
        return remarks

    def _conditions(self) -> tuple[tuple[str, float], ...]:
        found: dict[str, float] = {"ranks": self.num_ranks}
        if self.cores is not None:
            found["cores"] = self.cores
        share = self.load.others_share(sum(self.cpus_s))
        if share is not None:
            found["others_cpu_share"] = round(share, 4)
        if self.step_times_s:
            found["loss"] = self.loss
            found["wall_s"] = statistics.median(self.walls_s)
            found["cpu_s"] = statistics.median(self.cpus_s)
        for name in ("group_s", "build_s", "warmup_s"):
            if self.ready:
                found[name] = max(getattr(ready, name) for ready in self.ready.values())
        if self.finished:
            found["profile_s"] = max(told.profile_s for told in self.finished.values())
        return tuple(found.items())
