"""Judge Meshtune on clusters and frameworks that it has never seen: leave out one source of measured runs at a time.

    python -m benchmarks.strangers [--measured A.csv ...] [--seeds N] [--cache DIR] [--json]
    python -m benchmarks.strangers --predict [--peers DIR] [--cache DIR] [--json]

For each publisher of runs, whatever was fitted to its runs is fitted again without them (left_out.py). Its sources are
then (a) predicted with the profile of their own runtime: errors, order within groups, and the share of the runs inside
the stated intervals, for memory and for step times, under the error models of all other publishers (errors.py); and (b)
tuned: each group of at least --min-candidates candidates is searched by a study that names the right profile, by
studies that name each of the other profiles, and by one that names none (`runtime: unknown`). Searches end as in
benchmarks.search.sample_efficiency. `NAME_failed.csv` beside `NAME.csv` is read too. The constants of the search
(costmodels/catalog/search.yaml) are the catalog's.

Lines of the second table: Meshtune and its prior alone (candidates in the order of their predicted time) with the right
profile, with another, pooled over all others, and with none; random search, and the optimizers of
benchmarks/support/peers.py, which know no prediction.

Fits use the runs of the given files alone. Without --measured these are all of configs/measured/runs; --sources picks
the publishers to leave out. With few publishers the error models are those of the catalog. --cache keeps fitted
profiles between calls. --predict leaves the searches (b) out.

--peers DIR predicts the same runs with the cost models of other projects too, Calculon and llm-analysis, whose clones
DIR holds. None of them is fitted to anything here: they have their own tables of efficiencies, or those that their
documentation names, and the hosts and adapters of each run. Each is judged beside Meshtune on the runs that it can
express, and all on those that all can (beside.py); calculon.py and llm_analysis.py say how runs are put in their words.
They state no intervals. Psutil and fire have to be installed.

Progress goes to stderr; exit status 2 reports a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.strangers.beside import PEERS_HELP, compare, load_models, print_beside
from benchmarks.strangers.errors import FEWEST_PUBLISHERS, fit_errors, write_accuracy, write_errors
from benchmarks.strangers.left_out import CACHE_HELP, profiles_without
from benchmarks.strangers.predicting import Stranger, predict_stranger
from benchmarks.strangers.tables import FEWEST_ROWS, mean, over_sources, print_predicted, shown
from benchmarks.strangers.tuning import BLIND, OWN, RANGES_AFTER, RANKED_AFTER, Found, Search, run_search, searches_of
from benchmarks.support.peers import missing
from benchmarks.support.problems import Group, groups_of, read_runs
from benchmarks.support.search_figures import figures_of_group, figures_over_groups, finite, print_searches
from benchmarks.support.timing import answer, count_at_least, searching, tell
from benchmarks.support.trial_metrics import Trials
from benchmarks.support.workers import mapper
from costmodels.calibration.fidelity import GROUP
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import publisher_of, source_of
from costmodels.job.runtime import comparable_names
from hardware.io.errors import ConfigError, did_you_mean

SEARCHERS = ("meshtune", "prior", "random", "tpe", "gp", "botorch")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    return answer("strangers", _arguments(argv), _measure, _print)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = searching("strangers", __doc__)
    parser.add_argument("--searchers", default=",".join(SEARCHERS), help=f"comma-separated ({','.join(SEARCHERS)})")
    parser.add_argument("--profiles", help="comma-separated other profiles that a study names (all of the catalog)")
    parser.add_argument("--seeds", type=count_at_least(1), default=5, help="searches under each profile (5)")
    parser.add_argument(
        "--min-candidates", type=count_at_least(2), default=20, help="leave out groups with fewer candidates (20)"
    )
    parser.add_argument("--trials", type=count_at_least(1), default=100, help="largest number of trials (100)")
    parser.add_argument("--sources", help="comma-separated publishers to leave out, one at a time (all)")
    parser.add_argument("--predict", action="store_true", help="only predict, without searches")
    parser.add_argument("--peers", type=Path, metavar="DIR", help=PEERS_HELP)
    parser.add_argument(
        "--write", action="store_true", help="write error models and the errors of all sources into the catalog"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help=CACHE_HELP)
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute all figures.

    Raises:
        ConfigError: The arguments cannot be used.
    """
    searchers = _names(given.searchers, (*OWN, *BLIND), "--searchers", "is no searcher")
    unavailable = {name: reason for name in searchers if (reason := missing(name)) is not None}
    searchers = [name for name in searchers if name not in unavailable]
    named = _names(
        given.profiles or ",".join(comparable_names()), comparable_names(), "--profiles", "is no runtime profile"
    )
    peers = load_models(given.peers) if given.peers else []
    runs, skipped = read_runs(given.measured)
    by_publisher: dict[str, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        by_publisher[publisher_of(run.source)].append(run)
    publishers = sorted(by_publisher)
    if given.sources:
        publishers = _names(given.sources, publishers, "--sources", "published none of these runs")
    if given.write and (given.sources or len(publishers) < FEWEST_PUBLISHERS):
        raise ConfigError(f"needs all publishers, and at least {FEWEST_PUBLISHERS} of them", key="--write")
    groups, left_out = ([], Counter[str]()) if given.predict else groups_of(runs, given.min_candidates)
    of_publisher: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        of_publisher[publisher_of(group.runs[0].source)].append(group)
    with mapper(given.workers) as each:
        profiles = profiles_without(publishers, runs, given.cache, each)
        tell("predicting their runs")
        strangers = [Stranger(runs=tuple(by_publisher[name]), profiles=profiles[name]) for name in publishers]
        predictions = dict(zip(publishers, each(predict_stranger, strangers), strict=True))
        errors = {publisher: found.errors for publisher, found in predictions.items()}
        models = {name: fit_errors({key: own for key, own in errors.items() if key != name}) for name in publishers}
        predicted = [
            (source, figures)
            for publisher in publishers
            for source in sorted({run.source for run in by_publisher[publisher]})
            if (figures := predictions[publisher].figures_of(source, models[publisher])) is not None
        ]
        of_all = fit_errors(errors)
        if given.write:
            write_errors(of_all)
            write_accuracy(predicted)
        beside = compare(peers, predictions, models) if peers else None
        searches = [
            search
            for publisher in publishers
            for group in of_publisher[publisher]
            for search in searches_of(
                group, profiles[publisher], named=named, searchers=searchers, seeds=given.seeds, max_trials=given.trials
            )
        ]
        if searches:
            tell(f"{len(searches):,} searches of {len(groups):,} groups")
        found: dict[int, list[tuple[Search, Found]]] = defaultdict(list)
        for number, (search, result) in enumerate(zip(searches, each(run_search, searches), strict=True), start=1):
            found[id(search.group)].append((search, result))
            if number == len(searches) or searches[number].group is not search.group:
                tell(f"{number:,} of {len(searches):,} searches: {' '.join(map(str, search.group.key[:4]))}")
    tuned = [_tuned(group, found[id(group)]) for publisher in publishers for group in of_publisher[publisher]]
    return {
        "predicted": [{"source": source, **figures} for source, figures in predicted],
        "error_models": of_all.model_dump(),
        "predicted_overall": over_sources([figures for _, figures in predicted]),
        "predicted_by_tuning": {
            who: over_sources([figures for _, figures in predicted if figures["tuned_by"] == who])
            for who in ("vendor", "user")
        },
        **({"beside": beside} if beside else {}),
        "tuned": tuned,
        "tuned_by_source": {
            source: _over_groups([entry for entry in tuned if entry["source"] == source])
            for source in sorted({str(entry["source"]) for entry in tuned})
        },
        "tuned_overall": _over_groups(tuned),
        "skipped": dict(skipped + left_out),
        "settings": {
            "measured": [str(path) for path in given.measured],
            "searchers": searchers,
            "unavailable": unavailable,
            "profiles": named,
            "seeds": given.seeds,
            "min_candidates": given.min_candidates,
            "trials": given.trials,
        },
    }


def _names(text: str, valid: Sequence[str], option: str, rule: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in valid:
            raise ConfigError(rule, key=option, value=name, nearest=did_you_mean(name, valid))
    return names


def _tuned(group: Group, found: Sequence[tuple[Search, Found]]) -> dict[str, Any]:
    """Return the figures of one group: of each line of the table, and of Meshtune under each named profile."""
    regimes: dict[str, list[Trials]] = defaultdict(list)
    rankings: dict[str, list[tuple[float, float]]] = defaultdict(list)
    ranges: dict[str, dict[int, list[Mapping[str, float | None]]]] = defaultdict(lambda: defaultdict(list))
    for search, result in found:
        regimes[search.regime] += result.trials
        if result.ranking is not None:
            rankings[search.regime].append(result.ranking)
        for number, figures in result.ranges.items():
            ranges[search.regime][number].append(figures)
    times = group.step_time_s
    return {
        **dict(zip(GROUP, group.key, strict=True)),
        "num_candidates": len(times),
        "num_failed": sum(outcome.step_time_s is None for outcome in group.outcomes),
        "best_step_time_s": float(times.min()),
        "runtime": source_of(group.runs[0]).runtime,
        "regimes": finite({name: figures_of_group(group, trials) for name, trials in regimes.items()}),
        "by_profile": finite(
            {
                search.named: figures_of_group(group, result.trials)
                for search, result in found
                if search.searcher == "meshtune"
            }
        ),
        "ranking": finite(
            {
                name: dict(zip(("tau_before", "tau_after"), np.mean(taus, axis=0).tolist(), strict=True))
                for name, taus in rankings.items()
            }
        ),
        "ranges": {
            name: {f"after_{number}": _mean_figures(figures) for number, figures in of_number.items()}
            for name, of_number in ranges.items()
        },
    }


def _mean_figures(several: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the means of the figures that are there."""
    return {key: mean([figures[key] for figures in several]) for key in several[0]}


def _over_groups(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Summarise the lines of the table over groups."""
    if not entries:
        return {}
    names = list(entries[0]["regimes"])
    infinite = [{name: _infinite(entry["regimes"][name]) for name in names} for entry in entries]
    return finite({name: figures_over_groups([entry[name] for entry in infinite]) for name in names})


def _infinite(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return figures with infinity where a target was not reached, which `finite` replaced by None."""
    return {name: float("inf") if value is None and "trials_to" in name else value for name, value in figures.items()}


def _print(result: Mapping[str, Any]) -> None:
    print("Predicted by the profile of their own runtime, which has never seen the source:")
    overall = result["predicted_overall"]
    rows = [(figures["source"], figures) for figures in result["predicted"]]
    kinds = result["predicted_by_tuning"].items()
    rows += [(f"mean of {own['num_sources']} by {who}s", own) for who, own in kinds if own["num_sources"]]
    print_predicted([*rows, (f"mean of {overall['num_sources']} sources", overall)])
    print(f"The mean counts each source of at least {FEWEST_ROWS} timed runs once.")
    if "beside" in result:
        print_beside(result["beside"])
    for source, regimes in result["tuned_by_source"].items():
        count = sum(entry["source"] == source for entry in result["tuned"])
        print(f"\nTuned, {source}, {count} groups:")
        print_searches(regimes)
        _print_ranking([entry for entry in result["tuned"] if entry["source"] == source])
    if result["tuned"]:
        print(f"\nTuned, all {len(result['tuned'])} groups:")
        print_searches(result["tuned_overall"])
        _print_ranking(result["tuned"])
    for reason, count in result["skipped"].items():
        print(f"skipped {count:,}: {reason}")


def _print_ranking(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print what trials teach of the untried candidates' order and step times, in the mean over groups."""
    for name in entries[0]["ranking"]:
        before, after = (
            mean([entry["ranking"][name][key] for entry in entries]) for key in ("tau_before", "tau_after")
        )
        print(
            f"{name}: {RANKED_AFTER} trials raise Kendall's tau over the untried from {shown(before, '{:.3f}')} to "
            f"{shown(after, '{:.3f}')}"
        )
        for number in RANGES_AFTER:
            told = [entry["ranges"][name].get(f"after_{number}") for entry in entries]
            if known := [figures for figures in told if figures is not None]:
                print(f"  ranges after {number} trials, {len(known)} groups: {_ranges_in_words(_mean_figures(known))}")


def _ranges_in_words(figures: Mapping[str, float | None]) -> str:
    """Return what the ranges of untried candidates are worth, with the geometric mean of their widths over groups."""
    inside, slower, told, noticed, whole = (
        shown(figures[key], "{:.1%}") for key in ("inside", "slower", "told", "slower_told", "whole_inside")
    )
    width, whole_width = (math.exp(figures[key] or 0.0) for key in ("log_ratio", "whole_log_ratio"))
    return (
        f"{inside} inside, a width of {width:.2f}; {slower} slower, {told} told, and of {noticed} of the slower ones a "
        f"notable chance; one range with outliers in it: {whole} inside, a width of {whole_width:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
