import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.knob_effects import draw_effects
from trials.knobs.condition import ALWAYS, parse_condition
from trials.knobs.knob import Knob
from tuner.search.knobs.knob_space import knob_space

CONDITIONS = ("", "tp > 1", "dp > 2", "{} == {}", "tp > 1 and {} == {}", "{} != {}")

GRID = ConfigGrid.from_configs([ParallelConfig(tp=tp, dp=8 // tp // pp, pp=pp) for pp in (1, 2) for tp in (1, 2, 4)])


@st.composite
def knobs(draw):
    """Up to four knobs, whose conditions compare the layout and knobs that stand before."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        values = tuple(range(draw(st.integers(2, 3)))) if draw(st.booleans()) else ("a", "b", "c")
        text = draw(st.sampled_from(CONDITIONS[:3] if not found else CONDITIONS))
        if "{}" in text:
            other = draw(st.sampled_from(found))
            text = text.format(other.name, draw(st.sampled_from(other.values)))
        known = {knob.name: knob.values for knob in found}
        found.append(
            Knob(
                name=f"k{number}",
                values=values,
                today=draw(st.sampled_from(values)),
                when=parse_condition(text, known) if text else ALWAYS,
            )
        )
    return tuple(found)


def space_of(some):
    """These knobs on six layouts."""
    features = np.stack([np.log2(GRID.pp), np.log2(GRID.tp)], axis=1)
    return knob_space(some, GRID, features, {"tp": np.linspace(0, 0.5, len(GRID))}, np.arange(1.0, 1 + len(GRID)))


def every_pair(space):
    """All different pairs of a layout and knobs, by brute force."""
    ranges = [range(len(knob.values)) for knob in space.knobs]
    return {
        (layout, space.canonical(layout, codes)) for layout in range(len(GRID)) for codes in itertools.product(*ranges)
    }


@given(some=knobs())
def test_pairs_are_counted_without_enumerating_them(some):
    """The number of pairs is that of the different runs, with knobs that are not set at today's value."""
    space = space_of(some)

    assert space.num_pairs == len(every_pair(space))


@given(some=knobs(), seed=st.integers(0, 1000))
def test_the_best_knobs_are_those_of_the_enumeration(some, seed):
    """For each draw and layout, no pair has a smaller effect than the one that is named the best."""
    space = space_of(some)
    none = np.zeros(0, dtype=np.int64)
    drawn = draw_effects(
        space.steps,
        none,
        np.zeros((0, len(some)), dtype=np.int64),
        np.zeros((0, len(some)), dtype=np.bool_),
        np.zeros(0),
        np.zeros((0, 0)),
        5,
        np.random.default_rng(seed),
    )
    layouts = np.tile(np.arange(len(GRID)), (5, 1))
    codes, total = space.best(drawn, layouts, [np.ones((5, len(knob.values)), dtype=np.bool_) for knob in some])
    pairs = sorted(every_pair(space))
    at, values = np.array([layout for layout, _ in pairs]), np.array([codes for _, codes in pairs])
    effects = drawn.of_pairs(at, values, space.is_set(at, values))
    for layout in range(len(GRID)):
        assert total[:, layout] == pytest.approx(effects[:, at == layout].min(axis=1), abs=1e-9)
    assert space.sum_of(drawn, layouts, codes) == pytest.approx(total, abs=1e-9)
    assert all(
        space.canonical(layout, codes[draw, layout].tolist()) == tuple(codes[draw, layout].tolist())
        for draw in range(5)
        for layout in range(len(GRID))
    )


def test_values_that_cannot_run_are_not_named():
    """A value that a draw says the runtime cannot run is the best of no layout in that draw."""
    some = (Knob(name="k", values=("a", "b", "c"), today="a"),)
    space = space_of(some)
    none = np.zeros(0, dtype=np.int64)
    drawn = draw_effects(
        space.steps,
        none,
        none.reshape(0, 1),
        np.zeros((0, 1), dtype=np.bool_),
        np.zeros(0),
        np.zeros((0, 0)),
        200,
        np.random.default_rng(0),
    )
    runs = np.ones((200, 3), dtype=np.bool_)
    runs[:, 1] = False
    codes, _ = space.best(drawn, np.zeros((200, 1), dtype=np.int64), [runs])

    assert set(codes.ravel().tolist()) == {0, 2}


def test_numbers_are_values_whatever_their_type():
    """A stored 1.0 is the value 1, but true is not."""
    space = space_of((Knob(name="k", values=(1, 2), today=1), Knob(name="s", values=(False, True), today=False)))

    assert space.codes_of({"k": 2.0, "s": True}) == (1, 1)
    assert space.codes_of({"k": True}) is None
    assert space.codes_of({"s": 1}) is None
    assert space.codes_of({}) == (0, 0)
