"""Keeper of a job: a process that submits it, outlives whoever follows it, and then cancels it.

The keeper is a fork of the follower, in a session of its own. It submits the job itself, so that no moment exists in
which the job is in the queue and nobody knows its number. It then waits until the other end of its life line is
closed, which the kernel does however the follower ends, and cancels the job. A job that has ended is not changed by
that. If the keeper itself is killed before it has told the number, the follower looks for the job by its name; if it is
killed later, the follower forks another one.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trials.command.slurm.queue import SUBMITTER_KILLED, QueueError, cancel, jobs_named, submit
from trials.ranks.unheard_signals import ignore_signals

RETRY_AFTER_S = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Pauses between attempts to cancel a job while the controller does not answer [s]."""

ARRIVAL_S = 1.0
"""Time after which the controller knows each job that a killed sbatch has sent [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Submitted job with its keeper.

    Attributes:
        job: Number of the job.
        keeper: Process number of the keeper.
        life_line: File descriptor that keeps the job in the queue; closing it cancels the job.
        output: File that is removed with the job.
    """

    job: str
    keeper: int
    life_line: int
    output: Path

    @property
    def is_kept(self) -> bool:
        """Whether the keeper lives."""
        try:
            return os.waitpid(self.keeper, os.WNOHANG) == (0, 0)
        except ChildProcessError:  # its end has been seen before
            return False


def submit_kept(name: str, options: Sequence[str], script: str, output: Path) -> Kept:
    """Submit a job of this name that ends with this process; its output file is removed with it.

    Raises:
        QueueError: Slurm refuses the job, or somebody has killed the keeper while it submitted the job, which is then
            cancelled.
    """
    life_end, life_line = os.pipe()
    answer, answer_end = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        try:
            _keep(options, script, output, life_end, answer_end)
        finally:
            os._exit(0)
    os.close(life_end)
    os.close(answer_end)
    with os.fdopen(answer, encoding="utf-8") as stream:
        answered = stream.read()
    if not answered:
        os.close(life_line)
        _cancel_unknown(keeper, name)
        raise QueueError(SUBMITTER_KILLED)
    told = json.loads(answered)
    if "error" in told:
        os.close(life_line)
        raise QueueError(told["error"])
    return Kept(job=told["job"], keeper=keeper, life_line=life_line, output=output)


def keep_again(kept: Kept) -> Kept:
    """Return the same job with another keeper, in place of one that was killed."""
    os.close(kept.life_line)
    life_end, life_line = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        try:
            _leave(life_end)
            _cancel_at_end(kept.job, kept.output, life_end)
        finally:
            os._exit(0)
    os.close(life_end)
    return replace(kept, keeper=keeper, life_line=life_line)


def _cancel_unknown(keeper: int, name: str) -> None:
    """End the sbatch of a killed keeper, and cancel the job that it may have submitted.

    Raises:
        QueueError: The controller does not answer.
    """
    with suppress(ProcessLookupError):
        os.killpg(keeper, signal.SIGKILL)  # sbatch is in the session of its keeper
    time.sleep(ARRIVAL_S)
    cancel(jobs_named(name))


def _keep(options: Sequence[str], script: str, output: Path, life_end: int, answer_end: int) -> None:
    """Submit the job, tell its number, and cancel it at the end of the life line."""
    _leave(life_end, answer_end)
    try:
        told = {"job": submit(options, script)}
    except QueueError as error:
        told = {"error": str(error)}
    os.write(answer_end, json.dumps(told).encode())
    os.close(answer_end)
    if "job" in told:
        _cancel_at_end(told["job"], output, life_end)


def _cancel_at_end(job: str, output: Path, life_end: int) -> None:
    """Wait for the end of the life line, then cancel the job and remove its output."""
    os.read(life_end, 1)  # nobody writes: it returns when the follower is gone
    for pause_s in (*RETRY_AFTER_S, 0):
        try:
            cancel([job])
            break
        except QueueError:
            time.sleep(pause_s)
    output.unlink(missing_ok=True)


def _leave(*kept: int) -> None:
    """Leave the follower's session, signals and open files, except for some."""
    os.setsid()
    ignore_signals()
    _close_all_but(*kept)


def _close_all_but(*kept: int) -> None:
    """Close the follower's open files, except for some; a pipe that stayed open would hide the follower's end."""
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
