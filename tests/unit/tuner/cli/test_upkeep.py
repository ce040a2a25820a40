"""Commands for those who keep studies running: what is wrong, copies, metrics, and events for programs."""

import json
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from optuna import copy_study
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser
from typer import Exit

from tests.chaos.disk import SmallDisk, why_no_disk
from tests.support.programs.rights import reachable_folder, read_only, without_roots_rights
from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.run import following
from tuner.run.driver import DRIVER
from tuner.storage import backup
from tuner.storage.opening import open_store
from tuner.study_file.storage_address import StorageAddress


def opened(storage):
    """The SQLite database of a URL."""
    return closing(sqlite3.connect(storage.removeprefix("sqlite:///")))


def test_a_finished_study_is_well(finished, meshtune):
    """`doctor` finds nothing in a study that has ended, and says so with status 0."""
    path, storage, _ = finished

    done, told = (meshtune("doctor", path, "--storage", storage, *more) for more in ((), ("--json",)))

    assert (done.status, done.out) == (0, "Nothing is wrong.\n")
    assert (told.status, told.json["findings"]) == (0, [])


def copied(finished, tmp_path):
    """A copy of the finished study's database, whose URL it returns."""
    _, storage, _ = finished
    with opened(storage) as source, closing(sqlite3.connect(tmp_path / "copy.db")) as target:
        source.backup(target)
    return f"sqlite:///{tmp_path / 'copy.db'}"


def test_a_claim_and_trials_of_a_dead_driver_are_told(finished, meshtune, tmp_path):
    """A claim of a host that is silent, and its running trials, are told with what to do; the exit status is 1."""
    path, storage = finished[0], copied(finished, tmp_path)
    claim = {"host": "gone", "pid": 7, "pid_namespace": "", "started": "", "renewed_s": 0.0}
    with opened(storage) as database, database:
        database.execute("DELETE FROM study_user_attributes WHERE key = ?", (DRIVER,))
        database.execute(
            "INSERT INTO study_user_attributes (study_id, key, value_json) SELECT study_id, ?, ? FROM studies",
            (DRIVER, json.dumps(claim)),
        )
        database.execute("UPDATE trials SET state = 'RUNNING' WHERE number IN (1, 2)")

    done = meshtune("doctor", path, "--storage", storage, "--json")

    assert done.status == 1
    assert [finding["what"] for finding in done.json["findings"]] == ["claim", "trials"]
    assert "process 7 on gone" in done.json["findings"][0]["found"]
    assert "2 trials are left running without a driver: 1, 2" in done.json["findings"][1]["found"]
    assert all("run the study again" in finding["advice"] for finding in done.json["findings"])


def test_trials_of_an_end_in_order_are_no_damage(finished, meshtune, tmp_path):
    """Trials that wait since their driver gave the study up, or are left running by an older version's, are well."""
    path, storage = finished[0], copied(finished, tmp_path)
    with opened(storage) as database, database:
        database.execute("UPDATE trials SET state = 'WAITING' WHERE number = 1")
        database.execute("UPDATE trials SET state = 'RUNNING' WHERE number = 2")

    done, listed = (meshtune(command, path, "--storage", storage, "--json") for command in ("doctor", "trials"))

    assert (done.status, done.json["findings"]) == (0, [])
    assert [trial["status"] for trial in listed.json["trials"][1:3]] == ["waiting", "running"]


@pytest.mark.parametrize("damage", ["page", "text", "missing"])
def test_a_damaged_storage_is_told(finished, meshtune, tmp_path, damage):
    """A database with a broken page, a file that is no database and a file that is not there are told, and kept."""
    path, storage = finished[0], copied(finished, tmp_path)
    file = tmp_path / "copy.db"
    data = bytearray(file.read_bytes())
    if damage == "page":
        data[4096 * 8 : 4096 * 9] = b"\xff" * 4096
        file.write_bytes(data)
    elif damage == "text":
        file.write_text("no database " * 1000)
    else:
        file.unlink()
    before = file.read_bytes() if file.exists() else b""

    done = meshtune("doctor", path, "--storage", storage, "--json")

    assert done.status == 1
    (finding,) = done.json["findings"]
    assert finding["what"] == "storage"
    assert "meshtune backup" in finding["advice"]
    assert (file.read_bytes() if file.exists() else b"") == before


def test_a_backup_continues(finished, meshtune, tmp_path):
    """`backup` writes a database that holds the study, whole, and `status` of it is that of the study."""
    path, storage, run = finished

    done = meshtune("backup", path, str(tmp_path / "kept.db"), "--storage", storage, "--json")
    again = meshtune("backup", path, str(tmp_path / "kept.db"), "--storage", storage)
    told = meshtune("status", path, "--storage", done.json["backup"], "--json")

    assert done.status == 0, done.err
    assert (told.json["trials"], told.json["p_star"]) == (run.json["trials"], run.json["p_star"])
    assert again.status == 2
    assert f"TARGET = '{tmp_path / 'kept.db'}': exists already" in again.err
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_server_is_copied_by_its_own_program(finished, meshtune):
    """Of PostgreSQL `backup` makes no copy, and names pg_dump."""
    done = meshtune("backup", finished[0], "kept.db", "--storage", "postgresql://nobody@nowhere/study")

    assert done.status == 2
    assert "pg_dump" in done.err
    assert not Path("kept.db").exists()


@pytest.mark.usefixtures("no_ray")
def test_a_journal_is_copied_up_to_its_last_entry(simulated, meshtune, tmp_path):
    """A journal's copy lacks a torn end, which `doctor` tells of in the journal, and continues the study."""
    storage = f"journal:///{tmp_path / 'study.log'}"
    meshtune("run", simulated, "--storage", storage, "--trials", "2")
    with (tmp_path / "study.log").open("a", encoding="utf-8") as journal:
        journal.write('{"op_code": 4, "wor')

    sick = meshtune("doctor", simulated, "--storage", storage)
    done = meshtune("backup", simulated, str(tmp_path / "kept.log"), "--storage", storage, "--json")
    told = meshtune("status", simulated, "--storage", done.json["backup"], "--json")

    assert (sick.status, done.status) == (1, 0)
    assert "is torn" in sick.out
    assert told.json["trials"] == 2


@pytest.mark.usefixtures("no_ray")
def test_events_are_objects(simulated, meshtune, tmp_path):
    """`run --log-format json` writes one JSON object a line on stderr for each event: first trial, ends, state, end."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"

    done = meshtune("run", simulated, "--storage", storage, "--trials", "3", "--log-format", "json", "--json")
    wrong = meshtune("run", simulated, "--storage", storage, "--log-format", "yaml")

    events = [json.loads(line) for line in done.err.splitlines()]
    kinds = [event["event"] for event in events]
    assert done.status == 0
    assert kinds.count("trial") == 3
    assert kinds[-1] == "end"
    assert {"opening", "state"} < {*kinds}
    tried = {event["trial"]: event["config"] for event in events if event["event"] == "trial"}
    asked = [event for event in events if event["event"] == "next"]
    assert {event["trial"]: event["config"] for event in asked} == {number: tried[number] for number in (1, 2)}
    assert all(0 <= event["best_probability"] <= 1 for event in asked)
    assert all(event["study"] == "small" and event["time_s"] > 1.6e9 for event in events)
    assert [event["trial"] for event in events if event["event"] == "trial"] == [0, 1, 2]
    assert events[-1]["step_time_s"] == done.json["step_time_s"]
    assert [event["trials"] for event in events if event["event"] == "state"][-1] == 3
    assert wrong.status == 2
    assert "--log-format = 'yaml': is no format; text or json" in wrong.err


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("trouble", ["mistake", "usage", "storage", "interrupt", "failing"])
def test_the_json_log_ends_in_json(simulated, meshtune, tmp_path, monkeypatch, trouble):
    """However a run ends, each line of its JSON log is one whole object, and the last one says why."""
    options = ["--log-format", "json", "--storage", f"sqlite:///{tmp_path / 'study.db'}", "--trials", "2"]
    words = {
        "mistake": ("search.draws", 2),
        "usage": ("--trials", 2),
        "storage": ("cannot be used", 2),
        "interrupt": ("interrupted", 130),
        "failing": ("no such place", 1),
    }
    if trouble == "mistake":
        options += ["--set", "search.draws=none"]
    elif trouble == "usage":
        options[-1] = "many"
    elif trouble == "storage":
        options[3] = f"sqlite:///{tmp_path / 'none' / 'study.db'}"
    elif trouble == "failing":
        options += ["--metrics", "/dev/full"]

        def fail(*_, **__):
            sys.stderr.write("a library's words ")
            sys.stderr.write("without an end: no such place")
            raise Exit(1)

        monkeypatch.setattr(following, "run_following", fail)
    else:
        monkeypatch.setattr(InProcessExecutor, "poll", lambda *_: signal.raise_signal(signal.SIGINT))

    done = meshtune("run", simulated, *options)

    events = [json.loads(line) for line in done.err.splitlines()]
    text, status = words[trouble]
    assert done.status == status
    assert done.err.endswith("\n")
    assert all({"time_s", "event", "study"} <= {*event} for event in events)
    assert text in str(events[-1])


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(("name", "parser"), [("study.prom", parser), ("study.openmetrics", openmetrics_parser)])
def test_metrics_are_those_of_the_run(simulated, meshtune, tmp_path, name, parser):
    """`run --metrics` leaves a file that Prometheus' own parser of its format reads, with the run's values."""
    file = tmp_path / name
    options = ("--storage", f"sqlite:///{tmp_path / 'study.db'}", "--trials", "3", "--metrics", str(file))

    done = meshtune("run", simulated, *options, "--json")

    families = list(parser.text_string_to_metric_families(file.read_text()))
    samples = {
        (sample.name, sample.labels.pop("state", "")): (sample.value, sample.labels)
        for family in families
        for sample in family.samples
    }
    values = {name: value for (name, state), (value, _) in samples.items() if not state}
    assert done.status == 0
    assert all(labels == {"study": "small"} for _, labels in samples.values())
    assert all(family.type in ("gauge", "counter") for family in families)
    assert sum(value for (name, _), (value, _) in samples.items() if name == "meshtune_trials") == 3
    assert values["meshtune_best_step_time_seconds"] == done.json["step_time_s"]
    assert values["meshtune_confidence"] == done.json["p_star"]
    assert values["meshtune_device_hours_total"] == pytest.approx(done.json["device_hours"])
    assert values["meshtune_heartbeat_timestamp_seconds"] > 1.6e9


@pytest.mark.usefixtures("no_ray")
def test_metrics_that_cannot_be_written_end_no_run(simulated, meshtune, tmp_path):
    """A folder that vanishes, here a full device, costs the metrics but no trial, and is told once."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"

    done = meshtune("run", simulated, "--storage", storage, "--trials", "3", "--metrics", "/dev/full", "--json")
    wrong = meshtune("run", simulated, "--storage", storage, "--metrics", str(tmp_path / "none" / "file"))

    assert (done.status, done.json["trials"]) == (0, 3)
    assert done.err.count("--metrics") == 1
    assert wrong.status == 2
    assert "--metrics" in wrong.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_colleague_who_may_read_can_look(finished, meshtune, kind):
    """Who may read a study's folder and not write it gets every answer that its owner gets, and its owner's files stay
    as they are; `doctor` finds no damage, and where nothing may be read it says that the right is missing.
    """
    path, storage, _ = finished
    with reachable_folder() as folder, reachable_folder() as own:
        own.chmod(0o777)
        for file in (path, path.with_name("rows.csv")):
            (folder / file.name).write_bytes(file.read_bytes())
        study, url = folder / path.name, f"{kind}:///{folder / 'study'}"
        if kind == "sqlite":
            with opened(storage) as source, opened(url) as target:
                source.backup(target)
        else:
            copy_study(
                from_study_name="replayed",
                from_storage=storage,
                to_storage=open_store(StorageAddress.parse(url)).storage,
            )
        looks = [
            ["status", study, "--json"],
            ["trials", study, "--json"],
            ["best", study, "--json"],
            ["report", study, "--out", own / "report.html"],
            ["doctor", study, "--json"],
        ]
        owners = [meshtune(*look, "--storage", url) for look in looks]
        (own / "report.html").unlink()
        before = {file.name: file.read_bytes() for file in folder.iterdir()}

        with read_only(folder), without_roots_rights():
            seen = [meshtune(*look, "--storage", url) for look in looks]
            copy = meshtune("backup", study, own / "kept", "--storage", url)
            refused = meshtune("backup", study, folder / "kept", "--storage", url)
            run = meshtune("run", study, "--storage", url)
        (folder / "study").chmod(0)
        with without_roots_rights():
            blind = meshtune("doctor", study, "--storage", url, "--json")

        assert [done.status for done in owners] == [0] * len(looks)
        assert [(done.status, done.out) for done in seen] == [(done.status, done.out) for done in owners]
        assert copy.status == 0, copy.err
        assert meshtune("status", path, "--storage", f"{kind}:///{own / 'kept'}", "--json").json == owners[0].json
        assert (refused.status, run.status) == (2, 2)
        assert "TARGET" in refused.err
        assert "you may not write it" in run.err
        assert (blind.status, [finding["what"] for finding in blind.json["findings"]]) == (1, ["rights"])
        (folder / "study").chmod(0o644)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.skipif(bool(why_no_disk()), reason="needs a small disk")
@pytest.mark.parametrize("trouble", ["full", "interrupted"])
def test_a_failed_backup_leaves_nothing(finished, meshtune, tmp_path, monkeypatch, trouble):
    """A copy that finds no room, or is ended by a signal leaves no file, and says why."""
    path, storage, _ = finished
    disk = SmallDisk(tmp_path / "disk")
    target = disk.folder / "kept.db"
    try:
        if trouble == "full":
            disk.fill()
            done = meshtune("backup", path, target, "--storage", storage)
            disk.empty()
        else:
            monkeypatch.setattr(backup, "_flush", lambda _file: signal.raise_signal(signal.SIGTERM))
            done = meshtune("backup", path, target, "--storage", storage)

        assert done.status == (75 if trouble == "interrupted" else 2)
        if trouble == "full":
            words = "No space left on device; 0.0 MiB are free there"
            assert f"TARGET = '{target}': cannot be written ({words}" in done.err
        assert [file.name for file in disk.folder.iterdir()] == []
    finally:
        disk.close()
