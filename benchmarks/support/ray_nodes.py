"""Start the nodes of a Ray cluster on this machine, each a raylet with any number of CPUs.

The nodes have loopback addresses and free ports and require authentication tokens. Everything that is started here is
ended here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from benchmarks.support.process_table import below, marked_processes

RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""Command `ray` of this Python."""

HOST = "127.0.0.2"
"""Address of the head; the other nodes have the next addresses.

Ray takes 127.0.0.1 for the address of the network adapter.
"""

START_LIMIT_S = 120.0
END_LIMIT_S = 20.0
_SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}
"""System configuration with which Ray counts a node as dead after seconds instead of half a minute."""


class NotStartedError(AssertionError):
    """Node that Ray has given up: on a busy machine it may start too slowly."""


class RayNodes:
    """Ray cluster that lasts as long as the `with` block.

    Args:
        cpus: Number of CPUs of each node; the first node is the head.
        jobs: Whether jobs can be submitted, which needs `ray[default]`.

    Attributes:
        environment: Environment variables for programs that join the cluster or submit jobs.
        address: Address of the cluster.
        jobs_address: URL to which jobs are submitted; empty without `jobs`.
        folder: Folder to which Ray writes its files.
        mark: Entry `NAME=value` in the environment of all processes of the cluster.
    """

    def __init__(self, *cpus: int, jobs: bool = False) -> None:
        self._cpus = cpus
        self.mark = f"MESHTUNE_NODES={uuid.uuid4().hex}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="mt-"))  # short, since the length of a socket's path is limited
        self.environment = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"} | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # `ray start` creates none
            "RAY_USAGE_STATS_ENABLED": "0",
            **_split_entry(self.mark),
        }
        self.address = f"{HOST}:{_find_free_port()}"
        self.jobs_address = f"http://{HOST}:{_find_free_port()}" if jobs else ""

    def __enter__(self) -> RayNodes:
        """Start all nodes and wait for them."""
        try:
            port = self.address.rpartition(":")[2]
            dashboard = self.jobs_address.rpartition(":")[2]
            self._add(
                *("--head", "--port", port, "--temp-dir", str(self.folder)),
                *("--num-cpus", str(self._cpus[0]), "--system-config", json.dumps(_SOON)),
                # Ray Client is not used, but with ray[default] it would take a fixed port
                *(
                    (f"--dashboard-port={dashboard}", f"--ray-client-server-port={_find_free_port()}")
                    if dashboard
                    else ()
                ),
                f"--dashboard-host={HOST}",
                f"--include-dashboard={'true' if dashboard else 'false'}",
                "--no-monitor",  # of an autoscaler, of which there is none
            )
            # one after the other, since on a busy machine Ray gives up nodes that start slowly
            for cpus in self._cpus[1:]:
                self.add(cpus)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all nodes."""
        self.close()

    def processes(self) -> dict[int, str]:
        """Return the command lines of all processes that belong to the cluster or run on it, by process id."""
        return marked_processes(self.mark)

    @property
    def living(self) -> tuple[int, ...]:
        """Numbers of the nodes whose raylet lives, except the head."""
        known = self.processes()
        return tuple(
            number
            for number, node in enumerate(self._nodes)
            if number and any("raylet/raylet" in known.get(process, "") for process in below(node.pid))
        )

    def add(self, cpus: int) -> None:
        """Start one more node and wait for it."""
        self._add("--address", self.address, "--num-cpus", str(cpus))

    def on_node(self, number: int) -> dict[int, str]:
        """Return the command lines of the processes below the raylet of a node: its workers and their children."""
        known = self.processes()
        raylets = [process for process in below(self._nodes[number].pid) if "raylet/raylet" in known.get(process, "")]
        return {process: known[process] for raylet in raylets for process in below(raylet) if process in known}

    def kill(self, number: int, *, workers: bool) -> None:
        """Kill the raylet of a node (SIGKILL).

        Args:
            number: Number of the node.
            workers: Whether to kill its workers at once too, instead of letting them notice the loss.
        """
        known = self.processes()
        for process in below(self._nodes[number].pid):
            command = known.get(process, "")
            if "raylet/raylet" in command or (workers and command.startswith("ray::")):
                _kill(process)

    def ray(self, *arguments: str, limit_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Run the command `ray`."""
        return subprocess.run(
            [*RAY, *arguments], env=self.environment, capture_output=True, text=True, timeout=limit_s, check=False
        )

    def close(self) -> None:
        """End the nodes, the head last, and whatever is left of them."""
        nodes, self._nodes = self._nodes, []
        for node in reversed(nodes):
            node.terminate()
            try:
                node.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        for process in self.processes():
            _kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _add(self, *arguments: str) -> None:
        host = f"--node-ip-address=127.0.0.{len(self._nodes) + 2}"
        ports = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
        # our drivers ask for no logs of workers
        memory = ("--object-store-memory=100000000", "--include-log-monitor=false")
        said = self.folder / f"node-{len(self._nodes)}.log"
        with said.open("wb") as log:
            node = subprocess.Popen(
                [*RAY, "start", "--block", "--disable-usage-stats", *memory, host, *ports, *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes.append(node)
        deadline_s = time.monotonic() + START_LIMIT_S
        while b"Ray runtime started" not in said.read_bytes():
            if node.poll() is not None or time.monotonic() >= deadline_s:
                raise NotStartedError(said.read_text(errors="replace"))
            time.sleep(0.1)


def _split_entry(mark: str) -> Mapping[str, str]:
    name, _, value = mark.partition("=")
    return {name: value}


def _find_free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def _kill(process: int) -> None:
    """Kill a process, unless it has ended since it was listed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
