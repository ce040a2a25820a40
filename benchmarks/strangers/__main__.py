"""Judge Meshtune on clusters and frameworks that it has never seen: leave out one source of measured runs at a time.

    python -m benchmarks.strangers [--measured A.csv ...] [--seeds N] [--cache DIR] [--json]

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
profiles between calls. Progress goes to stderr; exit status 2 reports a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.strangers.errors import FEWEST_PUBLISHERS, fit_errors, write_errors
from benchmarks.strangers.left_out import CACHE_HELP, profiles_without
from benchmarks.strangers.predicting import Stranger, predict_stranger
from benchmarks.strangers.tuning import BLIND, OWN, RANKED_AFTER, Found, Search, run_search, searches_of
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
FEWEST_ROWS = 20
"""Fewest timed runs of a source whose share inside an interval is quoted by itself."""


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
    parser.add_argument("--write", action="store_true", help="write the error models of all sources into the catalog")
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
    runs, skipped = read_runs(given.measured)
    by_publisher: dict[str, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        by_publisher[publisher_of(run.source)].append(run)
    publishers = sorted(by_publisher)
    if given.sources:
        publishers = _names(given.sources, publishers, "--sources", "published none of these runs")
    if given.write and (given.sources or len(publishers) < FEWEST_PUBLISHERS):
        raise ConfigError(f"needs all publishers, and at least {FEWEST_PUBLISHERS} of them", key="--write")
    groups, left_out = groups_of(runs, given.min_candidates)
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
        searches = [
            search
            for publisher in publishers
            for group in of_publisher[publisher]
            for search in searches_of(
                group, profiles[publisher], named=named, searchers=searchers, seeds=given.seeds, max_trials=given.trials
            )
        ]
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
        "predicted_overall": _over_sources([figures for _, figures in predicted]),
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
    for search, result in found:
        regimes[search.regime] += result.trials
        if result.ranking is not None:
            rankings[search.regime].append(result.ranking)
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
    }


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


def _over_sources(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the predictions over sources of at least FEWEST_ROWS runs, each source counting once."""
    large = [figures for figures in sources if figures["n"] >= FEWEST_ROWS]
    return {
        "num_sources": len(large),
        "n": sum(figures["n"] for figures in sources),
        **{key: _mean([figures[key] for figures in large]) for key, _, _ in PREDICTED if key != "n"},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


PREDICTED = (
    ("n", "runs", "{:,}"),
    ("median_ape", "median error", "{:.1%}"),
    ("mean_ape", "mean error", "{:.1%}"),
    ("bias", "bias", "{:+.1%}"),
    ("covered_68", "in 68%", "{:.0%}"),
    ("covered_95", "in 95%", "{:.0%}"),
    ("median_tau", "tau", "{:.2f}"),
    ("median_regret", "regret", "{:.1%}"),
    ("mean_regret", "mean", "{:.1%}"),
    ("memory_n", "peaks", "{:,.0f}"),
    ("memory_median_ape", "memory", "{:.1%}"),
    ("memory_covered_68", "in 68%", "{:.0%}"),
    ("memory_covered_95", "in 95%", "{:.0%}"),
    ("ok_called_feasible", "ok fit", "{:.1%}"),
    ("failed_called_infeasible", "failed not", "{:.1%}"),
)
"""Keys of the columns of the first table, their headings and formats."""


def _print(result: Mapping[str, Any]) -> None:
    print("Predicted by the profile of their own runtime, which has never seen the source:")
    rows = [(figures["source"], figures) for figures in result["predicted"]]
    overall = result["predicted_overall"]
    rows.append((f"mean of {overall['num_sources']} sources", overall))
    lines = [[name, *(_shown(figures[key], form) for key, _, form in PREDICTED)] for name, figures in rows]
    header = ["source", *(title for _, title, _ in PREDICTED)]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for first, *rest in (header, *lines):
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *cells]))
    print(f"The mean counts each source of at least {FEWEST_ROWS} timed runs once.")
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
    """Print what trials teach of the untried candidates' order, in the mean over groups."""
    for name in entries[0]["ranking"]:
        before, after = (
            _mean([entry["ranking"][name][key] for entry in entries]) for key in ("tau_before", "tau_after")
        )
        print(
            f"{name}: {RANKED_AFTER} trials raise Kendall's tau over the untried from {_shown(before, '{:.3f}')} to "
            f"{_shown(after, '{:.3f}')}"
        )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


if __name__ == "__main__":
    sys.exit(main())
