"""Calibration of a runtime: fit its profile to files of measured runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodels.calibration.fidelity import UNCLEAN, is_clean
from costmodels.calibration.fitting import Calibration, FittedConstant, calibrate
from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.calibration.profile_file import peak_errors_of, profile_text, write_profile
from costmodels.calibration.sources import is_runtime_known, source_of
from costmodels.job.runtime import catalog_path, find_runtime
from hardware.io.errors import ConfigError
from hardware.io.output_file import check_place

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedFile:
    """Fitted profile and the file that holds it.

    Attributes:
        out: File of the profile.
        runtime: Name of the catalog's profile from which the fit started.
        fit: Fitted constants with their errors.
        memory_error: Spread of log(measured / predicted peak memory); None if too few peaks were measured.
        skipped: Number of rows and runs that the fit did not use, by reason.
    """

    out: Path
    runtime: str
    fit: Calibration
    memory_error: float | None
    skipped: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """Build the JSON object of `meshtune calibrate --json`."""
        return {
            "profile": str(self.out),
            "runtime": self.runtime,
            "runs": self.fit.num_runs,
            "sources": list(self.fit.sources),
            "median_ape": self.fit.median_ape,
            "held_out_error": self.fit.step_error,
            "memory_error": self.memory_error,
            "constants": {name: _constant_json(constant) for name, constant in self.fit.constants.items()},
            "device_speed": {name: _constant_json(speed) for name, speed in self.fit.device_speed.items()},
            "skipped": dict(self.skipped),
        }


def calibrate_file(
    measured: Sequence[Path], out: Path, *, runtime: str | None, overwrite: bool, on_progress: Callable[[str], None]
) -> CalibratedFile:
    """Fit one runtime's profile to the clean runs of the files and write it.

    Args:
        measured: CSV files in the format of configs/measured.
        out: File of the profile to write.
        runtime: Runtime to fit; runs of unknown sources count as its own. None if all runs used one runtime.
        overwrite: Whether `out` may exist already.
        on_progress: Function called with a line of text before each fit.

    Raises:
        ConfigError: A file cannot be read or written, or its runs are of several runtimes or too few.
    """
    _check_out(out, overwrite=overwrite)
    if runtime is not None:
        catalog_path(runtime)
    runs, unusable = read_measured_and_skipped(measured, Path())
    skipped = Counter(unusable)
    name, own = _select_runs(runs, runtime)
    skipped["runs of another runtime"] += len(runs) - len(own)
    timed = [run for run in own if run.step_time_s is not None]
    skipped["runs without a step time"] += len(own) - len(timed)
    clean = [run for run in timed if is_clean(run)]
    skipped[f"runs tagged {', '.join(UNCLEAN)}"] += len(timed) - len(clean)
    base = find_runtime(name)
    fit = calibrate(clean, base, on_progress=on_progress)
    skipped.update(fit.skipped)
    peaks = peak_errors_of([run for run in own if is_clean(run)], base)
    write_profile(out, profile_text(catalog_path(name), fit, peaks, is_own=True))
    return CalibratedFile(
        out=out,
        runtime=name,
        fit=fit,
        memory_error=peaks.spread if peaks else None,
        skipped={k: n for k, n in skipped.items() if n},
    )


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.suffix not in SUFFIXES:
        raise ConfigError(
            "must end in .yaml or .yml, so that a study recognises it as a file", key="--out", value=str(out)
        )
    check_place(out)
    if out.exists() and not overwrite:
        raise ConfigError("already exists", key="--out", value=str(out), nearest="--force replaces it")


def _select_runs(runs: Sequence[MeasuredRun], runtime: str | None) -> tuple[str, list[MeasuredRun]]:
    counts = Counter(source_of(run).runtime for run in runs)
    found = ", ".join(f"{name} ({count} runs)" for name, count in sorted(counts.items()))
    if runtime is None:
        if len(counts) > 1:
            raise ConfigError(f"the files hold runs of several runtimes: {found}", nearest="choose one with --runtime")
        return next(iter(counts)), list(runs)
    own = [run for run in runs if source_of(run).runtime == runtime or not is_runtime_known(run)]
    if not own:
        raise ConfigError("has no run in the files", key="--runtime", value=runtime, nearest=f"they hold {found}")
    return runtime, own


def _constant_json(constant: FittedConstant) -> dict[str, Any]:
    return {
        "value": constant.value,
        "log_error": constant.log_error,
        "determined": constant.is_determined,
        "at_bound": constant.at_bound,
    }
