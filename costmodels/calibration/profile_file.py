"""Writes a fitted runtime profile as the YAML file that `read_profile` reads.

Facts and their sources are those of the file that the fit began with; constants, speeds of devices, residuals, errors
and what they were fitted on are the fit's. Guesses that stood in place of fitted constants are kept as `priors`, so
that a later fit can begin where this one did.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from costmodels.calibration.fidelity import predict, settings_of
from costmodels.calibration.fitting import Calibration, FittedConstant
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.runtime import CONSTANTS, NOT_FITTED, ProfileFile, RuntimeProfile, read_profile
from hardware.io.config_file import checked, read_mapping
from hardware.io.errors import ConfigError

DIGITS = 4
LINE_WIDTH = 120
MIN_PEAKS = 10
"""Fewer measured peaks say nothing of the spread."""

LEAST_MEMORY_ERROR = 0.03
"""Peaks of one configuration differ by as much from launch to launch and with the allocator's history (assumed)."""

ONE_SIGMA = 0.683
"""Share of a normal distribution within one standard deviation."""


def memory_error_of(runs: Sequence[MeasuredRun], profile: RuntimeProfile) -> float | None:
    """Spread of log(measured / predicted peak), two thirds of the runs being within it; None without MIN_PEAKS peaks.

    The peak is predicted in the source's own meaning and on the stage that it reports. No constant that a fit moves
    enters it, so these runs need not be others than those fitted.
    """
    with_peak = [run for run in runs if run.peak_memory_bytes]
    kept, settings, _ = settings_of(with_peak, {profile.name: profile}, profile.name)
    if len(kept) < MIN_PEAKS:
        return None
    measured = np.array([run.peak_memory_bytes for run in kept], dtype=np.float64)
    error = np.abs(np.log(measured / predict(kept, settings).peak_memory_bytes))
    return max(LEAST_MEMORY_ERROR, float(np.quantile(error, ONE_SIGMA)))


def profile_text(base: Path, fit: Calibration, memory_error: float | None) -> str:
    """The text of a fitted profile's file.

    Args:
        base: File of the profile that the fit began with.
        fit: The fit.
        memory_error: Spread of the log of measured over predicted peaks; None keeps the file's.
    """
    mapping = read_mapping(base)
    if str(mapping["fitted_on"]).startswith(NOT_FITTED):
        mapping["priors"] = {
            name: guess for name, guess in mapping["constants"].items() if not _is_typical(name, guess)
        }
    mapping["fitted_on"] = _fitted_on(fit)
    mapping["constants"] = {name: _fitted(constant) for name, constant in fit.constants.items()}
    speeds = {name: _fitted(speed) for name, speed in fit.device_speed.items()}
    mapping["device_speed"] = {**mapping["device_speed"], **speeds}
    if fit.profile.residuals:
        names = ("device", "hidden_size", "tp", "tokens", "sequence_length", "weight")
        mapping["residuals"] = [{name: getattr(cell, name) for name in names} for cell in fit.profile.residuals]
    else:
        mapping.pop("residuals", None)
    mapping["errors"] = {
        "step": _rounded(fit.step_error),
        "memory": mapping["errors"]["memory"] if memory_error is None else _rounded(memory_error),
    }
    checked(ProfileFile, mapping, file=str(base))
    return "".join(
        _entry(key, mapping[key])
        for key in ProfileFile.model_fields
        if key in mapping
        if mapping[key] or key != "priors"
    )


def write_profile(out: Path, text: str) -> RuntimeProfile:
    """Writes a profile's text; the profile as it reads back.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", file=str(out)) from None
    return read_profile(out)


def _is_typical(name: str, guess: Mapping[str, float]) -> bool:
    known = CONSTANTS[name]
    return (guess["value"], guess["log_error"]) == (known.typical, known.log_error)


def _fitted_on(fit: Calibration) -> str:
    return f"{fit.num_runs:,} runs of {', '.join(fit.sources)}"


def _fitted(constant: FittedConstant) -> dict[str, float]:
    return {"value": _rounded(constant.value), "log_error": _rounded(constant.log_error)}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _entry(key: str, value: Any) -> str:
    """One key of the file: prose folded, long mappings and lists a line per entry, everything else on one line."""
    if key == "sources":
        paragraphs = "".join(_folded(name, str(text)) for name, text in value.items())
        return f"{key}:\n{paragraphs}"
    if key in ("priors", "constants", "device_speed") and value:
        return f"{key}:\n" + "".join(f"  {_flow({name: entry})[1:-1]}\n" for name, entry in value.items())
    if key == "residuals":
        return f"{key}:\n" + "".join(f"  - {_flow(entry)}\n" for entry in value)
    return f"{_flow({key: value})[1:-1]}\n"


def _folded(name: str, text: str) -> str:
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


def _flow(value: Mapping[str, Any]) -> str:
    """YAML on one line."""
    dumped = yaml.safe_dump(dict(value), default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
