import re

import pytest
from pydantic import TypeAdapter, ValidationError

from trials.time_limit import TimeLimit

LIMIT = TypeAdapter(TimeLimit)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30:00", 1800),
        ("0:45", 45),
        ("90:00", 5400),
        ("1:30:00", 5400),
        ("36:00:00", 129_600),
        ("2-00:00:00", 172_800),
        ("1-12:30", 86_400 + 12 * 3600 + 30 * 60),
        ("2-6", 2 * 86_400 + 6 * 3600),
        (90, 90),
        (0.5, 0.5),
    ],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    """Minutes and hours are told apart by the number of colons, days by the dash; a number is in seconds."""
    assert LIMIT.validate_python(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "1:2:3:4", "1h", "-5:00", "1:234", "٣:00", "infinite", "0:00", 0, -1.0, True]
)
def test_other_times_are_refused(text):
    """A bare number as text (minutes for Slurm, seconds here), other units and nothing at all are no limits."""
    with pytest.raises(ValidationError):
        LIMIT.validate_python(text, strict=True)


def test_editors_accept_what_the_reader_accepts():
    """The schema's expression matches the forms of a time."""
    pattern = LIMIT.json_schema()["anyOf"][1]["pattern"]

    assert all(re.search(pattern, text) for text in ("30:00", "1:30:00", "2-00:00:00", "2-6"))
    assert not re.search(pattern, "soon")
