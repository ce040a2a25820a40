"""Optimizers that update every element by itself: Adam and its relatives, SGD, Lion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodels.optimizers.contract import AbstractOptimizer, Part, State

FIRST = State(name="first_moment", width="first")
"""Running mean of gradients."""
SECOND = State(name="second_moment", width="second")
"""Running mean of squared gradients."""
MOMENTUM = State(name="momentum", width="first")

BLOCK = 256
"""Elements of an 8-bit state that share one float32 scale (bitsandbytes functional.py, blockwise; torchao
optim/subclass_8bit.py, block_size)."""


def eight_bit(name: str) -> State:
    """Return a state of one byte per element with a scale for each block (Dettmers et al. 2022, section 2)."""
    return State(name=name, width=1 + 4 / BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elementwise(AbstractOptimizer):
    """Optimizer whose fused update reads and writes each state once.

    Attributes:
        kept: States of every part.
        kept_instead: States of single parts where they differ.
        rereads: Bytes per parameter that the update moves beside gradient, weight and states.
    """

    kept: tuple[State, ...]
    kept_instead: Mapping[Part, tuple[State, ...]] = field(default_factory=dict)
    rereads: float = 0.0

    def states(self, part: Part) -> tuple[State, ...]:
        """Return the states that it keeps of a part."""
        return self.kept_instead.get(part, self.kept)

    def further_bytes(self, part: Part) -> float:  # noqa: ARG002 # alike for all
        """Return the bytes that it moves in further passes."""
        return self.rereads
