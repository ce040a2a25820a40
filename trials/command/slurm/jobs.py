"""Jobs of a study in Slurm's queue: their names, the options of sbatch, and the job of one trial."""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hardware.io.errors import ConfigError
from trials.command.host_program import HostPlan
from trials.command.slurm.batch_script import batch_script
from trials.command.slurm.job_program import JobPlan

Tasks = Literal["per_host", "per_device", "once"]
"""What a job starts: the command on every host, once for each device, or once on its first host."""

MARGIN_S = 120.0
"""Time by which a job's limit is above the trial's [s], so that the trial's comes first: Slurm counts in minutes."""

SET_BY_TRIALS = {
    "--job-name": "-J",
    "--output": "-o",
    "--error": "-e",
    "--nodes": "-N",
    "--ntasks": "-n",
    "--chdir": "-D",
    "--time": "-t",
    "--array": "-a",
    "--dependency": "-d",
    "--wait": "-W",
    "--wrap": "",
    "--parsable": "",
    "--test-only": "",
    "--clusters": "-M",
}
"""Options of sbatch, with their letters, that a trial sets itself or cannot have."""

_INSTEAD = {"--nodes": "cluster.hosts", "--time": "trial.time_limit", "--chdir": "trial.directory"}
_OF_SRUN = {"--nodes": "-N", "--ntasks": "-n", "--ntasks-per-node": "", "--output": "-o", "--error": "-e"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJobs:
    """Jobs of a study in Slurm's queue.

    Attributes:
        study: Beginning of the jobs' names, which no other study's jobs have.
        sbatch: Arguments of sbatch.
        srun: Further options of srun, which starts the command.
        tasks: How often the command is started.
        outputs: Folder for the output of running jobs, which all hosts share.
        time_limit_s: Time limit of a trial [s]; None leaves the job's limit to `sbatch` and Slurm.
    """

    study: str
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    tasks: Tasks = "per_host"
    outputs: Path
    time_limit_s: float | None = None


def check_options(words: tuple[str, ...], *, program: str) -> None:
    """Check that further options of sbatch or srun contradict none that a trial sets.

    Raises:
        ConfigError: One does; the key in the error is its position.
    """
    refused = _OF_SRUN if program == "srun" else SET_BY_TRIALS
    for number, word in enumerate(words):
        name = word.partition("=")[0]
        letter = word[:2] if re.match(r"-[A-Za-z]", word) else ""
        for option, short in refused.items():
            if name == option or (letter and letter == short):
                nearest = _INSTEAD.get(option, f"leave {option} out")
                raise ConfigError(
                    f"is set by each trial, with its own {program}", key=str(number), value=word, nearest=nearest
                )


def job_plan(jobs: SlurmJobs, plan: HostPlan, *, num_hosts: int, devices_per_host: int) -> JobPlan:
    """Return the job of one trial.

    The options of the study come first: of an option that is given twice, sbatch takes the last.
    """
    name = f"{jobs.study}{plan.log_name.removeprefix('trial-')}"
    output = jobs.outputs / f".{name}-{uuid.uuid4().hex[:8]}.out"
    shared = job_options(jobs, plan.directory, num_hosts=num_hosts)
    own = (f"--job-name={name}", *shared, "--output=" + str(output).replace("%", "%%"))
    return JobPlan(
        name=name,
        host=plan,
        options=(*jobs.sbatch, *own),
        script=batch_script(
            plan,
            step=step_words(jobs, num_hosts=num_hosts, devices_per_host=devices_per_host),
            per_device=jobs.tasks == "per_device",
        ),
        output=output,
    )


def job_options(jobs: SlurmJobs, directory: Path, *, num_hosts: int) -> tuple[str, ...]:
    """Return the options of sbatch that all trials with so many hosts share, beside those of the study."""
    limit = [] if jobs.time_limit_s is None else [f"--time={math.ceil((jobs.time_limit_s + MARGIN_S) / 60)}"]
    return (f"--nodes={num_hosts}", f"--chdir={directory}", *limit)


def step_words(jobs: SlurmJobs, *, num_hosts: int, devices_per_host: int) -> tuple[str, ...]:
    """Return srun with its options, which starts the command; nothing where the batch script itself does.

    A task per host may use all cores of its host: the command starts the processes of its devices itself.
    """
    if jobs.tasks == "once":
        return ()
    per_host = devices_per_host if jobs.tasks == "per_device" else 1
    counts = (f"--nodes={num_hosts}", f"--ntasks={num_hosts * per_host}", f"--ntasks-per-node={per_host}")
    binding = () if jobs.tasks == "per_device" else ("--cpu-bind=none",)
    return ("srun", *counts, *binding, "--kill-on-bad-exit=1", *jobs.srun)


def study_prefix(name: str, storage: str) -> str:
    """Return the beginning of the names of a study's jobs, which tells studies of equal names in two storages apart."""
    digest = hashlib.sha256(storage.encode()).hexdigest()[:8]
    return f"meshtune-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:80]}-{digest}-"
