"""Measured groups as tuning problems: the candidates, the result of each trial, and the predictions before any trial.

Letters: n candidates, d features.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.support.timing import reasons
from costmodels.calibration.fidelity import by_setting, group_key, settings_of
from costmodels.calibration.measured_runs import MeasuredGroup, MeasuredRun, read_measured_and_skipped
from costmodels.calibration.sources import MeasuredSetting, setting_of, source_of
from costmodels.job.parallel_config import DEGREES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile, catalog_path, find_prior, find_runtime
from hardware.arrays import FloatArray
from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError
from trials.backend import Observation
from trials.replay.backend import ReplayBackend
from tuner.search.posterior import Posterior
from tuner.search.prior import initial_posterior
from tuner.storage.history.published import past_of_runs

STRANGERS = ("megatron-core", "nanotron")
"""Shipped profiles that may predict the runs of other runtimes, in the order in which they are tried."""

CONTRADICTORY = "SUSPECT"
"""Tag of runs that contradict physics or their own page; merely slow runs stay, since a tuner meets them too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """All measured runs of one job on one cluster.

    Attributes:
        runs: One run of each candidate, the first in its files [n].
        grid: Candidates, timed or failed, in the order of the files [n].
        outcomes: Observation that a trial of each candidate returns [n]; its step time is the median of all its runs.
    """

    runs: tuple[MeasuredRun, ...]
    grid: ConfigGrid
    outcomes: tuple[Observation, ...]

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Values that the runs share, as in costmodels.calibration.fidelity."""
        return group_key(self.runs[0])

    @property
    def step_time_s(self) -> FloatArray:
        """Measured step times [n]; infinite for candidates that failed."""
        return np.array([np.inf if outcome.step_time_s is None else outcome.step_time_s for outcome in self.outcomes])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """Knowledge of a sampler about a group before its first trial.

    Attributes:
        grid: Candidates of the group [n].
        posterior: Prior over the candidates.
        runtime: Name of the profile that predicts them.
        num_history: Number of runs of the history of the same runtime; 0 without a history.
        num_dropped: Number of runs of the history that were left out because they belong to this very group.
    """

    grid: ConfigGrid
    posterior: Posterior
    runtime: str
    num_history: int
    num_dropped: int

    @property
    def predicted_s(self) -> FloatArray:
        """Predicted step times, corrected by the history [n]."""
        own = [hypothesis for hypothesis in self.posterior.steps if hypothesis.change is None]
        return np.exp(own[-1].log_predicted)

    @property
    def memory_share(self) -> FloatArray:
        """Predicted memory over the capacity of the devices [n]."""
        return self.posterior.predicted.needed_bytes / self.posterior.predicted.capacity_bytes


def read_runs(paths: Sequence[Path]) -> tuple[tuple[MeasuredRun, ...], Counter[str]]:
    """Read the runs of the files, and of `NAME_failed.csv` beside each `NAME.csv`; count the rows left out by reason.

    Raises:
        ConfigError: A file is missing or malformed, or holds no run.
    """
    files: list[Path] = []
    for path in paths:
        failed = path.with_name(f"{path.stem}_failed{path.suffix}")
        files += [path, failed] if failed.is_file() else [path]
    runs, skipped = read_measured_and_skipped(list(dict.fromkeys(files)), Path())
    kept = tuple(run for run in runs if run.is_failed or CONTRADICTORY not in run.notes)
    return kept, Counter(skipped) + Counter({f"tagged {CONTRADICTORY}": len(runs) - len(kept)})


def read_groups(paths: Sequence[Path], min_candidates: int) -> tuple[list[Group], Counter[str]]:
    """Read the groups of some files, and count the runs left out by reason.

    Raises:
        ConfigError: A file is missing or malformed, or no group has at least `min_candidates` candidates.
    """
    runs, skipped = read_runs(paths)
    groups, left_out = groups_of(runs, min_candidates)
    skipped += left_out
    if not groups:
        raise ConfigError(
            f"hold no group of at least {min_candidates} candidates with a timed one among them",
            key=", ".join(map(str, paths)),
            nearest=f"--min-candidates takes smaller ones; {reasons(skipped)}",
        )
    return groups, skipped


def groups_of(runs: Sequence[MeasuredRun], min_candidates: int) -> tuple[list[Group], Counter[str]]:
    """Return the groups with enough candidates and at least one timed run, and count the other runs by reason.

    Runs of one group whose models differ in size are separate jobs.
    """
    known, _, skipped = settings_of(runs, {})
    # Two models of one name can differ in size between sources; the model's fields are part of the key.
    by_job: dict[Hashable, list[MeasuredRun]] = defaultdict(list)
    for run in known:
        if run.is_failed or run.step_time_s is not None:
            by_job[group_key(run), run.model].append(run)
        else:
            skipped["no step time"] += 1
    groups = []
    for own in by_job.values():
        if len({run.config for run in own}) < min_candidates:
            skipped[f"in a group of fewer than {min_candidates} candidates"] += len(own)
        elif not any(run.step_time_s for run in own):
            skipped["in a group where nothing was timed"] += len(own)
        else:
            groups.append(_group(own))
    return groups, skipped


def _group(runs: Sequence[MeasuredRun]) -> Group:
    first = runs[0]
    backend = ReplayBackend(
        group=MeasuredGroup(
            model=first.model,
            sequence_length=first.sequence_length,
            global_batch_size=first.global_batch_size,
            devices=first.devices,
            device=first.device,
            precision=first.precision,
            runs=tuple(runs),
            skipped=0,
        )
    )
    grid = backend.candidates(backend.dimensions[len(DEGREES) :])
    configs = [grid.config(position) for position in range(len(grid))]
    first_of = {run.config: run for run in reversed(runs)}
    return Group(
        runs=tuple(first_of[config] for config in configs),
        grid=grid,
        outcomes=tuple(backend.measure(config, trial_number=number) for number, config in enumerate(configs)),
    )


def problem_of(group: Group, history: Sequence[MeasuredRun], runtime: str | None = None) -> Problem:
    """Build the tuning problem of a group.

    Without a history the candidates are predicted by a shipped profile that was never fitted to their source
    (`stranger_to`), as a newcomer would state them (`strange_setting`). With a history they are predicted by their
    source's own runtime as it was before any run, corrected by the history as in a study; runs of the group itself are
    left out.

    Args:
        group: The candidates and their runs.
        history: Runs of other groups; empty for none.
        runtime: Name of the profile to use instead.

    Raises:
        ConfigError: Every profile was fitted to the source.
    """
    source = source_of(group.runs[0])
    others = tuple(run for run in history if group_key(run) != group.key)
    # Runs of one group may differ in their settings, so each has its own.
    if history:
        name = runtime or source.runtime
        # With a history the profile starts before any fit, so that the history is not counted twice.
        settings = [setting_of(run, {name: find_prior(name)}, name) for run in group.runs]
    else:
        name = runtime or stranger_to(source.runtime, group.runs[0].source)
        settings = [strange_setting(run, find_runtime(name)) for run in group.runs]
    parts = [(measured, np.array(at)) for measured, at in by_setting(settings).items()]
    past = past_of_runs(others)
    if runtime is not None:  # a profile that is forced predicts all runs
        past = replace(past, runs=tuple(replace(run, runtime=name) for run in past.runs))
    return Problem(
        grid=group.grid,
        posterior=initial_posterior(parts, group.grid, past),
        runtime=name,
        num_history=sum(run.runtime == name for run in past.runs),
        num_dropped=len(history) - len(others),
    )


def strange_setting(run: MeasuredRun, profile: RuntimeProfile) -> MeasuredSetting:
    """Return the setting of a run as a newcomer would state it who names this profile.

    Under the source's own runtime, the facts that its publisher documents hold, but none that was concluded from its
    measurements. Under another, all facts are the profile's.
    """
    source = source_of(run)
    measured = setting_of(run, {profile.name: profile}, profile.name)
    if profile.name != source.runtime:
        return replace(measured, setting=replace(measured.setting, runtime=profile))
    facts = {name: getattr(profile, name) for name in source.inferred}
    return replace(measured, setting=replace(measured.setting, runtime=replace(measured.setting.runtime, **facts)))


def stranger_to(runtime: str, source: str) -> str:
    """Return the first of STRANGERS that is neither the runtime itself nor fitted to the source.

    Raises:
        ConfigError: There is no such profile.
    """
    for name in STRANGERS:
        fitted_on = str(read_mapping(catalog_path(name))["fitted_on"])
        if name != runtime and source not in re.split(r"[\s,]+", fitted_on):
            return name
    raise ConfigError(f"no profile is strange to {source}", key="--runtime", nearest="name the profile to begin with")
