"""Writer of fitted runtime profiles, as YAML files that `read_profile` reads.

Facts and their sources come from the file that the fit began with. Constants, device speeds, residuals, errors and the
list of fitted runs come from the fit. Guesses that the fitted constants replace are kept as `priors`, so a later fit
can begin where this one did.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from costmodels.calibration.fidelity import predict, settings_of
from costmodels.calibration.fitting import Calibration, FittedConstant
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.runtime import CONSTANTS, NOT_FITTED, ProfileFile, RuntimeProfile, read_profile
from hardware.io.config_file import read_mapping, read_text, validate_mapping
from hardware.io.output_file import write_output

DIGITS = 4
LINE_WIDTH = 120
MIN_PEAKS = 10
"""Fewest measured peaks that determine a spread."""

LEAST_MEMORY_ERROR = 0.03
"""Smallest memory error: peaks vary this much between launches and with the allocator's history (assumed)."""

ONE_SIGMA = 0.683
"""Share of a normal distribution within one standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakErrors:
    """Errors of predicted memory peaks.

    Attributes:
        spread: Spread of the log of measured over predicted peaks.
        sources: Sources of the peaks.
    """

    spread: float
    sources: tuple[str, ...]


def peak_errors_of(runs: Sequence[MeasuredRun], profile: RuntimeProfile) -> PeakErrors | None:
    """Compute the spread of log(measured / predicted peak) that contains two thirds of the runs.

    The peak is predicted as the source counts it, on the stage that it reports. It does not depend on any fitted
    constant, so the runs of the fit may be used again.

    Returns:
        The errors, or None with fewer than MIN_PEAKS peaks.
    """
    with_peak = [run for run in runs if run.peak_memory_bytes]
    kept, settings, _ = settings_of(with_peak, {profile.name: profile}, profile.name)
    if len(kept) < MIN_PEAKS:
        return None
    measured = np.array([run.peak_memory_bytes for run in kept], dtype=np.float64)
    error = np.abs(np.log(measured / predict(kept, settings).peak_memory_bytes))
    return PeakErrors(
        spread=max(LEAST_MEMORY_ERROR, float(np.quantile(error, ONE_SIGMA))),
        sources=tuple(sorted({run.source for run in kept})),
    )


def profile_text(base: Path, fit: Calibration, peaks: PeakErrors | None, *, is_own: bool) -> str:
    """Return the text of a fitted profile's file.

    Args:
        base: File of the profile that the fit began with.
        fit: Result of the fit.
        peaks: Errors of the predicted peaks; None keeps the value in `base`.
        is_own: Whether the runs of the fit are of the user's own cluster.
    """
    mapping = read_mapping(base)
    # values of a profile that no fit has touched are guesses; typical ones are known to the code anyway
    if str(mapping["fitted_on"]).startswith(NOT_FITTED):
        mapping["priors"] = {
            name: guess for name, guess in mapping["constants"].items() if not _is_typical(name, guess)
        }
    mapping.pop("constants_of", None)  # it has constants of its own now
    mapping["fitted_on"] = f"{fit.num_runs:,} runs of {', '.join(fit.sources)}"
    mapping["constants"] = {name: _constant_entry(constant) for name, constant in fit.constants.items()}
    speeds = {name: _constant_entry(speed) for name, speed in fit.device_speed.items()}
    mapping["device_speed"] = {**mapping["device_speed"], **speeds}
    if fit.profile.residuals:
        names = ("device", "hidden_size", "tp", "tokens", "sequence_length", "weight")
        mapping["residuals"] = [{name: getattr(cell, name) for name in names} for cell in fit.profile.residuals]
    else:
        mapping.pop("residuals", None)
    mapping["errors"]["step"] = _round(fit.step_error)
    if is_own:
        mapping["errors"]["own_cluster"] = True
        mapping["errors"].pop("peaks_of", None)  # peaks of other clusters do not tell the error on this one
    if peaks is not None:
        mapping["errors"] |= _peak_entries(peaks)
    # what is written must be readable, so it is validated before
    validate_mapping(ProfileFile, mapping, file=str(base))
    return "".join(
        _format_entry(key, mapping[key])
        for key in ProfileFile.model_fields
        if key in mapping
        if mapping[key] or key != "priors"
    )


def text_with_peaks(base: Path, peaks: PeakErrors) -> str:
    """Return the text of a profile's file with the errors of predicted peaks, and all else as it is."""
    errors = read_mapping(base)["errors"] | _peak_entries(peaks)
    lines = read_text(base).splitlines(keepends=True)
    return "".join(_format_entry("errors", errors) if line.startswith("errors:") else line for line in lines)


def _peak_entries(peaks: PeakErrors) -> dict[str, Any]:
    return {"memory": _round(peaks.spread), "peaks_of": list(peaks.sources)}


def write_profile(out: Path, text: str) -> RuntimeProfile:
    """Write a profile's text and return the profile as it is read back.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_output(out, text)
    return read_profile(out)


def _is_typical(name: str, guess: Mapping[str, float]) -> bool:
    known = CONSTANTS[name]
    return (guess["value"], guess["log_error"]) == (known.typical, known.log_error)


def _constant_entry(constant: FittedConstant) -> dict[str, float]:
    return {"value": _round(constant.value), "log_error": _round(constant.log_error)}


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _format_entry(key: str, value: Any) -> str:
    """Format one key: folded text, one line per entry of long mappings and lists, everything else on one line."""
    if key == "sources":
        paragraphs = "".join(_fold(name, str(text)) for name, text in value.items())
        return f"{key}:\n{paragraphs}"
    if key in ("priors", "constants", "device_speed") and value:
        return f"{key}:\n" + "".join(f"  {_format_flow({name: entry})[1:-1]}\n" for name, entry in value.items())
    if key == "residuals":
        return f"{key}:\n" + "".join(f"  - {_format_flow(entry)}\n" for entry in value)
    return f"{_format_flow({key: value})[1:-1]}\n"


def _fold(name: str, text: str) -> str:
    indent = "    "
    lines = textwrap.wrap(
        text,
        width=LINE_WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"  {name}: >-\n" + "\n".join(lines) + "\n"


def _format_flow(value: Mapping[str, Any]) -> str:
    """Format a mapping as YAML on one line."""
    dumped = yaml.safe_dump(dict(value), default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
