"""Watch the ranks of one trial until they have ended, and turn their messages into an observation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from hardware.cluster import Cluster
from trials.backend import Observation, OnStep, OperatorSample, Status, tail_of
from trials.ranks.contract import AbstractRanks
from trials.ranks.listening import listen
from trials.ranks.messages import Exit, Told
from trials.training.endings import GRACE_S, Endings
from trials.training.framework import Framework
from trials.training.messages import Begun, Failed, Finished, Ready, StepTaken
from trials.training.processor_time import MachineLoad, load_remark
from trials.training.work import AbstractWork


def watch_ranks(
    ranks: AbstractRanks,
    work: AbstractWork,
    framework: Framework,
    cluster: Cluster,
    *,
    num_ranks: int,
    cores: int | None,
    hang_limit_s: float,
    on_step: OnStep,
) -> Observation:
    """Watch the ranks that were just launched, and return their observation; the caller ends those that still run.

    Args:
        ranks: Launched ranks of the trial.
        work: Work that they do.
        framework: Library with which they do it.
        cluster: Cluster whose links the virtual clock uses.
        num_ranks: Number of them.
        cores: Number of cores of the machine that all ranks share; None if they run on several machines.
        hang_limit_s: Silence of all ranks that means a hang [s].
        on_step: Callback that is given the time of each step [s].
    """
    watch = _Watch(work, framework, cluster, num_ranks, cores, on_step)
    listen(ranks, watch, hang_limit_s=hang_limit_s, grace_s=GRACE_S)
    return watch.observation(ranks.printed, hang_limit_s)


class _Watch:
    """Messages of the ranks so far, and what follows from them."""

    def __init__(
        self,
        work: AbstractWork,
        framework: Framework,
        cluster: Cluster,
        num_ranks: int,
        cores: int | None,
        on_step: OnStep,
    ) -> None:
        self.work, self.framework, self.cluster = work, framework, cluster
        self.num_ranks, self.cores, self.on_step = num_ranks, cores, on_step
        self.ready: dict[int, Ready] = {}
        self.open_steps: dict[int, dict[int, StepTaken]] = {}
        # steps that all ranks have told, as the first rank has
        self.steps: list[StepTaken] = []
        self.step_times_s: list[float] = []
        self.finished: dict[int, Finished] = {}
        self.endings = Endings(num_ranks=num_ranks, lost_peer=framework.lost_peer)
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
        self.steps.append(taken[0])
        match self.work.clock:
            case "wall":
                step_time_s = taken[0].wall_s
            case "cpu":
                step_time_s = taken[0].cpu_s
            case "virtual":
                step_time_s = self.framework.virtual_step(taken, self.cluster)
        self.step_times_s.append(step_time_s)
        self.on_step(step_time_s)

    def observation(self, printed: Callable[[], str], hang_limit_s: float) -> Observation:
        status, reason, text = self.endings.outcome(printed, hang_limit_s)
        samples: tuple[OperatorSample, ...] = ()
        if status is Status.OK:
            finished = [self.finished[rank] for rank in range(self.num_ranks)]
            samples, differences = self.framework.compare(self.work, self.cluster, finished)
            reason = "; ".join([*self._remarks(), *differences])
        return Observation(
            status=status,
            step_times_s=tuple(self.step_times_s),
            peak_memory_bytes=max(self.endings.peaks_bytes(), default=None),
            operator_samples=samples,
            log_tail=tail_of(text or printed()) if status is not Status.OK else "",
            reason=reason,
            killed_by=self.endings.killed_by if status is Status.INCIDENT else "",
            origin="measured",
            clock=self.work.clock,
            conditions=self._conditions(),
        )

    def _others_share(self) -> float | None:
        return self.load.others_share(sum(taken.cpu_s for taken in self.steps))

    def _remarks(self) -> list[str]:
        """Return sentences on the plan, unless it is the one by hand, and on unusual conditions."""
        remarks = [] if self.work.is_by_hand else ["ran as the study's planner shards it"]
        remarks += load_remark(self._others_share())
        is_crowded = self.work.device == "cpu" and self.cores is not None and self.work.num_devices > self.cores
        if self.work.clock == "wall" and is_crowded:
            name = "devices" if self.framework.has_rank_per_host else "ranks"
            number = self.work.num_devices
            remarks.append(f"wall clock of {number} {name} on {self.cores} cores tells their total work only")
        return remarks

    def _conditions(self) -> tuple[tuple[str, float], ...]:
        found: dict[str, float] = {"ranks": self.work.num_devices}
        if self.framework.has_rank_per_host:
            found["processes"] = self.num_ranks
        if self.cores is not None:
            found["cores"] = self.cores
        share = self._others_share()
        if share is not None:
            found["others_cpu_share"] = round(share, 4)
        if self.steps:
            last = self.steps[-1].loss
            found |= {} if last is None else {"loss": last}
            found["wall_s"] = statistics.median(taken.wall_s for taken in self.steps)
            found["cpu_s"] = statistics.median(taken.cpu_s for taken in self.steps)
        for told in (self.ready, self.finished):
            times = [message.conditions for message in told.values()]
            found |= {name: max(each[name] for each in times) for name in (times[0] if times else {})}
        return tuple(found.items())
