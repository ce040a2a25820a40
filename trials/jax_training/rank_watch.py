"""Watch the processes of one trial until they have ended, and turn their messages into an observation."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from trials.backend import Observation, OnStep, Status, tail_of
from trials.jax_training.rank_plan import Finished, Ready, StepTaken, StepWork
from trials.processor_time import MachineLoad, load_remark
from trials.rank_endings import GRACE_S, Endings, Failed
from trials.ranks.contract import AbstractRanks
from trials.ranks.listening import listen
from trials.ranks.messages import Exit, Told

_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "UNAVAILABLE", "DEADLINE_EXCEEDED")


def watch_ranks(
    ranks: AbstractRanks, work: StepWork, *, num_processes: int, cores: int, hang_limit_s: float, on_step: OnStep
) -> Observation:
    """Watch the processes that were just launched, and return their observation; the caller ends those that still run.

    Args:
        ranks: Launched processes of the trial.
        work: Work that they do.
        num_processes: Number of them.
        cores: Number of cores of the machine that all of them share.
        hang_limit_s: Silence of all processes that means a hang [s].
        on_step: Callback that is given the time of each step [s].
    """
    watch = _Watch(work, num_processes, cores, on_step)
    listen(ranks, watch, hang_limit_s=hang_limit_s, grace_s=GRACE_S)
    return watch.observation(ranks.printed, hang_limit_s)


class _Watch:
    """Messages of the processes so far, and what follows from them."""

    def __init__(self, work: StepWork, num_processes: int, cores: int, on_step: OnStep) -> None:
        self.work, self.num_processes, self.cores, self.on_step = work, num_processes, cores, on_step
        self.ready: dict[int, Ready] = {}
        self.steps: list[StepTaken] = []
        self.endings = Endings(num_ranks=num_processes, lost_peer=_LOST_PEER)
        self.load = MachineLoad(cores)

    @property
    def is_enough(self) -> bool:
        """Whether the trial needs no further events: never, because every process reports its own end."""
        return False

    @property
    def is_ending(self) -> bool:
        """Whether a process has failed, which the others soon will too."""
        return self.endings.is_ending

    def take(self, event: Told | Exit) -> None:
        if isinstance(event, Exit):
            self.endings.take_exit(event)
            return
        match event.value:
            case Ready() as ready:
                self.ready[event.rank] = ready
                if len(self.ready) == self.num_processes:
                    self.load.begin()
            case StepTaken() as taken:
                # every process tells the same numbers
                if event.rank == 0:
                    self.load.note()
                    self.steps.append(taken)
                    self.on_step(taken.seconds(self.work.clock))
            case Finished() as finished:
                self.endings.finished[event.rank] = finished.peak_bytes
            case Failed() as failed:
                self.endings.failed[event.rank] = failed

    def observation(self, printed: Callable[[], str], hang_limit_s: float) -> Observation:
        status, reason, text = self.endings.outcome(printed, hang_limit_s)
        return Observation(
            status=status,
            step_times_s=tuple(taken.seconds(self.work.clock) for taken in self.steps),
            peak_memory_bytes=max(filter(None, self.endings.peaks_bytes()), default=None),
            log_tail=tail_of(text or printed()) if status is not Status.OK else "",
            reason="; ".join(self._remarks()) if status is Status.OK else reason,
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
        devices = self.work.plan.mesh.num_devices
        if self.work.clock == "wall" and devices > self.cores:
            remarks.append(f"wall clock of {devices} devices on {self.cores} cores tells their total work only")
        return remarks

    def _conditions(self) -> tuple[tuple[str, float], ...]:
        found: dict[str, float] = {
            "ranks": self.work.plan.mesh.num_devices,
            "processes": self.num_processes,
            "cores": self.cores,
        }
        share = self._others_share()
        if share is not None:
            found["others_cpu_share"] = round(share, 4)
        if self.steps:
            last = self.steps[-1].loss
            found |= {} if last is None else {"loss": last}
            found["wall_s"] = statistics.median(taken.wall_s for taken in self.steps)
            found["cpu_s"] = statistics.median(taken.cpu_s for taken in self.steps)
        if self.ready:
            told = ["group_s", "compile_s", "build_s", "warmup_s"]
            told += ["collectives_s"] if self.work.clock == "virtual" else []
            found |= {name: max(getattr(ready, name) for ready in self.ready.values()) for name in told}
        return tuple(found.items())
