"""Keeper of a job: a process that submits it, outlives whoever follows it, and then cancels it.

The keeper is a fork of the follower, in a session of its own. It submits the job itself, so that no moment exists in
which the job is in the queue and nobody knows its number. It then waits until the other end of its life line is
closed, which the kernel does however the follower ends, and cancels the job. A job that has ended is not changed by
that. If the keeper itself is killed before it has told the number, the follower looks for the job by its name.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trials.command.slurm.queue import SUBMITTER_KILLED, QueueError, cancel, jobs_named, submit

RETRY_AFTER_S = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Pauses between attempts to cancel a job while the controller does not answer [s]."""

ARRIVAL_S = 1.0
"""Time after which the controller knows each job that a killed sbatch has sent [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Submitted job with its keeper.

    Attributes:
        job: Number of the job.
        life_line: File descriptor that keeps the job in the queue; closing it cancels the job.
    """

    job: str
    life_line: int


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
    return Kept(job=told["job"], life_line=life_line)


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
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _close_all_but(life_end, answer_end)
    try:
        told = {"job": submit(options, script)}
    except QueueError as error:
        told = {"error": str(error)}
    os.write(answer_end, json.dumps(told).encode())
    os.close(answer_end)
    if "job" not in told:
        return
    os.read(life_end, 1)  # nobody writes: it returns when the follower is gone
    for pause_s in (*RETRY_AFTER_S, 0):
        try:
            cancel([told["job"]])
            break
        except QueueError:
            time.sleep(pause_s)
    output.unlink(missing_ok=True)


def _close_all_but(*kept: int) -> None:
    """Close what the follower has open, among it the pipe whose end tells that the follower has ended."""
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
