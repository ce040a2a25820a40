"""Searches of a source's groups by a study that names one profile or another, none of which has seen the source.

Letters: n candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from benchmarks.support.peers import PEERS
from benchmarks.support.problems import Group, Problem, strange_setting
from benchmarks.support.searchers import AbstractSearcher, prior, run_trials, thompson, uniform
from benchmarks.support.trial_metrics import Trials
from costmodels.calibration.fidelity import by_setting
from costmodels.calibration.sources import source_of
from costmodels.job.runtime import UNKNOWN, RuntimeProfile
from costmodels.surrogates.uncertainty import WIDE
from hardware.arrays import FloatArray
from tuner.search.prior import initial_posterior
from tuner.search.step_draws import NOTABLE, StepDraws

RIGHT, ANOTHER, NONE = "right profile", "another", "unknown"
"""Whether a study names the profile of the group's own runtime, one of the others, or none (`runtime: unknown`)."""

OWN: Mapping[str, Callable[[Problem, int], AbstractSearcher]] = {"meshtune": thompson, "prior": prior}
"""Searchers that know the prediction of the named profile."""

BLIND: Mapping[str, Callable[[Problem, int], AbstractSearcher]] = {"random": uniform, **PEERS}
"""Searchers that know no prediction, so that the profile does not matter."""


RANKED_AFTER = 10
"""Number of trials after which the order of the untried candidates is judged."""

RANGES_AFTER = (4, 8)
"""Numbers of trials after which the ranges of the untried candidates are judged."""

NUM_DRAWS = 1_000
"""Draws of the untried, as in the answers of a study."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """Result of the searches of one group under one named profile.

    Attributes:
        trials: Trials of each search.
        ranking: Kendall's tau of the candidates that are untried after RANKED_AFTER trials of Meshtune: as predicted,
            and as believed after these trials; None for other searchers.
        ranges: Figures of the ranges of the untried, after each number of RANGES_AFTER that leaves some.
    """

    trials: list[Trials]
    ranking: tuple[float, float] | None
    ranges: Mapping[int, Mapping[str, float | None]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Search:
    """Searches of one group under one named profile: the work of one process.

    Attributes:
        group: Group to search.
        profiles: Profiles without the group's publisher, by name.
        named: Name of the profile that the study names.
        searcher: Name of the searcher, in OWN or BLIND.
        seeds: Number of searches.
        max_trials: Largest number of trials of each.
    """

    group: Group
    profiles: Mapping[str, RuntimeProfile]
    named: str
    searcher: str
    seeds: int
    max_trials: int

    @property
    def regime(self) -> str:
        """Line of the table that this search counts in."""
        if self.searcher in BLIND:
            return self.searcher
        is_right = self.named == source_of(self.group.runs[0]).runtime
        return f"{self.searcher}, {RIGHT if is_right else NONE if self.named == UNKNOWN else ANOTHER}"

    def run(self) -> Found:
        """Search the group once for each seed; the prior alone needs one search."""
        problem = strange_problem(self.group, self.profiles[self.named], tuple(self.profiles.values()))
        make = (OWN | BLIND)[self.searcher]
        seeds = 1 if self.searcher == "prior" else self.seeds
        times = self.group.step_time_s
        trials = [run_trials(make(problem, seed), self.group.outcomes, times, self.max_trials) for seed in range(seeds)]
        if self.searcher != "meshtune":
            return Found(trials=trials, ranking=None, ranges={})
        ranking, ranges = _judge_untried(problem, self.group)
        return Found(trials=trials, ranking=ranking, ranges=ranges)


def _judge_untried(problem: Problem, group: Group) -> tuple[tuple[float, float], dict[int, dict[str, float | None]]]:
    """Return Kendall's tau of the untried, as predicted and as believed after RANKED_AFTER trials, and their ranges."""
    searcher = thompson(problem, 0)
    rest = np.flatnonzero(np.isfinite(group.step_time_s))
    ranges: dict[int, dict[str, float | None]] = {}
    for number in range(1, min(RANKED_AFTER, len(group.runs)) + 1):
        position = searcher.ask()
        searcher.tell(position, group.outcomes[position])
        rest = rest[rest != position]
        if number in RANGES_AFTER and len(rest):
            rng = np.random.default_rng(0)
            drawn = problem.posterior.draw_steps_at(searcher.observations, rest, NUM_DRAWS, rng)
            ranges[number] = ranges_against(drawn, group.step_time_s[rest])
    everyone = np.arange(len(group.runs))
    believed = problem.posterior.expected(searcher.observations, everyone).log_step_s
    measured = group.step_time_s[rest]
    before, after = (float(kendalltau(values[rest], measured).statistic) for values in (problem.predicted_s, believed))
    return (before, after), ranges


def ranges_against(drawn: StepDraws, measured_s: FloatArray) -> dict[str, float | None]:
    """Return how the ranges of untried candidates hold against their measured step times [m].

    Returns:
        inside: Share inside its range.
        told: Mean chance to be slower than it, as told.
        slower: Share that is.
        slower_told: Share of these whose chance is notable, so that it is told; None without any.
        log_ratio: Median log of the upper end over the lower.
        whole_inside, whole_log_ratio: The same of one interval of 95% that has the outlying part in it.
    """
    ranges = drawn.ranges()
    low_s, high_s = (np.array([getattr(each, end) for each in ranges]) for end in ("low_s", "high_s"))
    chances = np.array([each.slower_probability for each in ranges])
    whole_low_s, whole_high_s = np.exp(np.quantile(drawn.log_step_s, [(1 - WIDE) / 2, (1 + WIDE) / 2], axis=0))
    is_slower = measured_s > high_s
    return {
        "inside": float(np.mean((low_s <= measured_s) & ~is_slower)),
        "told": float(chances.mean()),
        "slower": float(is_slower.mean()),
        "slower_told": float(np.mean(chances[is_slower] >= NOTABLE)) if is_slower.any() else None,
        "log_ratio": float(np.median(np.log(high_s / low_s))),
        "whole_inside": float(np.mean((whole_low_s <= measured_s) & (measured_s <= whole_high_s))),
        "whole_log_ratio": float(np.median(np.log(whole_high_s / whole_low_s))),
    }


def run_search(search: Search) -> Found:
    """Run a search in a worker process."""
    return search.run()


def searches_of(
    group: Group,
    profiles: Mapping[str, RuntimeProfile],
    *,
    named: Sequence[str],
    searchers: Sequence[str],
    seeds: int,
    max_trials: int,
) -> list[Search]:
    """Return the searches of a group: Meshtune and the prior under each named profile, and each other searcher once."""
    right = source_of(group.runs[0]).runtime

    def search(searcher: str, profile: str) -> Search:
        return Search(
            group=group, profiles=profiles, named=profile, searcher=searcher, seeds=seeds, max_trials=max_trials
        )

    under = dict.fromkeys([right, *named])
    own = [search(searcher, name) for searcher in searchers if searcher in OWN for name in under]
    return [*own, *(search(searcher, right) for searcher in searchers if searcher in BLIND)]


def strange_problem(group: Group, profile: RuntimeProfile, others: Sequence[RuntimeProfile]) -> Problem:
    """Return the tuning problem of a group for a study that names this profile, where the catalog has the others."""
    settings = [strange_setting(run, profile) for run in group.runs]
    parts = [(measured, np.array(at)) for measured, at in by_setting(settings).items()]
    return Problem(
        grid=group.grid,
        posterior=initial_posterior(parts, group.grid, other_profiles=others),
        runtime=profile.name,
        num_history=0,
        num_dropped=0,
    )
