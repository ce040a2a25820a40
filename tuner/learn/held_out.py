"""Errors of predicted step times before and after a fit to a pool, each on runs that the fit has not seen.

Runs of one source share software and cluster, so a source is left out as a whole. A pool of one source leaves out its
jobs instead, one model on one number of devices at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.calibration.fidelity import group_key, predict, settings_of
from costmodels.calibration.fitting import MIN_RUNS, calibrate
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.runtime import RuntimeProfile
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Errors on one part of a pool.

    Attributes:
        name: Source, or the job where there is one source.
        runs: Number of its runs.
        before: Median of |predicted / measured - 1| under the catalog's profile.
        after: The same under a fit to all other parts; None where these are too few.
        ratio_before: Median of predicted / measured under the catalog's profile.
        ratio_after: The same under the fit.
    """

    name: str
    runs: int
    before: float
    after: float | None
    ratio_before: float
    ratio_after: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Errors on all parts of a pool.

    Attributes:
        part: What was left out at a time: `source` or `job`.
        parts: Errors of each part.
        before: Median error of the runs of all parts that were left out, under the catalog's profile; None if none was.
        after: Median error of the same runs under the fits that have not seen them.
    """

    part: str
    parts: tuple[HeldOut, ...]
    before: float | None
    after: float | None

    @property
    def helps(self) -> bool | None:
        """Whether fits to the others predict a part better than the catalog; None where that is not known."""
        return None if self.before is None or self.after is None else self.after < self.before


def check_held_out(
    runs: Sequence[MeasuredRun], profile: RuntimeProfile, *, on_progress: Callable[[str], None]
) -> Check:
    """Leave out one part of the runs at a time, and predict it before and after a fit to the others.

    Args:
        runs: Timed runs of the runtime.
        profile: Profile of the catalog.
        on_progress: Callback with a line of text before each fit.
    """
    kept, _, _ = settings_of(runs, {}, profile.name)
    sources = {run.source for run in kept}
    part = "source" if len(sources) > 1 else "job"
    names = [run.source if part == "source" else _job_of(run) for run in kept]
    found, before, after = [], [], []
    for name in dict.fromkeys(names):
        unseen = [run for run, own in zip(kept, names, strict=True) if own == name]
        seen = [run for run, own in zip(kept, names, strict=True) if own != name]
        was = _ratios(unseen, profile)
        now = None
        if len(seen) >= MIN_RUNS:
            on_progress(f"leaving out {len(unseen)} runs of {name}")
            now = _ratios(unseen, calibrate(seen, profile).profile)
            before.append(was)
            after.append(now)
        found.append(
            HeldOut(
                name=name,
                runs=len(unseen),
                before=_error(was),
                after=None if now is None else _error(now),
                ratio_before=float(np.median(was)),
                ratio_after=None if now is None else float(np.median(now)),
            )
        )
    return Check(
        part=part,
        parts=tuple(found),
        before=_error(np.concatenate(before)) if before else None,
        after=_error(np.concatenate(after)) if after else None,
    )


def _job_of(run: MeasuredRun) -> str:
    """Return the job of a run in words."""
    return ", ".join(str(part) for part in group_key(run)[1:7])


def _ratios(runs: Sequence[MeasuredRun], profile: RuntimeProfile) -> FloatArray:
    """Return predicted over measured step times [n]."""
    kept, settings, _ = settings_of(runs, {profile.name: profile}, profile.name)
    measured = np.array([run.step_time_s for run in kept], dtype=np.float64)
    ratios: FloatArray = predict(kept, settings).step_time_s / measured
    return ratios


def _error(ratios: FloatArray) -> float:
    return float(np.median(np.abs(ratios - 1)))
