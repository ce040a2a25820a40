from pathlib import Path

import pytest

from tuner.run.loop import Progress
from tuner.study_file.config import load_study
from tuner.terminal.progress import ALIVE_S, ProgressLine

STUDY = Path(__file__).resolve().parents[4] / "configs" / "studies" / "llama3-8b-dgx-h100.yaml"


def progress(done):
    """So many trials have ended, and one runs."""
    return Progress(
        done=done, running=1, budget=40, best=None, extrapolated=None, p_star=0.0, seconds_left=None, note=""
    )


@pytest.fixture
def told(capsys):
    """The lines that a run writes into a log, for times [s] and trials that have ended by then."""

    def lines(*moments):
        now_s = [0.0]
        with ProgressLine(load_study(STUDY), clock=lambda: now_s[0]) as line:
            for now_s[0], done in moments:
                line.show(progress(done))
        return capsys.readouterr().err

    return lines


def test_a_log_has_a_line_for_each_change(told):
    """Lines come when trials have ended, not at every look, and hold no control characters."""
    text = told((1, 0), (2, 1), (3, 1), (4, 3))

    assert [line.partition(" trials")[0] for line in text.splitlines()[1:]] == ["1/40", "3/40"]
    assert text.replace("\n", "").isprintable()


def test_a_log_shows_that_a_long_trial_runs(told):
    """Where nothing ends there is a line a minute, and it says how many run."""
    text = told((1, 1), (ALIVE_S, 1), (1 + ALIVE_S, 1), (2 + ALIVE_S, 1), (1 + 2 * ALIVE_S, 1))

    assert text.splitlines()[1:] == ["1/40 trials, no result yet, confidence 0.00, 1 running"] * 3
