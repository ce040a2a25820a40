"""Tests of the table of dimensions."""

import pytest

from costmodels.job.parallel_config import DIMENSIONS, ENUMERATED_DIMENSIONS, ConfigGrid, ParallelConfig
from hardware.io.errors import ConfigError
from tuner.space.dimensions import SEARCHED, STAGES
from tuner.study_file.config import StudyKeys


def test_enumeration_adds_every_dimension_once():
    """The stages of enumeration hold each dimension of the table once."""
    staged = [name for stage in STAGES for name in stage]

    assert sorted(staged) == sorted(SEARCHED)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_a_code_stands_for_its_value(name):
    """A value survives its code, a grid, and the spelling on a command line."""
    dimension = DIMENSIONS[name]
    for code in range(len(dimension.choices) or 3):
        value = dimension.value_of(code)

        assert dimension.code_of(value) == code
        assert getattr(ConfigGrid.from_configs([ParallelConfig(**{name: value})]).config(0), name) == value
        assert dimension.parse(dimension.show(code), "--config") == value


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("recompute", "half", "must be none, selective or full; valid: full, none, selective"),
        ("zero_stage", True, "must be 0, 1, 2 or 3"),
        ("sequence_parallel", 1, "must be false or true"),
        ("expert_tp", -1, "must be a whole number of at least 0"),
    ],
)
def test_a_wrong_value_is_refused_with_the_valid_ones(name, value, rule):
    """A dimension refuses values of another type or outside its domain, and says which are valid."""
    with pytest.raises(ConfigError, match=rule):
        ParallelConfig(**{name: value})


def test_study_files_have_a_key_for_every_dimension():
    """Each dimension is a key of `space:`, and each further one a key of `job:`."""
    fields = StudyKeys.model_fields
    space = type(fields["space"].default).model_fields
    (job,) = (one.model_fields for one in fields["job"].annotation.__args__ if hasattr(one, "model_fields"))

    assert set(SEARCHED) <= set(space)
    assert set(ENUMERATED_DIMENSIONS) <= set(job)
