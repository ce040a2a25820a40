"""Slurm's queue, through its programs: submit a job, ask for its state, cancel it, and find jobs by their names.

Sources: the manual pages of sbatch, scontrol, squeue and scancel of Slurm 24.05; checked with 22.05.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hardware.io.errors import ConfigError
from trials.time_limit import parse_time_limit

PROGRAMS = ("sbatch", "scontrol", "squeue", "scancel")
"""Programs of Slurm that must be on the driver's search path."""

ANSWER_LIMIT_S = 90.0
"""Time that the controller may take to answer [s]; Slurm's own programs give up after some ten seconds."""

_FIELD = re.compile(
    r" (?:(JobState|Reason)=(\S+)|(Restarts)=([0-9]{1,9})|(ExitCode)=([0-9]{1,9}:[0-9]{1,9})"
    r"|(TimeLimit)=((?:[0-9]{1,6}-)?[0-9]{1,6}:[0-9]{2}:[0-9]{2}))(?= )"
)
_UNKNOWN_JOB = "Invalid job id"


SUBMITTER_KILLED = "the process that submits the job was killed"

_PASSING = re.compile(
    f"contact slurm controller|timed out|gave no answer|standby mode|temporarily|not respond|{SUBMITTER_KILLED}", re.I
)
"""Messages that another attempt may not meet, of Slurm (src/common/slurm_errno.c) and of ours."""


_MAY_WAIT = re.compile(r"node configuration is not available|nodes are busy", re.I)
"""Messages of `sbatch --test-only` on a job that sbatch takes, and that waits: its nodes are drained, or are none."""


class QueueError(Exception):
    """Refusal of a request by Slurm, in its own words, or the lack of an answer."""

    @property
    def is_passing(self) -> bool:
        """Whether the failure says nothing about the request: no answer of the controller, or a killed submitter."""
        return _PASSING.search(str(self)) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """State of one job.

    Attributes:
        name: State, such as RUNNING.
        reason: Reason for the state, such as Resources for a job that waits; `None` in Slurm's words if there is none.
        restarts: Number of times that the job was put back into the queue.
        code: Exit status of its script, or the negative number of the signal that killed it.
        time_limit_s: Time limit of the job [s]; None if it has none.
    """

    name: str
    reason: str = "None"
    restarts: int = 0
    code: int = 0
    time_limit_s: float | None = None


def submit(options: Sequence[str], script: str) -> str:
    """Submit a job, and return its number.

    Raises:
        QueueError: Slurm refuses the job.
    """
    told = ask_slurm(["sbatch", "--parsable", *options], script)
    # a site's plugins may print lines of their own
    numbers = re.findall(r"^([0-9]+)(?:;\S*)?$", told, re.M)
    if not numbers:
        raise QueueError(f"sbatch printed no number of a job: {told[:200]}")
    return str(numbers[-1])


def state_of(job: str) -> JobState | None:
    """Return the state of a job, also for some minutes after its end; None if Slurm no longer knows it.

    Raises:
        QueueError: The controller does not answer.
    """
    try:
        return read_state(ask_slurm(["scontrol", "show", "job", "--oneliner", job]))
    except QueueError as error:
        if _UNKNOWN_JOB in str(error):
            return None
        raise


def read_state(text: str) -> JobState:
    """Read the line that `scontrol show job --oneliner` prints.

    Raises:
        QueueError: It states no state.
    """
    found: dict[str, str] = {}
    for groups in _FIELD.findall(text):
        name, value = filter(None, groups)
        found.setdefault(name, value)
    if "JobState" not in found:
        raise QueueError(f"scontrol printed no state of the job: {text[:200]}")
    status, _, signal = found.get("ExitCode", "0:0").partition(":")
    limit = found.get("TimeLimit")
    return JobState(
        name=found["JobState"],
        reason=found.get("Reason", "None"),
        restarts=int(found.get("Restarts", "0")),
        code=-int(signal) or int(status),
        time_limit_s=None if limit is None else parse_time_limit(limit),
    )


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs; those that have ended already are left as they are.

    Raises:
        QueueError: The controller does not answer.
    """
    if jobs:
        ask_slurm(["scancel", *jobs])


def jobs_named(prefix: str) -> list[str]:
    """Return the numbers of this user's jobs in the queue whose names begin so.

    Raises:
        QueueError: The controller does not answer.
    """
    lines = ask_slurm(["squeue", "--noheader", f"--user={os.geteuid()}", "--format=%i %j"]).splitlines()
    listed = (line.strip().partition(" ") for line in lines)
    return [number for number, _, name in listed if name.startswith(prefix)]


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment without what describes the worker: a job inherits all that sbatch has.

    If the driver is itself a job, Slurm's variables would describe that job; Ray's describe its worker, and Ray sets
    one thread for a worker of one core.
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("RAY_")
        and not (name.startswith("SLURM_") and name not in ("SLURM_CONF", "SLURM_CLUSTERS"))
        and not (name == "OMP_NUM_THREADS" and value == "1")
    }


def ask_slurm(command: Sequence[str], text: str | None = None) -> str:
    """Run one of Slurm's programs with a text as its input, and return what it prints.

    Raises:
        QueueError: It fails, or gives no answer.
    """
    try:
        asked = subprocess.Popen(  # noqa: S603 # programs of Slurm, and no shell
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=job_environment(os.environ),
        )
    except OSError as error:
        raise QueueError(f"{command[0]} cannot be started: {error.strerror}") from None
    with asked:
        try:
            answer, trouble = asked.communicate(text, timeout=ANSWER_LIMIT_S)
        except subprocess.TimeoutExpired:
            asked.kill()
            raise QueueError(f"{command[0]} gave no answer within {ANSWER_LIMIT_S:g} s") from None
    if asked.returncode:
        told = [line.partition("error: ")[2] or line for line in trouble.splitlines() if line.strip()]
        raise QueueError("; ".join(told)[:500] or f"{command[0]} ended with status {asked.returncode}")
    return answer


def cancel_named(prefix: str) -> int:
    """Cancel this user's jobs whose names begin with `prefix`, and return their number.

    Raises:
        ConfigError: Slurm does not answer.
    """
    try:
        jobs = jobs_named(prefix)
        cancel(jobs)
    except QueueError as error:
        raise ConfigError(
            f"cannot look for jobs named {prefix}... in Slurm's queue: {error}",
            key="trial.launch",
            value="slurm",
            nearest="try again when `squeue` answers here",
        ) from None
    return len(jobs)


def check_accepted(options: Sequence[str]) -> None:
    """Check that sbatch takes a job with these options, without submitting one.

    A controller that does not answer now, and hosts that are not there now, are no refusal.

    Raises:
        ConfigError: It refuses them.
    """
    try:
        ask_slurm(["sbatch", "--test-only", *options], "#!/bin/bash\ntrue\n")
    except QueueError as error:
        if error.is_passing or _MAY_WAIT.search(str(error)):
            return
        raise ConfigError(
            f"is refused by sbatch before any trial: {error}",
            key="trial.sbatch",
            value=shlex.join(["sbatch", *options]),
            nearest="mend its options; `sbatch --test-only` with them and any script tells the same",
        ) from None


def check_programs() -> None:
    """Check that Slurm's programs are on the search path.

    Raises:
        ConfigError: One is missing.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"needs {', '.join(missing)} on the PATH, which this machine lacks",
            key="trial.launch",
            value="slurm",
            nearest="run on a login node of the cluster, or launch: per_host on a Ray cluster",
        )
