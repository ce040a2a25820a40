"""Posterior of layouts and knobs: what trials of pairs tell of the layouts, and what of the knobs.

The effects of the knobs are drawn first, with the layouts' processes integrated out (`knob_effects.draw_effects`). Each
draw of the effects is then taken from the measured steps, and the rest is what the posterior of the layouts explains
(`Posterior.draw_steps`). Both together are joint draws of layouts and knobs, and their cost is that of the layouts. The
needed memory is split in the same way.

Letters: n layouts, j knobs, v values of a knob, t trials, M draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from costmodels.surrogates.crash_surrogate import Kinds, crash_surrogate
from costmodels.surrogates.knob_effects import KNOB_NOISE, KnobDraws, draw_effects
from hardware.arrays import FloatArray, IntArray
from tuner.search.knobs.knob_space import KnobSpace
from tuner.search.knobs.pairs import PairTable
from tuner.search.observations import Observations
from tuner.search.posterior import PEAK_VARIANCE, Composed, Posterior
from tuner.search.subset import MAX_FAILURES, MAX_OBSERVATIONS

ROUNDS = 2
"""Times that the effects and the layouts' hyperparameters are fitted in turn: the first fit takes the effects of knobs
for noise of the layouts."""

LEAST_OVER = 1e-3
"""Log factor by which a trial that ran out of memory needed more than there was, at least."""

FEW_DRAWS = 64
"""Draws of the effects of which only the mean is used."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairDraws:
    """Joint draws of layouts and knobs.

    Attributes:
        log_step_s: Log step time of each layout with today's knobs, as if it could run [M, n].
        log_needed: Log needed memory of each layout with today's knobs, in bytes [M, n]; None if it is not predicted.
        effects: Effects of the knobs on the log step time.
        memory: Effects of the knobs on the log needed memory; None where none may have any.
        layout_runs: Whether the runtime can run each layout [M, n]; memory is another matter.
        value_runs: Whether it can run each value of each knob, by knob [M, v].
    """

    log_step_s: NDArray[np.float32]
    log_needed: NDArray[np.float32] | None
    effects: KnobDraws
    memory: KnobDraws | None
    layout_runs: NDArray[np.bool_]
    value_runs: tuple[NDArray[np.bool_], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tried:
    """Pairs of some trials, row by row: layouts [t], values of the knobs [t, j], and which of them are set [t, j]."""

    layouts: IntArray
    codes: IntArray
    is_set: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobPosterior:
    """Posterior of a study with knobs, as a function of its observations of pairs.

    Attributes:
        layouts: Posterior of the layouts with today's knobs.
        space: Knobs and the priors of their effects.
    """

    layouts: Posterior
    space: KnobSpace

    def draw(self, observations: Observations, table: PairTable, num_draws: int, rng: np.random.Generator) -> PairDraws:
        """Return joint draws of layouts and knobs, given the observations of pairs."""
        shifts, peaks, memory = self._fit_memory(observations, table, num_draws, rng)
        measured = self._tried(table, observations.measured)
        composed = self.layouts.compose(observations, num_draws, rng)
        mean = np.zeros(len(observations.measured))
        for last in [False] * (ROUNDS - 1) + [True]:
            told = self._of_layouts(observations, table, mean, peaks, shifts)
            effects = self._draw_step_effects(
                observations, told, composed, measured, num_draws if last else FEW_DRAWS, rng
            )
            of_pairs = effects.of_pairs(measured.layouts, measured.codes, measured.is_set)
            mean = of_pairs.mean(axis=0)
        told = self._of_layouts(observations, table, mean, peaks, shifts)
        offsets = np.zeros((num_draws, len(self.layouts.predicted)), dtype=np.float32)
        weights = _weights(observations.variance, measured.layouts)
        np.add.at(offsets.T, measured.layouts, (weights * (of_pairs - mean)).T.astype(np.float32))
        subset = self.layouts.select_subset(told)
        drawn = self.layouts.draw_steps(told, subset, num_draws, rng, offsets=offsets, composed=composed)
        needed = self.layouts.draw_needed(subset, num_draws, rng)
        if needed is not None:
            self._hold_to_misfits(needed, memory, self._tried(table, np.array(sorted(observations.misfits), dtype=int)))
        layout_runs, value_runs = self._draw_crashes(observations, table, subset, num_draws, rng)
        return PairDraws(
            log_step_s=drawn,
            log_needed=needed,
            effects=effects,
            memory=memory,
            layout_runs=layout_runs,
            value_runs=value_runs,
        )

    def _hold_to_misfits(self, needed: NDArray[np.float32], memory: KnobDraws | None, misfits: _Tried) -> None:
        """Raise the drawn log need of layouts [M, n] to what did not fit with the knobs of some trials."""
        log_capacity = np.log(self.layouts.predicted.capacity_bytes[misfits.layouts])
        least = np.broadcast_to(log_capacity, (len(needed), len(log_capacity)))
        if memory is not None:
            least = least - memory.of_pairs(misfits.layouts, misfits.codes, misfits.is_set)
        np.maximum.at(needed.T, misfits.layouts, (least + LEAST_OVER).T.astype(np.float32))

    def told_of_layouts(self, observations: Observations, table: PairTable) -> Observations:
        """Return what the trials tell of the layouts, as if no knob had an effect."""
        peaks = {int(table.layouts[position]): peak_bytes for position, peak_bytes in observations.peaks_bytes.items()}
        return self._of_layouts(observations, table, np.zeros(len(observations.measured)), peaks, {})

    def _draw_step_effects(
        self,
        observations: Observations,
        told: Observations,
        composed: Composed,
        tried: _Tried,
        num_draws: int,
        rng: np.random.Generator,
    ) -> KnobDraws:
        """Draw the effects on the step time from the measured pairs, of many from the latest ones."""
        subset = self.layouts.select_subset(told)
        rows = np.flatnonzero(np.isin(tried.layouts, subset.measured))[-MAX_OBSERVATIONS:]
        mean, covariance = self.layouts.steps_without_trials(subset, composed, tried.layouts[rows])
        return draw_effects(
            self.space.steps,
            tried.layouts[rows],
            tried.codes[rows],
            tried.is_set[rows],
            observations.log_step_s[rows] - mean,
            covariance + np.diag(observations.variance[rows]),
            num_draws,
            rng,
        )

    def _fit_memory(
        self, observations: Observations, table: PairTable, num_draws: int, rng: np.random.Generator
    ) -> tuple[Mapping[int, float], Mapping[int, int], KnobDraws | None]:
        """Return the mean log effects on memory by pair, the peaks of layouts without them, and draws of the effects.

        The peak of a layout is the geometric mean over its pairs.
        """
        # of many trials the latest ones tell enough
        at = np.array(list(observations.peaks_bytes), dtype=np.int64)[-MAX_OBSERVATIONS:]
        peaks = np.array(list(observations.peaks_bytes.values()), dtype=np.float64)[-MAX_OBSERVATIONS:]
        tried = self._tried(table, at)
        if not (self.layouts.memory and self.space.affects_memory):
            return {}, _mean_peaks(tried.layouts, peaks), None
        predicted = self.layouts.predicted
        needed = np.log(predicted.needed_bytes[tried.layouts] * peaks / predicted.peak_bytes[tried.layouts])
        variance = np.full(len(at), PEAK_VARIANCE)
        # pairs that ran out of memory need more than there is, those that ran without a known peak need less
        ran = sorted(set(observations.measured.tolist()) - set(observations.peaks_bytes))[-MAX_FAILURES:]
        misfits = sorted(observations.misfits)[-MAX_FAILURES:]
        bounded = np.array([*misfits, *ran], dtype=np.int64)
        sides = np.repeat([1.0, -1.0], [len(misfits), len(ran)])
        every = self._tried(table, np.concatenate([at, bounded]))
        told = self._of_layouts(
            observations, table, np.zeros(len(observations.measured)), _mean_peaks(tried.layouts, peaks), {}
        )
        found = self.layouts.memory_without_trials(self.layouts.select_subset(told), every.layouts)
        assert found is not None, "memory is predicted"
        before, covariance = found

        def draw(rows: IntArray, needed: FloatArray, variance: FloatArray, count: int) -> KnobDraws:
            return draw_effects(
                self.space.memory,
                every.layouts[rows],
                every.codes[rows],
                every.is_set[rows],
                needed - before[rows],
                covariance[np.ix_(rows, rows)] + np.diag(variance),
                count,
                rng,
            )

        rows = np.arange(len(at))
        if len(bounded):
            # each bound becomes a measurement that leaves the same mean and deviation, given the measured peaks
            effects = draw(rows, needed, variance, FEW_DRAWS)
            of_every = effects.of_pairs(every.layouts, every.codes, every.is_set)
            gain = np.linalg.solve(covariance[np.ix_(rows, rows)] + np.diag(variance), covariance[rows])  # [t, m]
            mean = before + gain.T @ (needed - of_every.mean(axis=0)[rows] - before[rows]) + of_every.mean(axis=0)
            left = np.diag(covariance) - (covariance[:, rows] * gain.T).sum(axis=1)
            deviation = np.sqrt(np.maximum(left, 1e-12) + of_every.var(axis=0))
            log_capacity = np.log(predicted.capacity_bytes[every.layouts])
            behind = np.arange(len(at), len(every.layouts))
            values, extra = _as_measurements(sides * mean[behind], deviation[behind], sides * log_capacity[behind])
            tells = np.isfinite(extra)
            rows = np.append(rows, behind[tells])
            needed = np.append(needed, (sides * values)[tells])
            variance = np.append(variance, extra[tells])
        effects = draw(rows, needed, variance, num_draws)
        of_peaks = effects.of_pairs(tried.layouts, tried.codes, tried.is_set).mean(axis=0)
        others = self._tried(table, bounded)
        of_bounded = effects.of_pairs(others.layouts, others.codes, others.is_set).mean(axis=0)
        shifts = dict(zip(bounded.tolist(), of_bounded.tolist(), strict=True))
        return shifts, _mean_peaks(tried.layouts, peaks * np.exp(-of_peaks)), effects

    def _draw_crashes(
        self, observations: Observations, table: PairTable, told: Observations, num_draws: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.bool_], tuple[NDArray[np.bool_], ...]]:
        """Draw which layouts and which values of knobs the runtime can run: [M, n], and [M, v] for each knob."""
        kinds, space = self.layouts.kinds, self.space
        layout_runs = np.ones((num_draws, len(self.layouts.predicted)), dtype=np.bool_)
        value_runs = tuple(np.ones((num_draws, len(knob.values)), dtype=np.bool_) for knob in space.knobs)
        crashed = np.array(sorted(observations.crashed), dtype=np.int64)
        if not len(crashed):
            return layout_runs, value_runs
        # kinds of a pair: those of its layout, and each value of a knob that is not today's
        tried = self._tried(table, np.arange(len(table)))
        columns, names, owners = [kinds.holds[tried.layouts]], [*kinds.names], []
        for at, knob in enumerate(space.knobs):
            for code, value in enumerate(knob.values):
                if code != knob.code_today:
                    columns.append(((tried.codes[:, at] == code) & tried.is_set[:, at])[:, None])
                    names.append(f"{knob.name}={value}")
                    owners.append((at, code))
        surrogate = crash_surrogate(
            Kinds(names=tuple(names), holds=np.concatenate(columns, axis=1)),
            observations.measured,
            crashed,
            self.layouts.explained_by_memory(told, table.layouts[crashed]),
        )
        for draw, pair in enumerate(surrogate.draw_broken(num_draws, rng).tolist()):
            for kind in pair:
                if kind >= len(kinds.names):
                    at, code = owners[kind - len(kinds.names)]
                    value_runs[at][draw, code] = False
                elif kind >= 0:
                    layout_runs[draw] &= ~kinds.holds[:, kind]
        return layout_runs, value_runs

    def _tried(self, table: PairTable, positions: IntArray) -> _Tried:
        layouts, codes = table.layouts[positions], table.codes[positions]
        return _Tried(layouts=layouts, codes=codes, is_set=self.space.is_set(layouts, codes))

    def _of_layouts(
        self,
        observations: Observations,
        table: PairTable,
        effects: FloatArray,
        peaks: Mapping[int, int],
        shifts: Mapping[int, float],
    ) -> Observations:
        """Return what the trials tell of the layouts with today's knobs.

        A layout that ran with some knobs can run; one that failed with others than today's may not be to blame.

        Args:
            observations: Observations of pairs.
            table: Pairs.
            effects: Expected log effect of the knobs of each measured pair [t].
            peaks: Peaks of memory by layout, without the effects of knobs [bytes].
            shifts: Expected log effect on memory by pair.
        """
        of_pair = table.layouts
        layouts, inverse = np.unique(of_pair[observations.measured], return_inverse=True)
        weights = _weights(observations.variance, of_pair[observations.measured])
        values, variance, completed = np.zeros(len(layouts)), np.zeros(len(layouts)), np.zeros(len(layouts))
        np.add.at(values, inverse, weights * (observations.log_step_s - effects))
        np.add.at(variance, inverse, weights**2 * (observations.variance + KNOB_NOISE**2))
        np.add.at(completed, inverse, observations.num_completed)

        def to_layouts(pairs: frozenset[int]) -> frozenset[int]:
            return frozenset(of_pair[sorted(pairs)].tolist())

        explored = to_layouts(observations.explored)
        misfits = to_layouts(observations.misfits) - explored
        by_layout = {int(of_pair[position]): shift for position, shift in sorted(shifts.items())}
        return replace(
            observations,
            measured=layouts,
            log_step_s=values,
            variance=variance,
            num_completed=completed.astype(np.int64),
            limits_s={
                int(of_pair[position]): limit_s
                for position, limit_s in observations.limits_s.items()
                if of_pair[position] not in layouts
            },
            peaks_bytes=dict(peaks),
            explored=explored,
            misfits=misfits,
            crashed=frozenset(),  # crashes are drawn for pairs
            pending=to_layouts(observations.pending),
            memory_shifts={layout: by_layout[layout] for layout in sorted(misfits | explored) if layout in by_layout},
        )


def _as_measurements(mean: FloatArray, deviation: FloatArray, edge: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return values and variances of measurements that tell as much of normal quantities as that they exceed edges [b].

    Mean and variance after each are those of the truncated normal distribution (assumed density filtering, Minka 2001,
    section 3). A bound that tells nothing has an infinite variance.
    """
    place = (edge - mean) / deviation
    ratio = np.exp(-0.5 * place**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(-place))
    after_mean = mean + deviation * ratio
    after_variance = deviation**2 * np.maximum(1 + place * ratio - ratio**2, 1e-6)
    precision = 1 / after_variance - 1 / deviation**2
    tells = precision > 1e-9 / deviation**2
    safe = np.where(tells, precision, 1.0)
    values = np.where(tells, (after_mean / after_variance - mean / deviation**2) / safe, after_mean)
    return values, np.where(tells, 1 / safe, np.inf)


def _weights(variance: FloatArray, layouts: IntArray) -> FloatArray:
    """Return the weight of each measured pair in the mean of its layout, by the variances of their errors [t]."""
    precision = 1 / (variance + KNOB_NOISE**2)
    total = np.zeros(int(layouts.max(initial=0)) + 1)
    np.add.at(total, layouts, precision)
    return np.asarray(precision / total[layouts])


def _mean_peaks(layouts: IntArray, peaks: FloatArray) -> dict[int, int]:
    """Return the geometric mean of the peaks of each layout [bytes]."""
    logs: dict[int, list[float]] = {}
    for layout, peak in zip(layouts.tolist(), np.log(peaks).tolist(), strict=True):
        logs.setdefault(layout, []).append(peak)
    return {layout: round(float(np.exp(np.mean(values)))) for layout, values in logs.items()}
