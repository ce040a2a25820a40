"""Slurm's options of a job, and the environment variables that a job with such options has.

Sources: the manual pages of sbatch and srun (options, OUTPUT ENVIRONMENT VARIABLES) of Slurm 24.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

JOB_ID = "1"
"""Number of the job that a captured script believes to be."""
_SHORT = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-G": "--gpus",
    "-c": "--cpus-per-task",
    "-J": "--job-name",
    "-p": "--partition",
    "-A": "--account",
    "-q": "--qos",
}
_COUNTED = ("--nodes", "--ntasks", "--ntasks-per-node", "--gpus-per-node", "--gres", "--gpus", "--gpus-per-task")
_NUMBER = re.compile(r"(?:gpu|npu)?:?(?:[\w.-]*[A-Za-z][\w.-]*:)?([0-9]{1,6})(?:-[0-9]+)?")
"""Value of an option: --nodes may be a range, and --gres and --gpus name a kind before the number."""
_HEADER = re.compile(r"^#SBATCH[ \t]+(.*?)[ \t]*(?:[ \t]#.*)?$", re.M)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Hosts, tasks and devices of a job; None is unknown.

    Attributes:
        hosts: Number of hosts.
        tasks_per_host: Number of processes that the launcher starts on each host.
        devices_per_host: Number of devices on each host.
    """

    hosts: int | None = None
    tasks_per_host: int | None = None
    devices_per_host: int | None = None

    def over(self, outer: Allocation) -> Allocation:
        """Return this allocation with the values of the outer one where this one has none."""
        return Allocation(
            hosts=self.hosts or outer.hosts,
            tasks_per_host=self.tasks_per_host or outer.tasks_per_host,
            devices_per_host=self.devices_per_host or outer.devices_per_host,
        )


def header_words(text: str) -> list[str]:
    """Return the words of all `#SBATCH` lines of a script."""
    return [word for line in _HEADER.findall(text) for word in line.split()]


def allocation_of(words: Sequence[str]) -> Allocation:
    """Return what options of sbatch, salloc or srun state; options that are no numbers are left out."""
    counts: dict[str, int] = {}
    for name, value in _pairs(words):
        # --nodes may be a range, --gres and --gpus name a kind before the number
        found = re.fullmatch(
            r"(?:gpu|npu)?:?(?:[A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*:)?([0-9]{1,6})(?:-[0-9]+)?", value
        )
        if name in _COUNTED and found:
            counts[name] = int(found[1])
    hosts, tasks, total = counts.get("--nodes"), counts.get("--ntasks-per-node"), counts.get("--ntasks")
    if tasks is None and total and hosts and total % hosts == 0:
        tasks = total // hosts
    if hosts is None and total and tasks and total % tasks == 0:
        hosts = total // tasks
    devices = counts.get("--gpus-per-node") or counts.get("--gres")
    if devices is None and counts.get("--gpus") and hosts and counts["--gpus"] % hosts == 0:
        devices = counts["--gpus"] // hosts
    if devices is None and counts.get("--gpus-per-task") and tasks:
        devices = counts["--gpus-per-task"] * tasks
    return Allocation(hosts=hosts or None, tasks_per_host=tasks or None, devices_per_host=devices or None)


def _pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return the options among words with their values: `--name=value`, `--name value`, `-N value` and `-Nvalue`."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            yield name, value if equals else following
        elif word[:2] in _SHORT:
            yield _SHORT[word[:2]], word[2:].lstrip("=") or following


_AS_STATED = {
    "--cpus-per-task": "SLURM_CPUS_PER_TASK",
    "--gpus": "SLURM_GPUS",
    "--gpus-per-node": "SLURM_GPUS_PER_NODE",
    "--gpus-per-task": "SLURM_GPUS_PER_TASK",
    "--ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "--threads-per-core": "SLURM_THREADS_PER_CORE",
    "--job-name": "SLURM_JOB_NAME",
    "--partition": "SLURM_JOB_PARTITION",
    "--account": "SLURM_JOB_ACCOUNT",
    "--qos": "SLURM_JOB_QOS",
}
"""Options whose values a job finds, as they are written, in a variable that it has only with the option."""


def stated_variables(header: Sequence[str]) -> dict[str, str]:
    """Return the variables of a job that the words of its `#SBATCH` lines fix, with their values.

    What Slurm decides when the job starts, such as the names of its hosts, is not among them; nor is a number of hosts
    that is a range. Parts of a heterogeneous job have variables of their own.
    """
    if {"hetjob", "packjob"} & set(header):
        return {}
    options = {name: value.strip("'\"") for name, value in _pairs(header)}
    found = {_AS_STATED[name]: value for name, value in options.items() if name in _AS_STATED and value}
    if "," in found.get("SLURM_JOB_PARTITION", ""):
        del found["SLURM_JOB_PARTITION"]  # one of several
    job = allocation_of(header)
    if job.hosts and "-" not in options.get("--nodes", ""):
        found |= {"SLURM_NNODES": str(job.hosts), "SLURM_JOB_NUM_NODES": str(job.hosts)}
        if job.tasks_per_host:
            tasks, each = str(job.hosts * job.tasks_per_host), str(job.tasks_per_host)
            found |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
            found["SLURM_TASKS_PER_NODE"] = each if job.hosts == 1 else f"{each}(x{job.hosts})"
    elif (tasks := options.get("--ntasks", "")).isdigit():
        found |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    if job.devices_per_host:
        found["SLURM_GPUS_ON_NODE"] = str(job.devices_per_host)
    return found


def host_names(hosts: int) -> list[str]:
    """Return the names of the hosts of a captured job."""
    return [f"host-{number}" for number in range(hosts)]


def job_environment(allocation: Allocation, directory: str) -> Mapping[str, str]:
    """Return the variables that a batch script of such a job sees on its first host."""
    hosts = allocation.hosts or 1
    tasks = allocation.tasks_per_host or 1
    names = ",".join(host_names(hosts))
    found = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOBID": JOB_ID,
        "SLURM_JOB_NAME": "capture",
        "SLURM_SUBMIT_DIR": directory,
        "SLURM_SUBMIT_HOST": "localhost",
        "SLURM_NNODES": str(hosts),
        "SLURM_JOB_NUM_NODES": str(hosts),
        "SLURM_NODELIST": names,
        "SLURM_JOB_NODELIST": names,
        "SLURM_NTASKS": str(hosts * tasks),
        "SLURM_NPROCS": str(hosts * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_TASKS_PER_NODE": str(tasks) if hosts == 1 else f"{tasks}(x{hosts})",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": host_names(1)[0],
    }
    if allocation.devices_per_host:
        devices = allocation.devices_per_host
        found |= {
            "SLURM_GPUS_ON_NODE": str(devices),
            "SLURM_GPUS_PER_NODE": str(devices),
            "SLURM_JOB_GPUS": ",".join(map(str, range(devices))),
        }
    return found
