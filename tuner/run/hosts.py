"""Hosts that a study needs, and whether they are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.run.executor import Executor

HostsNow = Callable[[Executor, float], tuple[int, ...] | None]
"""Function that returns the hosts of the whole cluster that are there, given the executor and the time that the study
has run [s]; None if nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Hosts that a study needs.

    Attributes:
        hosts: Hosts of the study; the run ends when some are lost, or when others come back.
        now: Function that returns the hosts that are there.
    """

    hosts: tuple[int, ...]
    now: HostsNow


class HostWatch:
    """Watch over the hosts of a run.

    Args:
        expected: Hosts that the study needs; None if it does not look after them.

    Attributes:
        others: Hosts that were there at the last look that found others than the study needs; empty before.
    """

    def __init__(self, expected: Expected | None) -> None:
        self._expected = expected
        self.others: tuple[int, ...] = ()

    def finds_others(self, running: Executor, elapsed_s: float) -> bool:
        """Return whether other hosts are there than the study needs, `elapsed_s` after its start [s]."""
        there = None if self._expected is None else self._expected.now(running, elapsed_s)
        if self._expected is None or not there or there == self._expected.hosts:
            return False
        self.others = there
        return True

    @property
    def lost_some(self) -> bool:
        """Whether hosts that the study needs were not there when others were found."""
        assert self._expected is not None, "a run that looks after its hosts expects some"
        return not {*self.others} >= {*self._expected.hosts}
