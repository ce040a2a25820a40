"""What is fuzzed: a reader of the program, from the bytes of an input, and what counts as a defect of it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from hardware.io.errors import ConfigError
from tests.fuzz.mutation import Mutation, of_bytes

LONGEST_MESSAGE = 4_000
"""Characters of a message about a mistake, whatever megabytes it is about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One kind of input.

    Attributes:
        name: Of the kind.
        read: Reads an input as the program does; in this folder it may write, and find what it wrote before.
        mutation: How inputs are changed.
        seeds: Good inputs, of which others are made.
        refusals: The errors by which an input may be refused.
    """

    name: str
    read: Callable[[bytes, Path], object]
    mutation: Mutation
    seeds: Callable[[], tuple[bytes, ...]]
    refusals: tuple[type[Exception], ...] = (ConfigError,)

    def pick_mutation(self, rng: Random) -> Mutation:
        """The change of its form or, one time in five, of its bytes."""
        return of_bytes if rng.random() < 0.2 else self.mutation


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """What is wrong with how an input was answered.

    Attributes:
        kind: The exception, or what else; with the line of ours it comes from, so that equal ones count once.
        text: All that is known of it.
    """

    kind: str
    text: str


def defect_of(target: Target, data: bytes, folder: Path) -> tuple[bool, Defect | None]:
    """Reads one input; whether it was accepted, and what is wrong."""
    try:
        target.read(data, folder)
    except target.refusals as error:
        message = str(error)
        if len(message) > LONGEST_MESSAGE:
            return False, Defect(kind=f"long message: {_without_values(message)[:80]}", text=message)
        return False, None
    except Exception as error:  # noqa: BLE001 # every other exception is a defect
        return False, Defect(kind=f"{type(error).__name__} {_place_of(error)}", text=traceback.format_exc())
    return True, None


def _without_values(message: str) -> str:
    return re.sub(r"[^A-Za-z ]+.*?[^A-Za-z ]+", "*", message)


def _place_of(error: BaseException) -> str:
    """The innermost line of ours."""
    root = Path(__file__).parents[2]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if Path(frame.filename).is_relative_to(root) and not Path(frame.filename).is_relative_to(root / "tests")
    ]
    last = (ours or frames)[-1]
    name = Path(last.filename)
    return f"{name.relative_to(root) if name.is_relative_to(root) else name.name}:{last.lineno}"
