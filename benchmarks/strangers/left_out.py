"""Runtime profiles as they would be if one publisher's runs had never been seen.

Whatever was fitted to the publisher's runs is fitted again without them, from the profile's guesses: constants, device
speeds, residuals, the errors of step times and memory, and the facts about memory that were chosen on them. A profile
that keeps too few runs goes back to its guesses, with the errors of profiles that no fit has touched. A profile that
was never fitted to the publisher's runs stays as it is shipped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.timing import tell
from costmodels.calibration import fitting
from costmodels.calibration.device_speeds import shrink_speeds
from costmodels.calibration.fidelity import is_clean, predict, settings_of
from costmodels.calibration.fitting import MIN_RUNS, calibrate
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.profile_file import peak_errors_of
from costmodels.calibration.sources import publisher_of, source_of
from costmodels.job.runtime import (
    CONSTANTS,
    LayerResidual,
    RuntimeProfile,
    catalog_path,
    comparable_names,
    find_prior,
    find_runtime,
)
from hardware.io.config_file import read_mapping

GUESSED_STEP, GUESSED_MEMORY = 0.35, 0.25
"""Errors of step times and memory in profiles that no fit has touched, as in torch-reference.yaml."""

CACHE_HELP = "keep fitted profiles in this folder"
"""Help of the option `--cache` of programs that leave publishers out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Without:
    """One profile without one publisher: the work of one process.

    Attributes:
        runtime: Name of the profile.
        publisher: Publisher that is left out.
        runs: All measured runs.
        cache: Folder that keeps fitted profiles between calls; None keeps none.
    """

    runtime: str
    publisher: str
    runs: tuple[MeasuredRun, ...]
    cache: Path | None


def profile_without(work: Without) -> RuntimeProfile:
    """Return the profile, fitted again if the shipped one has seen the publisher's runs."""
    shipped, entry = find_runtime(work.runtime), read_mapping(catalog_path(work.runtime))
    if copied := entry.get("constants_of"):
        if not _has_seen(copied["sources"], work.publisher):
            return shipped
        other = profile_without(replace(work, runtime=copied["runtime"]))
        return shipped.with_constants({name: getattr(other, name) for name in CONSTANTS})
    seen = [run for run in work.runs if source_of(run).runtime == work.runtime and is_clean(run)]
    seen = [run for run in seen if publisher_of(run.source) != work.publisher]
    profile = replace(shipped, **_memory_facts(entry, work.publisher))
    if _has_seen(entry["errors"].get("peaks_of", ()), work.publisher):
        peaks = peak_errors_of(seen, profile)
        profile = replace(profile, memory_error=peaks.spread if peaks else GUESSED_MEMORY)
    sources = _fitted_sources(entry)
    if not _has_seen(sources, work.publisher):
        return profile
    guess = find_prior(work.runtime)
    profile = replace(
        profile.with_constants({name: getattr(guess, name) for name in CONSTANTS}),
        log_errors=guess.log_errors,
        device_speed=(),
        residuals=(),
        step_error=GUESSED_STEP,
    )
    kept = [run for run in seen if run.source in sources and run.step_time_s]
    return profile if len(kept) < MIN_RUNS else _fit(kept, profile, work.cache)


def profiles_without(
    publishers: Sequence[str],
    runs: Sequence[MeasuredRun],
    cache: Path | None,
    each: Callable[..., Iterable[RuntimeProfile]] = map,
) -> dict[str, dict[str, RuntimeProfile]]:
    """Return all profiles of the catalog without each publisher, by publisher and name.

    Args:
        publishers: Publishers to leave out, one at a time.
        runs: All measured runs.
        cache: Folder that keeps fitted profiles between calls; None keeps none.
        each: A `map`, over worker processes for instance.
    """
    work = [
        Without(runtime=name, publisher=publisher, runs=tuple(runs), cache=cache)
        for publisher in publishers
        for name in comparable_names()
        if has_seen(name, publisher)
    ]
    tell(f"leaving out {len(publishers)} publishers, one at a time")
    refitted = dict(zip(((one.publisher, one.runtime) for one in work), each(profile_without, work), strict=True))
    return {
        publisher: {name: refitted.get((publisher, name), find_runtime(name)) for name in comparable_names()}
        for publisher in publishers
    }


def has_seen(runtime: str, publisher: str) -> bool:
    """Return whether anything in the shipped profile was fitted to the publisher's runs."""
    entry = read_mapping(catalog_path(runtime))
    copied = (entry.get("constants_of") or {}).get("sources", ())
    memory = (*entry["errors"].get("peaks_of", ()), *entry.get("memory_fitted_on", ()))
    return _has_seen([*_fitted_sources(entry), *copied, *memory], publisher)


def _fitted_sources(entry: Mapping[str, Any]) -> list[str]:
    """Return the words of a profile's `fitted_on`, the sources of its fit among them."""
    return re.split(r"[\s,]+", str(entry["fitted_on"]))


def _has_seen(sources: Iterable[str], publisher: str) -> bool:
    """Return whether one of the sources is the publisher's."""
    return publisher in {publisher_of(source) for source in sources}


def _memory_facts(entry: Mapping[str, Any], publisher: str) -> dict[str, Any]:
    """Return the guesses of the facts about memory that were chosen on the publisher's runs."""
    if not _has_seen(entry.get("memory_fitted_on", ()), publisher):
        return {}
    guesses = dict(entry["memory_priors"])
    overhead_gib = guesses.pop("overhead_gib", None)
    return guesses | ({} if overhead_gib is None else {"memory_overhead_bytes": round(overhead_gib * 2**30)})


def _fit(runs: Sequence[MeasuredRun], guess: RuntimeProfile, cache: Path | None) -> RuntimeProfile:
    """Fit the profile as benchmarks.calibration.fit_profiles does, or take the same fit from the cache."""
    place = cache and cache / f"{guess.name}-{_key(runs, guess)}.json"
    if place and place.is_file():
        profile = _restored(guess, json.loads(place.read_text(encoding="utf-8")))
    else:
        tell(f"fitting {guess.name} to {len(runs):,} runs of {', '.join(sorted({run.source for run in runs}))}")
        profile = calibrate(runs, guess).profile
        if place:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(_fitted(profile)), encoding="utf-8")
    return replace(profile, device_speed=tuple(shrink_speeds(dict(profile.device_speed), runs).items()))


def _fitted(profile: RuntimeProfile) -> dict[str, Any]:
    """Return all that a fit changes, as JSON."""
    return {
        "constants": {name: getattr(profile, name) for name in CONSTANTS},
        "log_errors": dict(profile.log_errors),
        "device_speed": dict(profile.device_speed),
        "residuals": [asdict(residual) for residual in profile.residuals],
        "step_error": profile.step_error,
    }


def _restored(guess: RuntimeProfile, fitted: Mapping[str, Any]) -> RuntimeProfile:
    """Return the profile whose fit `_fitted` described."""
    return replace(
        guess.with_constants(fitted["constants"]),
        log_errors=tuple(fitted["log_errors"].items()),
        device_speed=tuple(fitted["device_speed"].items()),
        residuals=tuple(LayerResidual(**residual) for residual in fitted["residuals"]),
        step_error=fitted["step_error"],
    )


def _key(runs: Sequence[MeasuredRun], guess: RuntimeProfile) -> str:
    """Return a key that is equal for equal fits: of the same runs, from the same guess, by the same model.

    The model is known by its predictions of the runs, so that changes that leave them alone keep the cache.
    """
    kept, settings, _ = settings_of(runs, {guess.name: guess}, guess.name)
    predicted = predict(kept, settings).step_time_s
    prior = {name: getattr(guess, name) for name in CONSTANTS}
    digest = hashlib.sha256(repr((runs, guess.name, prior, guess.log_errors, guess.step_error)).encode())
    digest.update(np.round(np.log(predicted), 6).tobytes())
    digest.update(Path(fitting.__file__).read_bytes())
    return digest.hexdigest()[:16]
