"""Device time of a study's trials, and the number of training steps after which the gain has paid for it.

A trial costs the devices of its job, or of the smaller job that ran in its place, times the wall clock for which it had
them. Failed trials, those stopped early, repeats and lost attempts count. Only time that nobody recorded is left out: a
trial's time under a driver that was killed.

A measurement that the study file states took no devices of the study. Simulated and replayed trials take none either.
They count the time of their measured steps, and nothing for start-up.
`device_s` is devices times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardware.time_units import DAY_S, HOUR_S
from trials.backend import Observation, TrialAbility
from tuner.answers.gain import Compared
from tuner.answers.reference import Reference
from tuner.storage.record import TrialRecord
from tuner.study_file.request import StudyRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Device time of trials.

    Attributes:
        steps_device_s: Device time from the first measured step on [device s].
        startup_device_s: Device time until then, and in attempts that were lost [device s]; None where trials take no
            devices.
    """

    steps_device_s: float
    startup_device_s: float | None

    @property
    def device_s(self) -> float:
        """Device time in all [device s]."""
        return self.steps_device_s + (self.startup_device_s or 0.0)

    @property
    def device_hours(self) -> float:
        """Device time in all, in hours."""
        return self.device_s / HOUR_S

    @property
    def startup_device_hours(self) -> float | None:
        """Device time of start-up, in hours."""
        return None if self.startup_device_s is None else self.startup_device_s / HOUR_S

    @property
    def is_spent(self) -> bool:
        """Whether devices were really taken."""
        return self.startup_device_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Payback:
    """Point at which a faster step has saved the device time that finding it took.

    Attributes:
        steps: Number of training steps to that point.
        seconds: Time of these steps with the best configuration [s].
    """

    steps: int
    seconds: float


def device_time_of(request: StudyRequest, records: Sequence[TrialRecord]) -> DeviceTime:
    """Return the device time of the trials that have ended."""
    full_size, trains = request.problem.cluster.num_devices, TrialAbility.TRAINING in request.trials.backend.abilities
    steps_device_s = startup_device_s = 0.0
    for record in records:
        if record.observation is None or not record.finished or record.observation.taken_from:
            continue
        devices = record.proxy.config.num_devices if record.proxy else full_size
        if trains:
            total_s, startup_s = _wall_s(record.observation), _startup_s(record.observation)
        else:
            total_s, startup_s = sum(record.observation.step_times_s), 0.0
        steps_device_s += devices * (total_s - startup_s)
        startup_device_s += devices * startup_s
    return DeviceTime(steps_device_s=steps_device_s, startup_device_s=startup_device_s if trains else None)


def payback_of(request: StudyRequest, compared: Compared | None, records: Sequence[TrialRecord]) -> Payback | None:
    """Return when the gain over the reference has paid for the trials, start-up included.

    None without a gain or a measured step of the reference, and where step times are not those of the wall clock that
    trials are paid by.
    """
    reference_s, gain = (compared.step_time_s, compared.gain) if compared is not None else (None, None)
    if request.trials.backend.clock != "wall" or not reference_s or gain is None or gain <= 1:
        return None
    # every step of training saves this much with the best configuration
    best_s = reference_s / gain
    saved_device_s = (reference_s - best_s) * request.problem.cluster.num_devices
    steps = math.ceil(device_time_of(request, records).device_s / saved_device_s)
    return Payback(steps=steps, seconds=steps * best_s)


def device_time_json(
    request: StudyRequest, compared: Compared | None, records: Sequence[TrialRecord]
) -> dict[str, Any]:
    """Return device time and pay-back under the keys of JSON."""
    spent, payback = device_time_of(request, records), payback_of(request, compared, records)
    return {
        "device_hours": spent.device_hours,
        "startup_device_hours": spent.startup_device_hours,
        "payback_steps": payback.steps if payback else None,
    }


def hours_in_words(spent: DeviceTime) -> str:
    """Return a sentence on the device time of the trials."""
    if not spent.is_spent:
        return f"On devices the measured steps of the trials would have taken {hours(spent.device_s)} device-hours"
    return (
        f"The trials took {hours(spent.device_s)} device-hours, "
        f"{hours(spent.startup_device_s or 0.0)} of them for start-up and warm-up"
    )


def payback_in_words(reference: Reference, payback: Payback) -> str:
    """Return a sentence on when the gain has paid for the trials."""
    steps = "1 step" if payback.steps == 1 else f"{payback.steps:,} steps"
    return f"{steps} of training ({duration(payback.seconds)}) pay them back by the gain over {reference.in_words}"


def hours(device_s: float) -> str:
    """Return device-hours with three significant digits."""
    found = device_s / HOUR_S
    return f"{found:,.0f}" if abs(found) >= 100 else f"{found:#.3g}" if found else "0"


def duration(seconds: float) -> str:
    """Return a time in the unit that people plan by."""
    for unit_s, unit in ((DAY_S, "days"), (HOUR_S, "hours"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.1f} {unit}"
    return f"{seconds:.3g} s"


def _wall_s(observation: Observation) -> float:
    """Return the time for which the trial had its devices [s]; at least its steps where nobody measured it."""
    own_s = observation.elapsed_s
    return observation.lost_s + (sum(observation.step_times_s) if own_s is None else own_s)


def _startup_s(observation: Observation) -> float:
    """Return the part of that time before the first measured step, or in lost attempts [s]."""
    if observation.measured_after_s is not None:
        own_s = observation.measured_after_s
    elif observation.elapsed_s is None:
        own_s = 0.0
    elif not observation.step_times_s:
        own_s = observation.elapsed_s
    elif observation.clock == "wall":
        own_s = max(observation.elapsed_s - sum(observation.step_times_s), 0.0)
    else:
        own_s = 0.0
    return observation.lost_s + own_s
