"""Acquisition functions: choices of the next candidate from joint draws of all step times.

Letters: M draws, n candidates. Every acquisition function sees the draws as the logarithm of the step time [M, n]. A
candidate that cannot run in a draw is infinite there; one that has failed is infinite in all draws.

A candidate is closed if it was tried, cannot run, or is pending. No acquisition function names a closed candidate while
an open one is left. When none is left, all count as open, and the fastest ones are measured again.

Trials that run side by side are asked for one after the other, each with those before it pending, hence closed. The
two functions that pick at random spread such a batch over the likely candidates. The two that maximize a score take its
next best candidates, often neighbours, since the pending trials have taught them nothing yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray, IntArray

LogDraws = NDArray[np.float32] | NDArray[np.float64]
"""Draws of the logarithm of the step time [M, n], infinite where a candidate cannot run."""

UNMEASURED = 1.5
"""Slowdown that a search counts as long as nothing has been measured: the price of a first trial that fails. First
trials of published sweeps have the least regret from 1.25 to 2, and fail below (docs/decisions.md)."""

SHARPNESS = 3
"""Power of the odds to run that price a candidate's gain: a trial that fails takes a slot and teaches little. Without
a price, a large gain at a chance of 5% is worth a trial again and again, and a search that is almost over makes no
others. A power of the chance itself would also spare what probably runs (chosen by hand; see docs/decisions.md)."""

LIKELY_TO_RUN = 0.5
"""Share of the draws in which a candidate must run for its spread to mean anything; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outlook:
    """Input of a decision.

    Attributes:
        log_step_s: Joint draws of the log step time [M, n].
        allowed: Candidates to choose from [n]; there is at least one, and each runs in some draw.
        best_s: Fastest measured step time [s]; None while nothing has been measured.
        trial_s: Expected time of a trial of each candidate [n], or anything proportional to it.
        layout: Layout of each candidate, where several have the same with other knobs [n]; None where each is its own.
    """

    log_step_s: LogDraws
    allowed: NDArray[np.bool_]
    best_s: float | None
    trial_s: FloatArray
    layout: IntArray | None = None

    def fastest_allowed(self) -> IntArray:
        """Return the fastest allowed candidate of each draw in which one of them runs [at most M]."""
        drawn = np.where(self.allowed, self.log_step_s, np.float32(np.inf))
        named: IntArray = np.argmin(drawn, axis=1).astype(np.int64)
        return named[np.isfinite(drawn[np.arange(len(drawn)), named])]


class AbstractAcquisition(ABC):
    """Acquisition function, which chooses the next candidate.

    The tests of the contract stand in tests/unit/tuner/search/test_acquisition.py.
    """

    def choose(
        self,
        log_step_s: LogDraws,
        *,
        closed: NDArray[np.bool_],
        best_s: float | None,
        trial_s: FloatArray,
        rng: np.random.Generator,
        layout: IntArray | None = None,
    ) -> int:
        """Return the position of the next candidate; equal arguments and an equal state of `rng` give the same one.

        Args:
            log_step_s: Joint draws of the log step time [M, n].
            closed: Candidates that should not be named [n].
            best_s: Fastest measured step time [s]; None while nothing has been measured.
            trial_s: Expected time of a trial of each candidate [n], or anything proportional to it.
            rng: Source of chance; consumed.
            layout: Layout of each candidate [n]; None where each is its own.
        """
        allowed = ~closed if not closed.all() else np.ones_like(closed)
        runs_somewhere = allowed & np.isfinite(log_step_s).any(axis=0)
        if not runs_somewhere.any():  # every draw says that nothing which is left can run, and a draw may err
            return int(rng.choice(np.flatnonzero(allowed)))
        outlook = Outlook(log_step_s=log_step_s, allowed=runs_somewhere, best_s=best_s, trial_s=trial_s, layout=layout)
        return self._choose(outlook, rng)

    @abstractmethod
    def _choose(self, outlook: Outlook, rng: np.random.Generator) -> int:
        """Return the position of one of the outlook's allowed candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnexploredDraws(AbstractAcquisition):
    """Uniform choice over the draws whose fastest candidate is open (FlexParallel 3.2).

    Candidates are chosen in proportion to their probability of being the best, and explored ones are passed over. If
    every draw names a closed candidate, this is `PlainThompson`.
    """

    def _choose(self, outlook: Outlook, rng: np.random.Generator) -> int:
        # drawing uniformly from the named candidates weighs each by its probability of being the best
        fastest = np.argmin(outlook.log_step_s, axis=1)
        runs = np.isfinite(outlook.log_step_s[np.arange(len(fastest)), fastest])
        named = fastest[outlook.allowed[fastest] & runs]
        return int(rng.choice(named if len(named) else outlook.fastest_allowed()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedLoss(AbstractAcquisition):
    """Choice of the candidate after whose trial the search would lose least if it ended; the default.

    The loss of a draw is the log slowdown of the fastest candidate tried against the draw's fastest, averaged over the
    draws. A candidate that cannot run in a draw leaves the loss as it was, and its gain in others is priced by its
    chance to run, whose odds are raised to the power of SHARPNESS. Pending candidates count as tried, so that trials
    that run side by side do not chase the same gain. While no candidate that was tried runs, the loss is that of
    UNMEASURED. If no candidate lessens the loss, this is `UnexploredDraws`.

    It is the expected improvement of the logarithm (Jones et al. 1998) over joint draws in place of a normal
    distribution, in batches as in Ginsbourger et al. 2010.

    Where candidates share a layout, a trial of one teaches what the others' knobs do. So the layout is chosen first, by
    the gain of its best knobs in each draw, and then the knobs that gain most on average.
    """

    def _choose(self, outlook: Outlook, rng: np.random.Generator) -> int:
        drawn = outlook.log_step_s
        fastest = drawn.min(axis=1)
        tried = np.min(drawn, axis=1, where=~outlook.allowed, initial=np.inf)
        # draws in which nothing runs at all have nothing to lose
        at_worst = np.where(np.isfinite(fastest), fastest + np.float32(np.log(UNMEASURED)), -np.inf)
        incumbent = np.where(np.isfinite(tried), tried, at_worst)
        # the draw's fastest step is the same whatever is tried, so the least loss is the largest gain
        runs = np.isfinite(drawn).mean(axis=0) ** SHARPNESS
        fails = np.isinf(drawn).mean(axis=0) ** SHARPNESS
        gains = np.maximum(incumbent[:, None] - drawn, 0.0) * (runs / (runs + fails))
        if outlook.layout is not None:
            return self._choose_pair(np.where(outlook.allowed, gains, 0.0), outlook, outlook.layout, rng)
        gain = gains.mean(axis=0)
        best = int(np.argmax(np.where(outlook.allowed, gain, -1.0)))
        return best if gain[best] > 0 else UnexploredDraws()._choose(outlook, rng)

    def _choose_pair(self, gains: FloatArray, outlook: Outlook, layout: IntArray, rng: np.random.Generator) -> int:
        """Return the choice among candidates that share layouts, from their gains in each draw [M, n]."""
        layouts, inverse = np.unique(layout, return_inverse=True)
        by_layout = np.zeros((len(layouts), len(gains)))
        np.maximum.at(by_layout, inverse, gains.T)
        gain = by_layout.mean(axis=1)
        best = int(np.argmax(gain))
        if gain[best] <= 0:
            return UnexploredDraws()._choose(outlook, rng)
        return int(np.argmax(np.where(inverse == best, gains.mean(axis=0), -1.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainThompson(AbstractAcquisition):
    """Choice of one draw's fastest open candidate (Russo et al. 2018; FlexParallel equation 4).

    The textbook's sampler runs the draw's argmin even if it was tried before, which earns reward and teaches little. A
    trial here costs a restart, so a draw that names a closed candidate gives its next best instead. Late in a study
    most draws do, and the choice goes to the runners-up of the explored candidates.
    """

    def _choose(self, outlook: Outlook, rng: np.random.Generator) -> int:
        return int(rng.choice(outlook.fastest_allowed()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfidenceBound(AbstractAcquisition):
    """Choice of the lowest mean - beta * standard deviation over the draws (FlexParallel equation 3; Auer 2002).

    The bound is taken on the logarithm, where draws are close to normal: it is then a quantile, and never a negative
    time. Mean and deviation are those of the draws in which the candidate runs. Candidates that run in less than half
    of the draws come after all others.

    Attributes:
        beta: Number of deviations below the mean; 2 is the 2.3% quantile.
    """

    beta: float = 2.0

    def _choose(self, outlook: Outlook, rng: np.random.Generator) -> int:  # noqa: ARG002 # the bound leaves nothing to chance
        positions = np.flatnonzero(outlook.allowed)
        finite = np.isfinite(outlook.log_step_s)
        runs = finite.mean(axis=0)[positions]
        # candidates that rarely run have a spread of few draws, which says nothing
        positions = positions[runs >= min(LIKELY_TO_RUN, float(runs.max()))]
        drawn, runs_there = outlook.log_step_s[:, positions], finite[:, positions]
        bound = drawn.mean(axis=0, where=runs_there) - self.beta * drawn.std(axis=0, where=runs_there)
        return int(positions[np.argmin(bound)])


@dataclass(frozen=True, kw_only=True, slots=True)
class ImprovementPerSecond(AbstractAcquisition):
    """Choice of the largest expected improvement per second of trial (Snoek et al. 2012, section 3.2).

    The improvement over the fastest measured step is averaged over the draws, without the normal distribution of the
    textbook; a candidate improves nothing in draws where it cannot run. While nothing has been measured, the median of
    the draws' fastest steps stands in for the best. If no draw improves on the best, this is `PlainThompson`.
    """

    def _choose(self, outlook: Outlook, rng: np.random.Generator) -> int:
        reference_s = outlook.best_s
        if reference_s is None:
            fastest = outlook.log_step_s.min(axis=1)
            reference_s = float(np.exp(np.median(fastest[np.isfinite(fastest)])))
        # expected improvement over the draws; exp(inf) improves nothing
        improvement_s = np.maximum(reference_s - np.exp(outlook.log_step_s), 0).mean(axis=0)
        per_second = np.where(outlook.allowed, improvement_s / outlook.trial_s, 0.0)
        best = int(np.argmax(per_second))
        return best if per_second[best] > 0 else int(rng.choice(outlook.fastest_allowed()))


ACQUISITION_FUNCTIONS: Mapping[str, AbstractAcquisition] = MappingProxyType(
    {
        "expected_loss": ExpectedLoss(),
        "draws": UnexploredDraws(),
        "thompson": PlainThompson(),
        "ucb": ConfidenceBound(),
        "ei_per_second": ImprovementPerSecond(),
    }
)
"""Acquisition functions by the names that a study's `search.acquisition` takes."""

DEFAULT = "expected_loss"
"""Name of the acquisition function of a study that names none."""
