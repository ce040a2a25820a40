"""Measure the cost model's accuracy: fit it to some measured runs and quote its errors on others.

    python -m benchmarks.judges.fidelity [--fit A.csv] [--quote B.csv C.csv ...] [--model both] [--json]

A fit starts from each profile as it was before it saw any run. Without `--fit` the shipped profiles are quoted. Without
`--quote` all of configs/measured/runs is quoted; the shipped profiles were fitted to much of it, so their errors there
are no test. Each figure is followed, in brackets, by the score of a perfect model if repeated measurements of one
configuration spread by `--noise`. `--model simulator` quotes the event simulator in place of the closed form. `--model
both` quotes the two side by side on the runs that both can predict. Profiles are always fitted with the closed form.
Groups on unlike devices (`mixed:8xV100-SXM-16+12xT4-16`) appear in a separate table too, with the seconds spent on
predicting and ranking the layouts of each. A run whose source does not say what it recomputed counts in no figure and
no fit: the closed form predicts it under each mode that its runtime offers, and a further table quotes the range.
Progress goes to stderr; exit status 2 reports a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration.noise_floor import noise_floor
from benchmarks.support.fidelity_figures import LogErrors, judge, log_errors
from benchmarks.support.shipped_runs import shipped_runs
from benchmarks.support.simulated_runs import simulated, taken
from benchmarks.support.timing import USERS_MISTAKE, count_at_least, reasons, tell
from costmodels.calibration.fidelity import (
    UNCLEAN,
    PredictedRange,
    Predictions,
    group_key,
    is_clean,
    predict,
    predict_unstated,
    settings_of,
)
from costmodels.calibration.fitting import Calibration, calibrate_all
from costmodels.calibration.measured_runs import (
    RECOMPUTE_NOT_STATED,
    MeasuredRun,
    UnstatedRun,
    read_measured_and_unstated,
)
from costmodels.job.runtime import RuntimeProfile, find_prior, find_runtime
from hardware.io.errors import ConfigError

SEED = 0
CLOSED_FORM, SIMULATOR, BOTH = MODELS = ("closed_form", "simulator", "both")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Content of the given files.

    Attributes:
        runs: Usable runs of all files.
        unstated: Timed runs that lack their recomputation alone.
        skipped: Number of rows that do not describe a whole run, by reason.
        unclean: Number of runs left out because of a tag in their notes.
    """

    runs: tuple[MeasuredRun, ...]
    unstated: tuple[UnstatedRun, ...]
    skipped: Mapping[str, int]
    unclean: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    given = _arguments(argv)
    try:
        if given.runtime is not None:
            find_runtime(given.runtime)
        quoted = _read(given.quote, raw=given.raw)
        if given.most_per_group is not None:
            quoted = _fewer(quoted, given.most_per_group)
        fits = _fit(given.fit, quoted.runs, given.runtime) if given.fit else {}
        result = quote(
            quoted,
            {name: fit.profile for name, fit in fits.items()},
            runtime=given.runtime,
            noise=given.noise,
            model=given.model,
        )
    except ConfigError as error:
        tell(f"fidelity: {error}")
        return USERS_MISTAKE
    result["fit"] = {name: _fit_json(fit) for name, fit in fits.items()}
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judges.fidelity", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--fit", nargs="+", type=Path, default=[], metavar="CSV", help="fit the profiles to these runs")
    parser.add_argument(
        "--quote",
        nargs="+",
        type=Path,
        default=shipped_runs(),
        metavar="CSV",
        help="quote errors on these runs (all of configs/measured/runs)",
    )
    parser.add_argument("--runtime", help="runtime profile for the runs of every source")
    parser.add_argument(
        "--raw", action="store_true", help=f"quote rows tagged {', '.join(UNCLEAN)} too (no fit ever uses them)"
    )
    parser.add_argument(
        "--noise", type=_noise, default=0.09, help="standard deviation of the log of a repeated measurement (0.09)"
    )
    parser.add_argument("--model", choices=MODELS, default=CLOSED_FORM, help=f"model that predicts ({CLOSED_FORM})")
    parser.add_argument(
        "--most-per-group", type=count_at_least(1), metavar="N", help="quote at most N random runs of each group"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _noise(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, but got {text}")
    return value


def _read(paths: Sequence[Path], *, raw: bool) -> Given:
    """Read the usable runs of the files; failed runs always stay, since they say what is feasible."""
    runs, unstated, skipped = read_measured_and_unstated(paths, Path())
    kept = tuple(run for run in runs if raw or run.is_failed or is_clean(run))
    open_runs = tuple(each for each in unstated if each.run.step_time_s and (raw or is_clean(each.run)))
    if not kept and not open_runs:
        raise ConfigError(
            f"hold no run without a tag ({', '.join(UNCLEAN)})",
            key=", ".join(map(str, paths)),
            nearest="--raw quotes tagged rows too",
        )
    left = {RECOMPUTE_NOT_STATED: len(unstated) - len(open_runs)} if len(unstated) > len(open_runs) else {}
    return Given(runs=kept, unstated=open_runs, skipped=skipped | left, unclean=len(runs) - len(kept))


def _fewer(given: Given, most: int) -> Given:
    """Draw at most `most` runs of each group, independently of what they measured."""
    positions: dict[tuple[Any, ...], list[int]] = {}
    for position, run in enumerate(given.runs):
        positions.setdefault(group_key(run), []).append(position)
    rng = np.random.default_rng(SEED)
    kept = sorted(at for own in positions.values() for at in rng.choice(own, min(most, len(own)), replace=False))
    return replace(given, runs=tuple(given.runs[at] for at in kept))


def _fit(paths: Sequence[Path], quoted: Sequence[MeasuredRun], runtime: str | None) -> dict[str, Calibration]:
    """Calibrate each runtime of the files' runs, and report runs that are both fitted and quoted."""
    given = _read(paths, raw=False)
    known, _, skipped = settings_of(given.runs, {}, runtime)
    fits = calibrate_all(known, find_prior, runtime, on_progress=tell)
    if not fits:
        raise ConfigError(
            "hold too few timed runs of known devices to fit any runtime",
            key=", ".join(map(str, paths)),
            nearest=reasons({**given.skipped, **skipped}) or None,
        )
    both = {_identity(run) for run in known if run.step_time_s} & {_identity(run) for run in quoted if run.step_time_s}
    if both:
        tell(f"note: {len(both)} of the quoted runs were fitted too; their errors are no test of the model")
    return fits


def _identity(run: MeasuredRun) -> tuple[Any, ...]:
    return (*group_key(run), run.config, run.step_time_s)


def quote(
    given: Given, profiles: Mapping[str, RuntimeProfile], *, runtime: str | None, noise: float, model: str = CLOSED_FORM
) -> dict[str, Any]:
    """Compute the figures of every group, of every source and of all runs, with the noise floor.

    Under BOTH they are the closed form's, and the simulator's figures of the same runs are under the key "simulator".

    Args:
        given: The runs to quote.
        profiles: Fitted profiles that replace the catalog's of the same name.
        runtime: Name of the profile to use for every source; None looks it up in the table of sources.
        noise: Standard deviation of the logarithm of a repeated measurement.
        model: One of MODELS.

    Raises:
        ConfigError: None of the runs can be predicted.
    """
    runs, settings, fallen = settings_of(given.runs, profiles, runtime)
    ranges, unknown = predict_unstated(given.unstated, profiles, runtime)
    fallen += unknown
    if not runs and not ranges:
        raise ConfigError("none of the quoted runs can be predicted", nearest=reasons(Counter(given.skipped) + fallen))
    tell(f"predicting {len(runs):,} runs")
    quoted = {CLOSED_FORM: predict(runs, settings)}
    if model != CLOSED_FORM:
        # Both models are quoted on the runs that the simulator can predict too, so that the figures are comparable.
        kept, quoted[SIMULATOR], unfit = simulated(runs, settings, quoted[CLOSED_FORM])
        quoted[CLOSED_FORM] = taken(quoted[CLOSED_FORM], np.array(kept, dtype=np.int64))
        runs, settings = [runs[position] for position in kept], [settings[position] for position in kept]
        fallen += unfit
        if not runs:
            raise ConfigError("none of the quoted runs can be simulated", nearest=reasons(fallen))
    errors = log_errors(runs, settings)
    skipped = Counter(given.skipped) + fallen
    figures = {
        name: _figures(runs, predictions, errors, noise, {"skipped": dict(skipped), "unclean": given.unclean})
        for name, predictions in quoted.items()
    }
    shown = figures[SIMULATOR if model == SIMULATOR else CLOSED_FORM]
    beside = {SIMULATOR: figures[SIMULATOR]} if model == BOTH else {}
    unlike = _unlike(given.runs, profiles, runtime, model)
    return {**shown, "unlike": unlike, "unstated": [_range_json(each) for each in ranges], "model": model, **beside}


def _range_json(predicted: PredictedRange) -> dict[str, Any]:
    run, times_s = predicted.run, predicted.step_time_s
    return {
        "place": run.place,
        "source": run.source,
        "model": run.model.name,
        "device": run.device,
        "devices": run.devices,
        "measured_s": run.step_time_s,
        "predicted_s": dict(times_s),
        "fits": list(predicted.fits),
        "inside": run.step_time_s is not None and min(times_s.values()) <= run.step_time_s <= max(times_s.values()),
    }


def _figures(
    runs: Sequence[MeasuredRun], predictions: Predictions, errors: LogErrors, noise: float, told: Mapping[str, Any]
) -> dict[str, Any]:
    """Judge the predictions of every group, of every source and of all runs; add `told` to the last."""
    groups, overall = judge(runs, predictions, errors)
    return {
        "groups": [_group_json(group) for group in groups],
        "overall": {**overall, **told, "noise_floor": _floor(runs, noise)},
        "by_source": [
            _source_json(source, runs, predictions, errors, noise) for source in sorted({run.source for run in runs})
        ],
    }


def _unlike(
    runs: Sequence[MeasuredRun], profiles: Mapping[str, RuntimeProfile], runtime: str | None, model: str
) -> list[dict[str, Any]]:
    """Compute the figures of every group on unlike devices.

    `rank_s` is the time from a group's runs to their order, including the construction of the cluster [s]. The
    simulator is quoted here only if `model` is SIMULATOR.
    """
    of_group: dict[tuple[Any, ...], list[MeasuredRun]] = {}
    for run in runs:
        if run.device.lower().lstrip().startswith("mixed:"):
            of_group.setdefault(group_key(run), []).append(run)
    found = []
    for own in of_group.values():
        start_s = time.perf_counter()
        known, settings, _ = settings_of(own, profiles, runtime)
        if not known:
            continue
        predictions, hosts = predict(known, settings), settings[0].setting.cluster.groups
        if model == SIMULATOR:
            kept, predictions, _ = simulated(known, settings, predictions)
            known, settings = [known[position] for position in kept], [settings[position] for position in kept]
            if not known:
                continue
        rank_s = time.perf_counter() - start_s
        (group,), _ = judge(known, predictions, log_errors(known, settings))
        named = [f"{each.hosts} x {each.devices_per_host} {each.device.name}" for each in hosts]
        found.append({**_group_json(group), "hosts": named, "rank_s": rank_s})
    return found


def _floor(runs: Sequence[MeasuredRun], noise: float) -> dict[str, Any]:
    return noise_floor(runs, noise, np.random.default_rng(SEED)).as_json()


def _source_json(
    source: str, runs: Sequence[MeasuredRun], predictions: Predictions, errors: LogErrors, noise: float
) -> dict[str, Any]:
    at = np.array([position for position, run in enumerate(runs) if run.source == source])
    own = [runs[position] for position in at]
    _, figures = judge(own, taken(predictions, at), errors.take(at))
    return {"source": source, **figures, "noise_floor": _floor(own, noise)}


def _group_json(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's figures under the keys of `overall` as well, with shares computed from the group's counts."""
    # Groups hold counts and `overall` holds shares and summaries; sources and groups print with the same table.
    shares = {
        name: group[name] / group[count] if group[count] else None
        for name, count in (("ok_called_feasible", "ok"), ("failed_called_infeasible", "failed"))
    }
    summaries = {"median_tau": group["tau"], "median_regret": group["regret"], "mean_regret": group["regret"]}
    return {**group, **shares, **summaries, "num_groups": 1, "skipped": {}}


def _fit_json(fit: Calibration) -> dict[str, Any]:
    return {
        "runs": fit.num_runs,
        "sources": list(fit.sources),
        "median_ape": fit.median_ape,
        "held_out_error": fit.step_error,
        "undetermined": [name for name, constant in fit.constants.items() if not constant.is_determined],
        "at_bound": [name for name, constant in fit.constants.items() if constant.at_bound],
    }


COLUMNS = (
    ("median_ape", "median error"),
    ("mean_ape", "mean error"),
    ("p90_ape", "90th perc."),
    ("median_tau", "median tau"),
    ("median_regret", "median regret"),
    ("mean_regret", "mean regret"),
)
"""Keys of the columns with a noise floor in brackets, and their headings."""


def _print(result: Mapping[str, Any]) -> None:
    for name, fit in result["fit"].items():
        print(f"fitted {name} to {fit['runs']:,} runs of {', '.join(fit['sources'])}:")
        print(f"  median error {fit['median_ape']:.1%} on them, {fit['held_out_error']:.1%} on what a fit did not see")
    overall = result["overall"]
    titles = [title for _, title in COLUMNS]
    header = ["source", "runs", "groups", "ranked", *titles, "in 68%", "in 95%", "memory", "ok fit", "failed not"]
    lines = [_line(figures["source"], figures) for figures in result["by_source"]] + [_line("all", overall)]
    _print_table(header, lines)
    noise = overall["noise_floor"]["noise"]
    print(
        f"In brackets: the score of a perfect model if repeated measurements spread by {noise:.0%}. Tau and regret "
        "are those of groups of at least 5 configurations. In 68% and 95%: share of the runs inside these intervals."
    )
    if SIMULATOR in result:
        _print_beside(result, result[SIMULATOR])
    if result["unlike"]:
        _print_unlike(result["unlike"])
    if result["unstated"]:
        _print_ranges(result["unstated"])
    wrong = overall["best_called_infeasible"]
    print(f"Groups whose measured best is called infeasible: {wrong}")
    if overall["unclean"]:
        print(f"{overall['unclean']:,} runs tagged {', '.join(UNCLEAN)} were left out")
    for reason, count in overall["skipped"].items():
        print(f"skipped {count:,}: {reason}")


BESIDE = (
    ("median_ape", "median error"),
    ("mean_ape", "mean error"),
    ("p90_ape", "90th perc."),
    ("bias", "bias"),
    ("median_tau", "median tau"),
    ("median_regret", "median regret"),
    ("mean_regret", "mean regret"),
)
"""Keys and headings of the figures of a source that are shown for the closed form and for the simulator."""

BESIDE_IN_GROUPS = (
    ("median_ape", "median error"),
    ("tau", "tau"),
    ("spearman", "Spearman"),
    ("rank_of_best", "rank of best"),
    ("regret", "regret"),
)
"""Keys and headings of the figures of a group that are shown for both models."""


def _print_beside(closed_form: Mapping[str, Any], simulator: Mapping[str, Any]) -> None:
    """Print sources and ranked groups, each figure of the closed form beside the simulator's."""
    print("\nThe closed form | the event simulator")
    pairs = [*zip(closed_form["by_source"], simulator["by_source"], strict=True)]
    pairs.append((closed_form["overall"] | {"source": "all"}, simulator["overall"]))
    lines = [[one["source"], f"{one['n']:,}", *(_pair(one, other, key) for key, _ in BESIDE)] for one, other in pairs]
    _print_table(["source", "runs", *(title for _, title in BESIDE)], lines)
    ranked = [
        pair for pair in zip(closed_form["groups"], simulator["groups"], strict=True) if pair[0]["tau"] is not None
    ]
    if not ranked:
        return
    print()
    lines = [
        [
            f"{one['source']}: {one['model']}, {one['devices']} {one['device']}, {one['sequence_length']} tokens, "
            f"batch {one['global_batch_size']}",
            str(one["num_configs"]),
            *(_pair(one, other, key) for key, _ in BESIDE_IN_GROUPS),
        ]
        for one, other in ranked
    ]
    _print_table(["group", "layouts", *(title for _, title in BESIDE_IN_GROUPS)], lines)
    print()


def _pair(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> str:
    if key == "rank_of_best":
        return f"{one[key]} | {other[key]}"
    is_share = key not in ("median_tau", "tau", "spearman")
    return f"{_shown(one[key], is_share=is_share)} | {_shown(other[key], is_share=is_share)}"


def _print_unlike(groups: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each group on unlike devices."""
    header = [
        "unlike hosts",
        "model",
        "runs",
        "layouts",
        "median error",
        "Spearman",
        "rank of best",
        "regret",
        "seconds",
    ]
    lines = [
        [
            " + ".join(group["hosts"]),
            group["model"],
            f"{group['n']:,}",
            f"{group['num_configs']:,}",
            _shown(group["median_ape"], is_share=True),
            _shown(group["spearman"], is_share=False),
            str(group["rank_of_best"] or "-"),
            _shown(group["regret"], is_share=True),
            f"{group['rank_s']:.3f}",
        ]
        for group in groups
    ]
    _print_table(header, lines)


def _print_ranges(ranges: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each run whose recomputation is not stated."""
    header = ["recomputation not stated", "model", "devices", "measured", "predicted", "by mode"]
    lines = [
        [
            each["place"],
            each["model"],
            f"{each['devices']:,} {each['device']}",
            f"{each['measured_s']:.3g} s",
            f"{min(each['predicted_s'].values()):.3g} to {max(each['predicted_s'].values()):.3g} s",
            ", ".join(f"{mode} {seconds:.3g} s" for mode, seconds in each["predicted_s"].items()),
        ]
        for each in ranges
    ]
    _print_table(header, lines)
    inside = sum(each["inside"] for each in ranges)
    print(f"{inside:,} of {len(ranges):,} such runs took a step time inside their range; no other figure counts them.")


def _print_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their widest cell, the first left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for line in (header, *lines):
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]))


def _line(name: str, figures: Mapping[str, Any]) -> list[str]:
    floor = figures["noise_floor"]
    return [
        name,
        f"{figures['n']:,}",
        f"{figures['num_groups']:,}",
        f"{figures['num_ranked_groups']:,}",
        *(_with_floor(figures[key], floor[key], is_share=key != "median_tau") for key, _ in COLUMNS),
        _shown(figures["covered_68"], is_share=True),
        _shown(figures["covered_95"], is_share=True),
        _shown(figures["memory_median_ape"], is_share=True),
        _shown(figures["ok_called_feasible"], is_share=True),
        _shown(figures["failed_called_infeasible"], is_share=True),
    ]


def _with_floor(value: float | None, floor: float | None, *, is_share: bool) -> str:
    return f"{_shown(value, is_share=is_share)} [{_shown(floor, is_share=is_share)}]" if value is not None else "-"


def _shown(value: float | None, *, is_share: bool) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if is_share else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
