"""BoTorch as a peer: its default Gaussian process, choosing the candidate with the largest log expected improvement."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim.optimize import optimize_acqf_discrete
from botorch.utils.sampling import manual_seed
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch.quasirandom import SobolEngine

from benchmarks.support.points import FAILURE_SLOWDOWN, points_of
from benchmarks.support.problems import Problem
from benchmarks.support.searchers import AbstractSearcher
from trials.backend import Observation

NUM_START = 5
"""Number of quasi-random trials before the first model, as in Ax's default generation strategy."""


class BoTorchPeer(AbstractSearcher):
    """SingleTaskGP on the candidates' coordinates, refitted before each choice.

    All observations are passed anew each time, so that a failed trial is always reported relative to the slowest timed
    one.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._points = points_of(problem.grid)
        self._coordinates = torch.tensor(self._points.coordinates, dtype=torch.float64)
        self._start = SobolEngine(self._coordinates.shape[1], scramble=True, seed=seed)
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self._tried: dict[int, float | None] = {}

    def ask(self) -> int:
        """Return a quasi-random candidate at first, then the best by the acquisition function."""
        if len(self._tried) < NUM_START or not any(self._tried.values()):
            point = self._start.draw(1).double().numpy()[0]
            return self._points.nearest(point, set(self._tried), self._rng)
        left = [position for position in range(len(self._coordinates)) if position not in self._tried]
        with manual_seed(self._seed), warnings.catch_warnings():
            # fits that do not converge or see duplicates warn, which concerns BoTorch alone
            warnings.simplefilter("ignore")
            chosen, _ = optimize_acqf_discrete(self._acquisition(), q=1, choices=self._coordinates[left])
        (match,) = (self._coordinates[left] == chosen).all(dim=1).nonzero(as_tuple=True)
        return left[int(match[0])]

    def _acquisition(self) -> LogExpectedImprovement:
        # The model has no notion of failures, so a failed trial counts as a very slow one; the GP sees log times.
        slowest_s = max(seconds for seconds in self._tried.values() if seconds is not None)
        told = [seconds or FAILURE_SLOWDOWN * slowest_s for seconds in self._tried.values()]
        target = -torch.tensor(told, dtype=torch.float64).log().unsqueeze(-1)
        model = SingleTaskGP(self._coordinates[list(self._tried)], target, outcome_transform=Standardize(m=1))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return LogExpectedImprovement(model, best_f=target.max())

    def tell(self, position: int, outcome: Observation) -> None:
        """Store the step time, None for a failed trial."""
        self._tried[position] = outcome.step_time_s
