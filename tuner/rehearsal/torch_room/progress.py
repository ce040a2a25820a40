"""Progress of a rehearsed program: its model is built, then it makes some steps."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tuner.rehearsal.torch_room.watch import Watch, as_lists
from tuner.rehearsal.torch_room.whole_step import whole_bytes, whole_counts


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
        micro_batches: Number of micro-batches that the last step makes, and that it would make.
        parameters: Number of parameters of this rank; None before the model is built.
        built_parts: Bytes by purpose after the model and the optimizer were built.
        has_own_loop: Whether a framework's own loop reports the steps, so that its optimizers do not.
        peaks: Largest number of bytes alive in each step.
        orders: Micro-batches and order of each step, if they are recorded.
        build_cpu_s: CPU time until model and optimizer were built [s].
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
    build_cpu_s: float = 0.0
    cpu_s: list[float] = field(default_factory=list)
    _began_s: float = 0.0
    _fewest: int = 1
    _passed: int | None = None
    _short: tuple[Counter[Any], Counter[Any], int | None] | None = None

    def built(self, parameters: int) -> None:
        """Record that model and optimizer are built."""
        self.parameters, self.built_parts = parameters, self.watch.storages.parts
        self._began_s = self.build_cpu_s = time.process_time()

    def cut_micro_batches(self, whole: int, enough: int | None = None, fewest: int = 1) -> int:
        """Return how many of the micro-batches of the present step are made.

        If they are cut, a step follows the others: all but the last make as few as can be, so that the last two tell
        what a whole step would do.

        Args:
            whole: Micro-batches of a step.
            enough: Number after which the schedule holds no more than before; by default `most_micro_batches`.
            fewest: Smallest number that the schedule can make.
        """
        most = self.most_micro_batches
        if self.watch.order is not None:
            before = self.most_before_last if len(self.peaks) < self.steps - 1 else None
            cut = min([whole, *(one for one in (most, before) if one is not None)])
            self.micro_batches = (cut, whole)
            return cut
        cut = whole if most is None else min(whole, most if enough is None else max(enough, fewest + 2))
        self.micro_batches, self._fewest = (cut, whole), min(fewest, cut)
        return self._fewest if cut < whole and len(self.peaks) < self.steps else cut

    @property
    def is_cut(self) -> bool:
        """Whether steps make fewer micro-batches than they would."""
        return self.micro_batches is not None and self.micro_batches[0] < self.micro_batches[1]

    def end_passes(self) -> None:
        """Record that the forward and backward passes of a step are over, and its optimizer follows."""
        self._passed = self.watch.storages.live

    def begin_step(self) -> None:
        """Record that a step begins."""
        self.watch.begin_step()
        self._passed = None
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
        if len(self.peaks) == self.steps + (self.is_cut and self.watch.order is None):
            raise EnoughError
        self._short = self.watch.operators.copy(), self.watch.collectives.copy(), self._passed

    def as_json(self) -> dict[str, Any]:
        """Return what was seen as JSON types."""
        watch = self.watch
        operators, collectives, further = watch.operators, watch.collectives, None
        if self.is_cut and self._short is not None and len(self.peaks) > self.steps:
            (made, whole), short = self.micro_batches or (0, 0), self._short
            operators = whole_counts(short[0], operators, (self._fewest, made), whole)
            collectives = whole_counts(short[1], collectives, (self._fewest, made), whole)
            if short[2] is not None and self._passed is not None:
                further = whole_bytes(short[2], self._passed, (self._fewest, made), whole)
        return {
            "parameters": self.parameters,
            "built": self.built_parts,
            "micro_batches": self.micro_batches,
            "peaks": self.peaks,
            "peak_parts": watch.storages.peak_parts,
            "build_cpu_s": self.build_cpu_s,
            "cpu_s": self.cpu_s,
            "is_whole_step": not self.is_cut or further is not None,
            "further_bytes": further or 0,
            "operators": [[name, shapes, count] for (name, shapes), count in operators.most_common()],
            "collectives": as_lists(collectives),
            "invented": dict(watch.invented.most_common()),
            **({} if watch.order is None else {"kinds": list(watch.order.kinds), "orders": self.orders[1:]}),
        }
