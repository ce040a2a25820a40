"""Benchmarks of this machine's devices in processes of their own, so that no crash of a kernel ends the command."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from costmodels.operators.isolated import LoneCall
from trials.ranks.messages import Exit, Told
from trials.ranks.processes import RankProcesses
from trials.torch_training.benchmarks.messages import Accelerators, Refusal, Timing

DeviceType = Literal["cpu", "cuda"]

RANKS = "trials.torch_training.benchmarks.ranks"
"""The module whose functions the ranks run; it imports torch, and nothing here does."""

LIMIT_S = 120.0
"""How long one call may take, data and warm-up included."""

Measured = tuple[LoneCall, Timing | Refusal]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBenchmarks:
    """Times calls on this machine.

    Attributes:
        processes: Where the ranks come from.
        device: What they run on.
    """

    processes: RankProcesses
    device: DeviceType

    def accelerators(self) -> Accelerators:
        """The GPUs of this machine."""
        self._launch("tell_accelerators", num_ranks=1)
        found = [value for value in self._told() if isinstance(value, Accelerators)]
        self.processes.kill()
        return found[0] if found else Accelerators(count=0, name="")

    def measure(self, calls: Sequence[LoneCall]) -> Generator[Measured, None, None]:
        """The time of each call in turn, or why there is none; whoever has enough may leave at any time.

        Args:
            calls: All operators, or all collectives of one number of ranks.
        """
        left = list(calls)
        try:
            while left:
                yield from self._until_it_ends(left)
        finally:
            self.processes.kill()

    def _until_it_ends(self, left: list[LoneCall]) -> Iterator[Measured]:
        """What one launch measures; takes it off `left`, and with it the call that ended the launch, if one did."""
        function = "time_collectives" if left[0].is_collective else "time_operators"
        self._launch(function, self.device, tuple(left), num_ranks=left[0].group_size)
        for value in self._told():
            assert isinstance(value, Timing | Refusal), value
            yield left.pop(0), value
            if not left:
                return
        self.processes.kill()
        yield left.pop(0), Refusal(reason=self._last_words())

    def _launch(self, function: str, *arguments: Any, num_ranks: int) -> None:
        self.processes.launch(f"{RANKS}:{function}", *arguments, num_ranks=num_ranks)

    def _told(self) -> Iterator[Any]:
        """What the ranks tell, until the one that tells ends, another one fails, or all are silent for too long."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            events = self.processes.events(until_s - time.monotonic())
            for event in events:
                if isinstance(event, Told):
                    until_s = time.monotonic() + LIMIT_S
                    yield event.value
            if any(isinstance(event, Exit) and (event.code or event.rank == 0) for event in events):
                return

    def _last_words(self) -> str:
        lines = self.processes.printed().strip().splitlines()
        return lines[-1].strip() if lines else f"its process ended, or was silent for {LIMIT_S:.0f} s"
