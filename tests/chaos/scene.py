"""Where a round takes place: its storage, the nodes of its cluster, the ledger, and one driver after the other."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import uuid
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.support.postgresql_server import PostgresqlServer
from benchmarks.support.process_table import marked_processes
from benchmarks.support.ray_nodes import RayNodes
from benchmarks.support.timing import tell
from tests.chaos.captures import kill_a_capture
from tests.chaos.disk import SmallDisk, why_no_disk
from tests.chaos.invariants import IN_ORDER, End
from tests.chaos.stored import EMPTY, Stored, read_stored
from tests.chaos.studies import Round, write_study
from tests.support.own_slurm import OwnSlurm
from tests.support.studies.driver_process import DriverProcess

NODES = (0, 2, 2)
"""CPUs of the nodes of a cluster, the head first."""

END_LIMIT_S = 240.0
_ENDED = re.compile(r"(\d+)/\d+ trials")
MEASURES = "ray::chaos-"
"""How the process of a worker begins that works on a trial: Ray calls it by the trial's name."""


class Scene:
    """One round's world; leaving the block ends all that it has started, and waits for nothing.

    Attributes:
        round: What is played.
        mark: What the environment of all its processes holds.
        ledger: Where trials write.
        disk: The small disk that its files are on; None where none can be mounted.
        server: The PostgreSQL server; None where the storage is another.
        slurm: Cluster that runs the trials; None where they are no jobs.
        nodes: The cluster; None where drivers start Ray themselves.
        ends: Of the drivers so far.
        moments: What the storage held after each fault.
        answer: What the last driver that ended well printed.
        drivers: The numbers of their processes.
        harmed: The user's files that captures beside the study have changed.
    """

    def __init__(self, which: Round, folder: Path, server: PostgresqlServer | None, slurm: OwnSlurm | None) -> None:
        self.round = which
        self.mark = f"MESHTUNE_CHAOS={uuid.uuid4().hex}"
        self.ledger = folder / "ledger"
        self.server = server if which.storage == "postgresql" else None
        self.slurm = slurm if which.trials == "slurm" else None
        self.disk = None if why_no_disk() else SmallDisk(folder / "disk")
        self.nodes = RayNodes(*NODES) if which.ray == "nodes" else None
        self.driver: DriverProcess | None = None
        self.ends: list[End] = []
        self.moments: list[Stored] = []
        self.answer: dict[str, Any] | None = None
        self.drivers: list[int] = []
        self.harmed: list[str] = []
        self._beside = folder / "beside"
        self._faults: list[str] = []
        self._allowed: set[int] = set()
        own = self.disk.folder if self.disk is not None else folder
        self.study = write_study(which, folder, self.ledger, own / "logs")
        self.storage = f"{which.storage}:///{own / 'study'}"
        if self.server is not None:
            schema = f"chaos_{uuid.uuid4().hex}"
            _run_sql(self.server.url, f"CREATE SCHEMA {schema}")
            self.storage = f"{self.server.url}?options=-csearch_path%3D{schema}"
        name, _, value = self.mark.partition("=")
        found = os.environ if self.slurm is None else self.slurm.environment
        self._environment = {key: text for key, text in found.items() if key != "RAY_ADDRESS"} | {name: value}
        if self.nodes is not None:
            self.nodes.environment |= self._environment

    def __enter__(self) -> Scene:
        """Starts the cluster, if there is one."""
        if self.nodes is not None:
            try:
                self.nodes.__enter__()
            except BaseException:
                self._unmount()
                raise
            self._environment = {**self.nodes.environment, "RAY_ADDRESS": self.nodes.address}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends driver and cluster."""
        if self.driver is not None:
            self.driver.process.kill()
            self.driver.process.wait()
        if self.nodes is not None:
            self.nodes.close()
        self._unmount()

    def _unmount(self) -> None:
        if self.disk is not None:
            self.disk.close()

    # The drivers

    @property
    def is_driven(self) -> bool:
        """Whether a driver lives; the end of one that has just died is noted."""
        if self.driver is not None and self.driver.process.poll() is not None:
            self.note_end()
        return self.driver is not None

    @property
    def is_over(self) -> bool:
        """Whether a driver has come to the end of the study."""
        return bool(self.ends) and self.ends[-1].status == 0

    def begin(self) -> None:
        """Starts a driver."""
        assert self.driver is None, "one driver at a time"
        self.driver = DriverProcess(
            self.storage, *self.round.overrides, study=self.study, environment=self._environment
        )
        self.drivers.append(self.driver.process.pid)

    def kill_a_capture(self, after_s: float) -> None:
        """Captures a script beside the study, and kills the capture after that time."""
        folder = self._beside / uuid.uuid4().hex
        self.harmed += kill_a_capture(folder, self._environment, after_s)

    def excuse(self, fault: str, statuses: frozenset[int]) -> None:
        """Notes a fault that the present driver was hit by, and what it may end with."""
        self._faults.append(fault)
        self._allowed |= statuses

    def note_end(self, limit_s: float = END_LIMIT_S) -> None:
        """Waits for the end of the present driver; it hangs, and is killed, if no trial ends for so long."""
        assert self.driver is not None, "there is one to wait for"
        hangs, ended, since_s = "", [], time.monotonic()
        while self.driver.process.poll() is None:
            counts = _ENDED.findall(self.driver.told)
            if counts[-1:] != ended:
                ended, since_s = counts[-1:], time.monotonic()
            if time.monotonic() - since_s >= limit_s:
                hangs = f"\n(it hung: killed after {limit_s:g} s without the end of a trial)"
                self.driver.process.kill()
                self._allowed.clear()
                break
            time.sleep(0.1)
        status, printed, told = self.driver.end()
        self.driver = None
        allowed = frozenset(self._allowed)
        left = read_stored(self.storage) if status in IN_ORDER else EMPTY
        self.ends.append(End(status=status, allowed=allowed, faults=tuple(self._faults), told=told + hangs, left=left))
        self._faults, self._allowed = [], set()
        tell(f"  driver ended with {status}: {told.strip().splitlines()[-1:]}{hangs}")
        if status == 0:
            self.answer = json.loads(printed)

    # What is looked at from outside

    def processes(self) -> dict[int, str]:
        """All processes of the round."""
        return marked_processes(self.mark)

    def workers(self) -> list[int]:
        """Ray's workers that work on a trial."""
        return sorted(process for process, command in self.processes().items() if command.startswith(MEASURES))

    def jobs(self) -> list[str]:
        """Numbers of the study's jobs in Slurm's queue."""
        if self.slurm is None:
            return []
        return [number for number, name, _ in self.slurm.queue() if name.startswith(f"meshtune-{self.round.name}-")]

    def keep_moment(self) -> Stored:
        """Notes what the storage holds now."""
        self.moments.append(read_stored(self.storage))
        return self.moments[-1]

    def wait_for_work(self, limit_s: float = END_LIMIT_S) -> bool:
        """Waits until a worker works on a trial; False where the driver ends before, or the time does."""
        deadline_s = time.monotonic() + limit_s
        while self.is_driven and time.monotonic() < deadline_s:
            # workers of a driver that has just died may still be there
            if self._has_begun and self.workers():
                return True
            time.sleep(0.2)
        return False

    def wait_for_start(self) -> None:
        """Waits until the driver says that it starts."""
        deadline_s = time.monotonic() + END_LIMIT_S
        while self.is_driven and not self._has_begun:
            if time.monotonic() >= deadline_s:
                return
            time.sleep(0.01)

    @property
    def _has_begun(self) -> bool:
        """Whether the driver has said with which configuration it begins."""
        return self.driver is not None and "trying first" in self.driver.told


def _run_sql(url: str, text: str) -> None:
    import psycopg2

    with closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(text)


def send(process: int, number: signal.Signals) -> bool:
    """Sends a signal; False where the process has just ended."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True
