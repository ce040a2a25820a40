"""Watch the ranks of one trial until they have ended, and turn their messages into an observation.

A rank that fails, dies or hangs takes the others of its trial with it: they soon fail too, because a peer is missing.
So the cause is found from all ranks together. A signal that killed a rank comes first, then a lack of memory, then the
first error that is not about a lost connection, then a rank that ended without a message. A rank that the C library or
C++ has ended for lack of memory could send nothing; it is recognised by its output.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Sequence

from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from trials.backend import Clock, Observation, OnStep, OperatorSample, Status, tail_of
from trials.profiling.operator_profile import RankProfile, merge_pipeline, mismatches
from trials.ranks.contract import AbstractRanks
from trials.ranks.listening import listen
from trials.ranks.messages import Exit, Told
from trials.ranks.out_of_memory import speaks_of_memory
from trials.torch_training.processor_time import busy_s
from trials.torch_training.profiling.call_profile import call_mismatches
from trials.torch_training.profiling.virtual_clock import virtual_step
from trials.torch_training.rank_plan import Begun, Failed, Finished, RankPlan, Ready, StepTaken

GRACE_S = 3.0
"""Time that the other ranks have to report when one has failed [s]."""

MUCH_CPU = 0.1
"""Share of the machine's CPU that other programs may use before an observation mentions it."""

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Connection was likely closed",
    "Broken pipe",
    "Socket Timeout",
    "recvValue failed",
)


def watch_ranks(
    ranks: AbstractRanks, plan: RankPlan, cluster: Cluster, *, cores: int | None, hang_limit_s: float, on_step: OnStep
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

    def __init__(self, plan: RankPlan, cluster: Cluster, cores: int | None, on_step: OnStep) -> None:
        self.plan, self.cluster, self.cores, self.on_step = plan, cluster, cores, on_step
        self.num_ranks = plan.config.num_devices
        self.begun: dict[int, Begun] = {}
        self.ready: dict[int, Ready] = {}
        self.open_steps: dict[int, dict[int, StepTaken]] = {}
        self.step_times_s: list[float] = []
        self.walls_s: list[float] = []
        self.cpus_s: list[float] = []
        self.loss = 0.0
        self.finished: dict[int, Finished] = {}
        self.failed: dict[int, Failed] = {}
        self.killed: dict[int, Exit] = {}
        self.exited: dict[int, Exit] = {}
        self.began_s = self.ended_s = 0.0
        self.busy_at_begin_s = self.busy_at_end_s = busy_s()

    @property
    def is_enough(self) -> bool:
        """Whether the trial needs no further events: never, because every rank reports its own end."""
        return False

    @property
    def is_ending(self) -> bool:
        """Whether a rank has failed, which the others soon will too."""
        return bool(self.failed or self.killed or self.exited)

    def take(self, event: Told | Exit) -> None:
        if isinstance(event, Exit):
            if event.code < 0:
                self.killed[event.rank] = event
            elif event.code > 0 or event.rank not in self.finished:
                self.exited[event.rank] = event
            return
        match event.value:
            case Begun() as begun:
                self.begun[event.rank] = begun
            case Ready() as ready:
                self.ready[event.rank] = ready
                if len(self.ready) == self.num_ranks:
                    self.began_s, self.busy_at_begin_s = time.monotonic(), busy_s()
            case StepTaken() as taken:
                together = self.open_steps.setdefault(taken.number, {})
                together[event.rank] = taken
                if len(together) == self.num_ranks:
                    self._end_step([together[rank] for rank in range(self.num_ranks)])
                    del self.open_steps[taken.number]
            case Finished() as finished:
                self.finished[event.rank] = finished
            case Failed() as failed:
                self.failed[event.rank] = failed

    def _end_step(self, taken: Sequence[StepTaken]) -> None:
        self.ended_s, self.busy_at_end_s = time.monotonic(), busy_s()
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
        status, reason, text = self._outcome(printed, hang_limit_s)
        samples: tuple[OperatorSample, ...] = ()
        if status is Status.OK and self.plan.profiles:
            samples = merge_pipeline([profile.samples for profile in self._profiles()], self.plan.config)
        if status is Status.OK:
            reason = "; ".join(self._remarks())
        return Observation(
            status=status,
            step_times_s=tuple(self.step_times_s),
            peak_memory_bytes=max(self._peaks_bytes(), default=None),
            operator_samples=samples,
            log_tail=tail_of(text or printed()) if status is not Status.OK else "",
            reason=reason,
            killed_by=self._killed_by() if status is Status.INCIDENT else "",
            origin="measured",
            clock=self.plan.clock,
            conditions=self._conditions(),
        )

    def _outcome(self, printed: Callable[[], str], hang_limit_s: float) -> tuple[Status, str, str]:
        """Return the status, its reason in one line, and the traceback that shows it."""
        if len(self.finished) == self.num_ranks:
            return Status.OK, "", ""
        lack = self._lack_of_memory(printed)
        if lack:
            return Status.OUT_OF_MEMORY, *lack
        if self.killed:
            return Status.INCIDENT, f"rank {next(iter(self.killed))} was killed by {self._killed_by()}", ""
        own, speechless = self._own_failures(), self._speechless()
        if speechless and not own:
            return Status.CRASHED, f"rank {speechless[0].rank} ended early with exit status {speechless[0].code}", ""
        if self.failed:
            rank, failed = next(iter((own or self.failed).items()))
            return Status.CRASHED, f"rank {rank}: {failed.reason}", failed.text
        silent = sorted(set(range(self.num_ranks)) - set(self.finished))
        return Status.INCIDENT, f"hangs: ranks {silent} sent nothing for {hang_limit_s:g} s", ""

    def _killed_by(self) -> str:
        """Return the first signal that killed a rank; empty if none did."""
        return next((signal.Signals(-end.code).name for end in self.killed.values()), "")

    def _lack_of_memory(self, printed: Callable[[], str]) -> tuple[str, str] | None:
        """Return a lack of memory in one line, and its traceback; None if no rank lacks memory.

        It is None, too, if a signal from outside has killed a rank. SIGABRT is not from outside: a process that lacks
        memory may abort.
        """
        if any(-end.code != signal.SIGABRT for end in self.killed.values()):
            return None
        speechless = self._speechless()
        lines = [line.strip() for line in printed().splitlines() if speaks_of_memory(line)] if speechless else []
        if lines:
            return f"rank {speechless[0].rank}: {lines[0][:500]}", ""
        if self.killed:
            return None
        for rank, failed in self.failed.items():
            if failed.is_out_of_memory:
                return f"rank {rank}: {failed.reason}", failed.text
        for rank, failed in self._own_failures().items():
            if failed.is_memory_used_up:
                return f"rank {rank} has used up its memory: {failed.reason}", failed.text
        return None

    def _speechless(self) -> list[Exit]:
        """Return the exits of the ranks that have sent no reason."""
        return [end for end in (self.killed | self.exited).values() if end.rank not in self.failed]

    def _own_failures(self) -> dict[int, Failed]:
        """Return the failures that are not due to a lost peer."""
        return {
            rank: failed for rank, failed in self.failed.items() if not any(sign in failed.text for sign in _LOST_PEER)
        }

    def _peaks_bytes(self) -> list[int]:
        """Return the memory peaks of all ranks [bytes]: reported ones, or those of processes that ended without."""
        told = {rank: end.peak_bytes for rank, end in (self.finished | self.failed).items()}
        # a rank that ended without a message: the peak of its process, less what it held before it trained
        ended = {
            rank: max(end.peak_bytes - self.begun[rank].resident_bytes, 0)
            for rank, end in (self.killed | self.exited).items()
            if rank in self.begun
        }
        return list((ended | told).values())

    def _profiles(self) -> list[RankProfile]:
        """Return the profiles of all ranks in their order; none if the trial does not profile."""
        found = [self.finished[rank].profile for rank in range(self.num_ranks)]
        return [profile for profile in found if profile is not None]

    def _remarks(self) -> list[str]:
        """Return sentences on unusual conditions, and on differences from the cost model."""
        remarks = []
        share = self._others_share()
        if share is not None and share > MUCH_CPU:
            remarks.append(f"other programs used {share:.0%} of the machine's CPU")
        is_crowded = self.plan.device == "cpu" and self.cores is not None and self.num_ranks > self.cores
        if self.plan.clock == "wall" and is_crowded:
            remarks.append(f"wall clock of {self.num_ranks} ranks on {self.cores} cores tells their total work only")
        if self.plan.profiles:
            plan = self.plan
            remarks += mismatches(plan.job, plan.runtime, plan.config, self._profiles())
            recordings = [told.recording for told in self.finished.values() if told.recording is not None]
            if recordings:
                setting = Setting(job=plan.job, cluster=self.cluster, runtime=plan.runtime)
                remarks += call_mismatches(setting, plan.config, recordings)
        return remarks

    def _others_share(self) -> float | None:
        """Return the share of the machine's CPU time that other programs used during the steps; None if unknown."""
        if self.cores is None or self.busy_at_begin_s is None or self.busy_at_end_s is None:
            return None
        if self.ended_s <= self.began_s:
            return None
        # CPU time of the whole machine during the steps, less that of our own ranks
        others_s = self.busy_at_end_s - self.busy_at_begin_s - sum(self.cpus_s)
        return max(others_s, 0.0) / ((self.ended_s - self.began_s) * self.cores)

    def _conditions(self) -> tuple[tuple[str, float], ...]:
        found: dict[str, float] = {"ranks": self.num_ranks}
        if self.cores is not None:
            found["cores"] = self.cores
        share = self._others_share()
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
