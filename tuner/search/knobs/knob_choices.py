"""Pairs of a layout and the values of knobs as the candidates of a search.

There are far too many pairs to draw each of them. But effects of knobs add up, so that each draw tells the best knobs
of a layout without enumerating them. So the candidates of a decision are the pairs that were tried, and those that some
draw names among its fastest; each of these is then drawn in all draws.

Letters: n layouts, j knobs, M draws, p pairs, l layouts of a draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.knob_effects import KNOB_NOISE
from costmodels.surrogates.predicted import Predicted
from hardware.arrays import FloatArray, IntArray
from tuner.search.choices import AbstractChoices, LayoutPositions
from tuner.search.failures import FailureConclusion
from tuner.search.implied import ImpliedFailures
from tuner.search.knobs.knob_posterior import KnobPosterior, PairDraws
from tuner.search.knobs.knob_space import KnobSpace, Priced
from tuner.search.knobs.pairs import PairTable
from tuner.search.observations import Observations
from tuner.search.parameters import distribution_of
from tuner.search.posterior import Posterior

LAYOUTS_PER_DRAW = 64
"""Layouts of each draw, the fastest with today's knobs, whose best knobs are looked for."""

NAMED_PER_DRAW = 3
"""Pairs that each draw names, its fastest ones."""

PRICES_OF_MEMORY = (0.0, 0.03, 0.1, 0.3, 1.0, 10.0)
"""Log step time that is given for a unit of log memory where the fastest knobs do not fit, tried in this order."""


class KnobChoices(AbstractChoices):
    """Pairs of a layout and the values of knobs.

    Args:
        layouts: Grid of the layouts [n].
        posterior: Posterior of the layouts with today's knobs.
        space: Knobs and the priors of their effects.
    """

    def __init__(self, layouts: ConfigGrid, posterior: Posterior, space: KnobSpace) -> None:
        self.layouts = layouts
        self.search_space = {name: distribution_of(name, layouts) for name in layouts.dimensions} | {
            knob.name: CategoricalDistribution(knob.values) for knob in space.knobs
        }
        self.num_candidates = space.num_pairs
        self.space = space
        self.posterior = KnobPosterior(layouts=posterior, space=space)
        self._positions = LayoutPositions(layouts)
        self._failures = ImpliedFailures(layouts)
        self.table = PairTable(len(space.knobs))

    def __len__(self) -> int:
        """Return the number of pairs that were tried or named so far."""
        return len(self.table)

    def position_of(self, params: Mapping[str, Any]) -> int | None:
        """Return the number of the pair that a trial's parameters name; None if they name none.

        Knobs that are missing have today's value.
        """
        names = {knob.name for knob in self.space.knobs}
        layout = self._positions.position_of({name: value for name, value in params.items() if name not in names})
        codes = self.space.codes_of({name: params[name] for name in params if name in names})
        if layout is None or codes is None:
            return None
        return self.table.number_of((layout, self.space.canonical(layout, codes)))

    def layout_of(self, position: int) -> int:
        """Return the position of a pair's layout in the grid."""
        return int(self.table.layouts[position])

    @property
    def predicted(self) -> Predicted:
        """Predictions for the layouts with today's knobs."""
        return self.posterior.layouts.predicted

    def config(self, position: int) -> ParallelConfig:
        """Return the layout of a pair with the values of its knobs."""
        knobs = self.space.values_of(self.table.codes[position])
        return replace(self.layouts.config(self.layout_of(position)), knobs=tuple(knobs.items()))

    def values(self, position: int) -> dict[str, Any]:
        """Return the identifying dimensions of a pair's layout and the values of its knobs."""
        return self.layouts.values(self.layout_of(position)) | self.space.values_of(self.table.codes[position])

    def trial_s(self) -> FloatArray:
        """Return the predicted step times of the pairs' layouts [p]."""
        return np.asarray(self.posterior.layouts.predicted.step_time_s[self.table.layouts])

    def shared_layouts(self, count: int) -> IntArray:
        """Return the layout of each of the first pairs [count]."""
        return self.table.layouts[:count]

    def implied(self, observations: Observations) -> frozenset[int]:
        """Return the pairs with equal knobs whose layouts need more memory by every account than one that ran out."""
        layouts, codes = self.table.layouts, self.table.codes
        ran = layouts[sorted(observations.explored)].tolist()
        found: set[int] = set()
        for position in observations.misfits:
            more = self._failures.by([int(layouts[position])], ran)
            alike = np.isin(layouts, sorted(more)) & (codes == codes[position]).all(axis=1)
            found.update(np.flatnonzero(alike).tolist())
        return frozenset(found)

    def conclusions(self, observations: Observations) -> tuple[FailureConclusion, ...]:
        """Return conclusions from the failures of the layouts, as sentences."""
        return self.posterior.layouts.conclusions(self.posterior.told_of_layouts(observations, self.table))

    def draw(self, observations: Observations, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return joint draws of the log step time of the pairs [M, p]; infinite where one cannot run.

        Pairs that earlier decisions named and this one does not are infinite too.
        """
        drawn = self.posterior.draw(observations, self.table, num_draws, rng)
        tried = sorted(observations.closed)
        named = sorted({self.table.number_of(pair) for pair in self._name_pairs(drawn, observations)} - set(tried))
        found = np.full((num_draws, len(self.table)), np.inf, dtype=np.float32)
        rows = np.array([*tried, *named], dtype=np.int64)
        found[:, rows] = self._draw_pairs(drawn, rows)
        # a measured pair has its own step time, whatever the sum of effects says
        noise = rng.standard_normal((num_draws, len(observations.measured))) * np.sqrt(observations.variance)
        found[:, observations.measured] = observations.log_step_s + noise
        for position, limit_s in observations.limits_s.items():
            found[:, position] = np.maximum(found[:, position], np.log(limit_s))
        found[:, sorted(observations.impossible)] = np.inf
        found[self._misfits_rehearsed(observations, num_draws, rng)] = np.inf
        return found

    def _misfits_rehearsed(
        self, observations: Observations, num_draws: int, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Draw which pairs do not run by what their own rehearsals say [M, p]: refused, or too large."""
        fails = np.zeros((num_draws, len(self.table)), dtype=np.bool_)
        rehearsed = observations.rehearsed
        known = sorted(rehearsed.log_needed.keys() - observations.explored)
        if known:
            mean = np.array([rehearsed.log_needed[position] for position in known])
            drawn = mean + rehearsed.deviation * rng.standard_normal((num_draws, len(known)))
            fails[:, known] = drawn > self._log_capacity[self.table.layouts[known]]
        fails[:, sorted(observations.dropped)] = True
        return fails

    def draw_steps(
        self, observations: Observations, positions: IntArray, num_draws: int, rng: np.random.Generator
    ) -> FloatArray:
        """Return joint draws of the log step time of a few pairs, as if each could run [M, m].

        A pair deviates from the sum of its layout and its knobs by KNOB_NOISE; what its own trials show of that is
        weighed by their errors.
        """
        drawn = self.posterior.draw(observations, self.table, num_draws, rng)
        layouts, codes = self.table.layouts[positions], self.table.codes[positions]
        found: FloatArray = drawn.log_step_s[:, layouts].astype(np.float64)
        found += drawn.effects.of_pairs(layouts, codes, self.space.is_set(layouts, codes))
        own = {position: row for row, position in enumerate(observations.measured.tolist())}
        for position in set(positions.tolist()):
            columns, row = np.flatnonzero(positions == position), own.get(position)
            deviation = KNOB_NOISE * rng.standard_normal(num_draws)
            if row is not None:
                variance = float(observations.variance[row])
                share = KNOB_NOISE**2 / (KNOB_NOISE**2 + variance)
                behind = observations.log_step_s[row] - found[:, columns[0]]
                deviation = share * behind + np.sqrt(1 - share) * deviation
            found[:, columns] += deviation[:, None]
            if position in observations.limits_s:
                found[:, columns] = np.maximum(found[:, columns], np.log(observations.limits_s[position]))
        return found

    def _draw_pairs(self, drawn: PairDraws, rows: IntArray) -> FloatArray:
        """Return the draws of the log step time of some pairs [M, p]; infinite where one cannot run."""
        layouts, codes = self.table.layouts[rows], self.table.codes[rows]
        is_set = self.space.is_set(layouts, codes)
        found = drawn.log_step_s[:, layouts] + drawn.effects.of_pairs(layouts, codes, is_set)
        runs = drawn.layout_runs[:, layouts].copy()
        for at, value_runs in enumerate(drawn.value_runs):
            runs &= value_runs[:, codes[:, at]] | ~is_set[:, at]
        if drawn.log_needed is not None:
            needed: FloatArray = drawn.log_needed[:, layouts].astype(np.float64)
            if drawn.memory is not None:
                needed = needed + drawn.memory.of_pairs(layouts, codes, is_set)
            runs &= needed <= self._log_capacity[layouts]
        return np.where(runs, found, np.inf)

    @property
    def _log_capacity(self) -> FloatArray:
        return np.log(self.posterior.layouts.predicted.capacity_bytes)

    def _name_pairs(self, drawn: PairDraws, observations: Observations) -> list[tuple[int, tuple[int, ...]]]:
        """Return the fastest pairs of each draw, and the best layouts with the knobs that are best on average."""
        layouts = self._fastest_layouts(drawn)
        codes, cost = self._best_knobs(drawn, layouts)
        total = np.take_along_axis(drawn.log_step_s, layouts, axis=1) + cost
        # the layouts of the draws' fastest pairs, with today's knobs and with those that are best on average
        first = layouts[np.arange(len(layouts)), total.argmin(axis=1)]
        leaders = np.unique(np.concatenate([first, self.table.layouts[observations.measured]]))
        order = np.argsort(total, axis=1, kind="stable")[:, :NAMED_PER_DRAW]
        named = [
            (int(layouts[draw, at]), tuple(codes[draw, at].tolist()))
            for draw, row in enumerate(order)
            for at in row.tolist()
            if np.isfinite(total[draw, at])
        ]
        named += [(int(layout), self.space.canonical(int(layout), self.space.today.tolist())) for layout in leaders]
        mean = replace(
            drawn.effects,
            weights=tuple(weights.mean(axis=0, keepdims=True) for weights in drawn.effects.weights),
            scales=drawn.effects.scales[:1],
        )
        allowed = [(runs.mean(axis=0) > 0.5)[None] for runs in drawn.value_runs]
        on_average, _ = self.space.best(mean, leaders[None], allowed)
        named += [(int(layout), tuple(row.tolist())) for layout, row in zip(leaders, on_average[0], strict=True)]
        return list(dict.fromkeys((layout, self.space.canonical(layout, row)) for layout, row in named))

    def _fastest_layouts(self, drawn: PairDraws) -> IntArray:
        """Return the fastest layouts of each draw with today's knobs, of those that may fit with some knobs [M, l]."""
        log_step_s = np.where(drawn.layout_runs, drawn.log_step_s, np.float32(np.inf))
        if drawn.log_needed is not None:
            saved = np.zeros(len(log_step_s))
            if drawn.memory is not None:
                everywhere = np.zeros((len(log_step_s), 1), dtype=np.int64)
                for knob in range(len(self.space.knobs)):
                    saved -= np.minimum(drawn.memory.of_values(knob, everywhere)[:, 0].min(axis=1), 0.0)
            log_step_s[drawn.log_needed - saved[:, None] > self._log_capacity] = np.inf
        count = min(LAYOUTS_PER_DRAW, log_step_s.shape[1])
        return np.asarray(np.argpartition(log_step_s, count - 1, axis=1)[:, :count])

    def _best_knobs(self, drawn: PairDraws, layouts: IntArray) -> tuple[IntArray, FloatArray]:
        """Return the best knobs with which each layout fits [M, l, j], and their log effect; infinite if none do."""
        cannot = ~np.take_along_axis(drawn.layout_runs, layouts, axis=1)
        codes, cost = self.space.best(drawn.effects, layouts, drawn.value_runs)
        if drawn.log_needed is None:
            return codes, np.where(cannot, np.inf, cost)
        room = self._log_capacity[layouts] - np.take_along_axis(drawn.log_needed, layouts, axis=1)
        if drawn.memory is None:
            return codes, np.where(cannot | (room < 0), np.inf, cost)
        misfits = self._memory_of(drawn, layouts, codes) > room
        for price in PRICES_OF_MEMORY[1:]:
            if not misfits.any():
                break
            priced = Priced(effects=drawn.effects, memory=drawn.memory, price=price)
            cheaper, _ = self.space.best(priced, layouts, drawn.value_runs)
            codes[misfits] = cheaper[misfits]
            misfits &= self._memory_of(drawn, layouts, codes) > room
        cost = self.space.sum_of(drawn.effects, layouts, codes)
        return codes, np.where(cannot | misfits, np.inf, cost)

    def _memory_of(self, drawn: PairDraws, layouts: IntArray, codes: IntArray) -> FloatArray:
        assert drawn.memory is not None, "some knob may affect memory"
        return self.space.sum_of(drawn.memory, layouts, codes)
