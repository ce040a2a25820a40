"""Progress of a rehearsed program: its model is built, then it makes some steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tuner.rehearsal.torch_room.watch import Watch


class EnoughError(BaseException):
    """End of a program after its last step. No handler of the program takes it for a fault of its own."""


@dataclass(slots=True)
class Progress:
    """Progress of a program.

    Attributes:
        watch: Record of the present step.
        steps: Number of steps after which the program ends.
        most_micro_batches: Largest number of micro-batches that a step makes; None for all.
        most_before_last: The same for all steps but the last, so that two steps tell the time of one more micro-batch.
        micro_batches: Number of micro-batches that each step makes, and that it would make.
        parameters: Number of parameters of this rank; None before the model is built.
        built_parts: Bytes by purpose after the model and the optimizer were built.
        has_own_loop: Whether a framework's own loop reports the steps, so that its optimizers do not.
        peaks: Largest number of bytes alive in each step.
        orders: Micro-batches and order of each step, if they are recorded.
        cpu_s: CPU time of each step [s].
    """

    watch: Watch
    steps: int
    most_micro_batches: int | None = None
    most_before_last: int | None = None
    micro_batches: tuple[int, int] | None = None
    parameters: int | None = None
    built_parts: dict[str, int] = field(default_factory=dict)
    has_own_loop: bool = False
    peaks: list[int] = field(default_factory=list)
    orders: list[dict[str, Any]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    _began_s: float = 0.0

    def built(self, parameters: int) -> None:
        """Record that model and optimizer are built."""
        self.parameters, self.built_parts = parameters, self.watch.storages.parts
        self._began_s = time.process_time()

    def cut_micro_batches(self, whole: int) -> int:
        """Return how many of the micro-batches of a step are made."""
        most = (self.most_micro_batches, self.most_before_last if len(self.peaks) < self.steps - 1 else None)
        cut = min([whole, *(one for one in most if one is not None)])
        self.micro_batches = (cut, whole)
        return cut

    def begin_step(self) -> None:
        """Record that a step begins."""
        self.watch.begin_step()
        self._began_s = time.process_time()

    def end_step(self) -> None:
        """Record the step, and end the program after the last.

        Raises:
            EnoughError: it was the last one.
        """
        self.peaks.append(self.watch.storages.peak)
        self.cpu_s.append(time.process_time() - self._began_s)
        if self.watch.order is not None:
            self.orders.append({"micro_batches": (self.micro_batches or [None])[0], "steps": self.watch.order.steps})
        if len(self.peaks) == self.steps:
            raise EnoughError

    def as_json(self) -> dict[str, Any]:
        """Return what was seen as JSON types."""
        watch = self.watch
        return {
            "parameters": self.parameters,
            "built": self.built_parts,
            "micro_batches": self.micro_batches,
            "peaks": self.peaks,
            "peak_parts": watch.storages.peak_parts,
            "cpu_s": self.cpu_s,
            "operators": [[name, shapes, count] for (name, shapes), count in watch.operators.most_common()],
            "collectives": watch.counted_collectives(),
            "invented": dict(watch.invented.most_common()),
            **({} if watch.order is None else {"kinds": list(watch.order.kinds), "orders": self.orders[1:]}),
        }
