"""Speeds of devices as a stranger should take them from a fit to other publishers' runs.

A fit cannot tell a device's speed from what else its runs have in common: the software and the hosts of those who
published them. Fitted speeds of one device differ between profiles by as much as those of different devices do, about
4% each, so the runs of one publisher determine half of what a fit to them says, and those of m publishers m / (m + 1):
the weight of m observations whose error is as large as the spread of the truth (James and Stein 1961).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from costmodels.calibration.fidelity import settings_of
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import publisher_of, source_of


def shrink_speeds(speeds: Mapping[str, float], runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Return the speeds of devices, drawn towards 1 the more the fewer publishers' runs they were fitted to.

    Args:
        speeds: Fitted speed of each device relative to its published figures.
        runs: Runs of the fit; those without a step time do not count.
    """
    known, settings, _ = settings_of([run for run in runs if run.step_time_s and source_of(run).timed], {})
    publishers = defaultdict[str, set[str]](set)
    for run, measured in zip(known, settings, strict=True):
        for device in measured.setting.cluster.devices:
            publishers[device.name].add(publisher_of(run.source))
    counts = {name: len(publishers[name]) for name in speeds}
    return {name: speed ** (counts[name] / (counts[name] + 1)) for name, speed in speeds.items()}
