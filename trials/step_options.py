"""Options of measuring steps, which the backends that train by themselves share."""

from __future__ import annotations

from dataclasses import dataclass

from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """Options of measuring, which a study chooses and every process of a trial follows.

    Attributes:
        seed: Seed of weights and data.
        warmup_steps: Number of steps before the first measured one.
        min_steps: Smallest number of measured steps.
        max_steps: Largest number of measured steps.
        precision: Relative standard error of the median below which measuring ends.
    """

    seed: int = 0
    warmup_steps: int = 2
    min_steps: int = 5
    max_steps: int = 20
    precision: float = 0.02

    @property
    def fixed_steps(self) -> int | None:
        """Number of measured steps if it is fixed; None if it depends on the precision."""
        return self.max_steps if self.min_steps == self.max_steps else None


def check_numbers_of_steps(min_steps: int, max_steps: int) -> None:
    """Check that the study's largest number of measured steps is not below its smallest.

    Raises:
        ConfigError: It is.
    """
    if max_steps < min_steps:
        raise ConfigError(f"must be at least min_steps, which is {min_steps}", key="trial.max_steps", value=max_steps)
