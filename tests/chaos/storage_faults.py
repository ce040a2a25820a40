"""Faults of what holds the study: the database stops, or loses a session; the disk is full."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.support.process_table import below
from tests.chaos.fault import AbstractFault
from tests.chaos.scene import Scene, send

GAVE_UP = 2
"""What a driver ends with that cannot write: one message, and the next run goes on."""


class _OfDatabase(AbstractFault):
    """Strikes PostgreSQL."""

    statuses = frozenset({GAVE_UP})

    def suits(self, storage: str, trials: str, ray: str) -> bool:  # noqa: ARG002 # the contract's
        """Where there is one."""
        return storage == "postgresql"


class _StopDatabase(_OfDatabase):
    """Stops it, and starts it a while later.

    Attributes:
        how: The signal to the server.
    """

    how: ClassVar[signal.Signals]

    def strike(self, scene: Scene, pick: int) -> bool:  # noqa: ARG002 # the contract's
        """Until it has stopped."""
        assert scene.server is not None, "it suits rounds with a server"
        scene.server.stop(self.how)
        return True

    def undo(self, scene: Scene) -> None:
        """Starts it on the same port."""
        assert scene.server is not None, "as above"
        scene.server.start()


@dataclass(frozen=True)
class StopDatabase(_StopDatabase):
    """In order: transactions are broken off."""

    name = "stop database"
    how = signal.SIGINT


@dataclass(frozen=True)
class BreakDatabase(_StopDatabase):
    """At once: the server mends itself when it starts."""

    name = "break database off"
    how = signal.SIGQUIT


@dataclass(frozen=True)
class KillSession(_OfDatabase):
    """SIGKILL of a process of the server: it ends all sessions, and starts anew by itself."""

    name = "kill database session"

    def strike(self, scene: Scene, pick: int) -> bool:
        """Of a driver or of the server's own."""
        assert scene.server is not None, "as above"
        found = sorted(below(scene.server.process.pid))
        return bool(found) and send(found[pick % len(found)], signal.SIGKILL)

    def undo(self, scene: Scene) -> None:
        """It comes back by itself."""
        assert scene.server is not None, "as above"
        scene.server.wait()


@dataclass(frozen=True)
class FillDisk(AbstractFault):
    """The disk under the study's files is full for a while."""

    name = "fill disk"
    statuses = frozenset({GAVE_UP})

    def suits(self, storage: str, trials: str, ray: str) -> bool:  # noqa: ARG002 # the contract's
        """Where the storage, or the logs of trials, are files."""
        return storage != "postgresql" or trials == "command"

    def strike(self, scene: Scene, pick: int) -> bool:  # noqa: ARG002 # the contract's
        """To the last byte."""
        assert scene.disk is not None, "schedules leave it out where there is none"
        scene.disk.fill()
        return True

    def undo(self, scene: Scene) -> None:
        """There is room again."""
        assert scene.disk is not None, "as above"
        scene.disk.empty()
