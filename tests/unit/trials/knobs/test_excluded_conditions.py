"""Conditions that exclude one another, and flags that a knob's value takes away or leaves."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from trials.knobs.condition import OPERATORS, Comparison, Condition, parse_condition
from trials.knobs.knob import Knob, without_knob_flags
from trials.knobs.places import Place

COMPARISONS = st.builds(
    lambda name, sign, value: Comparison(name=name, sign=sign, value=value),
    st.sampled_from(["pp", "tp"]),
    st.sampled_from(list(OPERATORS)),
    st.integers(1, 4),
)


@given(st.lists(COMPARISONS, max_size=3), st.lists(COMPARISONS, max_size=3))
def test_exclusive_conditions_never_hold_together(one, other):
    """Where two conditions exclude one another, no degrees from 1 to 6 meet both."""
    first, second = Condition(comparisons=tuple(one)), Condition(comparisons=tuple(other))
    together = any(
        first.holds_for(config, {}) and second.holds_for(config, {})
        for pp, tp in itertools.product(range(1, 7), repeat=2)
        for config in [ParallelConfig(pp=pp, tp=tp)]
    )

    assert not (first.excludes(second) and together)
    assert first.excludes(second) == second.excludes(first)


@pytest.mark.parametrize(
    ("one", "other", "is_exclusive"),
    [
        ("pp == 1", "pp > 1 and vpp > 1", True),
        ("recompute == none", "recompute == selective", True),
        ("recompute != none", "recompute != selective", False),
        ("pp == 1", "tp > 1", False),
        ("tp <= 4", "tp >= 4", False),
    ],
)
def test_single_names_tell(one, other, is_exclusive):
    """Conditions exclude one another if no value of some name meets both."""
    assert parse_condition(one, {}).excludes(parse_condition(other, {})) == is_exclusive


def test_a_value_takes_away_what_does_not_go_with_it():
    """Without overlapped gradients the export's overlapped gather goes too; a value that keeps all leaves both."""
    place = Place(
        flags=(("none", ()), ("all", ("--overlap-grad-reduce",)), ("as_is", ())),
        removes=(("none", ("--overlap-param-gather",)),),
        keeps=("as_is",),
    )
    knob = Knob(name="overlap", values=("none", "all", "as_is"), today="all", place=place)
    exported = ["--overlap-grad-reduce", "--overlap-param-gather", "--tp", "2"]

    def left(value):
        return without_knob_flags(exported, [knob], ParallelConfig(knobs=(("overlap", value),)))

    assert left("none") == ["--tp", "2"]
    assert left("all") == ["--overlap-param-gather", "--tp", "2"]
    assert left("as_is") == exported
