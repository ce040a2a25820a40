"""Faults of the driver: it is killed, interrupted, or sleeps for a while."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar

from tests.chaos.fault import AbstractFault
from tests.chaos.scene import Scene, send

INTERRUPTED = 130


class _Signalled(AbstractFault):
    """Sends the driver a signal.

    Attributes:
        signal: Which.
    """

    signal: ClassVar[signal.Signals]
    ends_driver = True
    may_be_early = True

    def suits(self, storage: str, trials: str, ray: str) -> bool:
        """Every round has a driver."""
        return bool(storage and trials and ray)

    def strike(self, scene: Scene, pick: int) -> bool:  # noqa: ARG002 # the contract's
        """Whatever it does."""
        return scene.driver is not None and send(scene.driver.process.pid, self.signal)


@dataclass(frozen=True)
class KillDriver(_Signalled):
    """SIGKILL."""

    name = "kill driver"
    signal = signal.SIGKILL
    statuses = frozenset({-signal.SIGKILL})


@dataclass(frozen=True)
class TerminateDriver(_Signalled):
    """SIGTERM, as schedulers send it."""

    name = "terminate driver"
    signal = signal.SIGTERM
    statuses = frozenset({INTERRUPTED})


@dataclass(frozen=True)
class InterruptDriver(_Signalled):
    """SIGINT, as Ctrl-C sends it."""

    name = "interrupt driver"
    signal = signal.SIGINT
    statuses = frozenset({INTERRUPTED})


@dataclass(frozen=True)
class SuspendDriver(_Signalled):
    """SIGSTOP, and SIGCONT a while later."""

    name = "suspend driver"
    signal = signal.SIGSTOP
    ends_driver = False

    def undo(self, scene: Scene) -> None:
        """It goes on."""
        if scene.driver is not None:
            send(scene.driver.process.pid, signal.SIGCONT)
