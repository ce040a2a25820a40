"""Watch the hosts of one trial while a command runs there, and turn its log into an observation.

A trial with enough readings (log lines with a step time) has ended well, whatever follows. Otherwise the first of
these reasons counts: a lack of memory on any host, what a queue states, a signal, a port that was taken, an exit status
other than 0, and last a hang.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trials.backend import Observation, OnStart, OnStep, Status, tail_of
from trials.command.host_program import Ended
from trials.command.log_pattern import Reading
from trials.command.log_reader import Printed
from trials.command.memory_messages import lack_of_memory
from trials.command.slurm.job_program import Started, Waiting
from trials.ranks.contract import AbstractRanks
from trials.ranks.listening import listen
from trials.ranks.messages import Exit, Told

GRACE_S = 5.0
"""Time that the other hosts get to end after one has ended [s]: their logs may say more."""

PATIENCE = 2
"""Number of times the asked steps after which a command that was to end by itself is ended; assumed."""

_LAUNCHERS_SIGNAL = re.compile(r"exitcode\s*:\s*-([0-9]{1,3})\b|Signal ([0-9]{1,3}) \(SIG\w+\) received")
"""Message of torchrun that a signal has killed one of its processes; torchrun itself ends with status 1."""

_ROOT_CAUSE = "Root Cause (first observed failure)"
"""Heading of torchrun over the process that failed first; it ends all others by signals, and lists them before it."""


_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
"""Messages of torch's store, gRPC and the C library on a port that is in use, which is no fault of the candidate."""


_NAMES_ERROR = re.compile(r"(?:Error|Exception|error)\b")
"""Name of an error, searched before a line's last colon. One expression for both could take hours on a long line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Measurement that a trial is asked for.

    Attributes:
        warmup_steps: Number of readings of the log that are dropped.
        steps: Number of readings that are measured after those.
        hang_limit_s: Time without a message from any host after which the trial counts as hung [s].
        to_the_end: Whether the command is left to end by itself once it is measured, because it saves what it trained.
    """

    warmup_steps: int
    steps: int
    hang_limit_s: float
    to_the_end: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """Result of the watch over a command.

    Attributes:
        observation: What it measured.
        ended_well: Whether the command ended by itself on every host, with status 0.
        losses: Loss of each step that the log tells, by its number there; without numbers they are counted from 1.
    """

    observation: Observation
    ended_well: bool
    losses: Mapping[int, float]


def watch_log(ranks: AbstractRanks, wanted: Wanted, *, on_step: OnStep, on_start: OnStart) -> Watched:
    """Watch the command that was just launched on every host; the caller ends what still runs afterwards."""
    seen = _Seen(wanted, on_step, on_start)
    seen.hangs = listen(ranks, seen, hang_limit_s=wanted.hang_limit_s, grace_s=GRACE_S)
    ended_well = not seen.hangs and not ranks.running and bool(seen.codes) and not any(seen.codes.values())
    return Watched(observation=seen.observation(ranks.printed), ended_well=ended_well, losses=seen.losses)


class _Seen:
    """Messages of the hosts so far, and the observation that follows from them."""

    def __init__(self, wanted: Wanted, on_step: OnStep, on_start: OnStart) -> None:
        self.wanted = wanted
        self.on_step = on_step
        self.on_start = on_start
        self.launched_s = time.monotonic()
        self.begun_s = self.launched_s
        self.queued_s: float | None = None
        self.start_s: float | None = None
        self.warmup_s: float | None = None
        self.num_read = 0
        self.step_times_s: list[float] = []
        self.losses: dict[int, float] = {}
        self.peak_bytes: int | None = None
        self.last_iteration: int | None = None
        self.codes: dict[int, int] = {}
        self.ended: Ended | None = None
        self.hangs = False

    @property
    def most_read(self) -> int:
        """Number of readings after which a command that was to end by itself is ended."""
        return PATIENCE * (self.wanted.warmup_steps + self.wanted.steps)

    @property
    def is_measured(self) -> bool:
        return len(self.step_times_s) >= self.wanted.steps

    @property
    def is_endless(self) -> bool:
        """Whether a command that was to end by itself trains on long after its steps."""
        return self.num_read > self.most_read

    @property
    def is_enough(self) -> bool:
        return self.is_measured and (self.is_endless or not self.wanted.to_the_end)

    @property
    def is_ending(self) -> bool:
        # hosts that save end when they have saved
        return any(self.codes.values()) if self.wanted.to_the_end else bool(self.codes)

    def take(self, event: Told | Exit) -> None:
        if isinstance(event, Exit):
            self.codes.setdefault(event.rank, event.code if event.code else 1)  # without a report, it failed
        elif isinstance(event.value, Ended):
            self.codes[event.rank] = event.value.code
            if self.ended is None or not self.ended.trouble:
                self.ended = event.value
        elif isinstance(event.value, Reading):
            self._read(event.value)
        elif isinstance(event.value, Started):
            self.begun_s = time.monotonic()
            self.queued_s = self.begun_s - self.launched_s
            self.on_start()
        else:
            assert isinstance(event.value, Printed | Waiting), event

    def _read(self, reading: Reading) -> None:
        if reading.memory_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, reading.memory_bytes)
        if reading.loss is not None and len(self.losses) < self.most_read:
            self.losses[len(self.losses) + 1 if reading.iteration is None else reading.iteration] = reading.loss
        if reading.step_time_s is None or self.is_enough:
            return
        if reading.iteration is not None:
            if reading.iteration == self.last_iteration:  # two ranks or two hosts may print the same one
                return
            self.last_iteration = reading.iteration
        self._time_parts(reading.step_time_s)
        self.num_read += 1
        if self.num_read > self.wanted.warmup_steps and not self.is_measured:
            self.step_times_s.append(reading.step_time_s)
            self.on_step(reading.step_time_s)

    def _time_parts(self, step_time_s: float) -> None:
        """Tell the program's start from its first steps, as a step's reading comes at its end."""
        since_s = time.monotonic() - self.begun_s
        if self.start_s is None:
            self.start_s = max(since_s - step_time_s, 0.0)
        if self.num_read == self.wanted.warmup_steps:
            self.warmup_s = max(since_s - step_time_s - self.start_s, 0.0)

    def observation(self, printed: Callable[[], str]) -> Observation:
        log = printed()
        status, reason, killed_by = self._outcome(log)
        conditions = {
            "readings": self.num_read,
            "queued_s": self.queued_s,
            "start_s": self.start_s,
            "warmup_s": self.warmup_s,
        }
        return Observation(
            status=status,
            step_times_s=tuple(self.step_times_s),
            expected_steps=self.wanted.steps,
            peak_memory_bytes=self.peak_bytes,
            log_tail=tail_of(log),
            reason=reason,
            killed_by=killed_by,
            time_limit_s=self.ended.time_limit_s if self.ended and status is Status.TIMEOUT else None,
            conditions=tuple((name, float(value)) for name, value in conditions.items() if value is not None),
        )

    def _outcome(self, log: str) -> tuple[Status, str, str]:
        """Return the status, its reason in one line, and the signal that killed the command."""
        if self.is_measured:
            return Status.OK, "", ""
        failed = {rank: code for rank, code in self.codes.items() if code}
        if failed or self.hangs:
            lack = lack_of_memory(log, _last_error(log))
            if lack:
                return Status.OUT_OF_MEMORY, lack[:500], ""
        if failed:
            return self._explain_failure(failed, log)
        if self.hangs:
            return Status.INCIDENT, f"hangs: printed nothing for {self.wanted.hang_limit_s:g} s", ""
        if self.step_times_s:
            asked = self.wanted.warmup_steps + self.wanted.steps
            return Status.OK, f"ended after {self.num_read} of the {asked} expected log lines", ""
        return Status.CRASHED, self._explain_too_few(), ""

    def _explain_failure(self, failed: dict[int, int], log: str) -> tuple[Status, str, str]:
        if self.ended and self.ended.trouble:
            return self.ended.status, self.ended.trouble, ""
        host, code = next(iter(failed.items()))
        where = f" on host {host}" if len(self.codes) > 1 else ""
        told = _LAUNCHERS_SIGNAL.search(log.rpartition(_ROOT_CAUSE)[2])
        number = -code if code < 0 else int(told[1] or told[2]) if told else 0
        if number:
            name = _signal_name(number)
            return Status.INCIDENT, f"was killed by {name}{where}", name
        taken = next((line.strip() for line in log.splitlines() if _PORT_TAKEN.search(line)), "")
        if taken:
            return Status.INCIDENT, f"found its port taken{where}: {taken[:300]}", ""
        return Status.CRASHED, f"exit status {code}{where}: {_last_words(log)}", ""

    def _explain_too_few(self) -> str:
        if self.num_read:
            return (
                f"ended after {self.num_read} log lines with a step time, all of them warm-up: "
                f"train {self.wanted.warmup_steps + self.wanted.steps} steps ({{total_steps}}), or lower "
                "trial.warmup_steps"
            )
        return "ended without a log line in which trial.log finds a step time"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(log: str) -> str:
    """Return the last line that names an error, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return (_last_error(log) or (lines or ["it printed nothing"])[-1])[:400]


def _last_error(log: str) -> str:
    lines = reversed(log.splitlines())
    return next((line.strip() for line in lines if _NAMES_ERROR.search(line.rpartition(":")[0])), "")
