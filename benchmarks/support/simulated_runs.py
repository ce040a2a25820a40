"""Predict measured runs with the event simulator, as costmodels/calibration/fidelity.py does with the closed form."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.support.timing import tell
from costmodels.calibration.fidelity import Predictions, by_setting
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory

TELL_EVERY_S = 20.0


def simulated(
    runs: Sequence[MeasuredRun], settings: Sequence[MeasuredSetting], predictions: Predictions
) -> tuple[list[int], Predictions, Counter[str]]:
    """Simulate the measured runs.

    Runs without a step time keep the closed form's, and all runs keep its memory.

    Args:
        runs: Measured runs [n].
        settings: Setting of each run [n].
        predictions: Predictions of the closed form [n].

    Returns:
        Positions of the runs that can be simulated, their predictions, and the number of others by reason.
    """
    step_time_s, fallen = predictions.step_time_s.copy(), Counter[str]()
    kept, done, told_s = np.ones(len(runs), dtype=np.bool_), 0, time.perf_counter()
    for measured, at in by_setting(settings).items():
        # Runs of the same configuration share one simulation, which takes most of the time.
        of_config: dict[ParallelConfig, list[int]] = {}
        for position in at:
            if runs[position].step_time_s is not None:
                of_config.setdefault(runs[position].config, []).append(position)
        for config, positions in of_config.items():
            try:
                step_time_s[positions] = _step_s(measured.setting, config)
            except ValueError as error:
                kept[positions] = False
                fallen[f"{runs[positions[0]].source}: {error}"] += len(positions)
        done += len(at)
        if time.perf_counter() - told_s > TELL_EVERY_S:
            told_s = time.perf_counter()
            tell(f"simulated {done:,} of {len(runs):,}")
    found = np.flatnonzero(kept)
    return found.tolist(), taken(replace(predictions, step_time_s=step_time_s), found), fallen


def taken(predictions: Predictions, at: np.ndarray) -> Predictions:
    """Return the predictions of the runs at some positions."""
    return Predictions(
        step_time_s=predictions.step_time_s[at],
        peak_memory_bytes=predictions.peak_memory_bytes[at],
        fits=predictions.fits[at],
    )


def _step_s(setting: Setting, config: ParallelConfig) -> float:
    grid = ConfigGrid.from_configs([config])
    memory = estimate_memory(setting, grid)
    return simulate_step(setting, config, memory=memory).step_time_s
