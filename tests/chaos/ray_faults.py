"""Faults of Ray: a worker that measures, a raylet, the process that knows the cluster."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tests.chaos.fault import AbstractFault
from tests.chaos.scene import NODES, Scene, send

RAY_ENDED_IT = 1
"""What Ray ends a driver with, from C++ and in its own words, whose raylet or GCS has died; the next run goes on."""

GAVE_UP = 2
"""What a driver ends with to whom Ray has told it first, while it started."""


@dataclass(frozen=True)
class KillWorker(AbstractFault):
    """SIGKILL of an actor's process while it works on a trial."""

    name = "kill worker"

    def suits(self, storage: str, trials: str, ray: str) -> bool:
        """Every round has workers."""
        return bool(storage and trials and ray)

    def strike(self, scene: Scene, pick: int) -> bool:
        """One of those that work."""
        workers = scene.workers()
        return bool(workers) and send(workers[pick % len(workers)], signal.SIGKILL)


@dataclass(frozen=True)
class KillNode(AbstractFault):
    """SIGKILL of the raylet of one node of a cluster, its workers too or not."""

    name = "kill node's raylet"

    def suits(self, storage: str, trials: str, ray: str) -> bool:  # noqa: ARG002 # the contract's
        """Where nodes remain."""
        return ray == "nodes"

    def strike(self, scene: Scene, pick: int) -> bool:
        """One that works on a trial, and not the last one."""
        assert scene.nodes is not None, "it suits rounds on nodes alone"
        workers = set(scene.workers())
        living = scene.nodes.living
        at_work = [number for number in living if workers & scene.nodes.on_node(number).keys()]
        if len(living) < 2 or not at_work:
            return False
        scene.nodes.kill(at_work[pick % len(at_work)], workers=bool(pick % 2))
        return True

    def undo(self, scene: Scene) -> None:
        """The cluster gets a fresh node."""
        assert scene.nodes is not None, "as above"
        scene.nodes.add(NODES[-1])


class _OfOwnRay(AbstractFault):
    """Kills a process of the Ray that the driver has started."""

    process: str
    statuses = frozenset({RAY_ENDED_IT, GAVE_UP})

    def suits(self, storage: str, trials: str, ray: str) -> bool:  # noqa: ARG002 # the contract's
        """Where the driver starts one."""
        return ray == "local"

    def strike(self, scene: Scene, pick: int) -> bool:  # noqa: ARG002 # the contract's
        """The one there is."""
        found = [number for number, command in scene.processes().items() if self.process in command.split(" ")[0]]
        return bool(found) and send(found[0], signal.SIGKILL)


@dataclass(frozen=True)
class KillRaylet(_OfOwnRay):
    """SIGKILL of the only raylet."""

    name = "kill raylet"
    process = "raylet/raylet"


@dataclass(frozen=True)
class KillGcs(_OfOwnRay):
    """SIGKILL of the process that knows the cluster."""

    name = "kill gcs"
    process = "gcs_server"
