"""General-purpose optimizers on pairs of a layout and knobs.

A layout is a point of the box of `points.py`, and the knobs are parameters of their own: categories, or levels of
ordered values. A proposal whose layout is none, or whose pair was tried before, becomes that of the nearest layout,
with the values that are proposed for the knobs. Failures are reported as in `peers.py`. Peers know no prediction.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from benchmarks.support.knob_worlds import KnobProblem
from benchmarks.support.points import FAILURE_SLOWDOWN, points_of
from costmodels.job.parallel_config import ParallelConfig
from trials.backend import Observation

NUM_START = 8
"""Random pairs before BoTorch's first model."""

NUM_SCORED = 2000
"""Random pairs that BoTorch's acquisition function scores for each choice, beside the neighbours of the best ones."""


class AbstractKnobPeer(ABC):
    """Optimizer over the levels of layouts and knobs: `ask` and `tell` are called in turns."""

    def __init__(self, problem: KnobProblem, seed: int) -> None:
        self.problem = problem
        self.points = points_of(problem.grid)
        self.rng = np.random.default_rng(seed)
        self.sizes = {name: len(values) for name, values in zip(self.points.names, self.points.values, strict=True)}
        self.knobs = {knob.name: knob for knob in problem.space.knobs}
        self.tried: dict[tuple[int, tuple[int, ...]], float | None] = {}

    @abstractmethod
    def propose(self) -> dict[str, int]:
        """Return the level of each dimension and knob."""

    @abstractmethod
    def learn(self, levels: dict[str, int], log_step_s: float) -> None:
        """Learn the logarithm of the step time of the pair with these levels."""

    def ask(self) -> tuple[int, ParallelConfig]:
        """Return an untried pair: the position of its layout, and its configuration."""
        levels = self.propose()
        closed: set[int] = set()
        codes = [levels[name] for name in self.knobs]
        while True:
            layout = self.points.nearest(self.points.at({name: levels[name] for name in self.sizes}), closed, self.rng)
            pair = layout, self.problem.space.canonical(layout, codes)
            if pair not in self.tried:
                break
            closed.add(layout)
        self._asked = pair
        values = self.problem.space.values_of(pair[1])
        return layout, replace(self.problem.grid.config(layout), knobs=tuple(values.items()))

    def tell(self, outcome: Observation) -> None:
        """Learn the outcome of the pair that was asked for."""
        self.tried[self._asked] = outcome.step_time_s
        timed = [seconds for seconds in self.tried.values() if seconds is not None]
        if not timed:
            return
        seconds = outcome.step_time_s or FAILURE_SLOWDOWN * max(timed)
        layout, codes = self._asked
        self.learn(self.points.levels_of(layout) | dict(zip(self.knobs, codes, strict=True)), math.log(seconds))


class OptunaKnobPeer(AbstractKnobPeer):
    """Optuna sampler: a whole number for each dimension and each ordered knob, a category for each other knob."""

    def __init__(self, problem: KnobProblem, seed: int, sampler: BaseSampler) -> None:
        super().__init__(problem, seed)
        self.study = optuna.create_study(sampler=sampler)
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, size - 1) for name, size in self.sizes.items()
        }
        for name, knob in self.knobs.items():
            levels = range(len(knob.values))
            self.distributions[name] = (
                IntDistribution(0, levels[-1]) if knob.is_ordered else CategoricalDistribution(tuple(levels))
            )

    def propose(self) -> dict[str, int]:
        """Return what the sampler proposes."""
        trial = self.study.ask(fixed_distributions=self.distributions)
        self.study.tell(trial, state=TrialState.FAIL)  # its result enters at the pair that was really tried
        return dict(trial.params)

    def learn(self, levels: dict[str, int], log_step_s: float) -> None:
        """Add the result as a trial of its own."""
        self.study.add_trial(
            optuna.trial.create_trial(params=levels, distributions=self.distributions, value=log_step_s)
        )


class BoTorchKnobPeer(AbstractKnobPeer):
    """BoTorch's default Gaussian process with log expected improvement.

    It is scored over random pairs and the neighbours of the best ones.

    Dimensions and ordered knobs are coordinates from 0 to 1, other knobs are one-hot.
    """

    def __init__(self, problem: KnobProblem, seed: int) -> None:
        super().__init__(problem, seed)
        self.seed = seed
        self.known: list[tuple[list[float], float]] = []

    def propose(self) -> dict[str, int]:
        """Return a random pair at first, then the one with the largest acquisition value."""
        if len(self.known) < NUM_START:
            return self._random()
        import torch  # noqa: PLC0415 # optional, and slow to load
        from botorch.acquisition.analytic import LogExpectedImprovement  # noqa: PLC0415 # as above
        from botorch.fit import fit_gpytorch_mll  # noqa: PLC0415 # as above
        from botorch.models import SingleTaskGP  # noqa: PLC0415 # as above
        from botorch.models.transforms import Standardize  # noqa: PLC0415 # as above
        from botorch.utils.sampling import manual_seed  # noqa: PLC0415 # as above
        from gpytorch.mlls import ExactMarginalLogLikelihood  # noqa: PLC0415 # as above

        torch.set_num_threads(1)
        inputs = torch.tensor([point for point, _ in self.known], dtype=torch.float64)
        target = -torch.tensor([[value] for _, value in self.known], dtype=torch.float64)
        scored = [self._random() for _ in range(NUM_SCORED)]
        for layout, codes in sorted(self.tried, key=lambda pair: self.tried[pair] or math.inf)[:3]:
            best = self.points.levels_of(layout) | dict(zip(self.knobs, codes, strict=True))
            scored += [best | {name: other[name]} for other in scored[:200] for name in (*self.sizes, *self.knobs)]
        with manual_seed(self.seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fits that do not converge warn, which concerns BoTorch alone
            model = SingleTaskGP(inputs, target, outcome_transform=Standardize(m=1))
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
            improvement = LogExpectedImprovement(model, best_f=target.max())
            with torch.no_grad():
                values = improvement(torch.tensor([self._at(one) for one in scored], dtype=torch.float64)[:, None, :])
        return scored[int(values.argmax())]

    def learn(self, levels: dict[str, int], log_step_s: float) -> None:
        """Keep the result for the next model."""
        self.known.append((self._at(levels), log_step_s))

    def _random(self) -> dict[str, int]:
        layout = int(self.rng.integers(len(self.problem.grid)))
        codes = {name: int(self.rng.integers(len(knob.values))) for name, knob in self.knobs.items()}
        return self.points.levels_of(layout) | codes

    def _at(self, levels: dict[str, int]) -> list[float]:
        found = self.points.at({name: levels[name] for name in self.sizes}).tolist()
        for name, knob in self.knobs.items():
            if knob.is_ordered:
                found.append(levels[name] / (len(knob.values) - 1))
            else:
                found += [float(levels[name] == code) for code in range(len(knob.values))]
        return found


class SmacKnobPeer(AbstractKnobPeer):
    """SMAC3's facade for hyperparameters: a random forest with log expected improvement, and a Sobol start."""

    def __init__(self, problem: KnobProblem, seed: int) -> None:
        super().__init__(problem, seed)
        import logging  # noqa: PLC0415 # SMAC logs at its import

        logging.disable(logging.WARNING)
        from ConfigSpace import Categorical, ConfigurationSpace, Integer  # noqa: PLC0415 # optional
        from smac import HyperparameterOptimizationFacade, Scenario  # noqa: PLC0415 # optional

        space = ConfigurationSpace(seed=seed)
        space.add([Integer(name, (0, size - 1)) for name, size in self.sizes.items() if size > 1])
        for name, knob in self.knobs.items():
            levels = range(len(knob.values))
            space.add(Integer(name, (0, levels[-1])) if knob.is_ordered else Categorical(name, list(levels)))
        self.folder = tempfile.TemporaryDirectory()
        scenario = Scenario(
            space, deterministic=True, n_trials=10_000, seed=seed, output_directory=Path(self.folder.name)
        )
        self.space = space
        self.facade = HyperparameterOptimizationFacade(
            scenario,
            lambda config, seed: 0.0,  # noqa: ARG005 # trials are asked for and told
            initial_design=HyperparameterOptimizationFacade.get_initial_design(scenario, n_configs=10),
            overwrite=True,
            logging_level=False,
        )

    def propose(self) -> dict[str, int]:
        """Return what SMAC proposes."""
        self.info = self.facade.ask()
        return {name: int(value) for name, value in dict(self.info.config).items()}

    def learn(self, levels: dict[str, int], log_step_s: float) -> None:
        """Tell the result at the pair that was really tried."""
        from ConfigSpace import Configuration  # noqa: PLC0415 # optional
        from smac.runhistory.dataclasses import TrialInfo, TrialValue  # noqa: PLC0415 # optional

        config = Configuration(self.space, values=levels)
        self.facade.tell(TrialInfo(config=config, seed=self.info.seed), TrialValue(cost=log_step_s), save=False)


KNOB_PEERS: dict[str, Callable[[KnobProblem, int], AbstractKnobPeer]] = {
    "random": lambda problem, seed: OptunaKnobPeer(problem, seed, RandomSampler(seed=seed)),
    "tpe": lambda problem, seed: OptunaKnobPeer(problem, seed, TPESampler(seed=seed, multivariate=True)),
    "gp": lambda problem, seed: OptunaKnobPeer(problem, seed, GPSampler(seed=seed)),
    "botorch": BoTorchKnobPeer,
    "smac": SmacKnobPeer,
}

NEEDS = {"gp": ("torch",), "botorch": ("torch", "botorch"), "smac": ("smac",)}
"""Modules that a peer needs beyond Meshtune's own."""


def missing(name: str) -> list[str]:
    """Return the modules that a peer needs and that are not here."""
    return [module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
