"""Choice between candidates by a compiler's schedules and memory."""

import pytest

from tuner.planners.judged import Verdict, choose


def verdict(name, scheduled_s, compiled_bytes, *, fits=True):
    """A verdict on a candidate whose price says nothing; without a schedule it was refused."""
    return Verdict(
        name=name, planned_s=1.0, planned_bytes=1.0, scheduled_s=scheduled_s, compiled_bytes=compiled_bytes, fits=fits
    )


OURS = verdict("ours", 2.0, 8.0)


@pytest.mark.parametrize(
    ("verdicts", "answer"),
    [
        ((OURS, verdict("faster", 1.0, 9.0)), "faster"),
        ((OURS, verdict("as fast", 1.999, 1.0)), "ours"),
        ((OURS, verdict("too large", 1.0, 90.0, fits=False)), "ours"),
        ((verdict("refused", None, None, fits=False), OURS), "ours"),
        ((verdict("larger", 1.0, 91.0, fits=False), verdict("large", 2.0, 90.0, fits=False)), "large"),
    ],
)
def test_the_fastest_schedule_that_fits_is_the_answer(verdicts, answer):
    """A schedule must be faster to take the planner's place; what was refused or is too large can't."""
    number, found = choose(verdicts)

    assert verdicts[number].name == answer
    assert [each.name for each in found if each.is_answer] == [answer]
