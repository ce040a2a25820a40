"""Contract of the steps that ranks compile and run: a rank lowers a step, begins it, and runs it repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class RunningStep(Protocol):
    """Compiled step with its arguments on the devices, of which each run replaces some."""

    @property
    def arguments(self) -> Sequence[Any]:
        """Arrays of the compiled program's parameters, in their order."""

    @property
    def replaced(self) -> Mapping[int, int]:
        """Number of the result that replaces an argument in the next run, by the argument's number."""

    def run(self) -> float | None:
        """Run the step to its end, and return its loss; None without one."""


class LoweredStep(Protocol):
    """Step that JAX has lowered for all devices of a mesh."""

    @property
    def program(self) -> Any:
        """Lowered program, each array of which is a parameter, also those that nothing reads."""

    def begin(self, compiled: Any) -> RunningStep:
        """Make the arguments of the compiled program."""
