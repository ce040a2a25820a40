"""Posterior of a study's candidates: joint draws of all step times, given the observations of its trials.

A draw has four parts:

1. The errors of operators and collectives, as trials and history measured them, correct the predicted step of every
   candidate (FlexParallel 3.1 and equation 5a).
2. The surrogate of step times draws the error that remains.
3. The surrogate of memory draws which candidates do not fit.
4. The surrogate of crashes draws which candidates the runtime cannot run.

A candidate that does not fit or cannot run is infinitely slow in that draw. Each draw thus agrees with all
observations, and its fastest candidate may be the best one.

Letters: n candidates, p proxies, M draws.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import CONSTANTS
from costmodels.surrogates.crash_surrogate import OWN_CRASH, CrashSurrogate, Kinds, crash_surrogate, kinds_of
from costmodels.surrogates.failure_classifier import failure_chances
from costmodels.surrogates.hypotheses import (
    Alternative,
    FittedHistory,
    SimulatedSteps,
    memory_hypotheses,
    step_hypotheses,
)
from costmodels.surrogates.operator_surrogate import Composition
from costmodels.surrogates.predicted import Predicted, together
from costmodels.surrogates.surrogate import Hypothesis, Seen, Surrogate, after
from hardware.arrays import FloatArray, IntArray
from tuner.search.failures import FailureConclusion
from tuner.search.observations import Observations
from tuner.search.operator_posterior import OperatorPosterior
from tuner.search.proxy.proxy_posterior import ProxyPosterior, observations_with_proxies
from tuner.search.proxy.proxy_trials import Proxy
from tuner.search.rehearsed import Rehearsed
from tuner.search.step_draws import StepDraws
from tuner.search.subset import select_subset

PEAK_VARIANCE = 0.01**2
"""Variance of the logarithm of a measured memory peak."""

MISHAPS = (1.0, 49.0)
"""Pseudo-counts of trials that failed against all belief and of others, before the first: other processes that hold
memory, or a fault that no model knows. The rate is the cluster's, and its trials update it."""

BROKEN_EXCESS = 10.0
"""Log factor of memory that stands for a broken kind: a candidate of one fits nowhere."""

FOREIGN_CRASH = 0.3
"""Prior probability that a crash whose message does not mention memory has nothing to do with memory."""

EDGE = 1e-3
"""Least log distance of the capacity from the draws of a candidate that fits in all of them, or in none."""

CHANCE_DRAWS = 256
"""Number of draws of needed memory, of which the chance to fit is a share once something failed."""

SLOW_MISHAP = 1e-4
"""Probability that a trial reaches its time limit although its steps are short (a file system that hangs)."""

LIKELY = 0.5
"""Probability above which a kind of configuration counts as broken, or a candidate as one that does not fit."""

FEWEST_DRAWS = 2
"""Number of draws of the operators where only their mean is used."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expected:
    """Expected values of n candidates.

    Attributes:
        log_step_s: Mean of the log step time [n].
        log_needed: Mean of the logarithm of the needed memory, in bytes [n].
        is_broken: Whether the candidate failed in a trial, or is of a kind that the runtime probably cannot run [n].
    """

    log_step_s: FloatArray
    log_needed: FloatArray
    is_broken: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Composed:
    """Corrections of the steps by measured operators.

    Attributes:
        composition: Changes of the log step times; None without measured operators.
        told: Names of the constants of the profile that the operators determine.
    """

    composition: Composition | None = None
    told: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, eq=False)
class Posterior:
    """Posterior of a study's candidates, as a function of its observations.

    Attributes:
        predicted: Predictions of the cost model for the candidates [n].
        kinds: Kinds of configuration that may crash, such as "vpp=2".
        steps: Hypotheses of the errors of step times.
        memory: Hypotheses of the errors of memory; empty if memory was not predicted.
        operators: Posterior of the operators; None where operator times are not used.
        proxies: Predictions of proxies; None if the study has none.
        aside: Proxies that are appended to the candidates, as if they were candidates too.
        memory_fit: The latest surrogate of memory, by the observations that it knows.
    """

    predicted: Predicted
    kinds: Kinds
    steps: tuple[Hypothesis, ...]
    memory: tuple[Hypothesis, ...]
    operators: OperatorPosterior | None = None
    proxies: ProxyPosterior | None = None
    aside: tuple[Proxy, ...] = ()
    memory_fit: dict[Hashable, Surrogate] = field(default_factory=dict, repr=False)

    def with_proxies(self, observations: Observations) -> tuple[Posterior, Observations]:
        """Return the posterior and observations with each tried proxy as one more candidate [n + p].

        These are never chosen. A proxy is of the same kinds as its candidate. Only the surrogates carry over what it
        showed to other candidates.
        """
        assert self.proxies is not None, "proxies are predicted where they can be tried"
        tried = tuple(seen.proxy for seen in observations.proxies)
        twins = tuple(seen.positions for seen in observations.proxies)
        predicted = self.proxies.predicted(tried)
        # hypotheses with a past use the predictions of the profile that was fitted to it
        told = {False: (predicted, twins), True: (self.proxies.predicted_as_fitted(tried), twins)}
        count = len(self.predicted)
        # kinds of a proxy are those of the first candidate in whose place it ran
        holds = self.kinds.holds[[seen.positions[0] for seen in observations.proxies]]
        wider = replace(
            self,
            predicted=together([self.predicted, predicted], [np.arange(count), np.arange(count, count + len(tried))]),
            kinds=replace(self.kinds, holds=np.concatenate([self.kinds.holds, holds])),
            steps=tuple(one for each in self.steps for one in each.with_aside(*told[each.past is not None])),
            memory=tuple(one for each in self.memory for one in each.with_aside(*told[each.past is not None])),
            aside=tried,
            memory_fit={},
        )
        return wider, observations_with_proxies(observations, count)

    def draw(self, observations: Observations, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return joint draws of the log step time [M, n]; infinite where a candidate cannot run."""
        if observations.proxies:
            wider, seen = self.with_proxies(observations)
            drawn = wider.draw(seen, num_draws, rng)
            for candidate, at in observations.crashed_by_proxy.items():
                # if the proxy crashed, its candidate crashes too, unless the proxy only ran out of memory
                crashes = rng.random(num_draws) > wider.misfit_probability(seen, len(self.predicted) + at)
                drawn[crashes, candidate] = np.inf
            return drawn[:, : len(self.predicted)]
        # steps and failures are drawn independently, given the subset of observations that the surrogates learn from
        told = self.select_subset(observations)
        drawn = self.draw_steps(observations, told, num_draws, rng)
        fails = self._draw_failures(told, num_draws, rng)
        # the outcome of a trial is certain, whatever the surrogates draw
        fails[:, sorted(observations.explored)] = False
        fails[:, sorted(observations.impossible | observations.dropped)] = True
        drawn[fails] = np.inf
        return drawn

    def draw_steps(
        self,
        observations: Observations,
        told: Observations,
        num_draws: int,
        rng: np.random.Generator,
        *,
        offsets: NDArray[np.float32] | None = None,
        composed: Composed | None = None,
    ) -> NDArray[np.float32]:
        """Return joint draws of the log step time, as if every candidate could run [M, n].

        Args:
            observations: All observations.
            told: Observations that the surrogates learn from.
            num_draws: Number M of draws.
            rng: Source of the draws.
            offsets: Drawn log factors that the measured steps of each candidate contain and its step does not [M, n];
                zero for candidates that were not measured.
            composed: Corrections of the steps by measured operators, as `compose` returned them for M draws; None to
                draw them here.
        """
        steps, beside = self._fit_steps(told, self.compose(told, num_draws, rng) if composed is None else composed)
        if offsets is not None:
            beside = [offsets if other is None else other + offsets for other in beside]
        drawn = steps.draw(num_draws, rng, beside=beside)
        if told is not observations:  # draw measured candidates outside the subset from their own measurements
            rest = ~np.isin(observations.measured, told.measured)
            noise = rng.standard_normal((num_draws, int(rest.sum()))) * np.sqrt(observations.variance[rest])
            drawn[:, observations.measured[rest]] = observations.log_step_s[rest] + noise
        # to the surrogate a time limit is a soft bound; no draw may be faster than the limit
        limited = np.array(list(observations.limits_s), dtype=np.int64)
        if len(limited):
            drawn[:, limited] = np.maximum(drawn[:, limited], np.log(list(observations.limits_s.values())))
        if offsets is not None:
            drawn -= offsets
        return drawn

    def draw_steps_at(
        self, observations: Observations, at: IntArray, num_draws: int, rng: np.random.Generator
    ) -> StepDraws:
        """Return joint draws of the log step time of a few candidates, as if each could run [M, m].

        Args:
            observations: All observations.
            at: Positions of the candidates [m]; one may be named more than once.
            num_draws: Number M of draws.
            rng: Source of the draws.
        """
        if observations.proxies:
            wider, seen = self.with_proxies(observations)
            return wider.draw_steps_at(seen, at, num_draws, rng)
        told = self.select_subset(observations)
        steps, beside = self._fit_steps(told, self.compose(told, num_draws, rng))
        # draws of all candidates would cost as much as a decision
        first_aside = len(self.predicted) - len(self.aside)
        limited = np.array(list(told.limits_s), dtype=np.int64)
        rows = np.unique(np.concatenate([told.measured, limited, at, np.arange(first_aside, len(self.predicted))]))
        taken = [None if each is None else each[:, rows] for each in beside]
        of_rows, again = steps.take(rows), deepcopy(rng)
        both = [
            surrogate.draw(num_draws, source, beside=taken)[:, np.searchsorted(rows, at)].astype(np.float64)
            for surrogate, source in ((of_rows, rng), (of_rows.regular, again))
        ]
        own = {position: row for row, position in enumerate(observations.measured.tolist())}
        for position in set(at.tolist()):
            columns, row = np.flatnonzero(at == position), own.get(position)
            if row is not None and position not in told.measured:  # it is outside the subset
                noise = rng.standard_normal(num_draws) * np.sqrt(observations.variance[row])
                for drawn in both:
                    drawn[:, columns] = (observations.log_step_s[row] + noise)[:, None]
            if position in observations.limits_s:
                for drawn in both:
                    drawn[:, columns] = np.maximum(drawn[:, columns], np.log(observations.limits_s[position]))
        log_step_s, log_regular_s = both
        return StepDraws(log_step_s=log_step_s, log_regular_s=log_regular_s)

    def draw_needed(self, told: Observations, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32] | None:
        """Return joint draws of the log needed memory, in bytes [M, n]; None if memory was not predicted.

        A candidate of a kind that the runtime cannot run needs more than there is. Each candidate fails as often as the
        classifier says.
        """
        needed = self._draw_believed(told, num_draws, rng)
        if needed is not None:
            self._hold_to_classifier(needed, told)
        return needed

    def _draw_believed(
        self, told: Observations, num_draws: int, rng: np.random.Generator
    ) -> NDArray[np.float32] | None:
        """Return the same by the models of memory and of crashes alone."""
        memory = self._fit_memory(told)
        if memory is None:
            return None
        needed = memory.draw(num_draws, rng)
        if told.crashed:
            needed[self._fit_crashes(told, memory).draw(num_draws, rng)] += np.float32(BROKEN_EXCESS)
        return needed

    def believed_to_fail(self, told: Observations, rng: np.random.Generator, num_draws: int = 300) -> FloatArray:
        """Return the chance of each candidate to fail by the models of memory and of crashes alone [n]."""
        needed = self._draw_believed(told, num_draws, rng)
        assert needed is not None, "memory is predicted"
        return np.asarray((needed > np.log(self.predicted.capacity_bytes)).mean(axis=0))

    def _hold_to_classifier(self, needed: NDArray[np.float32], told: Observations) -> None:
        """Shift the draws of the log needed memory so that each candidate fails as often as the classifier says [M, n].

        A candidate whose own program told its need keeps it. A trial with knobs that change its memory tells nothing
        of its layout.
        """
        ran, failed = (
            np.array(sorted(which - told.memory_shifts.keys()), dtype=np.int64)
            for which in (set(told.measured.tolist()), told.misfits | told.crashed)
        )
        if not len(failed):  # where nothing fails there is nothing to tell apart
            return
        log_capacity = np.log(self.predicted.capacity_bytes).astype(np.float32)
        before = (needed > log_capacity).mean(axis=0)
        chances = failure_chances(before, self.predicted.features, ran, failed, mishap=self.mishap_rate(told))
        # each candidate's edge stands between the draws that fit and the share that does not
        num_draws, everywhere = len(needed), np.arange(needed.shape[1])
        num_fit = num_draws - np.round(chances * num_draws).astype(np.int64)
        ordered = np.sort(needed, axis=0)
        # what the models do not know is the cluster's: a draw in which little fits has less of every candidate fit
        kept = needed[:, sorted(told.rehearsed.log_needed)]
        needed[np.argsort(needed.mean(axis=1))] = ordered
        needed[:, sorted(told.rehearsed.log_needed)] = kept
        low, high = (ordered[np.clip(num_fit - 1 + at, 0, num_draws - 1), everywhere] for at in (0, 1))
        beyond = EDGE * ((num_fit == num_draws).astype(np.float32) - (num_fit == 0))
        shift = log_capacity - ((low + high) / 2 + beyond)
        shift[sorted(told.rehearsed.log_needed)] = 0.0
        needed += shift

    def mishap_rate(self, observations: Observations) -> float:
        """Return the probability that a trial runs out of memory although it fits, or runs although it does not.

        Each failure counts as a mishap with the probability that it was one, as far as was known before any trial.
        """
        mishaps, others = MISHAPS
        before = mishaps / (mishaps + others)
        misfit = self._misfit_at_first[sorted(observations.misfits)]
        mishap = before / (before + (1 - before) * misfit)
        return float((mishaps + mishap.sum()) / (mishaps + others + len(observations.measured) + len(misfit)))

    def steps_without_trials(
        self, told: Observations, composed: Composed, at: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return mean [m] and covariance [m, m] of the log step times of candidates, had no trial run.

        Residuals of their own are in the covariance, measurement errors are not.

        Args:
            told: Observations that the surrogates learn from.
            composed: Corrections of the steps by measured operators.
            at: Positions of the candidates [m]; one may be named more than once.
        """
        return self._fit_steps(told, composed)[0].without_trials(at)

    def memory_without_trials(self, told: Observations, at: IntArray) -> tuple[FloatArray, FloatArray] | None:
        """Return the same of the log needed memory; None if it is not predicted."""
        memory = self._fit_memory(told)
        return None if memory is None else memory.without_trials(at)

    def memory_after(self, observations: Observations) -> Surrogate | None:
        """Return the surrogate of the needed memory after the trials, also of proxies; None if it is not predicted."""
        if observations.proxies:
            wider, seen = self.with_proxies(observations)
            return wider.memory_after(seen)
        return self._fit_memory(self.select_subset(observations))

    def chances_to_fit(self, observations: Observations, log_room: FloatArray, at: IntArray) -> FloatArray | None:
        """Return the chance of candidates to run within some room after the trials [m]; None if memory is unknown.

        Args:
            observations: Observations of the trials.
            log_room: Logarithm of the memory that there is for each [m].
            at: Positions of the candidates [m].
        """
        if observations.proxies:
            wider, seen = self.with_proxies(observations)
            return wider.chances_to_fit(seen, log_room, at)
        told = self.select_subset(observations)
        if not told.misfits | told.crashed:
            memory = self._fit_memory(told)
            return None if memory is None else 1 - memory.probability_above(log_room, at)
        needed = self.draw_needed(told, CHANCE_DRAWS, np.random.default_rng(0))
        return None if needed is None else np.asarray((needed[:, at] <= log_room).mean(axis=0))

    def select_subset(self, observations: Observations) -> Observations:
        """Return the observations that the surrogates learn from; the same object where there are few."""
        return select_subset(observations, self.steps[0].points.features)

    def expected(self, observations: Observations, same_as: IntArray) -> Expected:
        """Return the expected values of every candidate, as one number each.

        Args:
            observations: Observations of the trials.
            same_as: Position of the candidate whose trials count for each candidate: its own, or that of another with
                the same configuration [n].
        """
        count = len(self.predicted)
        if observations.proxies:
            wider, seen = self.with_proxies(observations)
            behind = np.arange(count, len(wider.predicted))
            found = wider.expected(seen, np.concatenate([same_as, behind]))
            return Expected(
                log_step_s=found.log_step_s[:count],
                log_needed=found.log_needed[:count],
                is_broken=found.is_broken[:count],
            )
        told = self.select_subset(observations)
        # row of each candidate among the observations of the subset; -1 where it has none
        place = np.full(count, -1, dtype=np.int64)
        place[told.measured] = np.arange(len(told.measured))
        # only the mean of the operators is used, not the draws
        steps, _ = self._fit_steps(told, self.compose(told, FEWEST_DRAWS, np.random.default_rng(0)))
        log_step_s = steps.expected(place[same_as])
        # measured candidates outside the subset keep their measured time
        if told is not observations:
            measured_s = np.full(count, np.nan)
            measured_s[observations.measured] = observations.log_step_s
            rest = (same_as >= 0) & (place[same_as] < 0) & np.isfinite(measured_s[same_as])
            log_step_s[rest] = measured_s[same_as[rest]]
        everywhere = np.arange(count)
        memory = self._fit_memory(told)
        log_needed = np.log(self.predicted.needed_bytes) if memory is None else memory.mean_and_deviation(everywhere)[0]
        is_broken = np.zeros(count, dtype=np.bool_)
        # a kind counts as broken if that is likely, given the crashes that memory does not explain
        if told.crashed:
            found_broken = self._fit_crashes(told, memory).broken_probability()
            broken = [self.kinds.names.index(name) for name, chance in found_broken.items() if chance > LIKELY]
            is_broken |= self.kinds.holds[:, broken].any(axis=1)
        is_broken[np.isin(same_as, sorted(observations.explored))] = False
        is_broken[np.isin(same_as, sorted(observations.impossible | observations.dropped))] = True
        return Expected(log_step_s=log_step_s, log_needed=log_needed, is_broken=is_broken)

    def compose(self, observations: Observations, num_draws: int, rng: np.random.Generator) -> Composed:
        """Return the corrections of all steps by measured operators (FlexParallel equation 5a), if there are any."""
        if not self.operators:
            return Composed()
        aside = self.proxies.terms(self.aside) if self.proxies else []
        found = self.operators.compose(observations.samples, num_draws, rng, aside=aside)
        return Composed() if found is None else Composed(composition=found[0], told=found[1])

    def _fit_steps(
        self, observations: Observations, composed: Composed
    ) -> tuple[Surrogate, list[NDArray[np.float32] | None]]:
        """Return the surrogate of step times after the trials, and the operators' drawn deviations per hypothesis."""
        limited = np.array(list(observations.limits_s), dtype=np.int64)
        # time limits are censored observations: the step takes longer than the limit
        seen = Seen(
            measured=observations.measured,
            log_value=observations.log_step_s,
            variance=observations.variance,
            bounded=limited,
            log_edge=np.log(list(observations.limits_s.values())),
            side=np.ones(len(limited)),
            mishap=np.full(len(limited), SLOW_MISHAP),
        )
        hypotheses = list(self.steps)
        beside: list[NDArray[np.float32] | None] = [None] * len(hypotheses)
        composition = composed.composition
        if composition is not None:
            # measured operators tell more of a step than any other profile does
            hypotheses = [hypothesis for hypothesis in hypotheses if hypothesis.change is None]
            beside = beside[: len(hypotheses)]
            # a constant of the profile that measured operators determine has no error of its own any more
            columns = [list(CONSTANTS).index(name) for name in composed.told]
            # the profile fitted to the past, if there is one, predicts operators: correct only its hypotheses
            knows_past = any(hypothesis.past for hypothesis in hypotheses)
            for at, hypothesis in enumerate(hypotheses):
                if bool(hypothesis.past) == knows_past:
                    hypotheses[at] = hypothesis.corrected(composition.mean, columns)
                    beside[at] = composition.deviation
        return after(tuple(hypotheses), seen), beside

    def _draw_failures(self, observations: Observations, num_draws: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Draw which candidates do not fit or crash [M, n]."""
        log_capacity = np.log(self.predicted.capacity_bytes)
        fails = np.zeros((num_draws, len(self.predicted)), dtype=np.bool_)
        needed = self.draw_needed(observations, num_draws, rng)
        if needed is not None:
            # a candidate does not fit in a draw if the drawn need exceeds the capacity
            fails |= needed > log_capacity.astype(np.float32)
        elif observations.crashed:
            fails |= self._fit_crashes(observations, self._fit_memory(observations)).draw(num_draws, rng)
        if observations.rehearsed.refused:
            refused = self._fit_refusals(observations.rehearsed).draw(num_draws, rng)
            refused[:, sorted(observations.rehearsed.accepted)] = False
            fails |= refused
        return fails

    def _fit_refusals(self, rehearsed: Rehearsed) -> CrashSurrogate:
        """Return the surrogate of what rehearsals refuse. What they accept may still crash on a device."""
        refused, accepted = (
            np.array(sorted(which), dtype=np.int64) for which in (rehearsed.refused, rehearsed.accepted)
        )
        return crash_surrogate(self.kinds, accepted, refused, np.zeros(len(refused)))

    def _fit_memory(self, observations: Observations) -> Surrogate | None:
        """Return the surrogate of the needed memory after the trials; None if memory was not predicted."""
        if not self.memory:
            return None
        # draws and conclusions of one state of the study need the same fit
        key = (
            tuple(observations.peaks_bytes.items()),
            observations.measured.tobytes(),
            observations.misfits,
            observations.crashed,
            tuple(observations.memory_shifts.items()),
            observations.rehearsed.key,
        )
        found = self.memory_fit.get(key)
        if found is None:
            found = after(self.memory, self._seen_memory(observations))
            self.memory_fit.clear()
            self.memory_fit[key] = found
        return found

    def _seen_memory(self, observations: Observations) -> Seen:
        """Return what the trials showed of the needed memory."""
        predicted = self.predicted
        peaks = np.array(list(observations.peaks_bytes), dtype=np.int64)
        # needed memory scales with the peak: both err by the same factor
        ratio = np.array(list(observations.peaks_bytes.values())) / predicted.peak_bytes[peaks]
        # what a rehearsal says of a candidate is as good as a measured peak, within its own error
        rehearsed = observations.rehearsed
        known = np.array(sorted(rehearsed.log_needed.keys() - observations.peaks_bytes.keys()), dtype=np.int64)
        log_rehearsed = np.array([rehearsed.log_needed[position] for position in known.tolist()])
        # a candidate that ran without a known peak needs less than the capacity, and one that failed needs more
        ran = np.array(sorted(set(observations.measured.tolist()) - set(observations.peaks_bytes)), dtype=np.int64)
        misfits, crashed = (
            np.array(sorted(which), dtype=np.int64) for which in (observations.misfits, observations.crashed)
        )
        bounded = np.concatenate([ran, misfits, crashed])
        # the bound holds for the needed memory with the knobs of the trial
        shifts = np.array([observations.memory_shifts.get(position, 0.0) for position in bounded.tolist()])
        sizes, mishap = [len(ran), len(misfits), len(crashed)], self.mishap_rate(observations)
        return Seen(
            measured=np.concatenate([peaks, known]),
            log_value=np.concatenate([np.log(predicted.needed_bytes[peaks] * ratio), log_rehearsed]),
            variance=np.repeat([PEAK_VARIANCE, rehearsed.deviation**2], [len(peaks), len(known)]),
            bounded=bounded,
            log_edge=np.log(predicted.capacity_bytes[bounded]) - shifts,
            side=np.repeat([-1.0, 1.0, 1.0], sizes),
            mishap=np.repeat([mishap, mishap, FOREIGN_CRASH], sizes),
        )

    def misfit_probability(self, observations: Observations, crashed: int) -> float:
        """Return the probability that a crashed candidate ran out of memory unnoticed, if no kind of it is broken."""
        memory = self._fit_memory(self.select_subset(observations))
        misfit = float(self._explain_by_memory(np.array([crashed]), memory)[0])
        # Bayes: without a broken kind, the cause is lack of memory or a fault of the candidate's own
        return misfit / (misfit + (1 - misfit) * OWN_CRASH)

    def explained_by_memory(self, told: Observations, positions: IntArray) -> FloatArray:
        """Return the probability that each of the given candidates does not fit in memory [m]."""
        return self._explain_by_memory(positions, self._fit_memory(told))

    def _explain_by_memory(self, positions: IntArray, memory: Surrogate | None) -> FloatArray:
        """Return the probability that each of the given candidates does not fit in memory."""
        if memory is None:
            return np.zeros(len(positions))
        return memory.probability_above(np.log(self.predicted.capacity_bytes[positions]), positions)

    def _fit_crashes(self, observations: Observations, memory: Surrogate | None) -> CrashSurrogate:
        """Return the surrogate of the crashes that lack of memory does not explain, after the trials."""
        crashed = np.array(sorted(observations.crashed), dtype=np.int64)
        # only measured candidates count as run: one that was cut off before a step ended may be unable to run
        return crash_surrogate(self.kinds, observations.measured, crashed, self._explain_by_memory(crashed, memory))

    def conclusions(self, observations: Observations) -> tuple[FailureConclusion, ...]:
        """Return conclusions from the failures of the trials, as sentences."""
        if observations.proxies:
            wider, seen = self.with_proxies(observations)
            return wider.conclusions(seen)
        conclusions = []
        log_capacity = np.log(self.predicted.capacity_bytes)
        told = self.select_subset(observations)
        memory = self._fit_memory(told) if observations.misfits or told.crashed else None
        if memory is not None and observations.misfits:
            means = memory.means()
            # candidates that probably fitted before any trial, and now probably do not
            fitted = self._misfit_at_first <= LIKELY
            fitted[sorted(observations.explored | observations.impossible)] = False
            at = np.flatnonzero(fitted)
            newly = memory.is_likely_above(log_capacity[at], at, means[:, at])
            # ratio of needed to predicted memory: of those tried, because nobody has seen the others'
            tried = sorted(observations.explored | observations.misfits)
            logs = (memory.probabilities @ means - np.log(self.predicted.needed_bytes))[tried]
            low, factor, high = np.exp([np.min(logs), np.median(logs), np.max(logs)])
            conclusions.append(
                FailureConclusion(
                    kind="memory",
                    text=f"{_count_in_words(len(observations.misfits), 'trial')} ran out of memory; what was "
                    f"tried needs {factor:.2f} times the predicted memory in the median ({low:.2f} to {high:.2f}), and "
                    f"{_count_in_words(int(newly.sum()), 'more candidate')} probably won't fit.",
                )
            )
        if told.crashed:
            found = self._fit_crashes(told, memory).broken_probability()
            conclusions += [
                FailureConclusion(kind="crash", text=self._explain_broken_kind(name, probability, observations))
                for name, probability in found.items()
                if probability > LIKELY
            ]
        if observations.limits_s:
            slowest_s = max(observations.limits_s.values())
            conclusions.append(
                FailureConclusion(
                    kind="timeout",
                    text=f"{_count_in_words(len(observations.limits_s), 'trial')} reached the limit of time before a "
                    f"step ended; the slowest takes more than {slowest_s:.3g} s per step.",
                )
            )
        return tuple(conclusions)

    @cached_property
    def _misfit_at_first(self) -> FloatArray:
        """Probability that each candidate does not fit as far as is known before any trial [n]."""
        before, everywhere = after(self.memory, NOTHING_SEEN), np.arange(len(self.predicted))
        return before.probability_above(np.log(self.predicted.capacity_bytes), everywhere)

    def _explain_broken_kind(self, name: str, probability: float, observations: Observations) -> str:
        holds = self.kinds.holds[:, self.kinds.names.index(name)]
        tried = sorted(observations.explored | observations.crashed)
        num_crashed = int(holds[sorted(observations.crashed)].sum())
        # proxies follow the candidates, and do not count as candidates
        num_held = int(holds[: len(holds) - len(self.aside)].sum())
        return (
            f"{name} crashed in {num_crashed} of {_count_in_words(int(holds[tried].sum()), 'trial')}: with probability "
            f"{probability:.0%} this runtime cannot run it, and {_count_in_words(num_held, 'candidate')} are "
            "unlikely to run."
        )


NOTHING_SEEN = Seen(
    measured=np.zeros(0, dtype=np.int64),
    log_value=np.zeros(0),
    variance=np.zeros(0),
    bounded=np.zeros(0, dtype=np.int64),
    log_edge=np.zeros(0),
    side=np.zeros(0),
    mishap=np.zeros(0),
)
"""Observations of no trial."""


def posterior_of(
    predicted: Predicted,
    grid: ConfigGrid,
    *,
    history: FittedHistory | None = None,
    alternatives: Sequence[Alternative] = (),
    simulated: SimulatedSteps | None = None,
    operators: OperatorPosterior | None = None,
    proxies: ProxyPosterior | None = None,
) -> Posterior:
    """Return the posterior of candidates, which is their prior before any trial.

    Args:
        predicted: Predictions of the cost model with the runtime's profile.
        grid: Grid of the candidates.
        history: Prior from earlier runs of the runtime.
        alternatives: Predictions of other profiles, whose clusters may resemble the study's more.
        simulated: Steps of the leaders by the event simulator.
        operators: Posterior of the operators, predicted by the profile fitted to `history`, or else by the runtime's
            own.
        proxies: Predictions of proxies, by both profiles.
    """
    return Posterior(
        predicted=predicted,
        kinds=kinds_of(grid),
        steps=step_hypotheses(predicted, history, alternatives, simulated),
        memory=memory_hypotheses(predicted, history, alternatives) if predicted.knows_memory else (),
        operators=operators,
        proxies=proxies,
    )


def _count_in_words(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
