"""Spaces and trials that leave little to learn from, through every command that tells of a study."""

import json
import re
from pathlib import Path

import pytest

from tests.support.studies.broken_studies import rows, study
from tests.support.studies.command_line import MEASURED, Done, write_replay
from tuner.run.studies import stored_study
from tuner.storage.record import read_records
from tuner.study_file.config import load_study

SEARCH = "{max_trials: 12, draws: 10}"
ONE = "{pp: [1], tp: [8], cp: [1], up: [1], vpp: [1], ep: [1], mbs: [1]}"

TIMES = {
    "equal": lambda _, _step_s: 1.0,
    "tiny": lambda _, step_s: 1e-9 * (step_s or 1.0),
    "huge": lambda _, step_s: 1e9 * (step_s or 1.0),
    "one outlier": lambda number, step_s: 1e9 if number == 3 else step_s,
    "eighteen decades": lambda number, _step_s: (1e-9, 1.0, 1e9)[number % 3],
    "all out of memory": lambda _, _step_s: None,
}
FAILING = 9
"""Trials of the 12 candidates that fail, after which the other three must, as they need more than some of these."""
FIRST_ALONE = {"one row": MEASURED[0], "one row, failed": (*MEASURED[0][:4], None)}
SCRIPTS = {
    **{name: [(*row[:4], time(number, row[4])) for number, row in enumerate(MEASURED)] for name, time in TIMES.items()},
    **{name: [row] for name, row in FIRST_ALONE.items()},
}


def strict(text):
    """JSON without NaN and Infinity, which are none."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def figures_of(page):
    """What the figures of a report draw: traces and layouts."""
    return [strict(found[1]) for found in re.finditer(r'<script class="figure"[^>]*>(.*?)</script>', page, re.DOTALL)]


def told_by_all(meshtune, path, storage) -> dict[str, Done]:
    """What each command says of a study that has run, for people, after it was asked for strict JSON."""
    done = {}
    for command in ("run", "status", "best"):
        told, done[command] = (meshtune(command, path, "--storage", storage, *extra) for extra in (("--json",), ()))
        assert told.status == done[command].status, told.err
        strict(told.out)
    return done


def assert_only_numbers(*texts):
    """No text shows people what is no number."""
    for text in texts:
        assert not re.search(r"\b(nan|inf|infinity)\b", text, flags=re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_times_that_teach_little(meshtune, tmp_path, name):
    """Equal, tiny, huge, outlying or failed trials end a study in order: numbers are numbers in all that it prints."""
    path, storage = write_replay(tmp_path, SCRIPTS[name], search=SEARCH), f"sqlite:///{tmp_path / 'done.db'}"

    done = told_by_all(meshtune, path, storage)

    works = any(step_s for *_, step_s in SCRIPTS[name])
    assert [one.status for one in done.values()] == ([0, 0, 0] if works else [1, 0, 1])
    assert_only_numbers(*(one.out for one in done.values()))


def assert_report_opens(meshtune, path, *storage):
    """What the figures of a study's report draw is JSON, and its text shows numbers."""
    done = meshtune("report", path, *storage, "--out", "report.html", "--json")

    assert done.status == 0, done.err
    page = Path("report.html").read_text(encoding="utf-8")
    assert len(figures_of(page)) >= 1
    assert_only_numbers(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", ["eighteen decades", "one row"])
def test_report_of_times_that_teach_little(meshtune, tmp_path, name):
    """The report of such a study opens."""
    path = write_replay(tmp_path, SCRIPTS[name], search="{max_trials: 6, draws: 10}")
    storage = ("--storage", f"sqlite:///{tmp_path / 'done.db'}")
    meshtune("run", path, *storage)

    assert_report_opens(meshtune, path, *storage)


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_has_failed_is_not_the_best(meshtune, tmp_path):
    """While all trials fail, the best is the fastest of the others, by what these taught; once all candidates have
    failed, or must since another did that needs less, `best` and `export` hand none of them over and say where to
    look, and the report opens.
    """
    path = write_replay(tmp_path, SCRIPTS["all out of memory"], search=SEARCH)
    storage = ("--storage", f"sqlite:///{tmp_path / 'done.db'}")
    before = meshtune("best", path, *storage, "--json").json["config"]
    meshtune("run", path, *storage, "--trials", 7)
    after = meshtune("best", path, *storage, "--json").json
    tried = [record.params for record in read_records(stored_study(load_study(path, storage=storage[1])))]

    assert len(tried) == 7
    assert after["config"] != before  # it ran out of memory, or needs more than one that did
    assert after["source"] == "learned"
    assert after["config"] not in tried

    told, run, best, status = (
        meshtune(*command, *storage)
        for command in (("run", path, "--trials", 20, "--json"), ("run", path), ("best", path), ("status", path))
    )
    export = meshtune("export", path, "--to", "json", *storage)

    assert (told.status, run.status) == (1, 1)
    assert (told.json["best"], told.json["step_time_s"], told.json["failed"]) == (None, None, FAILING)
    assert told.json["stop_reason"] == "exhausted"
    assert f"No configuration completed a trial: {FAILING} out of memory" in run.out
    for done in (best, export):
        assert (done.status, done.out) == (1, "")
        assert done.err == (
            "No configuration works; `meshtune space` explains why, and `meshtune status` lists failed trials.\n"
        )
    assert f"{FAILING} trials, {FAILING} failed" in status.out
    assert "Probability" not in status.out
    assert_report_opens(meshtune, path, *storage)


@pytest.mark.usefixtures("no_ray")
def test_one_candidate(meshtune, tmp_path):
    """A space of one candidate is tried once, and that is the answer, with certainty."""
    path = tmp_path / "one.yaml"
    path.write_text(study(name="one", space=ONE, search=SEARCH), encoding="utf-8")

    done = told_by_all(meshtune, path, f"sqlite:///{tmp_path / 'one.db'}")

    assert "Tried 1 of 1 candidates, 0 failed; confidence 1.00" in done["run"].out
    assert "Best: pp=1,tp=8,dp=1" in done["best"].out


HISTORIES = {
    "one row": [{}],
    "duplicates": [{}] * 8,
    "constant": [{"mbs": mbs, "tp": tp, "dp": 8 // tp} for mbs in (1, 2) for tp in (1, 2, 4, 8)],
    "equal but for an outlier": [{"tp": 4, "dp": 2}] * 5 + [{"step_seconds": 1e9}],
    "all failed": [{"step_seconds": "", "notes": "FAILED: out of memory"}] * 3,
    "eighteen decades": [{"step_seconds": seconds} for seconds in (1e-9, 1.0, 1e9)],
}


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", HISTORIES)
def test_history_that_teaches_little(meshtune, tmp_path, name):
    """A history of one row, of equal rows, of equal times or of failures alone changes no prediction to no number."""
    (tmp_path / "past.csv").write_text(rows(*HISTORIES[name]), encoding="utf-8")
    path = tmp_path / "study.yaml"
    path.write_text(study(name="past", history="[past.csv]", search="{max_trials: 3, draws: 10}"), encoding="utf-8")

    done = told_by_all(meshtune, path, f"sqlite:///{tmp_path / 'done.db'}")

    assert done["run"].status == 0, done["run"].err
    assert "Best: pp=" in done["best"].out


@pytest.mark.parametrize("seconds", ["-1.5", "nan", "1e400"])
def test_history_of_no_times_is_refused_by_its_line(meshtune, tmp_path, seconds):
    """A step time in a history that is no time is a mistake that names file and line."""
    (tmp_path / "past.csv").write_text(rows({}, {"step_seconds": seconds}), encoding="utf-8")
    path = tmp_path / "study.yaml"
    path.write_text(study(name="past", history="[past.csv]"), encoding="utf-8")

    done = meshtune("run", path)

    assert (done.status, done.out) == (2, "")
    assert f"past.csv:3: step_seconds = '{seconds}': must be a number of at least 0" in done.err
    assert "Traceback" not in done.err
