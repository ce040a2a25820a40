"""Observations of a study's candidates, read from its trials in their order."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from costmodels.job.parallel_config import ConfigGrid
from hardware.arrays import FloatArray, IntArray
from trials.backend import Observation, OperatorSample, Status
from tuner.search.constraints import exceeds_memory
from tuner.search.parameters import named_values, params_of
from tuner.search.proxy.proxy_trials import PROXY, Proxy
from tuner.search.rehearsed import NOTHING_REHEARSED, Rehearsed
from tuner.search.standing import Standing

STATUS = "status"
"""Trial attribute with the Status of the observation, where a trial did not simply complete."""

OBSERVATION = "observation"
"""Trial attribute with the observation. A trial without it, of a user's own loop, is judged by its value and state."""

FAILS_ALIKE = "fails_alike"
"""Trial attribute with the numbers of trials, its own among them, that failed for a reason that is no candidate's: they
count as if they had not been. See tuner/run/alike_failures.py."""

STEP_NOISE = 0.02
"""Assumed standard deviation of the log time of one measured step where its trial has no others."""

LEAST_NOISE = 0.005
"""Smallest standard deviation of the log step time between runs of one configuration on one cluster. The steps of a
run share this error."""

EXPLORING = (Status.OK, Status.PRUNED, Status.TIMEOUT)
"""Statuses of a trial after which its candidate needs no other trial."""

MOST_SAMPLED = 256
"""Largest number of trials whose operator times are used: half of it for the first trials, half for the last. The
hyperparameters are learned from the first trials; each later one adds less than the one before."""

T = TypeVar("T")
"""Anything that was cut off: a candidate, or a proxy."""

StepTimeOf = Callable[[int, Sequence[float]], float]
"""Function that returns the step time of the candidate at a position with such values of its trial [s]."""

Ending = tuple[FrozenTrial, TrialState, Sequence[float] | None]
"""Trial with its state and values, which its storage may not hold yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyObservations:
    """Observations of one proxy job, from all its trials.

    Attributes:
        proxy: Proxy job and its configuration.
        positions: Positions of the candidates in whose place it ran.
        log_step_s: Logarithm of its step time, the mean over its trials; None if no step was measured.
        variance: Variance of the error of that mean.
        limit_s: Lower bound of its step time, where it was cut off before a step ended [s].
        peak_bytes: Peak of its memory, where it was measured [bytes].
        ran_out: Whether its memory ran out.
        crashed: Whether it crashed, and never ran.
    """

    proxy: Proxy
    positions: tuple[int, ...]
    log_step_s: float | None
    variance: float
    limit_s: float | None
    peak_bytes: int | None
    ran_out: bool
    crashed: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Observations:
    """Observations of the candidates of a study.

    Results of a proxy do not count as results of its candidate; they are in `proxies`.

    Attributes:
        measured: Positions of candidates with measured steps, each once, in the order of their first trials [t].
        log_step_s: Logarithm of their step times, the mean over their trials [t].
        variance: Variance of the error of that mean [t].
        num_completed: Number of their completed trials [t].
        num_trials: Number of trials of each candidate that has any, however they ended, pending ones included.
        best_s: Shortest step time among candidates with a completed trial [s]; None if there is none.
        limits_s: Lower bounds of the step times of candidates that were cut off before a step ended [s].
        peaks_bytes: Measured peaks of memory by candidate [bytes].
        explored: Candidates that need no further trial: measured, stopped early or timed out.
        misfits: Candidates that ran out of memory.
        crashed: Candidates that crashed.
        pending: Candidates of trials that have not finished.
        samples: Operator times of all trials, or of MOST_SAMPLED where there are more.
        num_decisions: Number of trials so far, finished or not.
        proxies: Observations of proxy jobs, each once, in the order of their first trials.
        proxies_pending: Candidates of proxies that have not finished; these are among `pending`.
        num_proxies: Number of trials of proxies so far, finished or not; these are among `num_decisions`.
        memory_shifts: Log factor by which the knobs of a candidate's trials changed its needed memory, where that is
            known only as a bound; none without knobs.
        rehearsed: What rehearsals told of candidates; none of it is a trial.
        implied: Candidates that cannot fit, since one that needs less did not; see implied.py.
    """

    measured: IntArray
    log_step_s: FloatArray
    variance: FloatArray
    num_completed: IntArray
    num_trials: Mapping[int, int]
    best_s: float | None
    limits_s: Mapping[int, float]
    peaks_bytes: Mapping[int, int]
    explored: frozenset[int]
    misfits: frozenset[int]
    crashed: frozenset[int]
    pending: frozenset[int]
    samples: tuple[OperatorSample, ...]
    num_decisions: int
    proxies: tuple[ProxyObservations, ...] = ()
    proxies_pending: frozenset[int] = frozenset()
    num_proxies: int = 0
    memory_shifts: Mapping[int, float] = field(default_factory=dict)
    rehearsed: Rehearsed = NOTHING_REHEARSED
    implied: frozenset[int] = frozenset()

    @property
    def num_at_full_size(self) -> int:
        """Number of trials of candidates at full size so far, finished or not."""
        return self.num_decisions - self.num_proxies

    @property
    def num_ended(self) -> int:
        """Number of candidates and proxies with a result."""
        return len(self.explored) + len(self.impossible) + len(self.proxies)

    @property
    def proxied(self) -> frozenset[int]:
        """Candidates with a result from a proxy."""
        return frozenset(position for seen in self.proxies for position in seen.positions)

    @property
    def crashed_by_proxy(self) -> Mapping[int, int]:
        """Row in `proxies` of each candidate's crashed proxy, for candidates without a result of their own."""
        known = self.explored | self.impossible
        crashed = [
            (position, at) for at, seen in enumerate(self.proxies) if seen.crashed for position in seen.positions
        ]
        return {position: at for position, at in crashed if position not in known}

    @property
    def impossible(self) -> frozenset[int]:
        """Candidates that trials showed to be unable to run."""
        return self.misfits | self.crashed

    @property
    def dropped(self) -> frozenset[int]:
        """Candidates that rehearsals or the failures of others rule out, except for those that ran."""
        return (self.rehearsed.ruled_out | self.implied) - self.explored

    @property
    def closed(self) -> frozenset[int]:
        """Candidates that should not be tried now."""
        return self.explored | self.impossible | self.pending | self.dropped


class ObservationLog:
    """Reader of the trials of one study, which parses and counts each ended trial only once.

    Args:
        position_of: Function that returns the candidate named by a trial's parameters, or None.
        step_time_of: Function that returns the step time of a candidate with such values of its trial [s]; None where
            the first value is the step time.
    """

    def __init__(
        self, position_of: Callable[[Mapping[str, Any]], int | None], step_time_of: StepTimeOf | None = None
    ) -> None:
        self._position_of = position_of
        self._step_time_of = step_time_of
        self._parsed: dict[int, tuple[FrozenTrial, _Entry | None]] = {}
        self._tally = _Tally()
        self._standing: Standing | None = None
        self._num_read = 0
        self._latest: tuple[list[_Entry], Observations] | None = None

    def observations(
        self,
        trials: Sequence[FrozenTrial],
        finishing: Ending | None = None,
        chosen: Mapping[int, int] = MappingProxyType({}),
    ) -> Observations:
        """Return the observations of the candidates in the trials.

        Args:
            trials: Trials of the study; ended trials never change.
            finishing: One trial whose end the storage does not hold yet.
            chosen: Candidates of running trials, by number, whose parameters may not be stored yet.
        """
        self._standing = None
        entries = self._parse_all(trials, finishing, chosen)
        known, ended = self._tally.entries, [entry for entry in entries if entry.status]
        if not known.keys() <= {entry.number for entry in ended}:  # fewer trials than before, or another study's
            self._tally, self._latest = _Tally(), None
        return self._observe(entries)

    def observations_of(
        self,
        standing: Standing,
        *,
        but: int | None = None,
        finishing: Ending | None = None,
        chosen: Mapping[int, int] = MappingProxyType({}),
    ) -> Observations:
        """Return the observations of the candidates in all trials of a study, of which only new ones are read.

        Args:
            standing: Trials of the study.
            but: Number of a running trial to leave out.
            finishing: One trial whose end is not among the trials yet.
            chosen: Candidates of running trials, as above.
        """
        running = [trial for number, trial in standing.running.items() if number != but]
        if self._standing is standing and not any(trial.number in self._tally.entries for trial in running):
            found = self._observe(self._parse_all([*standing.ended[self._num_read :], *running], finishing, chosen))
        else:
            found = self.observations([*standing.ended, *running], finishing, chosen)
        self._standing, self._num_read = standing, len(standing.ended)
        return found

    def _parse_all(
        self, trials: Sequence[FrozenTrial], finishing: Ending | None, chosen: Mapping[int, int]
    ) -> list[_Entry]:
        entries = [self._parse_trial(trial, chosen) for trial in trials]
        if finishing is not None:
            entries.append(_parse_trial(finishing, self._position_of, self._step_time_of))
        return [entry for entry in entries if entry is not None]

    def _observe(self, entries: Sequence[_Entry]) -> Observations:
        """Return the observations of these trials and of those counted before; of these, all that run are given."""
        known = self._tally.entries
        ended = sorted((entry for entry in entries if entry.status), key=_number_of)
        running = sorted((entry for entry in entries if entry.status is None), key=_number_of)
        fresh = [entry for entry in ended if known.get(entry.number) is not entry]
        if any(entry.number in known and not entry.is_like(known[entry.number]) for entry in fresh):
            fresh = sorted((known | {entry.number: entry for entry in fresh}).values(), key=_number_of)
            self._tally = _Tally()
        new = [entry for entry in fresh if entry.number not in self._tally.entries]
        for entry in new:
            self._tally.add(entry)
        # several hooks may ask before anything changes
        if self._latest is None or new or self._latest[0] != running:
            self._latest = running, self._tally.observations(running)
        return self._latest[1]

    def _parse_trial(self, trial: FrozenTrial, chosen: Mapping[int, int]) -> _Entry | None:
        known = self._parsed.get(trial.number)
        if known is not None and known[0] is trial:
            return known[1]
        entry = _parse_trial((trial, trial.state, trial.values), self._position_of, self._step_time_of)
        if entry is None and trial.state == TrialState.RUNNING and trial.number in chosen:
            return _Entry(number=trial.number, position=chosen[trial.number])
        if trial.state.is_finished():
            self._parsed[trial.number] = trial, entry
        return entry


def observations_of(endings: Sequence[Ending], position_of: Callable[[Mapping[str, Any]], int | None]) -> Observations:
    """Return the observations of some trials.

    Args:
        endings: Trials of the study.
        position_of: Function that returns the candidate named by a trial's parameters, or None.
    """
    return _combine([entry for entry in (_parse_trial(ending, position_of) for ending in endings) if entry])


def observations_on(grid: ConfigGrid, trials: Sequence[FrozenTrial]) -> Observations:
    """Return the observations of the candidates of a grid, from the trials of a study."""
    positions = {
        tuple(params_of(dict(zip(grid.dimensions, key, strict=True))).values()): at
        for key, at in grid.positions().items()
    }

    def position_of(params: Mapping[str, Any]) -> int | None:
        named = named_values(params, grid.dimensions)
        return None if named is None else positions.get(tuple(named.values()))

    return observations_of([(trial, trial.state, trial.values) for trial in trials], position_of)


def excused_trials(trials: Iterable[FrozenTrial]) -> frozenset[int]:
    """Return the numbers of the trials whose failures say nothing about any candidate."""
    return frozenset(number for trial in trials for number in trial.user_attrs.get(FAILS_ALIKE, ()))


def _combine(own: list[_Entry]) -> Observations:
    """Return the observations of trials that have a candidate, without those that some trial excuses."""
    excused = {number for entry in own for number in entry.fails_alike}
    counted = sorted((entry for entry in own if entry.number not in excused), key=_number_of)
    tally = _Tally()
    for entry in counted:
        if entry.status is not None:
            tally.add(entry)
    return tally.count_with([entry for entry in counted if entry.status is None])


@dataclass(kw_only=True, slots=True)
class _Entry:
    """Parsed trial of a candidate.

    Attributes:
        number: Number of the trial.
        position: Position of the candidate.
        status: Status at its end; None if it has not ended.
        value_s: Step time of the trial, if it completed [s].
        log_step_s: Logarithm of its step time, from its value or the steps measured so far; None without any.
        variance: Variance of the error of that logarithm.
        startup_s: Time that it took besides its steps, if its observation has it [s].
        cut: Observation of the trial, if it was cut off.
        peak_bytes: Measured peak of memory, if the trial completed and measured one [bytes].
        samples: Operator times that it measured.
        proxy: Proxy that ran in the candidate's place; None at full size.
        fails_alike: Numbers of the trials that it excuses, its own among them; see FAILS_ALIKE.
    """

    number: int
    position: int
    status: Status | None = None
    value_s: float | None = None
    log_step_s: float | None = None
    variance: float = STEP_NOISE**2
    startup_s: float | None = None
    cut: Observation | None = None
    peak_bytes: int | None = None
    samples: tuple[OperatorSample, ...] = ()
    proxy: Proxy | None = None
    fails_alike: tuple[int, ...] = ()

    def is_like(self, other: _Entry) -> bool:
        """Return whether both are the same trial, of which one may have lost its operator times."""
        return replace(self, samples=()) == replace(other, samples=())


class _Tally:
    """Figures of the ended trials of a study. One more trial changes its own share of them and leaves the rest alone.

    Attributes:
        entries: Ended trials, by number.
    """

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}
        self._excuses = False
        self._smaller: list[_Entry] = []  # proxies, in the order of their numbers, as all lists of trials here
        self._num_trials: Counter[int] = Counter()
        self._of_status: dict[Status, set[int]] = defaultdict(set)
        self._explored: set[int] = set()
        self._seen: dict[int, list[_Entry]] = {}
        self._firsts: list[int] = []  # number of the first trial of each measured candidate, in order
        self._measured = np.zeros(0, dtype=np.int64)
        self._steps = np.zeros((2, 0))
        self._num_completed = np.zeros(0, dtype=np.int64)
        self._completed_s: dict[int, float] = {}
        self._startups_s: list[float] = []
        self._cut: list[_Entry] = []
        self._peaks_bytes: dict[int, int] = {}
        self._peak_of: dict[int, int] = {}
        self._sampled: list[_Entry] = []

    def add(self, entry: _Entry) -> None:
        """Add a trial that has ended."""
        self.entries[entry.number] = entry
        self._excuses = self._excuses or bool(entry.fails_alike)
        if entry.samples:
            insort(self._sampled, entry, key=_number_of)
            if len(self._sampled) > MOST_SAMPLED:  # times in the middle are dropped, to free their memory
                self._sampled.pop(MOST_SAMPLED // 2).samples = ()
        if entry.proxy is not None:
            insort(self._smaller, entry, key=_number_of)
            return
        assert entry.status is not None, "a trial that has ended has a status"
        at = entry.position
        self._num_trials[at] += 1
        self._of_status[entry.status].add(at)
        if entry.status in EXPLORING:
            self._explored.add(at)
        if entry.log_step_s is not None:
            self._measure(entry)
        if entry.startup_s is not None:
            insort(self._startups_s, entry.startup_s)
        if entry.cut:
            insort(self._cut, entry, key=_number_of)
        if entry.peak_bytes and self._peak_of.get(at, -1) < entry.number:
            self._peak_of[at], self._peaks_bytes[at] = entry.number, entry.peak_bytes

    def _measure(self, entry: _Entry) -> None:
        """Add the step time of a trial to that of its candidate, which stands where its first trial does."""
        own = self._seen.setdefault(entry.position, [])
        if own:
            row = bisect_left(self._firsts, own[0].number)
            del self._firsts[row]
            self._measured, self._num_completed = (
                np.delete(each, row) for each in (self._measured, self._num_completed)
            )
            self._steps = np.delete(self._steps, row, axis=1)
        insort(own, entry, key=_number_of)
        times_s = [each.value_s for each in own if each.value_s is not None]
        if times_s:
            self._completed_s[entry.position] = of_trials(times_s)
        row = bisect_left(self._firsts, own[0].number)
        self._firsts.insert(row, own[0].number)
        self._measured = np.insert(self._measured, row, entry.position)
        self._num_completed = np.insert(self._num_completed, row, len(times_s))
        self._steps = np.insert(self._steps, row, _average_trials(own), axis=1)

    def observations(self, running: list[_Entry]) -> Observations:
        """Return the observations of the ended trials and of these, which have not ended, without excused ones."""
        if self._excuses:
            return _combine([*self.entries.values(), *running])
        return self.count_with(running)

    def count_with(self, running: list[_Entry]) -> Observations:
        """Return the observations of the ended trials and of these, which have not ended, all of which count."""
        # a proxy's steps are not its candidate's, so both are kept apart
        smaller = sorted((*self._smaller, *(each for each in running if each.proxy)), key=_number_of)
        # a candidate that ran once can run, whatever its other trials did
        explored = frozenset(self._explored)
        misfits = frozenset(self._of_status[Status.OUT_OF_MEMORY]) - explored
        limits_s = _bound_cut_trials(((each.position, each) for each in self._cut), _middle(self._startups_s))
        num_trials = self._num_trials.copy()
        num_trials.update(each.position for each in running if each.proxy is None)
        return Observations(
            measured=self._measured,
            log_step_s=self._steps[0],
            variance=self._steps[1],
            num_completed=self._num_completed,
            num_trials=num_trials,
            best_s=min(self._completed_s.values(), default=None),
            limits_s={position: limit_s for position, limit_s in limits_s.items() if position not in self._seen},
            peaks_bytes=self._peaks_bytes.copy(),
            explored=explored,
            misfits=misfits,
            crashed=frozenset(self._of_status[Status.CRASHED]) - explored - misfits,
            pending=frozenset(each.position for each in running),
            samples=tuple(sample for each in self._sampled for sample in each.samples),
            num_decisions=len(self.entries) + len(running),
            proxies=_gather_proxies(smaller),
            proxies_pending=frozenset(each.position for each in running if each.proxy),
            num_proxies=len(smaller),
        )


def _number_of(entry: _Entry) -> int:
    return entry.number


def _middle(values: Sequence[float]) -> float | None:
    """Return the median of sorted values; None without any."""
    half = len(values) // 2
    return (values[half] + values[~half]) / 2 if values else None


def of_trials(times_s: Sequence[float]) -> float:
    """Return a candidate's step time from the values of its trials, at least one: their geometric mean."""
    return times_s[0] if len(times_s) == 1 else statistics.geometric_mean(times_s)


def observation_of(trial: FrozenTrial) -> Observation | None:
    """Return what was observed of a trial; None where its loop kept nothing.

    A trial from a storage holds the observation as JSON. A trial in the memory of its driver holds the object itself.
    """
    stored = trial.user_attrs.get(OBSERVATION)
    return stored if stored is None or isinstance(stored, Observation) else Observation.from_json(stored)


def step_time_in(observation: Observation | None, values: Sequence[float]) -> float:
    """Return the step time of a completed trial [s]: what was observed or, in a user's own loop, the trial's value.

    Where a study minimizes something else, the values are those of its objective.
    """
    observed = None if observation is None else observation.step_time_s
    return values[0] if observed is None else observed


def status_without_value(trial: FrozenTrial, state: TrialState) -> Status:
    """Return the status of a trial that gave no step time.

    Trials of a user's own Optuna loop have no status: it follows from Optuna's state or from a constraint.
    """
    if STATUS not in trial.user_attrs and exceeds_memory(trial):
        return Status.OUT_OF_MEMORY
    return Status(trial.user_attrs.get(STATUS, Status.PRUNED if state == TrialState.PRUNED else Status.CRASHED))


def _parse_trial(
    ending: Ending, position_of: Callable[[Mapping[str, Any]], int | None], step_time_of: StepTimeOf | None = None
) -> _Entry | None:
    """Return the parsed trial; None if its parameters name no candidate."""
    trial, state, values = ending
    position = position_of(trial.params)
    if position is None:
        return None
    status, value_s = None, None  # while the trial runs
    observation = observation_of(trial) if state.is_finished() else None
    # a user's own Optuna loop may return infinity for a failed trial
    if state == TrialState.COMPLETE and values and values[0] < math.inf and not exceeds_memory(trial):
        told = [step_time_of(position, values)] if step_time_of else values
        status, value_s = Status.OK, step_time_in(observation, told)
    elif state.is_finished():
        status = status_without_value(trial, state)
    proxy = trial.user_attrs.get(PROXY)
    steps_s = _measured_steps(trial, status, observation)
    log_step_s = math.log(statistics.median(steps_s)) if steps_s else None
    return _Entry(
        number=trial.number,
        position=position,
        status=status,
        value_s=value_s,
        log_step_s=log_step_s if value_s is None else math.log(value_s),
        variance=_median_variance(steps_s),
        startup_s=observation.startup_s if observation else None,
        cut=observation if observation and observation.status is Status.TIMEOUT else None,
        peak_bytes=observation.peak_memory_bytes if observation and status is Status.OK else None,
        samples=observation.timed_samples if observation else (),
        proxy=None if proxy is None else Proxy.from_json(proxy),
        fails_alike=tuple(trial.user_attrs.get(FAILS_ALIKE, ())),
    )


def _measured_steps(trial: FrozenTrial, status: Status | None, observation: Observation | None) -> Sequence[float]:
    """Return the measured steps of a trial, or those that it reported for a pruner (pruning.py); none if it failed."""
    if status not in EXPLORING:
        return ()
    if observation:
        return observation.step_times_s
    return [value for _, value in sorted(trial.intermediate_values.items()) if 0 < value < math.inf]


def _average_trials(entries: Sequence[_Entry]) -> tuple[float, float]:
    """Return the mean log step time of trials of one configuration, and the variance of its error.

    If the trials differ by more than the noise of their steps explains, the error is as large as they differ.
    """
    logs = [entry.log_step_s for entry in entries if entry.log_step_s is not None]
    if len(logs) == 1:
        return logs[0], entries[0].variance
    # the larger of the variances within and between trials
    explained = statistics.mean(entry.variance for entry in entries)
    return statistics.mean(logs), max(explained, statistics.variance(logs)) / len(logs)


def _gather_proxies(entries: Sequence[_Entry]) -> tuple[ProxyObservations, ...]:
    """Return the observations of proxies, without those that say nothing about their candidate."""
    limits_s = _bound_cut_trials(((entry.proxy, entry) for entry in entries), _usual_startup_s(entries))
    telling: dict[Proxy, list[_Entry]] = {}
    for entry in entries:
        if entry.proxy and entry.status in (*EXPLORING, Status.OUT_OF_MEMORY, Status.CRASHED):
            telling.setdefault(entry.proxy, []).append(entry)
    found = []
    for proxy, own in telling.items():
        timed = [entry for entry in own if entry.log_step_s is not None]
        log_step_s, variance = _average_trials(timed) if timed else (None, math.nan)
        statuses = {entry.status for entry in own}
        found.append(
            ProxyObservations(
                proxy=proxy,
                positions=tuple(dict.fromkeys(entry.position for entry in own)),
                log_step_s=log_step_s,
                variance=variance,
                limit_s=None if timed else limits_s.get(proxy),
                peak_bytes=next((entry.peak_bytes for entry in own if entry.peak_bytes), None),
                ran_out=not timed and Status.OUT_OF_MEMORY in statuses,
                crashed=statuses == {Status.CRASHED},
            )
        )
    return tuple(found)


def _usual_startup_s(entries: Iterable[_Entry]) -> float | None:
    """Return the median of the start-up times of trials [s]; None if none is known."""
    return _middle(sorted(entry.startup_s for entry in entries if entry.startup_s is not None))


def _bound_cut_trials(trials: Iterable[tuple[T, _Entry]], startup_s: float | None) -> dict[T, float]:
    """Return lower bounds of the step times of trials that were cut off, if the usual start-up time is known."""
    # the time limit covers start-up and one step, so it bounds the step once the usual start-up time is subtracted
    limits_s: dict[T, float] = {}
    for what, entry in trials:
        limit_s = entry.cut.censored_above_s(startup_s) if entry.cut and startup_s is not None else None
        if limit_s is not None:
            limits_s[what] = max(limit_s, limits_s.get(what, 0.0))
    return limits_s


def _median_variance(steps_s: Sequence[float]) -> float:
    """Return the variance of the log of the median step: pi / 2 times the mean's (Cramer 1946, section 28.5)."""
    if len(steps_s) < 2:
        return STEP_NOISE**2
    return LEAST_NOISE**2 + math.pi / 2 * statistics.variance(map(math.log, steps_s)) / len(steps_s)
