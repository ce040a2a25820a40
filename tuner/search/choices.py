"""What a sampler chooses from: positions that stand for candidates, and joint draws of their step times.

Without knobs the positions are those of the grid of layouts. With knobs they number pairs of a layout and the values of
the knobs; see knobs/knob_choices.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, Value
from costmodels.surrogates.predicted import Predicted
from hardware.arrays import FloatArray, IntArray
from tuner.search.failures import FailureConclusion
from tuner.search.implied import ImpliedFailures
from tuner.search.observations import Observations
from tuner.search.parameters import distribution_of, named_values, params_of
from tuner.search.posterior import Posterior


class AbstractChoices(ABC):
    """Candidates of a search by their positions.

    Attributes:
        layouts: Grid of the layouts.
        search_space: Optuna distributions of a trial's parameters, by name.
        num_candidates: Number of candidates.
    """

    layouts: ConfigGrid
    search_space: Mapping[str, BaseDistribution]
    num_candidates: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of positions."""

    @abstractmethod
    def position_of(self, params: Mapping[str, Any]) -> int | None:
        """Return the position of the candidate that a trial's parameters name; None if they name none."""

    @abstractmethod
    def layout_of(self, position: int) -> int:
        """Return the position of a candidate's layout in the grid."""

    @property
    @abstractmethod
    def predicted(self) -> Predicted:
        """Predictions for the layouts."""

    @abstractmethod
    def config(self, position: int) -> ParallelConfig:
        """Return the configuration of a candidate."""

    @abstractmethod
    def values(self, position: int) -> dict[str, Any]:
        """Return the values that identify a candidate, by the names of trials' parameters."""

    @abstractmethod
    def draw(self, observations: Observations, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return joint draws of the log step time of the candidates [M, n]; infinite where one cannot run."""

    @abstractmethod
    def draw_steps(
        self, observations: Observations, positions: IntArray, num_draws: int, rng: np.random.Generator
    ) -> FloatArray:
        """Return joint draws of the log step time of a few candidates, as if each could run [M, m]."""

    @abstractmethod
    def trial_s(self) -> FloatArray:
        """Return the expected time of a trial of each candidate [n], or anything proportional to it."""

    @abstractmethod
    def shared_layouts(self, count: int) -> IntArray | None:
        """Return the layout of each of the first candidates [count]; None where each has its own."""

    @abstractmethod
    def implied(self, observations: Observations) -> frozenset[int]:
        """Return the candidates that cannot fit, since one that needs less memory by every account did not."""

    @abstractmethod
    def conclusions(self, observations: Observations) -> tuple[FailureConclusion, ...]:
        """Return conclusions from the failures of the trials, as sentences."""


class LayoutPositions:
    """Positions of the layouts of a grid, by the parameters of trials."""

    def __init__(self, layouts: ConfigGrid) -> None:
        self._dimensions = layouts.dimensions
        # a trial names its candidate by parameters, so positions are looked up by their values
        self._positions = {
            tuple(params_of(dict(zip(self._dimensions, key, strict=True))).values()): at
            for key, at in layouts.positions().items()
        }
        # dimensions in which all candidates agree need not be suggested
        columns = zip(self._dimensions, zip(*self._positions, strict=True), strict=True)
        self._constants = {name: values[0] for name, values in columns if len(set(values)) == 1}

    def position_of(self, params: Mapping[str, Any]) -> int | None:
        """Return the position of the layout that a trial's parameters name; None if they name none."""
        named = named_values(params, self._dimensions) if any(name in params for name in self._dimensions) else None
        if named is None:
            return None
        complete = {**self._constants, **named}
        if len(complete) < len(self._dimensions):
            return None
        return self._positions.get(tuple(params_of({name: complete[name] for name in self._dimensions}).values()))


class LayoutChoices(AbstractChoices):
    """Layouts of a grid as the candidates of a search.

    Args:
        layouts: Grid of the layouts [n].
        posterior: Posterior of the layouts.
    """

    def __init__(self, layouts: ConfigGrid, posterior: Posterior) -> None:
        self.layouts = layouts
        self.search_space = {name: distribution_of(name, layouts) for name in layouts.dimensions}
        self.num_candidates = len(layouts)
        self.posterior = posterior
        self._positions = LayoutPositions(layouts)
        self._failures = ImpliedFailures(layouts)

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self.layouts)

    def position_of(self, params: Mapping[str, Any]) -> int | None:
        """Return the position of the layout that a trial's parameters name; None if they name none.

        Dimensions in which all candidates agree may be missing.
        """
        return self._positions.position_of(params)

    def layout_of(self, position: int) -> int:
        """Return the position itself."""
        return position

    @property
    def predicted(self) -> Predicted:
        """Predictions for the layouts."""
        return self.posterior.predicted

    def config(self, position: int) -> ParallelConfig:
        """Return the configuration at a position of the grid."""
        return self.layouts.config(position)

    def values(self, position: int) -> dict[str, Value]:
        """Return the identifying dimensions of a layout with their values."""
        return self.layouts.values(position)

    def draw(self, observations: Observations, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return joint draws of the log step time of the layouts [M, n]; infinite where one cannot run."""
        return self.posterior.draw(observations, num_draws, rng)

    def draw_steps(
        self, observations: Observations, positions: IntArray, num_draws: int, rng: np.random.Generator
    ) -> FloatArray:
        """Return joint draws of the log step time of a few layouts, as if each could run [M, m]."""
        return self.posterior.draw_steps_at(observations, positions, num_draws, rng).log_step_s

    def trial_s(self) -> FloatArray:
        """Return the predicted step times [n]."""
        return self.posterior.predicted.step_time_s

    def shared_layouts(self, count: int) -> None:  # the contract's
        """Return None: each candidate is a layout of its own."""

    def implied(self, observations: Observations) -> frozenset[int]:
        """Return the layouts that cannot fit, since one that needs less memory by every account did not."""
        return self._failures.by(observations.misfits, observations.explored)

    def conclusions(self, observations: Observations) -> tuple[FailureConclusion, ...]:
        """Return conclusions from the failures of the trials, as sentences."""
        return self.posterior.conclusions(observations)
