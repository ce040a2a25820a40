"""The oracle counts every set of at most two kinds, one by one."""

import itertools

import numpy as np
import pytest

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.crash_surrogate import BROKEN, OWN_CRASH, RUNS_THOUGH_BROKEN, crash_surrogate, kinds_of


def grid_of(opened=()):
    """Twelve configurations of eight devices."""
    configs = [
        ParallelConfig(pp=pp, tp=tp, dp=8 // (pp * tp), vpp=vpp, mbs=1)
        for pp, tp in itertools.product((1, 2, 4), (1, 2))
        for vpp in (1, 2)
    ]
    return ConfigGrid.from_configs(configs, opened)


def positions(grid, **values):
    """Where the configurations with these values stand."""
    return np.flatnonzero(np.all([getattr(grid, name) == value for name, value in values.items()], axis=0))


def by_counting(kinds, ran, crashed, misfit_probability):
    """Probability of every set of at most two kinds of those that crashed."""
    suspects = [at for at in range(len(kinds.names)) if any(kinds.holds[position, at] for position in crashed)]
    weights = {}
    for size in range(3):
        for broken in itertools.combinations(suspects, size):
            weight = (BROKEN / (1 - BROKEN)) ** size
            for position in ran:
                weight *= RUNS_THOUGH_BROKEN if any(kinds.holds[position, at] for at in broken) else 1.0
            for position, misfit in zip(crashed, misfit_probability, strict=True):
                is_broken = any(kinds.holds[position, at] for at in broken)
                weight *= 1 - RUNS_THOUGH_BROKEN if is_broken else 1 - (1 - OWN_CRASH) * (1 - misfit)
            weights[broken] = weight
    total = sum(weights.values())
    return {broken: weight / total for broken, weight in weights.items()}


@pytest.mark.parametrize("seed", range(6))
def test_it_agrees_with_counting(seed):
    """Probabilities of kinds, and the share of 20,000 draws in which a candidate crashes, are those of the oracle."""
    rng = np.random.default_rng(seed)
    kinds = kinds_of(grid_of())
    chosen = rng.permutation(len(kinds.holds))[:6]
    crashed, ran = chosen[: 1 + seed % 3], chosen[1 + seed % 3 :]
    misfit_probability = rng.uniform(0, 0.5, len(crashed))

    surrogate = crash_surrogate(kinds, ran, crashed, misfit_probability)

    sets = by_counting(kinds, ran, crashed, misfit_probability)
    expected = {name: sum(sets[broken] for broken in sets if at in broken) for at, name in enumerate(kinds.names)}
    assert surrogate.broken_probability() == pytest.approx(expected)
    crashes = sum(chance * kinds.holds[:, list(broken)].any(axis=1) for broken, chance in sets.items())
    assert surrogate.draw(20_000, rng).mean(axis=0) == pytest.approx(crashes, abs=0.002)


def test_two_crashes_of_one_kind_make_its_others_improbable():
    """After two of four trials crashed, both with vpp=2, another vpp=2 crashes in over 60% of the draws and vpp=1 in
    less than 5%; a single crash beside two that ran leaves it below 25%.
    """
    grid = grid_of()
    kinds = kinds_of(grid)
    ran = np.array([positions(grid, pp=pp, tp=1, vpp=1)[0] for pp in (1, 2)])
    crashed = np.array([positions(grid, pp=pp, tp=1, vpp=2)[0] for pp in (1, 2)])
    other, innocent = positions(grid, pp=4, tp=2, vpp=2)[0], positions(grid, pp=4, tp=2, vpp=1)[0]

    def crash_share(num_crashed):
        surrogate = crash_surrogate(kinds, ran, crashed[:num_crashed], np.zeros(num_crashed))
        return surrogate.draw(4000, np.random.default_rng(0)).mean(axis=0)

    assert crash_share(2)[other] > 0.6
    assert crash_share(2)[innocent] < 0.05
    assert crash_share(1)[other] < 0.25


def test_what_ran_or_lacked_memory_exonerates_kinds():
    """A kind that crashed once is suspect, and no longer once a candidate of it has run.

    A crash that was probably for want of memory blames its kinds less than one that was not.
    """
    grid = grid_of()
    kinds, none = kinds_of(grid), np.zeros(0, dtype=np.int64)

    def broken(ran, crashed, misfit):
        surrogate = crash_surrogate(kinds, ran, crashed, np.full(len(crashed), misfit))
        return surrogate.broken_probability()["vpp=2"]

    crashed, ran = positions(grid, pp=4, tp=2, vpp=2), positions(grid, pp=1, tp=1, vpp=2)
    assert broken(none, crashed, 0.0) > 0.05
    assert broken(ran, crashed, 0.0) < 0.2 * broken(none, crashed, 0.0)
    two = positions(grid, vpp=2)[:2]
    assert broken(none, two, 0.9) < 0.05 < broken(none, two, 0.0)


def test_without_a_crash_or_kinds_nothing_is_broken():
    """Trials that ran leave one hypothesis: no draw crashes. A single candidate has no kinds that could be blamed."""
    none = np.zeros(0, dtype=np.int64)
    alone = kinds_of(ConfigGrid.from_configs([ParallelConfig(dp=8)]))

    surrogate = crash_surrogate(kinds_of(grid_of()), np.arange(3), none, np.zeros(0))
    of_one = crash_surrogate(alone, none, np.array([0]), np.zeros(1))

    assert not surrogate.draw(50, np.random.default_rng(0)).any()
    assert set(surrogate.broken_probability().values()) == {0.0}
    assert alone.names == ()
    assert not of_one.draw(5, np.random.default_rng(0)).any()


def test_equal_columns_are_one_kind():
    """Two kinds that the same candidates have are one, under its first name; a kind of all or of none is none.

    What a study searches beside the degrees can be broken too, under the name that a study file has for it.
    """
    kinds = kinds_of(grid_of())
    configs = [ParallelConfig(dp=8, recompute=mode, zero_stage=zero) for mode in ("none", "full") for zero in (0, 1)]
    opened = kinds_of(ConfigGrid.from_configs(configs, ("recompute", "zero_stage")))

    columns = [column.tobytes() for column in kinds.holds.T]
    assert len(set(columns)) == len(columns)
    assert all(0 < column.sum() < len(kinds.holds) for column in kinds.holds.T)
    assert {"vpp=2", "pp above 1"} <= set(kinds.names)  # pp is 1, 2 or 4
    assert "vpp above 1" not in kinds.names  # vpp is 1 or 2
    assert not [name for name in kinds.names if name.startswith(("mbs", "cp"))]
    assert set(opened.names) == {"recompute=none", "recompute=full", "zero_stage=0", "zero_stage=1"}
