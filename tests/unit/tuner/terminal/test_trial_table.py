import pytest

from costmodels.job.parallel_config import DEGREES
from tuner.answers.comparison import Comparison
from tuner.answers.trial_rows import TrialRow
from tuner.terminal.trial_table import table_lines

CURRENT = dict.fromkeys(DEGREES, 1) | {"tp": 8, "dp": 8, "recompute": "none"}
COMPARED = Comparison(name="current", values=CURRENT, step_time_s=10.0)


def row(trial, step_time_s=None, status="ok", reason="", **changes):
    """A row of the table, with some changes of the current configuration."""
    return TrialRow(
        trial=trial,
        config=CURRENT | changes,
        status=status,
        is_proxy=False,
        step_time_s=step_time_s,
        speedup=COMPARED.speedup(step_time_s) if status == "ok" else None,
        predicted_s=11.25,
        peak_memory_bytes=50 * 2**30 if status == "ok" else None,
        elapsed_s=60.0,
        queued_s=None,
        start_s=20.0,
        warmup_s=10.0,
        steps_s=30.0,
        reason=reason,
    )


def test_columns_that_never_vary_are_left_out():
    """Dimensions with one value in all trials have no column; what is not 1 stands below."""
    lines = table_lines([row(0, 10.0), row(1, 8.0, tp=4, pp=2)], COMPARED, 1, 80)

    assert lines == [
        "trial  pp  tp  step [s]  speed-up   GiB  predicted [s]  outcome",
        "    0   1   8        10     1.000  50.0           11.2  current",
        "   *1   2   4         8     1.250  50.0           11.2",
        "In all trials: dp=8,recompute=none",
        "* the best configuration",
        "speed-up: times as fast as current",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_fits_its_terminal(width):
    """Reasons are cut and figures are left out until the lines fit; the last line names what has no room."""
    changes = {"pp": 16, "tp": 4, "dp": 32, "vpp": 2, "mbs": 16, "recompute": "selective"}
    rows = [row(0, 10.0), row(1, status="crashed", reason="exit status 1: " + "word " * 40, **changes)]

    lines = table_lines(rows, COMPARED, None, width)

    assert all(len(line) <= width for line in lines[:3])
    assert "crashed" in lines[2]
    assert ("Without room here" in lines[-1]) == (width < 120)


def test_unfinished_studies_have_a_table():
    """Trials that run or were stopped have rows, and figures that nobody has measured have no column."""
    lines = table_lines([row(0, status="running"), row(1, status="pruned", reason="slow", mbs=2)], None, None, 80)

    assert lines[0].split() == ["trial", "mbs", "predicted", "[s]", "outcome"]
    assert [line.split(maxsplit=3)[3] for line in lines[1:3]] == ["running", "stopped early"]
