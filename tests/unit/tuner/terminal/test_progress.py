import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import tuner.terminal.progress
from costmodels.job.parallel_config import DEGREES
from tests.support.studies.broken_studies import study
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.pseudo_terminal import on_terminal, without_styles
from trials.backend import Observation, Status
from tuner.answers.comparison import Comparison
from tuner.run.loop import run_study
from tuner.run.next_trial import NextTrial
from tuner.run.opening import Opening
from tuner.run.progress import InFlight, Progress
from tuner.search.prospect import Prospect
from tuner.search.waiting import Slots, Wait
from tuner.storage.record import TrialRecord
from tuner.study_file.config import load_study
from tuner.terminal.event_log import state_of
from tuner.terminal.progress import ALIVE_S, MOST_IN_FLIGHT, ProgressLine
from tuner.terminal.trial_words import state_line

STUDY = Path(__file__).resolve().parents[4] / "configs" / "studies" / "llama3-8b-dgx-h100.yaml"
CURRENT = dict.fromkeys(DEGREES, 1) | {"tp": 8, "dp": 8}
COMPARED = Comparison(name="current", values=CURRENT, step_time_s=10.0)


def record(number, observation, **changes):
    """A trial of the current configuration with some changes, which ended so."""
    return TrialRecord(
        number=number,
        params=CURRENT | changes,
        finished=True,
        status=observation.status,
        step_time_s=observation.step_time_s,
        predicted_s=None,
        prediction={},
        observation=observation,
        proxy=None,
        p_star=None,
        end_order=(0, 0.0, number),
        started_at=None,
        ended_at=None,
    )


def ran(number, step_time_s, **changes):
    """A trial that measured one step."""
    return record(number, Observation(status=Status.OK, step_times_s=(step_time_s,)), **changes)


def failed(number, status, reason, log_tail="", **changes):
    """A trial that measured nothing."""
    return record(number, Observation(status=status, reason=reason, log_tail=log_tail), **changes)


def progress(done, *ended, **values):
    """So many trials have ended, these among them since the last look, and one runs."""
    running = (CURRENT | {"pp": 2},)
    return Progress(done=done, running=1, budget=40, ended=ended, compared=COMPARED, layouts=running, **values)


@pytest.fixture
def told(capsys):
    """The lines that a run writes into a log, for times [s] and what it shows then."""

    def lines(*moments):
        now_s = [0.0]
        with ProgressLine(load_study(STUDY), clock=lambda: now_s[0]) as line:
            for now_s[0], shown in moments:
                line.show(shown)
        return capsys.readouterr().err

    return lines


def test_each_ended_trial_has_a_line(told):
    """A line tells the layout, the step time and its unit, and the speed-up; the state follows."""
    best = ran(1, 8.0, tp=4, pp=2)
    text = told(
        (1, progress(0)),
        (2, progress(1, ran(0, 10.0))),
        (3, progress(1)),
        (4, progress(3, best, ran(2, 12.5, mbs=2), best=best, p_star=0.5)),
    )

    assert text.splitlines() == [
        "trial 0   current (tp=8,dp=8)     10 s",
        "  1/40 trials, no result yet, confidence 0.00, running pp=2,tp=8,dp=8",
        "trial 1   pp=2,tp=4,dp=8          8 s, 1.250x as fast, best",
        "trial 2   tp=8,dp=8,mbs=2         12.5 s, 0.800x as fast",
        "  3/40 trials, best 8 s, confidence 0.50, running pp=2,tp=8,dp=8",
    ]


def test_a_failed_trial_says_why(told):
    """The reason stands in the line; where it quotes no line of the log, the last lines follow, once."""
    log = "starting\niteration 1\niteration 2\n\x1b[31mred\x1b[0m [bold]\nlast\n"
    text = told(
        (1, progress(1, failed(0, Status.OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate", "CUDA", mbs=8))),
        (2, progress(2, failed(1, Status.CRASHED, "exit status 1: ValueError: bad", "x\nValueError: bad", mbs=2))),
        (3, progress(3, failed(2, Status.CRASHED, "ended without a step time", log, mbs=4))),
        (4, progress(4, failed(3, Status.CRASHED, "ended without a step time", log, pp=2))),
    )

    assert [line for line in text.splitlines() if not line.startswith("  ") or "|" in line] == [
        "trial 0   tp=8,dp=8,mbs=8         out of memory",
        "trial 1   tp=8,dp=8,mbs=2         crashed: exit status 1: ValueError: bad",
        "trial 2   tp=8,dp=8,mbs=4         crashed: ended without a step time",
        "    | iteration 1",
        "    | iteration 2",
        r"    | \x1b[31mred\x1b[0m [bold]",
        "    | last",
        "trial 3   pp=2,tp=8,dp=8          crashed: ended without a step time",
    ]
    assert text.replace("\n", "").isprintable()


def test_the_first_line_says_what_comes_first(told):
    """The first line names the first trial and the reason, with what earlier runs found."""
    first = Opening(values=CURRENT, why="current", predicted_s=9.5, is_proxy=False)
    later = Opening(values=CURRENT | {"tp": 2}, why="learned", predicted_s=9.5, is_proxy=False)

    new = told((1, Progress(done=0, running=0, budget=40, opening=first)))
    again = told((1, Progress(done=7, running=0, budget=40, opening=later, best=ran(3, 8.0))))

    assert "trying first tp=8,dp=8: the current configuration" in new
    assert "predicted 9.5 s per step" in new
    assert "7 trials so far, best 8 s; trying first tp=2,dp=8: the most promising configuration" in again


def test_the_next_trial_has_its_reason(told):
    """A line tells what the draws say of the trial that was asked for, and what would end the search."""
    prospect = Prospect(
        is_repeat=False, best_probability=0.314, run_probability=0.9, expected_s=7.95, first_with=("pp",), num_open=6
    )
    chosen = NextTrial(number=3, values=CURRENT | {"pp": 4, "dp": 2}, is_proxy=False, prospect=prospect)
    again = replace(chosen, prospect=replace(prospect, is_repeat=True))
    unnamed = replace(chosen, prospect=replace(prospect, best_probability=0.0, run_probability=1.0, first_with=()))
    nothing = replace(unnamed, prospect=replace(unnamed.prospect, num_open=0))

    lines = [
        told((1, progress(3, chosen=each, p_star=0.62, seconds_left=5400.0))).strip()
        for each in (chosen, again, unnamed, nothing)
    ]

    assert lines[0] == (
        "next pp=4,tp=8,dp=2: probability 0.31 to be the best, expected 7.95 s, probability 0.90 to run; the first "
        "with pp=4. Ends above confidence 0.90 (now 0.62, 6 untried may be faster) or after 37 more trials or in "
        "90.0 min"
    )
    assert "measured again, because the fastest are too close to tell apart. Ends" in lines[1]
    assert ": no draw names it the best, expected 7.95 s. Ends" in lines[2]
    assert "no draw names it the best, nor any other that is left, expected 7.95 s. Ends" in lines[3]


def test_idle_slots_have_their_reason():
    """Where a run knows why slots are idle, the line of state and the event log say so; else neither does."""
    idle, busy = (progress(1, slots=Slots(count=4, why=why)) for why in (Wait.NOTHING_NAMED, ""))

    words = f"3 of 4 slots idle: {Wait.NOTHING_NAMED.value}"
    assert state_line(idle, "", COMPARED).endswith(f"running pp=2,tp=8,dp=8, {words}")
    assert (state_of(idle)["slots"], state_of(idle)["idle_because"]) == (4, Wait.NOTHING_NAMED.value)
    assert "idle" not in state_line(busy, "", COMPARED)
    assert state_of(busy)["idle_because"] is None


def test_a_log_shows_that_a_long_trial_runs(told):
    """Where nothing ends there is a line a minute, and it says what runs, and how much of the budgets is left."""
    shown = progress(1, seconds_left=5400.0)
    text = told(
        (1, progress(1, ran(0, 10.0))), *((at, shown) for at in (ALIVE_S, 1 + ALIVE_S, 2 + ALIVE_S, 1 + 2 * ALIVE_S))
    )

    assert (
        text.splitlines()[2:]
        == ["  1/40 trials, no result yet, confidence 0.00, 90.0 min left, running pp=2,tp=8,dp=8"] * 2
    )


def test_a_log_shows_how_many_trials_wait(told):
    """Trials in a queue do not run, and are counted apart."""
    (line,) = told((ALIVE_S, progress(1, queued=2))).splitlines()

    assert line.endswith("confidence 0.00, running pp=2,tp=8,dp=8, 2 waiting in the queue")


@pytest.mark.parametrize("force", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_log_never_holds_control_characters(told, monkeypatch, force):
    """Variables that ask for colours on terminals change nothing in a log."""
    monkeypatch.setenv(force, "1")

    assert told((1, progress(1, ran(0, 10.0)))).replace("\n", "").isprintable()


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_keeps_every_line_within_its_width(monkeypatch, width):
    """On a terminal each trial is one line, however long its layout or failure, and below is one line of state."""
    screen = io.StringIO()
    monkeypatch.setattr(
        tuner.terminal.progress,
        "Console",
        lambda **_: Console(file=screen, force_terminal=True, width=width, highlight=False, _environ={"TERM": "xterm"}),
    )
    long = failed(2, Status.CRASHED, "exit status 1: " + "word " * 60, pp=2, tp=4, dp=2, mbs=16)
    with ProgressLine(load_study(STUDY)) as line:
        line.show(progress(1, ran(0, 10.0)))
        line.show(progress(3, ran(1, 9.0, pp=2), long, seconds_left=60.0, best=ran(1, 9.0)))

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [each for each in re.split(r"[\r\n]", plain) if each.strip()]
    assert all(len(each) <= width for each in lines)
    trials = [each.split()[1] for each in lines if each.startswith("trial ")]
    assert trials == ["0", "1", "2"]
    assert any("3/40 trials, best 9 s, confidence 0.00" in each for each in lines)
    assert any(each.startswith("trial 2") and "crashed: exit status 1: word" in each for each in lines)


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_has_a_table_of_what_runs(monkeypatch, width):
    """Below the line of state each trial in flight has a row with what is known of it, within the terminal's width;
    those beyond the first are counted, and an ended one has left the table before its line is printed.
    """
    screen = io.StringIO()
    monkeypatch.setattr(
        tuner.terminal.progress,
        "Console",
        lambda **_: Console(file=screen, force_terminal=True, width=width, highlight=False, _environ={"TERM": "xterm"}),
    )
    first, second = (
        InFlight(number=number, values=CURRENT | {"pp": 2, "mbs": number}, predicted_s=9.5, since_s=75.4, steps_s=steps)
        for number, steps in ((5, (8.25, 8.5)), (6, ()))
    )
    many = [replace(second, number=number, is_queued=True) for number in range(10, 10 + MOST_IN_FLIGHT)]
    with ProgressLine(load_study(STUDY)) as line:
        line.show(progress(1, ran(4, 10.0), in_flight=(first, second)))
        line.show(progress(2, ran(5, 8.5, pp=2), in_flight=(second, *many)))

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [each.rstrip() for each in re.split(r"[\r\n]", plain) if each.strip()]
    ended = next(at for at, each in enumerate(lines) if each.startswith("trial 5"))
    rows = [each.split() for each in lines]
    assert all(len(each) <= width for each in lines)
    assert ["5", "9.5", "s", "2", "8.5", "s", "0:01:15", "pp=2,tp=8,dp=8,mbs=5"] in rows[:ended]
    assert ["6", "9.5", "s", "-", "-", "0:01:15", "pp=2,tp=8,dp=8,mbs=6"] in rows[:ended]
    assert not any(each[:2] == ["5", "9.5"] for each in rows[ended:])
    assert ["10", "9.5", "s", "-", "-", "in", "the", "queue", "pp=2,tp=8,dp=8,mbs=6"] in rows[ended:]
    assert ["and", "1", "more"] in rows[ended:]
    assert not any("running pp=2" in each for each in lines)


@pytest.mark.slow
def test_a_run_on_a_terminal_shows_its_trials(tmp_path):
    """A real run on a pseudo terminal shows its trials while they run, why each is tried, and then its result."""
    path = tmp_path / "live.yaml"
    path.write_text(
        study(
            name="live",
            current="{tp: 8}",
            search="{draws: 10, parallel_trials: 2}",
            trial="{backend: simulated, seconds_per_trial: 2}",
        ),
        encoding="utf-8",
    )

    written = without_styles(on_terminal("run", path, "--trials", 3, cwd=tmp_path, columns=100, timeout_s=300))

    assert re.search(r"^trial +predicted +steps +last step +for +configuration", written, re.M)
    assert re.search(r"^ +0 +\S+ s +.* 0:00:0\d +tp=8 *$", written, re.M)
    assert "next " in written
    assert "probability" in written
    assert "Best: " in written
    assert max(map(len, re.split(r"[\r\n]", written.partition("Stopped:")[0]))) <= 100


@pytest.mark.slow
def test_a_run_tells_its_trials(capsys, tmp_path):
    """A real run has one line per trial in its log, the first of which is that of the current configuration."""
    config = load_study(
        STUDY, overrides=["search.max_trials=3", "current={tp: 8, dp: 8}"], storage=f"sqlite:///{tmp_path / 'a.db'}"
    )

    with ProgressLine(config) as line:
        result = run_study(config, on_progress=line.show, executor=InProcessExecutor(config.trials.backend))

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{config.name}: trying first tp=8,dp=8")
    assert [each.split()[1] for each in lines if each.startswith("trial ")] == ["0", "1", "2"]
    assert any(each.startswith("trial 0   current (tp=8,dp=8") for each in lines)
    assert all(f"{each.step_time_s:.4g} s" in "\n".join(lines) for each in result.records)


def test_an_interrupt_is_told_at_once(capsys):
    """A log says that the run ends before Ray and what trials have started have ended."""
    with ProgressLine(load_study(STUDY)) as line:
        line.show_interrupt()

    assert capsys.readouterr().err == "interrupted; ending what runs\n"
