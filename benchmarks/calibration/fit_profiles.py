"""Fit the shipped runtime profiles to measured runs, and rewrite costmodels/catalog/runtimes/*.yaml in place.

    python -m benchmarks.calibration.fit_profiles [A.csv ...] [--runtime NAME] [--peaks]

Every runtime with enough clean, timed runs in the files (all of configs/measured/runs if none is named) is fitted; the
other profiles stay unchanged. A new profile is fitted to all of these runs, so its errors on them are no test: quote
figures from `benchmarks.judges.fidelity --fit ... --quote ...`. --peaks fits nothing and writes the errors of memory
peaks alone, as they are with today's model of memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.support.shipped_runs import shipped_runs
from costmodels.calibration.device_speeds import shrink_speeds
from costmodels.calibration.fidelity import is_clean, settings_of
from costmodels.calibration.fitting import calibrate_all
from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.calibration.profile_file import peak_errors_of, profile_text, text_with_peaks, write_profile
from costmodels.calibration.sources import source_of
from costmodels.job.runtime import catalog_path, find_prior
from hardware.io.errors import ConfigError

USERS_MISTAKE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the profiles and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration.fit_profiles", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument(
        "measured",
        nargs="*",
        type=Path,
        default=shipped_runs(),
        metavar="CSV",
        help="measured runs (all of configs/measured/runs)",
    )
    parser.add_argument("--runtime", help="fit only this runtime's profile")
    parser.add_argument("--peaks", action="store_true", help="write the errors of memory peaks only")
    given = parser.parse_args(argv)
    try:
        if given.runtime is not None:
            catalog_path(given.runtime)
        (write_peaks if given.peaks else fit_profiles)(given.measured, given.runtime)
    except ConfigError as error:
        print(f"fit_profiles: {error}", file=sys.stderr)
        return USERS_MISTAKE
    return 0


def fit_profiles(measured: Sequence[Path], only: str | None) -> None:
    """Fit every runtime of the files, or only the one named `only`, and print the results.

    Raises:
        ConfigError: A file cannot be read or written.
    """
    known = _known_runs(measured, only)
    fits = calibrate_all(known, find_prior, on_progress=lambda line: print(line, file=sys.stderr, flush=True))
    for name, fitted in fits.items():
        own = _runs_of(name, known)
        found = fitted.device_speed
        speeds = shrink_speeds({device: speed.value for device, speed in found.items()}, own)
        fit = replace(fitted, device_speed={key: replace(found[key], value=speeds[key]) for key in speeds})
        path = catalog_path(name)
        write_profile(path, profile_text(path, fit, peak_errors_of(own, find_prior(name)), is_own=False))
        unknown = [constant for constant, value in fit.constants.items() if not value.is_determined]
        print(
            f"{name}: {fit.num_runs:,} runs of {', '.join(fit.sources)}; median error {fit.median_ape:.1%} on them, "
            f"{fit.step_error:.1%} held out; not determined: {', '.join(unknown) or 'nothing'}"
        )


def write_peaks(measured: Sequence[Path], only: str | None) -> None:
    """Write the errors of memory peaks of every runtime with enough of them, or only of the one named `only`.

    Raises:
        ConfigError: A file cannot be read or written.
    """
    known = _known_runs(measured, only)
    for name in sorted({source_of(run).runtime for run in known}):
        if peaks := peak_errors_of(_runs_of(name, known), find_prior(name)):
            write_profile(catalog_path(name), text_with_peaks(catalog_path(name), peaks))
            print(f"{name}: {peaks.spread:.1%} on peaks of {', '.join(peaks.sources)}")


def _known_runs(measured: Sequence[Path], only: str | None) -> list[MeasuredRun]:
    """Return the clean runs of the files, or of one runtime, whose devices are known."""
    runs, _ = read_measured_and_skipped(measured, Path())
    return settings_of([run for run in runs if is_clean(run) and only in (None, source_of(run).runtime)], {})[0]


def _runs_of(name: str, runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    return [run for run in runs if source_of(run).runtime == name]


if __name__ == "__main__":
    sys.exit(main())
