"""Prior of the candidates, with everything that a history teaches of them.

The profile of the study's runtime is fitted to the earlier runs of that runtime, nearest jobs first. The errors that it
leaves, of step times and of memory, become observations of the study's own surrogates
(costmodels/surrogates/hypotheses.py). Operator times of earlier trials become observations of the operator surrogate,
and so do times of isolated operators that a calibration of the study's device measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from costmodels.calibration.fitting import fit_to_runs
from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.facts import under_profile
from costmodels.job.parallel_config import HAND, ConfigGrid
from costmodels.job.runtime import CONSTANTS, RuntimeProfile, other_runtimes
from costmodels.job.setting import Setting
from costmodels.simulator.leaders import LEADERS, is_worth_simulating, simulated_times_s
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.error_terms import step_terms
from costmodels.surrogates.hypotheses import (
    FEWEST_PAST,
    FOREIGN_TRUST,
    TRUST,
    Alternative,
    FittedHistory,
    PastGroup,
    SimulatedSteps,
)
from costmodels.surrogates.operator_surrogate import OperatorErrors
from costmodels.surrogates.predicted import Predicted, predict, together
from hardware.arrays import IntArray
from hardware.cluster import Cluster
from trials.backend import Status
from tuner.search.earlier_runs import Past, PastRun, PastSample
from tuner.search.operator_posterior import Key, OperatorPosterior, errors_of, isolated_errors, predicted_times
from tuner.search.posterior import Posterior, posterior_of
from tuner.search.proxy.proxy_posterior import ProxyPosterior
from tuner.space.fewer_hosts import leaves_hosts_idle

Part = tuple[MeasuredSetting, IntArray]
"""Setting, and the positions of the candidates that are predicted under it."""

OnProgress = Callable[[str], None]


def ignore_progress(_: object) -> None:
    """Do nothing, for callers who do not follow the progress."""


MOST_GROUPS = 16
"""Number of jobs of the history that are used; those nearest to the study's."""

MOST_RUNS = 30
"""Number of runs of one job that the profile is fitted to, spread evenly over them."""

MOST_KEPT = 12
"""Number of runs of one job whose remaining errors are observations: the process' cost grows with their cube."""

OPENNESS = 0.5
"""Least share of its unfitted error by which a constant of a shipped profile may err, for users who bring runs of their
own; assumed."""

OTHER_DEVICE = 4.0
"""Distance of a job on other devices, in octaves of size."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Learned:
    """Conclusions from a history.

    Attributes:
        runtime: Profile fitted to the history.
        groups: Runs of the history with the predictions of that profile.
        operators: Errors of that profile for the operator times of the history.
        trust: Probability that the fitted profile holds; see `FittedHistory`.
    """

    runtime: RuntimeProfile
    groups: tuple[PastGroup, ...]
    operators: tuple[OperatorErrors, ...]
    trust: float


def initial_posterior(
    parts: Sequence[Part],
    grid: ConfigGrid,
    past: Past | None = None,
    *,
    other_profiles: Sequence[RuntimeProfile] | None = None,
    other_clusters: Sequence[Part] = (),
    on_progress: OnProgress = ignore_progress,
) -> Posterior:
    """Return the posterior of candidates before any trial of the study.

    Args:
        parts: Settings of the candidates; a study has one, published sweeps now and then more.
        grid: Grid of the candidates.
        past: History of the study.
        other_profiles: Profiles that may predict the study's cluster better than its own; None for the catalog's.
        other_clusters: Candidates on other clusters or with other sequences, where no trial runs. They stand behind all
            others in this order, and trials on the study's own cluster teach of them too.
        on_progress: Function that is called with a line of text before a step that takes seconds.
    """
    learned = learn(past, parts[0][0].setting, on_progress=on_progress) if past else None
    history = None
    every = [*parts, *other_clusters]
    if learned:
        fitted = [(under(setting, learned.runtime), at) for setting, at in every]
        history = FittedHistory(predicted=_predict_parts(fitted, grid), groups=learned.groups, trust=learned.trust)
    # operators are composed in one setting on one kind of device only, for all hosts
    operators, proxies = None, None
    cluster = parts[0][0].setting.cluster
    if len(parts) == 1 and len(cluster.devices) == 1 and not leaves_hosts_idle(cluster, grid).any():
        fitted_study = under(parts[0][0], learned.runtime) if learned else parts[0][0]
        setting = fitted_study.setting
        proxies = ProxyPosterior(measured=parts[0][0], fitted=fitted_study)
        operators = OperatorPosterior(
            terms_of=partial(step_terms, setting, grid.take(parts[0][1]) if other_clusters else grid),
            past=learned.operators if learned else (),
            alone=isolated_errors(past.alone, parts[0][0].setting, is_absorbed=bool(learned and learned.trust == TRUST))
            if past
            else (),
            other_clusters_of=tuple(
                partial(
                    step_terms, replace(setting, job=other.setting.job, cluster=other.setting.cluster), grid.take(at)
                )
                for other, at in other_clusters
            ),
        )
    own = parts[0][0].setting.runtime
    others = other_runtimes(own) if other_profiles is None else other_profiles
    alternatives = [_alternative(every, grid, profile) for profile in others if profile.name != own.name]
    predicted = _predict_parts(every, grid)
    simulated = None
    if len(every) == 1 and is_worth_simulating(parts[0][0].setting.cluster):
        simulated = _simulate_leaders(parts[0][0].setting, grid, predicted, on_progress)
    return posterior_of(
        predicted,
        grid,
        history=history,
        alternatives=alternatives,
        simulated=simulated,
        operators=operators,
        proxies=proxies,
    )


def _simulate_leaders(
    setting: Setting, grid: ConfigGrid, predicted: Predicted, on_progress: OnProgress
) -> SimulatedSteps:
    """Simulate the candidates that are predicted to be the fastest of those that fit."""
    memory = estimate_memory(setting, grid)
    order = np.argsort(predicted.step_time_s, kind="stable")
    leaders = order[(memory.needed_bytes <= memory.capacity_bytes)[order]][:LEADERS]
    if len(leaders):
        on_progress(f"simulating the {len(leaders)} fastest predictions, because stages or links are unlike")
    return SimulatedSteps(at=leaders, step_time_s=simulated_times_s(setting, grid, leaders, memory=memory))


def _alternative(parts: Sequence[Part], grid: ConfigGrid, profile: RuntimeProfile) -> Alternative:
    """Return the predictions of all candidates by another profile."""
    step_time_s, needed_bytes = np.empty(len(grid)), np.empty(len(grid))
    for measured, at in parts:
        setting, some = measured.setting.predicted_by(profile), grid.take(at)
        memory = estimate_memory(setting, some)
        step_time_s[at] = estimate_step(setting, some, memory=memory).step_time_s
        needed_bytes[at] = memory.needed_bytes
    return Alternative(step_time_s=step_time_s, needed_bytes=needed_bytes)


def _predict_parts(parts: Sequence[Part], grid: ConfigGrid) -> Predicted:
    """Return the predictions of all candidates, each under its own setting."""
    return together([predict(setting, grid.take(at)) for setting, at in parts], [at for _, at in parts])


def learn(past: Past, setting: Setting, *, on_progress: OnProgress = ignore_progress) -> Learned | None:
    """Fit the runtime's profile to the history; return None if it holds too few runs of the runtime.

    Args:
        past: History of the study.
        setting: Setting of the study.
        on_progress: Function that is called with a line of text before a step that takes seconds.
    """
    # the nearest jobs say most of this one, and fitting to all would take long
    groups = nearest_groups(past.runs, setting)
    timed = replace(past, runs=tuple(run for runs in groups for run in runs)).timed(setting.runtime)
    if len(timed) < FEWEST_PAST:  # there would be no hypothesis of the fitted profile
        return None
    jobs = "1 job" if len(groups) == 1 else f"{len(groups)} jobs"
    on_progress(f"learning from {len(timed)} earlier runs of {jobs}")
    # what the study states of its program is no constant to be fitted
    runtime = under_profile(fit_to_runs(timed, _widen_errors(setting.runtime)), setting.runtime.stated)
    # residuals of fewer runs become observations of the surrogates, whose cost is cubic
    kept = tuple(_predict_group(part, runtime) for runs in groups for part in _group_by_setting(_thin(runs, MOST_KEPT)))
    samples: dict[str, list[PastSample]] = {}
    for sample in past.samples:
        samples.setdefault(sample.group, []).append(sample)
    operators = tuple(
        errors
        for runs in groups
        if runs[0].group in samples
        for errors in _compare_operators(runs, samples[runs[0].group], runtime)
    )
    is_own = any(_device_names_of(runs[0].cluster) == _device_names_of(setting.cluster) for runs in groups)
    return Learned(runtime=runtime, groups=kept, operators=operators, trust=TRUST if is_own else FOREIGN_TRUST)


def _widen_errors(runtime: RuntimeProfile) -> RuntimeProfile:
    """Return the profile with wider errors of its constants, which may differ from the clusters it was fitted to."""
    errors = dict(runtime.log_errors)
    widened = [(name, max(errors[name], OPENNESS * CONSTANTS[name].log_error)) for name in errors]
    return replace(runtime, log_errors=tuple(widened))


def nearest_groups(runs: Sequence[PastRun], setting: Setting) -> list[list[PastRun]]:
    """Return the runs of the setting's runtime by job, the nearest jobs first, thinned to MOST_GROUPS and MOST_RUNS."""
    by_group: dict[str, list[PastRun]] = {}
    for run in runs:
        tells = (
            run.is_clean
            and run.config.plan == HAND
            and (run.step_time_s is not None or run.peak_memory_bytes is not None)
        )
        if run.runtime == setting.runtime.name and tells and run.status is Status.OK:
            by_group.setdefault(run.group, []).append(run)
    nearest = sorted(by_group.values(), key=lambda group: _distance(group[0], setting))[:MOST_GROUPS]
    return [_thin(group, MOST_RUNS) for group in nearest]


def _thin(runs: list[PastRun], most: int) -> list[PastRun]:
    """Return at most `most` of the runs, spread evenly over them."""
    # runs of a sweep stand in the order of their degrees: an even spread covers them
    at = np.unique(np.linspace(0, len(runs) - 1, min(most, len(runs))).round().astype(int))
    return [runs[position] for position in at]


def _distance(run: PastRun, setting: Setting) -> float:
    """Return the distance of two jobs, in octaves of devices and parameters."""
    # sizes differ by factors, so octaves add up
    octaves = abs(math.log2(run.cluster.num_devices / setting.cluster.num_devices))
    octaves += abs(math.log2(run.job.model.num_parameters / setting.job.model.num_parameters))
    return octaves + (OTHER_DEVICE if _device_names_of(run.cluster) != _device_names_of(setting.cluster) else 0.0)


def _device_names_of(cluster: Cluster) -> frozenset[str]:
    return frozenset(device.name for device in cluster.devices)


def _group_by_setting(runs: Sequence[PastRun]) -> list[list[PastRun]]:
    """Group the runs of one job by the facts of their runtime."""
    parts: dict[object, list[PastRun]] = {}
    for run in runs:
        parts.setdefault((run.job, run.cluster, run.facts, run.memory, run.stage), []).append(run)
    return list(parts.values())


def _predict_group(runs: Sequence[PastRun], runtime: RuntimeProfile) -> PastGroup:
    """Return runs of one setting with the predictions of the fitted profile."""
    grid = ConfigGrid.from_configs([run.config for run in runs])
    return PastGroup(
        predicted=predict(runs[0].measured_setting(runtime), grid),
        step_time_s=np.array([math.nan if run.step_time_s is None else run.step_time_s for run in runs]),
        peak_bytes=np.array(
            [math.nan if run.peak_memory_bytes is None else float(run.peak_memory_bytes) for run in runs]
        ),
    )


def _compare_operators(
    runs: Sequence[PastRun], samples: Sequence[PastSample], runtime: RuntimeProfile
) -> tuple[OperatorErrors, ...]:
    """Return the errors of one study's operator times against the operators of its runs, proxies among them."""
    predicted_s: dict[Key, float] = {}
    for part in _group_by_setting(runs):
        setting = part[0].measured_setting(runtime).setting
        grid = ConfigGrid.from_configs(list(dict.fromkeys(run.config for run in part)))
        predicted_s |= predicted_times(step_terms(setting, grid))
    return errors_of(samples, predicted_s)


def under(measured: MeasuredSetting, runtime: RuntimeProfile) -> MeasuredSetting:
    """Return the setting with the constants of `runtime`; the facts of its own runtime stay."""
    own = measured.setting.runtime
    # a constant of 0 says that the runtime does no such thing, which a fit to others cannot change
    constants = {name: getattr(runtime, name) for name in CONSTANTS if getattr(own, name) != 0}
    fitted = replace(
        own,
        **constants,
        device_speed=runtime.device_speed,
        log_errors=runtime.log_errors,
        step_error=runtime.step_error,
        residuals=runtime.residuals,
    )
    return replace(measured, setting=replace(measured.setting, runtime=fitted))
