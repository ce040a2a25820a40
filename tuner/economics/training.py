"""Time, device-hours and cost of a whole training: with the current configuration, the best, and on other sizes.

A step consumes global batch size x sequence length tokens. The time of a training is its number of steps times the step
time; restarts, evaluation and checkpoints are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna import Study

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster import Cluster
from hardware.time_units import DAY_S, HOUR_S
from tuner.answers.basis import Basis, basis_in
from tuner.answers.best import best_known
from tuner.answers.gain import Compared, Known
from tuner.answers.predictions import judge_of, predict_taught
from tuner.economics.device_time import device_time_of
from tuner.forecast.prepared import Prepared
from tuner.forecast.sizes import best_by_size
from tuner.search.proxy.extrapolation import Extrapolated
from tuner.search.step_draws import SLOWER
from tuner.storage.record import TrialRecord, read_records
from tuner.study_file.cost_keys import NO_LIMITS, Limits
from tuner.study_file.request import Economics
from tuner.subject.ability import Ability


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Whole training with one configuration.

    Attributes:
        label: What the configuration is: current, baseline or best, or a number of hosts.
        devices: Number of devices.
        config: Configuration.
        source: Source of the step time: measured, synthetic, learned (from trials of others) or predicted.
        step_time_s: Step time [s].
        range_s: Step time that the 95% interval of a time begins and ends with [s]; None of a measured one.
        slower_probability: Probability of a time beyond that interval; None without trials that tell it.
        steps: Number of steps.
        per_hour: Price of all devices for one hour; None without a price.
        limits: Limits of the training.
    """

    label: str
    devices: int
    config: ParallelConfig
    source: str
    step_time_s: float
    range_s: tuple[float, float] | None
    steps: int
    per_hour: float | None = None
    limits: Limits = NO_LIMITS
    slower_probability: float | None = None

    @property
    def seconds(self) -> float:
        """Time of all steps [s]."""
        return self.steps * self.step_time_s

    @property
    def device_hours(self) -> float:
        """Time of all steps on all devices [h]."""
        return self.devices * self.seconds / HOUR_S

    @property
    def cost(self) -> float | None:
        """Cost of all steps; None without a price."""
        return None if self.per_hour is None else self.per_hour * self.seconds / HOUR_S

    @property
    def breaks(self) -> tuple[str, ...]:
        """Names of the study's limits that it breaks."""
        return self.limits.broken_by(self.seconds / DAY_S, self.cost)

    def as_json(self, dimensions: Sequence[str]) -> dict[str, Any]:
        """Return the training as an object."""
        return {
            "label": self.label,
            "devices": self.devices,
            "config": self.config.values(dimensions),
            "source": self.source,
            "step_time_s": self.step_time_s,
            "seconds": self.seconds,
            "seconds_range": None if self.range_s is None else [self.steps * step_s for step_s in self.range_s],
            SLOWER: self.slower_probability,
            "device_hours": self.device_hours,
            "cost": self.cost,
            "breaks": list(self.breaks),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingEstimate:
    """Answer to what a training takes.

    Attributes:
        tokens: Number of tokens.
        trainings: Trainings on the study's cluster: the reference, unless there is none or it has failed, and the best
            configuration.
        compared: Comparison of the best with the reference; None without one.
        sizes: Trainings on other numbers of hosts; a number on which nothing fits is left out.
        reasons: Reason why nothing fits, for each number of hosts that is left out.
        tuning_device_hours: Device-hours of the trials so far.
        takes_devices: Whether the trials really took devices.
    """

    tokens: float
    trainings: tuple[Training, ...]
    compared: Compared | None = None
    sizes: tuple[Training, ...] = ()
    reasons: tuple[tuple[int, str], ...] = ()
    tuning_device_hours: float = 0.0
    takes_devices: bool = False

    @property
    def saved_device_hours(self) -> float | None:
        """Device-hours that the best configuration saves over the reference by the gain [h].

        None without a reference that runs, and where one of the two is measured and the other predicted.
        """
        return self._saved(None if self.compared is None else self.compared.gain)

    @property
    def saved_device_hours_interval(self) -> tuple[float, float] | None:
        """Ends of the same by the ends of the gain's interval [h]; None where that is not known."""
        if self.compared is None or self.compared.interval is None:
            return None
        low, high = (self._saved(end) for end in self.compared.interval)
        return None if low is None or high is None else (low, high)

    def _saved(self, gain: float | None) -> float | None:
        if gain is None or len(self.trainings) < 2 or len({training.source for training in self.trainings}) > 1:
            return None
        return self.trainings[0].device_hours * (1 - 1 / gain)


def estimate_training(
    prepared: Prepared, study: Study | None, basis: Basis, tokens: float, sizes: Sequence[int] = ()
) -> TrainingEstimate | None:
    """Return what training on a number of tokens takes; None if no configuration fits.

    Args:
        prepared: Study.
        study: Its stored counterpart; None for a study that was never run.
        basis: What the answer rests on.
        tokens: Number of tokens.
        sizes: Numbers of hosts to predict too.
    """
    best, records = best_known(prepared, study, basis), read_records(study) if study is not None else []
    if best is None:
        return None
    steps = math.ceil(tokens / prepared.problem.setting.job.tokens_per_step)
    trainings = []
    compared = best.compared
    if compared is not None and compared.known is not Known.FAILED:
        reference = compared.reference
        trainings.append(
            _training(prepared, reference.role, reference.config, best.source, compared.step_time_s, steps, basis)
        )
    known_s = best.step_time_s if best.is_measured else None
    trainings.append(_training(prepared, "best", best.config, best.source, known_s, steps, basis))
    judge = judge_of(prepared, basis)
    found = list(best_by_size(prepared.problem, sizes, file=prepared.request.file, judge=judge))
    spent = device_time_of(prepared.request, records)
    return TrainingEstimate(
        tokens=tokens,
        trainings=tuple(trainings),
        compared=compared,
        sizes=tuple(
            Training(
                label=str(size.hosts),
                devices=size.devices,
                config=size.config,
                source=size.source,
                step_time_s=size.step_time_s,
                range_s=None,
                steps=steps,
                per_hour=_price_per_hour(prepared.request.economics, size.setting.cluster),
                limits=prepared.request.economics.limits,
            )
            for size in found
            if size.config is not None
        ),
        reasons=tuple((size.hosts, size.reason) for size in found if size.config is None),
        tuning_device_hours=spent.device_hours,
        takes_devices=spent.is_spent,
    )


def limited_training(prepared: Prepared, best: ParallelConfig, source: str, step_time_s: float) -> Training | None:
    """Return the training of `limits.tokens` with the best configuration; None where a study has no such limits.

    Args:
        prepared: Study.
        best: Best configuration.
        source: Source of its step time.
        step_time_s: Step time of the configuration [s].
    """
    tokens = prepared.request.economics.limits.tokens
    if tokens is None or not prepared.problem.subject.has(Ability.TOKENS):
        return None
    steps = math.ceil(tokens / prepared.problem.setting.job.tokens_per_step)
    return _training(prepared, "best", best, source, step_time_s, steps)


def limited_of(prepared: Prepared, best: TrialRecord | None, extrapolated: Extrapolated | None) -> Training | None:
    """Return the training of `limits.tokens` with the answer of a study's trials; see `limited_training`."""
    if best is not None and best.step_time_s is not None:
        return limited_training(
            prepared, prepared.problem.config_of(best.params), prepared.request.trials.backend.origin, best.step_time_s
        )
    if extrapolated is not None:
        return limited_training(
            prepared, prepared.problem.config_of(extrapolated.config), "predicted", extrapolated.step_time_s
        )
    return None


def _training(
    prepared: Prepared,
    label: str,
    chosen: ParallelConfig,
    known: str,
    known_s: float | None,
    steps: int,
    basis: Basis | None = None,
) -> Training:
    """Return the training with one configuration, learned or predicted where no trial has timed it.

    Args:
        prepared: Study.
        label: Name of the training in the answer: that of a role, or `best`.
        chosen: Configuration.
        known: Source of its step time, if that is known.
        known_s: Step time that is known [s]; None where it has to be predicted.
        steps: Number of steps.
        basis: What a step time that is not known rests on.
    """
    step_time_s, range_s, source, slower = known_s, None, known, None
    if step_time_s is None:
        told = predict_taught(prepared.problem, chosen, basis or basis_in(prepared, None))
        low_s, high_s = told["step_time_range_s"]
        step_time_s, range_s, source = float(told["step_time_s"]), (low_s, high_s), told["source"]
        slower = told.get(SLOWER)
    return Training(
        label=label,
        devices=prepared.problem.cluster.num_devices,
        config=chosen,
        source=source,
        step_time_s=step_time_s,
        range_s=range_s,
        steps=steps,
        per_hour=_price_per_hour(prepared.request.economics, prepared.problem.cluster),
        limits=prepared.request.economics.limits,
        slower_probability=slower,
    )


def _price_per_hour(economics: Economics, cluster: Cluster) -> float | None:
    return None if economics.prices is None else economics.prices.per_hour(cluster)
