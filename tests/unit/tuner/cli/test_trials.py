import csv
import io
import re

from tests.support.studies.command_line import FASTEST, assert_users_mistake, in_process
from tests.support.studies.pseudo_terminal import on_terminal, without_styles


def test_trials_of_a_finished_study(finished, meshtune):
    """`trials` has a row for each trial, in 80 columns, with the best one marked."""
    path, storage, run = finished

    done = meshtune("trials", path, "--storage", storage)

    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split()[0] == "trial"
    rows = [line for line in lines[1:] if line.split()[0].strip("*").isdigit()]
    assert len(rows) == run.json["trials"]
    (best,) = [line for line in rows if line.split()[0].startswith("*")]
    assert "0.95" in best
    assert "1.579" in best
    assert rows[0].endswith("current")
    assert sum("out of memory" in row for row in rows) == run.json["failed"]
    assert max(map(len, lines)) <= 80


def test_trials_on_a_terminal(finished, tmp_path):
    """On a terminal the best row is green and failed ones are red; the text is the same, with the degrees below."""
    path, storage, _ = finished

    coloured = on_terminal("trials", path, "--storage", storage, cwd=tmp_path)
    plain = in_process("trials", path, "--storage", storage, cwd=tmp_path)

    assert len(re.findall(r"^\x1b\[32m +\*", coloured, re.M)) == 1
    assert coloured.count("\x1b[31m") == plain.out.count("out of memory") > 0
    assert without_styles(coloured).startswith(plain.out)
    assert "pp pipeline, tp tensor" in plain.err


def test_trials_as_csv(finished, meshtune, tmp_path):
    """`--csv` holds every dimension and figure, on stdout or in a file."""
    path, storage, run = finished

    shown = meshtune("trials", path, "--storage", storage, "--csv")
    written = meshtune("trials", path, "--storage", storage, "--csv", "--out", tmp_path / "trials.csv")

    rows = list(csv.DictReader(io.StringIO(shown.out)))
    assert len(rows) == run.json["trials"]
    (best,) = [row for row in rows if row["step_time_s"] == "0.95"]
    assert {name: int(best[name]) for name in FASTEST} == FASTEST
    assert {row["status"] for row in rows} <= {"ok", "out_of_memory"}
    assert (tmp_path / "trials.csv").read_text(encoding="utf-8") == shown.out
    assert written.out == ""


def test_trials_as_json(finished, meshtune):
    """`--json` holds the same rows as CSV, and what they are compared with."""
    path, storage, run = finished

    told = meshtune("trials", path, "--storage", storage, "--json").json

    assert told["compared_with"] == "current"
    assert len(told["trials"]) == run.json["trials"]
    best = next(row for row in told["trials"] if row["trial"] == told["best_trial"])
    assert (best["config"], best["step_time_s"]) == (FASTEST, 0.95)


def test_mistakes_with_trials(finished, meshtune, simulated):
    """A study that never ran has no trials, and `--out` needs to know what to write."""
    path, storage, _ = finished

    assert_users_mistake(meshtune("trials", simulated), "has no trials")
    assert_users_mistake(meshtune("trials", path, "--storage", storage, "--out", "a.csv"), "--out", "--csv")
    assert_users_mistake(meshtune("trials", path, "--storage", storage, "--csv", "--json"), "--csv", "--json")
