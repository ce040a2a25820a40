"""What the trials of a study taught, for every command that names a step time: one posterior answers them all.

It knows the study's candidates, any other configuration on its cluster, and the same model elsewhere: on other numbers
of its hosts, on its cluster while links are slow, with other sequences. Trials say nothing of other devices.

Letters: n candidates, m configurations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.trial import FrozenTrial

from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ConfigGrid, ParallelConfig, Value, concatenate
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryEstimate
from hardware.arrays import IntArray
from hardware.io.errors import quote_value
from trials.backend import Status
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import Ranked, by_objective
from tuner.forecast.sizes import LEARNED, Judged
from tuner.search.implied import ImpliedFailures
from tuner.search.observations import Observations, observations_on
from tuner.search.posterior import LIKELY, Expected, Posterior
from tuner.search.prior import initial_posterior
from tuner.search.step_draws import SLOWER, STEP_RANGE, StepDraws, StepRange
from tuner.storage.history import past_of
from tuner.storage.record import MEANING, TrialRecord, fastest, records_of
from tuner.study_file.meaning import first_difference
from tuner.subject.ability import Ability
from tuner.subject.problem import Problem

OnProgress = Callable[[str], None]

NUM_DRAWS = 1_000
"""Number of draws of a step time, whose quantiles its intervals are."""

CARRIED = ("sequence_length", "global_batch_size")
"""Keys of a job in which that of the trials may differ, and still teaches."""

_ENDED = {
    Status.OUT_OF_MEMORY: "ran out of memory",
    Status.CRASHED: "crashed",
    Status.TIMEOUT: "reached the time limit",
    Status.PRUNED: "was stopped early",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaughtStep:
    """Step of one configuration after the trials.

    Attributes:
        source: Source of its step time: `measured`, `synthetic`, or `learned` from other trials.
        step_time_s: Step time: that of its own trials, or the mean of the posterior [s].
        range: Range that contains it with a probability of 95%, and the chance that it is slower.
        peak_bytes: Peak memory of the fullest device, from the same source [bytes].
        peak_log_error: Standard deviation of the logarithm of the peak; 0 if it was measured.
        fits: Whether it ran, or is expected to fit and run.
        fit_probability: Probability that it fits; 1 if it ran.
        outcome: What its own trial did, in words; empty without one.
    """

    source: str
    step_time_s: float
    range: StepRange
    peak_bytes: float
    peak_log_error: float
    fits: bool
    fit_probability: float
    outcome: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Taught:
    """What the trials of a study taught.

    Attributes:
        prepared: Study that is asked about.
        measured: Setting in which the trials ran: the study's own, or one with other sequences or another number of
            hosts; None for a step of the user's own, which has no such setting.
        tried: Configurations of the trials.
        trials: Trials as the storage holds them.
        records: Trials in the order of their numbers.
        is_own: Whether the trials ran in the study's own setting.
        on_progress: Function that is told what takes seconds.
    """

    prepared: Prepared
    measured: MeasuredSetting | None
    tried: ConfigGrid
    trials: Sequence[FrozenTrial]
    records: Sequence[TrialRecord]
    is_own: bool
    on_progress: OnProgress

    @cached_property
    def num_trials(self) -> int:
        """Number of candidates and proxies whose trials have told something."""
        return observations_on(self.tried, self.trials).num_ended

    @cached_property
    def grid(self) -> ConfigGrid:
        """Candidates whose trials are known: all of the study or, in another setting, those that were tried [n]."""
        return self.prepared.space.grid if self.is_own else self.tried

    @cached_property
    def observations(self) -> Observations:
        """Observations of these candidates."""
        return observations_on(self.grid, self.trials)

    @property
    def failed(self) -> frozenset[int]:
        """Positions of the study's candidates that trials showed to be unable to run, or that need more than these."""
        return self.observations.impossible | self._implied if self.is_own else frozenset()

    @cached_property
    def _implied(self) -> frozenset[int]:
        """Positions of the candidates whose failure follows from another's; none with knobs, which change memory."""
        if self.prepared.problem.knobs:
            return frozenset()
        return ImpliedFailures(self.grid).by(self.observations.misfits, self.observations.explored)

    @cached_property
    def ranked(self) -> Ranked:
        """Candidates of the study: measured step times, and of the others the mean of the posterior."""
        space = self.prepared.candidates.space
        if self.is_own:
            everywhere = np.arange(len(space.grid))
            judged = self._judge(self._own, everywhere, everywhere, space.memory, is_own=True)
        else:
            carried = self.elsewhere(self.prepared.problem.setting, space.grid, space.memory)
            assert carried is not None, "`taught_by` checks that the trials reach the study's setting"
            judged = carried
        ranked = Ranked(
            order=np.lexsort((judged.step_time_s, ~judged.fits)),
            step_time_s=judged.step_time_s,
            peak_bytes=judged.peak_bytes,
            fits=judged.fits,
            is_measured=judged.is_measured,
            is_simulated=np.zeros(len(space.grid), dtype=np.bool_),
            num_trials=self.num_trials,
            fit_probability=judged.fit_probability,
        )
        return by_objective(self.prepared, ranked)

    @property
    def in_words(self) -> str:
        """Clause on how the trials' setting differs from the one that is asked about; empty if it does not."""
        if self.is_own or self.measured is None:
            return ""
        return f"which ran with {_differing(self.measured.setting, self.prepared.problem.setting)}"

    def judge(self, setting: Setting, grid: ConfigGrid, memory: MemoryEstimate) -> Judged | None:
        """Return configurations in a setting [m], which may be the study's own; None where nothing is known of it."""
        if not (self.is_own and self._is_own(setting)):
            return self.elsewhere(setting, grid, memory)
        positions = replace(grid, opened=self.grid.opened).positions()
        rows = np.array([self._positions.get(key, -1) for key in positions], dtype=np.int64)
        is_whole = len(rows) == len(grid) and bool((rows >= 0).all())
        return self._judge(self._own, rows, rows, memory, is_own=True) if is_whole else None

    def draw_steps(
        self, chosen: Sequence[ParallelConfig], num_draws: int, settings: Sequence[Setting] = ()
    ) -> StepDraws | None:
        """Return joint draws of log step times [M, m]; None if the trials say nothing of one of them.

        Args:
            chosen: Configurations [m].
            num_draws: Number M of draws.
            settings: Setting of each [m]; empty for that of the study.
        """
        rng = np.random.default_rng(0)
        at = [self._positions.get(self._key(each)) for each in chosen]
        if self.is_own and not settings and None not in at:
            rows = np.array(at, dtype=np.int64)
            return self._own.posterior.draw_steps_at(self.observations, rows, num_draws, rng)
        if self.measured is None:
            return None
        settings = settings or [self.prepared.problem.setting] * len(chosen)
        if not all(map(self.reaches, settings)):
            return None
        grid = ConfigGrid.from_configs(list(chosen), self.grid.opened)
        parts = [(setting, np.array([place])) for place, setting in enumerate(settings)]
        posterior = self._beside(parts, grid).posterior
        behind = len(self.grid) + np.arange(len(grid))
        is_own = [self.is_own and self._is_own(setting) for setting in settings]
        rows = np.array(
            [place if own and place is not None else row for place, own, row in zip(at, is_own, behind, strict=True)]
        )
        return posterior.draw_steps_at(self.observations, rows, num_draws, rng)

    def step_ranges(self, positions: IntArray) -> list[dict[str, Any]]:
        """Return the ranges of the step times of some of the study's candidates by their keys; None where not known."""
        grid = self.prepared.candidates.space.grid
        drawn = self.draw_steps([grid.config(int(position)) for position in positions], NUM_DRAWS)
        if drawn is None:
            return [{STEP_RANGE: None, SLOWER: None}] * len(positions)
        return [found.as_json() for found in drawn.ranges()]

    def _is_own(self, setting: Setting) -> bool:
        """Return whether a setting is that of the trials."""
        if self.measured is None:
            return False
        own = self.measured.setting
        return (setting.cluster, setting.job) == (own.cluster, own.job)

    def elsewhere(self, setting: Setting, grid: ConfigGrid, memory: MemoryEstimate) -> Judged | None:
        """Return configurations in another setting [m] by the posterior; None where the trials say nothing of it."""
        if not self.reaches(setting):
            return None
        everywhere = np.arange(len(grid))
        rows = len(self.grid) + everywhere
        return self._judge(
            self._beside([(setting, everywhere)], grid), rows, self._same_as(setting, grid), memory, is_own=False
        )

    def reaches(self, setting: Setting) -> bool:
        """Return whether the trials say something of a setting: the same model on hosts like theirs."""
        if self.measured is None:
            return False
        own = self.measured.setting
        carried = {key: getattr(own.job, key) for key in CARRIED}
        return (
            replace(setting.job, **carried) == own.job
            and setting.cluster.name == own.cluster.name
            and {*setting.cluster.devices} <= {*own.cluster.devices}
            and bool(setting.runtime.layer_changes) == bool(own.runtime.layer_changes)
        )

    def step_of(self, chosen: ParallelConfig, setting: Setting | None = None) -> TaughtStep | None:
        """Return the step of one configuration, a candidate or not; None where the trials say nothing of the setting.

        Args:
            chosen: Configuration.
            setting: Setting of its step; None for the study's own.
        """
        subject = self.prepared.problem.subject
        grid = ConfigGrid.from_configs([chosen], self.grid.opened)
        at = self._positions.get(self._key(chosen)) if self.is_own and setting is None else None
        if at is not None:
            every, row, same_as = self._own, at, np.array([at])
            memory = subject.forecast(grid).memory
        else:
            asked = setting or (None if self.measured is None else subject.setting)
            if asked is None or not self.reaches(asked):
                return None
            every, row = self._beside([(asked, np.array([0]))], grid), len(self.grid)
            same_as = self._same_as(asked, grid)
            memory = subject.with_setting(asked).forecast(grid).memory
        rows = np.array([row])
        judged = self._judge(every, rows, same_as, memory, is_own=at is not None)
        is_known = int(same_as[0]) in self.observations.measured
        at_same = same_as if is_known else rows
        drawn = every.posterior.draw_steps_at(self.observations, at_same, NUM_DRAWS, np.random.default_rng(0))
        if is_known and at is None:  # the same layout while links are slow errs as it was seen to err
            drawn = drawn.shifted(math.log(judged.step_time_s[0]) - float(np.median(drawn.log_step_s)))
        needed = None if at in self.observations.peaks_bytes else every.posterior.memory_after(self.observations)
        log_error = 0.0 if needed is None else float(needed.mean_and_deviation(rows)[1][0])
        return TaughtStep(
            source=self.prepared.request.trials.backend.origin if judged.is_measured[0] else LEARNED,
            step_time_s=float(judged.step_time_s[0]),
            range=drawn.ranges()[0],
            peak_bytes=float(judged.peak_bytes[0]),
            peak_log_error=log_error,
            fits=bool(judged.fits[0]),
            fit_probability=float(judged.fit_probability[0]),
            outcome="" if at is None else self._outcome(at),
        )

    def corrected(self, chosen: ParallelConfig) -> tuple[float, float] | None:
        """Return step time [s] and peak memory [bytes] as the trials correct the prediction, its own trials among them.

        Where a trial has measured them, they are close to the measurement and not it, so that the two can be compared.
        None where the trials say nothing of the study's setting.
        """
        at = self._positions.get(self._key(chosen)) if self.is_own else None
        if at is None:
            step = self.step_of(chosen)
            return None if step is None else (step.step_time_s, step.peak_bytes)
        # the peak errs by the same factor as the memory that is needed
        factor = math.exp(self._expected.log_needed[at]) / self._own.posterior.predicted.needed_bytes[at]
        return math.exp(self._expected.log_step_s[at]), float(self.prepared.space.memory.peak_bytes[at] * factor)

    @cached_property
    def _expected(self) -> Expected:
        """Expected values of the study's candidates."""
        return self._own.posterior.expected(self.observations, np.arange(len(self.grid)))

    @cached_property
    def _own(self) -> _Every:
        """Posterior of the study's candidates."""
        subject = self.prepared.problem.subject
        past = past_of(self.prepared.request)
        return _Every(posterior=subject.prior(self.grid, past, on_progress=self.on_progress), grid=self.grid)

    def _beside(self, parts: Sequence[tuple[Setting, IntArray]], grid: ConfigGrid) -> _Every:
        """Return the posterior of the known candidates and, behind them, of configurations in other settings.

        Args:
            parts: Settings, and the positions of their configurations in `grid`.
            grid: Configurations.
        """
        assert self.measured is not None, "the trials reach these settings"
        both = concatenate([self.grid, replace(grid, opened=self.grid.opened)])
        posterior = initial_posterior(
            [(self.measured, np.arange(len(self.grid)))],
            both,
            past_of(self.prepared.request),
            other_clusters=[
                (replace(self.measured, setting=setting), len(self.grid) + places) for setting, places in parts
            ],
            on_progress=self.on_progress,
        )
        return _Every(posterior=posterior, grid=both)

    def _judge(
        self, every: _Every, rows: IntArray, same_as: IntArray, memory: MemoryEstimate, *, is_own: bool
    ) -> Judged:
        """Return configurations by the posterior [m].

        Args:
            every: Posterior, with the known candidates first.
            rows: Positions of the configurations in it [m].
            same_as: Position of the candidate whose trials count for each; -1 without one [m].
            memory: Predicted memory of the configurations [m].
            is_own: Whether they are candidates, and what was measured of these is theirs.
        """
        seen, posterior = self.observations, every.posterior
        whose = np.arange(len(posterior.predicted))
        whose[rows] = np.where(same_as >= 0, same_as, rows)
        expected = posterior.expected(seen, whose)
        ran = np.isin(whose[rows], sorted(seen.explored))
        is_broken = expected.is_broken[rows]
        if is_own:
            is_broken |= np.isin(rows, sorted(self._implied))
        else:
            is_broken |= every.needs_as_much(sorted(seen.misfits), rows)
        log_room = np.log((1 - self.prepared.problem.options.memory_headroom) * memory.capacity_bytes)
        found = posterior.chances_to_fit(seen, log_room, rows)
        chance = np.ones(len(rows)) if found is None else found
        chance[ran], chance[is_broken] = 1.0, 0.0
        # the peak errs by the same factor as the memory that is needed
        peak_bytes = memory.peak_bytes * np.exp(expected.log_needed[rows]) / posterior.predicted.needed_bytes[rows]
        step_time_s, is_measured = np.exp(expected.log_step_s[rows]), np.zeros(len(rows), dtype=np.bool_)
        if is_own:  # what was measured is told as measured, and not drawn towards the prediction
            place = {position: at for at, position in enumerate(rows.tolist())}
            for position, record in self._fastest.items():
                if position in place:
                    step_time_s[place[position]], is_measured[place[position]] = record.step_time_s, True
            for position, measured_bytes in seen.peaks_bytes.items():
                if position in place:
                    peak_bytes[place[position]] = measured_bytes
        return Judged(
            step_time_s=step_time_s,
            peak_bytes=peak_bytes,
            fits=(((expected.log_needed[rows] <= log_room) & (chance > LIKELY)) | ran) & ~is_broken,
            fit_probability=chance,
            is_measured=is_measured,
            origin=self.prepared.request.trials.backend.origin,
        )

    @cached_property
    def _positions(self) -> dict[tuple[Value, ...], int]:
        return self.grid.positions()

    def _key(self, chosen: ParallelConfig) -> tuple[Value, ...]:
        return tuple(chosen.values(self.grid.dimensions).values())

    def _position_of(self, record: TrialRecord) -> int | None:
        return self._positions.get(self._key(self.prepared.problem.config_of(record.params)))

    @cached_property
    def _fastest(self) -> dict[int, TrialRecord]:
        """Best record of each candidate with a completed trial; with knobs, that of the best values tried."""
        found: dict[int, TrialRecord] = {}
        for record in fastest(self.records, len(self.records)):
            if (position := self._position_of(record)) is not None:
                found.setdefault(position, record)
        return found

    def _outcome(self, position: int) -> str:
        """Return what the trials of a candidate did, in words; empty without one that has told something."""
        best = self._fastest.get(position)
        if best is not None:
            return f"{self.prepared.request.trials.backend.source_in_words} in trial {best.number}"
        for record in self.records:
            if not record.is_proxy and record.status in _ENDED and self._position_of(record) == position:
                return f"{_ENDED[record.status]} in trial {record.number}"
        return ""

    def _same_as(self, setting: Setting, grid: ConfigGrid) -> IntArray:
        """Return the position of the same candidate for each configuration in another setting [m]; -1 without one.

        On the same number of devices a layout has the same memory, and errs as it does while links are slow.
        """
        same = np.full(len(grid), -1, dtype=np.int64)
        own = self.measured and self.measured.setting
        if own and setting.job == own.job and setting.cluster.num_devices == own.cluster.num_devices:
            for key, at in replace(grid, opened=self.grid.opened).positions().items():
                same[at] = self._positions.get(key, -1)
        return same


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Every:
    """Posterior of candidates and, behind them, of configurations in another setting, with the grid of both."""

    posterior: Posterior
    grid: ConfigGrid

    def needs_as_much(self, misfits: Sequence[int], rows: IntArray) -> NDArray[np.bool_]:
        """Return whether a configuration needs at least the memory of one that ran out, and has no more of it [m].

        Layouts are compared that differ in their data parallelism alone: those of other numbers of hosts.
        """
        found = np.zeros(len(rows), dtype=np.bool_)
        layouts = self.grid.matrix([name for name in (*DEGREES, *FURTHER_DIMENSIONS) if name != "dp"])
        needed, room = self.posterior.predicted.needed_bytes, self.posterior.predicted.capacity_bytes
        for misfit in misfits:
            is_alike = (layouts[rows] == layouts[misfit]).all(axis=1)
            found |= is_alike & (needed[rows] >= needed[misfit]) & (room[rows] <= room[misfit])
        return found


def taught_by(prepared: Prepared, study: Study, *, on_progress: OnProgress = lambda _: None) -> Taught | str:
    """Return what the trials of a study taught or, in words, why they taught nothing.

    Args:
        prepared: Study that is asked about.
        study: Its stored counterpart.
        on_progress: Function that is told what takes seconds.

    Raises:
        ConfigError: The storage or the history cannot be read.
    """
    problem, trials = prepared.problem, study.get_trials(deepcopy=False)
    stored = study.user_attrs.get(MEANING) or {}
    now = json.loads(json.dumps(prepared.request.meaning))
    measured = problem.subject.measured_setting if problem.subject.has(Ability.LAYERS) else None
    difference = _difference(stored, now)
    is_own = difference is None
    if difference is not None:
        setting = None if measured is None else _setting_of_trials(problem, stored)
        if measured is None or setting is None:
            key, old, new = difference
            return f"its trials ran with {key} {quote_value(old)}, not {quote_value(new)}"
        measured = replace(measured, setting=setting)
    records = records_of(trials, study.user_attrs)
    tried = dict.fromkeys(problem.config_of(record.params) for record in records)
    taught = Taught(
        prepared=prepared,
        measured=measured,
        tried=ConfigGrid.from_configs(list(tried), problem.options.opened),
        trials=trials,
        records=records,
        is_own=is_own,
        on_progress=on_progress,
    )
    if not tried or not taught.num_trials:
        return "none of its trials has told anything yet" if records else "it has no trials yet"
    assert is_own or taught.reaches(problem.setting), "settings that differ by more have been told apart"
    return taught


_DESCRIBED = ("model", "job", "cluster")
"""Parts of the meaning of trials that say what was measured. A study's space may change, and so may its command."""


def _difference(stored: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first key at which the described parts of two meanings differ, as far as both have them."""
    for part in _DESCRIBED:
        old, new = stored.get(part), now.get(part)
        if isinstance(old, dict) and isinstance(new, dict):
            both = old.keys() & new.keys()
            found = first_difference({key: old[key] for key in both}, {key: new[key] for key in both}, f"{part}.")
            if found is not None:
                return found
    return None


def _setting_of_trials(problem: Problem, stored: Mapping[str, Any]) -> Setting | None:
    """Return the study's setting with the sequences and the number of hosts of its trials; None if more differs."""
    setting, of_job = problem.setting, stored.get("job", {})
    cluster, groups = setting.cluster, stored.get("cluster", {}).get("groups", [])
    if len(groups) == len(cluster.groups) == 1 and groups[0]["hosts"] != cluster.num_hosts:
        cluster = cluster.with_hosts(groups[0]["hosts"])
    job = replace(setting.job, **{key: of_job[key] for key in CARRIED if key in of_job})
    found = replace(setting, job=job, cluster=cluster)
    meaning = problem.subject.with_setting(found).meaning(problem.options, problem.planning, problem.knobs)
    return None if _difference(stored, json.loads(json.dumps(meaning))) else found


def _differing(trials: Setting, asked: Setting) -> str:
    """Return in words how the setting of the trials differs from the one that is asked about; empty if it does not."""
    own, job = trials.job, asked.job
    found = [f"{key} {getattr(own, key):,}" for key in CARRIED if getattr(own, key) != getattr(job, key)]
    if trials.cluster.num_hosts != asked.cluster.num_hosts:
        found.append(f"{trials.cluster.num_hosts} hosts")
    return " and ".join(found)
