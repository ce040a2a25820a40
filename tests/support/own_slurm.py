"""Slurm cluster for tests: a controller and nodes of this machine, on ports and in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.support.process_table import marked_processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
CORES_PER_NODE = 2
READY_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0

CONFIG = """
ClusterName=meshtune
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={first_node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldParameters=enable_configless
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
MinJobAge={min_job_age_s}
InactiveLimit=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
"""


def why_no_slurm() -> str:
    """Return why no cluster can be started here; empty where one can. Continuous integration installs Slurm."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    return "slurmd runs as root only" if os.geteuid() else ""


def skip_without_slurm() -> None:
    """Skip the test where no cluster can be started."""
    if reason := why_no_slurm():
        pytest.skip(reason)


class OwnSlurm:
    """Running Slurm cluster, whose nodes are all this machine.

    Args:
        folder: Folder for its keys, logs and state.
        num_nodes: Number of nodes, of two cores each.

    Attributes:
        environment: Variables with which Slurm's programs find this cluster.
    """

    def __init__(self, folder: Path, num_nodes: int = 1) -> None:
        self._folder = folder
        self._host = socket.gethostname().partition(".")[0]
        self.nodes = tuple(f"node{number}" for number in range(num_nodes))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment: Mapping[str, str] = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        folder = self._folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = _free_ports(1 + len(self.nodes))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={self._host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES_PER_NODE}"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        user = pwd.getpwuid(os.geteuid()).pw_name
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                host=self._host,
                user=user,
                folder=folder,
                controller=ports[0],
                first_node=ports[1],
                nodes=nodes,
                min_job_age_s=300,
            )
        )
        munge = (
            *("munged", "--foreground", f"--socket={folder}/munge.socket", f"--key-file={key}"),
            *(
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log",
                f"--seed-file={folder}/munged.seed",
            ),
        )
        self._launch(*munge)
        self._launch("slurmctld", "-D", "-c")
        for name in self.nodes:
            self._launch("slurmd", "-D", "-N", name)
        self._wait_until_idle()

    def _launch(self, *command: str) -> None:
        program = shutil.which(command[0], path=PLACES)
        assert program is not None, "skipped without it"
        with (self._folder / f"{command[0]}.out").open("ab") as told:
            self._processes.append(
                subprocess.Popen(
                    [program, *command[1:]],
                    env=self.environment,
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=told,
                    stderr=told,
                    start_new_session=True,
                )
            )

    def _wait_until_idle(self) -> None:
        deadline_s = time.monotonic() + READY_LIMIT_S
        while True:
            states = self.ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T", check=False).split()
            if states == ["idle"] * len(self.nodes):
                return
            assert time.monotonic() < deadline_s, self._logs()
            time.sleep(0.2)

    def _logs(self) -> str:
        files = [*self._folder.glob("*.log"), *self._folder.glob("*.out")]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)

    def ask(self, *command: str, check: bool = True) -> str:
        """Run one of Slurm's programs on this cluster, and return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *options: str) -> str:
        """Submit a job that prints nothing, and return its number."""
        return self.ask("sbatch", "--parsable", "--output=/dev/null", *options).strip()

    def queue(self) -> list[tuple[str, str, str]]:
        """Return number, name and state of each job in the queue that has not ended."""
        lines = self.ask("squeue", "--noheader", "--format=%i %j %T").splitlines()
        return [(number, name, state) for number, name, state in map(str.split, lines)]

    def cancel_all(self) -> None:
        """Kill all jobs, and wait until none is left."""
        deadline_s = time.monotonic() + STOP_LIMIT_S
        while (jobs := [number for number, *_ in self.queue()]) and time.monotonic() < deadline_s:
            self.ask("scancel", "--signal=KILL", "--full", *jobs, check=False)
            self.ask("scancel", *jobs, check=False)
            time.sleep(0.2)

    def close(self) -> None:
        """Kill all jobs, and stop all daemons."""
        if self._processes:
            self.cancel_all()
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in marked_processes(f"SLURM_CONF={self._folder}/slurm.conf"):  # of jobs whose daemon has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def own_slurm(num_nodes: int = 1) -> Iterator[OwnSlurm]:
    """Yield a cluster that runs as long as the block; skip the test if none can be started."""
    skip_without_slurm()
    folder = Path(tempfile.mkdtemp(prefix="meshtune-slurm-"))
    cluster = OwnSlurm(folder, num_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder)
