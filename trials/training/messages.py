"""Messages of the ranks of a trial; what only one library tells is their `detail`."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trials.ranks.out_of_memory import is_memory_used_up


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """Message of a rank on a CPU that it runs.

    Attributes:
        resident_bytes: Resident memory of the process before it trains [bytes].
    """

    resident_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Message of a rank that it has built its part of the step and run the warm-up steps.

    Attributes:
        conditions: Times until then by their names in an observation's conditions, such as `build_s` [s].
    """

    conditions: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """Message of a rank that it has measured a step.

    Attributes:
        number: Number of the step, from 0.
        wall_s: Wall clock of the slowest rank [s].
        cpu_s: CPU time of all threads of all ranks together [s].
        loss: Mean loss over the tokens of the batch, before the step; of a user's step in JAX, the first number that it
            returns, and None if it returns none.
        detail: What the virtual clock of the library reads; None on other clocks.
    """

    number: int
    wall_s: float
    cpu_s: float
    loss: float | None
    detail: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Message of a rank that it has finished its work.

    Attributes:
        peak_bytes: Peak memory of training on the rank's device [bytes]; on a CPU without the memory before training.
        conditions: Further times by their names in an observation's conditions [s].
        detail: What the library compares with predictions; None if it compares nothing.
    """

    peak_bytes: int
    conditions: Mapping[str, float]
    detail: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Message of a rank that it has failed.

    Attributes:
        is_out_of_memory: Whether the error says that memory was lacking.
        is_memory_used_up: Whether the process could hardly get more memory, whatever the error says.
        reason: Error in one line.
        text: Traceback of the error.
        peak_bytes: Peak memory until then [bytes]; None if unknown.
    """

    is_out_of_memory: bool
    is_memory_used_up: bool
    reason: str
    text: str
    peak_bytes: int | None

    @classmethod
    def of(cls, error: BaseException, *, is_out_of_memory: bool, peak_bytes: int | None, on_cpu: bool = True) -> Failed:
        """Return the message of an error that was just caught; a GPU's memory says nothing about the process."""
        return cls(
            is_out_of_memory=is_out_of_memory,
            is_memory_used_up=on_cpu and is_memory_used_up(),
            reason=describe_error(error),
            text=traceback.format_exc(),
            peak_bytes=peak_bytes,
        )


def describe_error(error: BaseException) -> str:
    """Return kind and first line of the root cause of an error, since libraries wrap errors in their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:500]
