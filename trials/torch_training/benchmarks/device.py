"""Benchmarks of this machine's devices in separate processes, so that a crashing kernel does not end the command."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from costmodels.operators.isolated import IsolatedCall
from trials.ranks.messages import Exit, Told
from trials.ranks.processes import RankProcesses
from trials.torch_training.benchmarks.messages import Accelerators, Refusal, Timing

DeviceType = Literal["cpu", "cuda"]

RANKS = "trials.torch_training.benchmarks.ranks"
"""Module whose functions the ranks run; it imports torch, and nothing here does."""

LIMIT_S = 120.0
"""Maximum time of one call, including data and warm-up [s]."""

Measured = tuple[IsolatedCall, Timing | Refusal]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBenchmarks:
    """Timer of calls on this machine.

    Attributes:
        processes: Launcher of the ranks' processes.
        device: Type of the device that the ranks use.
    """

    processes: RankProcesses
    device: DeviceType

    def accelerators(self) -> Accelerators:
        """Return the GPUs of this machine."""
        self._launch("tell_accelerators", num_ranks=1)
        found = [value for value in self._receive() if isinstance(value, Accelerators)]
        self.processes.kill()
        return found[0] if found else Accelerators(count=0, name="")

    def measure(self, calls: Sequence[IsolatedCall]) -> Generator[Measured, None, None]:
        """Yield each call with its time, or with the reason why it has none; the caller may stop at any point.

        The calls are operators, or collectives of one number of ranks.
        """
        left = list(calls)
        try:
            while left:
                yield from self._measure_launch(left)
        finally:
            self.processes.kill()

    def _measure_launch(self, left: list[IsolatedCall]) -> Iterator[Measured]:
        """Yield the results of one launch.

        Measured calls are removed from `left`, and so is the call that ended the launch, if any.
        """
        function = "time_collectives" if left[0].is_collective else "time_operators"
        self._launch(function, self.device, tuple(left), num_ranks=left[0].group_size)
        for value in self._receive():
            assert isinstance(value, Timing | Refusal), value
            yield left.pop(0), value
            if not left:
                return
        self.processes.kill()
        # The launch ended early, so the call in progress is the one that ended it.
        yield left.pop(0), Refusal(reason=self._read_last_line())

    def _launch(self, function: str, *arguments: Any, num_ranks: int) -> None:
        self.processes.launch(f"{RANKS}:{function}", *arguments, num_ranks=num_ranks)

    def _receive(self) -> Iterator[Any]:
        """Yield messages of the ranks until rank 0 ends, another rank fails, or all are silent for too long."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            events = self.processes.events(until_s - time.monotonic())
            for event in events:
                if isinstance(event, Told):
                    until_s = time.monotonic() + LIMIT_S
                    yield event.value
            # Rank 0 sends all results, so its end is the end of the launch, and a failure of any rank is, too.
            if any(isinstance(event, Exit) and (event.code or event.rank == 0) for event in events):
                return

    def _read_last_line(self) -> str:
        """Return the last line that the process printed, as the reason of its failure."""
        lines = self.processes.printed().strip().splitlines()
        return lines[-1].strip() if lines else f"its process ended, or was silent for {LIMIT_S:.0f} s"
