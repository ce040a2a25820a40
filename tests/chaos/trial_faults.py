"""Faults of a trial's own process: it is killed, or finds no more memory."""

from __future__ import annotations

import resource
import signal
import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.fault import AbstractFault
from tests.chaos.ledger import Entry, read_ledger, running
from tests.chaos.scene import Scene, send
from tests.chaos.trial_program import note


class _OfTrial(AbstractFault):
    """Hits the process of a trial that runs a command."""

    def suits(self, storage: str, trials: str, ray: str) -> bool:  # noqa: ARG002 # the contract's
        """Others have none."""
        return trials == "command"

    def strike(self, scene: Scene, pick: int) -> bool:
        """One of those that run."""
        found = running(read_ledger(scene.ledger))
        return bool(found) and self.hit(scene, found[pick % len(found)])

    @abstractmethod
    def hit(self, scene: Scene, entry: Entry) -> bool:
        """Whatever it does to this one."""


@dataclass(frozen=True)
class KillTrial(_OfTrial):
    """SIGKILL."""

    name = "kill trial"

    def hit(self, scene: Scene, entry: Entry) -> bool:  # noqa: ARG002 # the contract's
        """That process alone; what it has started is for others to end."""
        return send(entry.pid, signal.SIGKILL)


@dataclass(frozen=True)
class TakeMemory(_OfTrial):
    """Its limit of memory is lowered to what it has, so that its next allocation fails."""

    name = "take trial's memory"

    def hit(self, scene: Scene, entry: Entry) -> bool:
        """Notes in the ledger whom it hit."""
        try:
            pages = int(Path(f"/proc/{entry.pid}/statm").read_text(encoding="ascii").split()[0])
            limit = (pages * resource.getpagesize(),) * 2
            resource.prlimit(entry.pid, resource.RLIMIT_AS, limit)
        except (OSError, IndexError):  # it has just ended
            return False
        who = {"trial": entry.trial, "configuration": entry.configuration, "pid": entry.pid}
        note(str(scene.ledger), event="limited", time_s=time.time(), **who)
        return True
