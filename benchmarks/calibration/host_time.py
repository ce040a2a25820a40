"""Fit the time that a framework's host takes to launch an operator, on runs of tiny models.

    python -m benchmarks.calibration.host_time [A.csv ...] [--json]

Functional tests of frameworks print step times of models so small that the device waits for the host. A profile is
fitted to no such run, since they say nothing of the device; here, only the constants of the host are free: launches,
collectives, messages between stages, and the time once per step. Each kind of device is fitted by itself, since it
stands for the hosts around it. The last line of a runtime is the mean of these in logarithms, and their spread: the
prior of its profile (`priors` in costmodels/catalog/runtimes). Exit status 2 reports a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.fidelity_figures import error_figures
from benchmarks.support.shipped_runs import FOLDER
from benchmarks.support.timing import answer, benchmark_parser
from costmodels.calibration.fidelity import predict, settings_of
from costmodels.calibration.fitting import MIN_RUNS, TimedRun, fit_to_runs
from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.calibration.sources import MeasuredSetting, source_of
from costmodels.job.runtime import CONSTANTS, RuntimeProfile, find_prior

TESTS = (FOLDER / "megatron-lm-tests.csv", FOLDER / "mindspeed-llm-tests.csv")
HOST = ("launch_s", "collective_launch_s", "hop_launch_s", "step_overhead_s")
"""Constants of the host, in the order of the columns."""

FREE, FIXED = 2.0, 0.05
"""Prior errors of the logarithms of the host's constants and of all others."""

DEVICE_SHARE = 0.5
"""Largest share of a step that the device alone explains, if the step is to tell of the host."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fitted constants and return the exit status."""
    parser = benchmark_parser("calibration.host_time", __doc__)
    parser.add_argument("measured", nargs="*", type=Path, default=TESTS, metavar="CSV", help="runs of tiny models")
    return answer("host_time", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Fit the host of each runtime and kind of device.

    Raises:
        ConfigError: A file cannot be read.
    """
    runs, _ = read_measured_and_skipped(given.measured, Path())
    groups: dict[str, dict[str, list[MeasuredRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.step_time_s is not None:
            groups[source_of(run).runtime][run.device].append(run)
    return {
        "runtimes": {
            name: {device: _fit(find_prior(name), own) for device, own in sorted(devices.items())}
            for name, devices in sorted(groups.items())
        }
    }


def _fit(guess: RuntimeProfile, runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Fit the constants of the host to those runs of one kind of device that wait for it."""
    loose = replace(guess, log_errors=tuple((name, FREE if name in HOST else FIXED) for name in CONSTANTS))
    known, settings = [], []
    for run in runs:
        kept, found, _ = settings_of([run], {guess.name: loose}, guess.name)
        known += [run] * len(kept)
        settings += found
    measured_s = np.array([run.step_time_s for run in known], dtype=np.float64)
    # what the device takes where its host takes no time
    alone = {name: CONSTANTS[name].lower for name in HOST}
    waits = predict(known, _with(settings, alone)).step_time_s < DEVICE_SHARE * measured_s
    at = np.flatnonzero(waits).tolist()
    if len(at) < MIN_RUNS:
        return {"n": len(at)}
    timed = [
        TimedRun(
            group=(known[i].model.name, known[i].device),
            source=known[i].source,
            measured=settings[i],
            config=known[i].config,
            step_time_s=float(measured_s[i]),
        )
        for i in at
    ]
    fitted = fit_to_runs(timed, loose)
    constants = {name: float(getattr(fitted, name)) for name in HOST}
    predicted_s = predict([known[i] for i in at], _with([settings[i] for i in at], constants)).step_time_s
    return {"n": len(at), **constants, **error_figures(predicted_s, measured_s[at])}


def _with(settings: Sequence[MeasuredSetting], constants: Mapping[str, float]) -> list[MeasuredSetting]:
    return [
        replace(each, setting=replace(each.setting, runtime=replace(each.setting.runtime, **constants)))
        for each in settings
    ]


def _over_devices(devices: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean of each constant over kinds of devices, in logarithms, and the deviation of the logarithms."""
    logs = {name: np.log([each[name] for each in devices.values() if name in each]) for name in HOST}
    return {
        name: {"value": float(np.exp(each.mean())), "log_error": float(each.std(ddof=1))}
        for name, each in logs.items()
        if len(each) > 1
    }


def _print(result: Mapping[str, Any]) -> None:
    print(f"{'runtime':16}{'device':14}{'runs':>5}" + "".join(f"{name:>22}" for name in HOST) + f"{'median error':>14}")
    for runtime, devices in result["runtimes"].items():
        for device, found in devices.items():
            if "median_ape" in found:
                values = "".join(f"{found[name] * 1e6:19.0f} us" for name in HOST)
                print(f"{runtime:16}{device:14}{found['n']:5}{values}{found['median_ape']:14.1%}")
        for name, mean in _over_devices(devices).items():
            print(f"{runtime:16}{name}: {mean['value']:.2g} s, error of its logarithm {mean['log_error']:.2f}")


if __name__ == "__main__":
    sys.exit(main())
