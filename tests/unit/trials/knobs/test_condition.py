import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from hardware.io.errors import ConfigError
from trials.knobs.condition import ALWAYS, OPERATORS, Comparison, Condition, parse_condition

CONFIGS = [
    ParallelConfig(pp=pp, tp=tp, dp=4, cp=cp, recompute=mode, zero_stage=stage, sequence_parallel=is_split)
    for pp, tp, cp, mode, stage, is_split in [
        (1, 1, 1, "none", 0, False),
        (2, 4, 1, "full", 1, True),
        (8, 2, 2, "selective", 3, True),
        (1, 8, 4, "none", 2, False),
    ]
]
KNOBS = {"overlap": (False, True), "bucket": (1, 10, 100)}

comparisons = st.builds(
    Comparison,
    name=st.sampled_from(["pp", "tp", "cp", "zero_stage", "num_devices", "replicas", "context_parallel"]),
    sign=st.sampled_from(sorted(OPERATORS)),
    value=st.integers(0, 40),
)


@given(found=st.builds(Condition, comparisons=st.lists(comparisons, max_size=3).map(tuple)))
def test_a_grid_and_its_configurations_agree(found):
    """A condition holds at a position of a grid exactly where it holds for the configuration there."""
    holds = found.on_layouts(ConfigGrid.from_configs(CONFIGS))

    assert holds.tolist() == [found.holds_for(config, {}) for config in CONFIGS]


@given(found=st.builds(Condition, comparisons=st.lists(comparisons, min_size=1, max_size=3).map(tuple)))
def test_a_condition_is_read_as_it_is_printed(found):
    """Reading the text of a condition gives the condition back."""
    assert parse_condition(str(found), {}) == found


def test_words_and_switches_are_compared_too():
    """Recomputation is compared with its words, a switch with true and false, a knob with its values."""
    found = parse_condition("recompute == none and sequence_parallel == false and overlap == true", KNOBS)

    assert found.on_layouts(ConfigGrid.from_configs(CONFIGS)).tolist() == [True, False, False, True]
    assert found.on_knobs({"overlap": True})
    assert not found.on_knobs({"overlap": False})
    assert found.knobs == ("overlap",)
    assert found.holds_for(CONFIGS[0], {"overlap": True})
    assert not found.holds_for(CONFIGS[1], {"overlap": True})
    assert ALWAYS.holds_for(CONFIGS[0], {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "must be comparisons joined by `and`"),
        ("tp > 1 or pp > 1", "must be comparisons joined by `and`"),
        ("tpp > 1", "did you mean 'tp'?"),
        ("tp > many", "compares by `>` what has no order"),
        ("tp == many", "which is a number"),
        ("recompute == all", "recompute"),
        ("overlap == sometimes", "is no value of the knob overlap"),
        ("buckets > 1", "did you mean 'bucket'?"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    """A condition that makes no sense is refused with the part that does not."""
    with pytest.raises(ConfigError) as caught:
        parse_condition(text, KNOBS)

    assert message in str(caught.value)
