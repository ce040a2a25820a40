"""Empirical population S as data: the probability of each candidate to be the fastest (FlexParallel 3.2 and 4.3).

Each of the M draws of a decision names its fastest candidate. The share of draws that name a candidate is its
probability of being the best. A study keeps these shares before its first trial as its attribute `population:start`,
and after the end of each trial as that trial's attribute `population`. Figure 6 of the paper is drawn from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.trial import FrozenTrial

from costmodels.job.parallel_config import Value
from hardware.arrays import IntArray

P_STAR = "p_star"
"""Attribute of the study with p_star after the last finished trial, and of each trial with p_star after it.

Earlier versions kept the latter as study attributes `p_star:N`, and populations as `population:N`. A study reads all of
its attributes at once, so that each trial made every later one slower."""

POPULATION = "population"
"""Attribute of a trial with the population after its end."""

ENDED = "ended"
"""Attribute of a trial with the number of trials that had ended before it. Dates give no order where a clock was set
back."""

POPULATION_AT_START = "population:start"
"""Attribute of a study with the population before its first trial."""

MAX_SHARES = 30
"""Number of candidates kept of one population, the most probable ones; the rest is kept as a sum."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Population:
    """Empirical population S of one moment.

    Attributes:
        fastest: Fastest candidate of each draw in which one can run [at most M, or a multiple of M where the first M
            draws exceed the confidence].
        p_star: Share of these candidates that are explored (FlexParallel equation 6).
        log_step_s: Draws of the log step time [M, n], with a head start of the sampler's tolerance for explored
            candidates; infinite where a candidate cannot run.
    """

    fastest: IntArray
    p_star: float
    log_step_s: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Candidate that some draw names as the fastest.

    Attributes:
        config: Dimensions that identify the candidate.
        probability: Share of the draws that name it.
        tried: Whether a trial of it has ended.
    """

    config: dict[str, Value]
    probability: float
    tried: bool

    @property
    def key(self) -> tuple[Value, ...]:
        """Values that identify the candidate among those of its study."""
        return tuple(self.config.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Population of a study before its first trial, or after the end of one.

    Attributes:
        trial: Number of the trial that had just ended; None before the first.
        shares: Shares of the most probable candidates, the most probable one first.
        rest_tried: Sum of the shares of tried candidates that are not among them.
        rest_untried: Sum of the shares of the others that are not among them.
    """

    trial: int | None
    shares: tuple[Share, ...]
    rest_tried: float
    rest_untried: float

    @property
    def p_star(self) -> float:
        """Probability that the best candidate has been tried (FlexParallel equation 6)."""
        return math.fsum(share.probability for share in self.shares if share.tried) + self.rest_tried


def shares(
    fastest: IntArray, values_of: Callable[[int], dict[str, Any]], explored: Collection[int]
) -> tuple[Share, ...]:
    """Return the candidates that the draws name, the most probable first; equals stand in the order of positions.

    Args:
        fastest: Position of each draw's fastest candidate [M].
        values_of: Function that returns the values that identify the candidate at a position.
        explored: Positions of candidates that were tried.
    """
    # a stable sort keeps equals in the order of their positions
    positions, counts = np.unique(fastest, return_counts=True)
    return tuple(
        Share(
            config=values_of(int(positions[at])),
            probability=int(counts[at]) / len(fastest),
            tried=int(positions[at]) in explored,
        )
        for at in np.argsort(-counts, kind="stable")
    )


def as_json(found: Sequence[Share]) -> dict[str, Any]:
    """Return the value of the attribute: at most MAX_SHARES candidates, and the sums over the others."""
    kept, rest = found[:MAX_SHARES], found[MAX_SHARES:]
    return {
        "dimensions": list(found[0].config) if found else [],
        "shares": [[*share.key, share.probability, share.tried] for share in kept],
        "rest_tried": math.fsum(share.probability for share in rest if share.tried),
        "rest_untried": math.fsum(share.probability for share in rest if not share.tried),
    }


def from_json(trial: int | None, stored: Mapping[str, Any]) -> Moment:
    """Return the moment that `as_json` wrote."""
    return Moment(
        trial=trial,
        shares=tuple(
            Share(config=dict(zip(stored["dimensions"], key, strict=True)), probability=probability, tried=tried)
            for *key, probability, tried in stored["shares"]
        ),
        rest_tried=stored["rest_tried"],
        rest_untried=stored["rest_untried"],
    )


def end_order(trial: FrozenTrial) -> tuple[int, float, int]:
    """Return a key that sorts trials by their ends; trials without the attribute come first, by their dates."""
    date = trial.datetime_complete
    return trial.user_attrs.get(ENDED, -1), math.inf if date is None else date.timestamp(), trial.number


def read_moments(study: Study) -> tuple[Moment, ...]:
    """Return the populations that the study holds: before any trial, then in the order in which the trials ended.

    A trial that has not ended may have left one behind, if its driver died just then; it does not count.
    """
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.datetime_complete is not None]
    ended.sort(key=end_order)
    attributes = study.user_attrs
    start: list[tuple[int | None, Any]] = [(None, attributes.get(POPULATION_AT_START))]
    after = [(t.number, t.user_attrs.get(POPULATION, attributes.get(f"{POPULATION}:{t.number}"))) for t in ended]
    return tuple(from_json(number, stored) for number, stored in [*start, *after] if stored is not None)


def in_lines(moment: Moment, when: str, in_words: Callable[[Mapping[str, Value]], str], *, top: int = 5) -> list[str]:
    """Return lines for a terminal: the `top` most probable candidates and the sum over the others.

    Args:
        moment: Population to print.
        when: When that was, in words.
        in_words: Function that writes a candidate.
        top: Number of candidates that get a line of their own.
    """
    if not moment.shares:
        return []  # no draw has a candidate that can run
    others = math.fsum(share.probability for share in moment.shares[top:]) + moment.rest_tried + moment.rest_untried
    return [
        f"Probability of being the fastest, {when}:",
        *(
            f"  {share.probability:6.1%}  {in_words(share.config)}{'' if share.tried else '  (not tried yet)'}"
            for share in moment.shares[:top]
        ),
        *([f"  {others:6.1%}  all others"] if others else []),
    ]
