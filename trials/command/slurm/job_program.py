"""Program that runs one trial as a job of Slurm, and tells the trial what the job prints and how it ends.

It runs beside the driver. The job's output is a file in a folder that all hosts share, which is read as it grows. The
state of the job is asked for rarely: often after a change, and every ten seconds at last.

A job that is cancelled from outside, preempted, put back into the queue, suspended, or lost with its node says nothing
about the candidate. Such ends are incidents.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from trials.backend import Status
from trials.command.host_program import Ended, HostPlan
from trials.command.log_reader import HEARTBEAT_S, READ_BYTES, LogReader, SlowLineError
from trials.command.process_tree import code_of_shell
from trials.command.slurm.keeper import Kept, keep_again, submit_kept
from trials.command.slurm.queue import JobState, QueueError, state_of
from trials.ranks.messages import Place

REFUSED = "sbatch refused the job"
"""Beginning of the reason for a trial whose job never came into the queue, before sbatch's own words."""

READ_EVERY_S = 0.2
"""Interval at which the job's output is read [s]."""

FIRST_LOOK_S, LONGEST_LOOK_S, LOOK_GROWTH = 0.5, 10.0, 1.3
"""Interval between two questions for the job's state [s]: the first one, the longest one, and its growth."""

WAITING = frozenset({"PENDING", "CONFIGURING"})
"""States of a job that waits for its hosts."""

RUNNING = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING"})

_INCIDENTS = {
    "CANCELLED": "was cancelled from outside of the study",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "lost a node that did not boot",
    "DEADLINE": "met its deadline",
    "REVOKED": "was revoked, because another cluster runs it",
    "SUSPENDED": "was suspended",
    "STOPPED": "was suspended",
}

_NO_OUTPUT = -53
"""Signal that Slurm states for a job whose output file its host could not open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """Job of a trial.

    Attributes:
        name: Name of the job.
        host: Work of each host.
        options: Arguments of sbatch.
        script: Batch script.
        output: File of the job's output.
    """

    name: str
    host: HostPlan
    options: tuple[str, ...]
    script: str
    output: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Message that the job still waits in the queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Message that the job has got its hosts."""


def run_job(place: Place, plan: JobPlan) -> None:
    """Submit the job and follow it to its end. Whatever ends this process cancels the job."""
    if place.listening is not None:
        os.close(place.listening)  # it listens on this machine, where the command does not run
    host = plan.host
    with LogReader(place.tell, host.pattern, host.step, host.kept_log(place.rank)) as reader:
        try:
            plan.output.parent.mkdir(parents=True, exist_ok=True)
            kept = submit_kept(plan.name, plan.options, plan.script, plan.output)
        except QueueError as error:
            reader.note(shlex.join(["sbatch", *plan.options]))
            reader.note(f"sbatch: {error}")
            # a limit of the queue or a mistake in the options, and none of the configuration's
            place.tell(_incident(f"{'could not be submitted' if error.is_passing else REFUSED}: {error}"))
            return
        try:
            ended = _Follower(place, reader, kept).follow()
        except SlowLineError as error:
            ended = Ended(code=1, trouble=str(error))
    place.tell(ended)


class _Follower:
    """Follower of one job, with what it has seen so far."""

    def __init__(self, place: Place, reader: LogReader, kept: Kept) -> None:
        self.place = place
        self.reader = reader
        self.kept = kept
        self.job = kept.job
        self.output = kept.output
        self.position = 0
        self.has_started = False
        self.last: JobState | None = None
        self.answers = True

    def follow(self) -> Ended:
        """Read the output and ask for the state until the job has ended."""
        look_s, look_at_s, told_s = FIRST_LOOK_S, 0.0, 0.0
        while True:
            if not self.kept.is_kept:
                self.kept = keep_again(self.kept)
                self.reader.note("the process that cancels the job after its trial was killed; another one does")
            if self._read_output():
                self._start()
            now_s = time.monotonic()
            if now_s >= look_at_s:
                before = self.last
                ended = self._look()
                if ended is not None:
                    return ended
                look_s = FIRST_LOOK_S if self.last != before else min(look_s * LOOK_GROWTH, LONGEST_LOOK_S)
                look_at_s = time.monotonic() + look_s
            if not self.has_started and self.answers and now_s - told_s >= HEARTBEAT_S:
                self.place.tell(Waiting())
                told_s = now_s
            time.sleep(READ_EVERY_S)

    def _look(self) -> Ended | None:
        """Ask for the job's state; return its end if it has ended."""
        try:
            seen = state_of(self.job)
        except QueueError as error:
            if self.answers:
                self.reader.note(f"Slurm does not answer: {error}")
            self.answers = False
            return None
        self.answers = True
        if seen is None:
            self._read_rest()
            return _incident(f"left the queue, and Slurm no longer knows how (job {self.job})")
        if seen != self.last:
            reason = "" if seen.reason == "None" else f" ({seen.reason})"
            self.reader.note(f"Slurm: job {self.job} is {seen.name}{reason}")
            self.last = seen
        if seen.restarts or (self.has_started and seen.name in WAITING):
            return _incident(f"was put back into Slurm's queue (job {self.job})")
        if seen.name in WAITING:
            return None
        self._start()
        if seen.name in RUNNING:
            return None
        self._read_rest()
        return end_of(self.job, seen, self.output)

    def _start(self) -> None:
        if not self.has_started:
            self.has_started = True
            self.place.tell(Started())

    def _read_output(self) -> bool:
        """Read what the job has printed since; return whether its output file exists.

        The file is opened each time, because only then does a network file system look for what another host wrote.
        """
        try:
            file = os.open(self.output, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            while read := os.pread(file, READ_BYTES, self.position):
                self._start()
                self.position += len(read)
                self.reader.feed(read)
        finally:
            os.close(file)
        return True

    def _read_rest(self) -> None:
        """Read the output to its end; the last host may have written it a moment ago."""
        before = -1
        while self.position != before:
            before = self.position
            self._read_output()
            time.sleep(READ_EVERY_S)
        self.reader.end()


def end_of(job: str, seen: JobState, output: Path) -> Ended:
    """Return what the last state of a job means for its trial."""
    if seen.name == "COMPLETED":
        return Ended(code=0)
    if seen.name == "OUT_OF_MEMORY":
        trouble = f"ran out of its hosts' memory: Slurm's state is OUT_OF_MEMORY (job {job})"
        return Ended(code=1, trouble=trouble, status=Status.OUT_OF_MEMORY)
    if seen.name == "TIMEOUT":
        return Ended(
            code=1,
            trouble=f"was cut off at Slurm's time limit (job {job})",
            status=Status.TIMEOUT,
            time_limit_s=seen.time_limit_s,
        )
    if seen.name != "FAILED":
        return _incident(f"{_INCIDENTS.get(seen.name, 'ended')}: Slurm's state is {seen.name} (job {job})")
    if seen.code == _NO_OUTPUT:
        return Ended(code=1, trouble=f"its host could not write to {output.parent}: set trial.logs to a shared folder")
    return Ended(code=code_of_shell(seen.code) or 1)


def _incident(trouble: str) -> Ended:
    return Ended(code=1, trouble=trouble, status=Status.INCIDENT)
