"""Watches the ranks of one trial until they have ended, and makes an observation of what they told.

A rank that fails, dies or hangs takes the others of its trial with it. What it was is decided by all of them together,
because the others soon fail too, for want of a peer: a signal that killed a rank comes first, then a lack of memory,
then the first error that is not about a lost connection, then a rank that ended without a word. A rank that was ended
by the C library or by C++ for want of memory, and could tell nothing, is known by what it printed.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Sequence

from hardware.cluster import Cluster
from trials.backend import Clock, Observation, OnStep, OperatorSample, Status, tail_of
from trials.profiling.operator_profile import RankProfile, mismatches, of_pipeline
from trials.ranks.contract import AbstractRanks
from trials.ranks.listening import listen
from trials.ranks.messages import Exit, Told
from trials.ranks.out_of_memory import speaks_of_memory
from trials.torch_training.processor_time import busy_s
from trials.torch_training.profiling.call_profile import call_mismatches
from trials.torch_training.profiling.virtual_clock import virtual_step
from trials.torch_training.rank_plan import Begun, Failed, Finished, RankPlan, Ready, StepTaken

GRACE_S = 3.0
"""How long the other ranks may take to tell their side when one has failed."""

MUCH_CPU = 0.1
"""Share of the machine's CPU that other programs may use before an observation speaks of it."""

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
    plan: RankPlan,
    cluster: Cluster,
    *,
    cores: int | None,
    hang_limit_s: float,
    on_step: OnStep,
) -> Observation:
    """What became of the ranks that were just launched; those that still run afterwards are for the caller to end.

    Args:
        ranks: The running ranks.
        plan: What they do.
        cluster: Whose links the virtual clock counts.
        cores: Of the machine that all ranks share; None if they are on several.
        hang_limit_s: Silence that means a hang.
        on_step: Hears each step's time.
    """
    watch = _Watch(plan, cluster, cores, on_step)
    listen(ranks, watch, hang_limit_s=hang_limit_s, grace_s=GRACE_S)
    return watch.observation(ranks.printed, hang_limit_s)


class _Watch:
    """What has been heard so far."""

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
        """Whether no more has to be heard: never, for every rank tells its own end."""
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
            samples = of_pipeline([profile.samples for profile in self._profiles()], self.plan.config)
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
        """How it ended, in a line, and the traceback that says so."""
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
        return Status.INCIDENT, f"hangs: ranks {silent} told nothing for {hang_limit_s:g} s", ""

    def _killed_by(self) -> str:
        """The first signal that killed a rank; empty if none did."""
        return next((signal.Signals(-end.code).name for end in self.killed.values()), "")

    def _lack_of_memory(self, printed: Callable[[], str]) -> tuple[str, str] | None:
        """In a line, and the traceback that says so; None if a signal from outside has killed a rank, or none lacks it.

        A process that lacks memory may abort.
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
        """The ends of the ranks that have not told why."""
        return [end for end in (self.killed | self.exited).values() if end.rank not in self.failed]

    def _own_failures(self) -> dict[int, Failed]:
        """The failures that are not for want of a peer."""
        return {
            rank: failed for rank, failed in self.failed.items() if not any(sign in failed.text for sign in _LOST_PEER)
        }

    def _peaks_bytes(self) -> list[int]:
        """The peaks of the ranks that told theirs, and of those that have ended without."""
        told = {rank: end.peak_bytes for rank, end in (self.finished | self.failed).items()}
        ended = {
            rank: max(end.peak_bytes - self.begun[rank].resident_bytes, 0)
            for rank, end in (self.killed | self.exited).items()
            if rank in self.begun
        }
        return list((ended | told).values())

    def _profiles(self) -> list[RankProfile]:
        """Those of all ranks by their numbers; none where nobody asked."""
        found = [self.finished[rank].profile for rank in range(self.num_ranks)]
        return [profile for profile in found if profile is not None]

    def _remarks(self) -> list[str]:
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
                remarks += call_mismatches(plan.job, self.cluster, plan.runtime, plan.config, recordings)
        return remarks

    def _others_share(self) -> float | None:
        if self.cores is None or self.busy_at_begin_s is None or self.busy_at_end_s is None:
            return None
        if self.ended_s <= self.began_s:
            return None
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
