"""`meshtune dashboard`: the real server in a process of its own, asked as a browser asks it."""

import functools
import http.client
import http.server
import itertools
import json
import re
import shutil
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from threading import Thread

import optuna
import pytest

from tests.support.browser import rendered_dom
from tests.support.listening_sockets import listening_at
from tests.support.programs.rights import reachable_folder, read_only, without_roots_rights
from tests.support.studies.commanded_study import run_here, write_study
from tests.support.studies.served_study import Served, serving
from tuner.dashboard import Place, dashboard_server
from tuner.dashboard.artifacts import StudyFiles
from tuner.dashboard.markdown import LINE, block, plain, table
from tuner.dashboard.view import StudyView
from tuner.run.driver import claim
from tuner.run.studies import stored_study
from tuner.search.population import P_STAR
from tuner.storage.opening import open_store
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (the extra `dashboard`)")

from optuna_dashboard._custom_plot_data import get_plotly_graph_objects

TRIALS = 4
SECRET = "hunter2-canary"  # noqa: S105 # what the study's command gets in its environment


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A study that has run."""
    path = write_study(tmp_path_factory.mktemp("study"), trials=TRIALS)
    run_here(path)
    return path


@pytest.fixture(scope="module")
def served(file):
    """Its pages."""
    with serving(file) as (process, found):
        found.process = process.pid
        yield found


def content_of(database):
    """Everything that the database holds."""
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())


def attributes(entry):
    """Attributes as a page shows them."""
    return {attribute["key"]: attribute["value"] for attribute in entry["user_attrs"]}


def test_the_studys_note_says_what_was_found(served):
    """The best with its gain over the current one, the confidence, the probable, the failures, and why it stopped."""
    note = served.study()["note"]["body"]

    best_s = min(trial["values"][0] for trial in served.study()["trials"] if "values" in trial)
    assert f"Best so far: {best_s * 1e3:.4g} ms per step" in note
    assert re.search(r"\*\*[\d.]+ times as fast as the current configuration\*\*", note)
    assert re.search(r"\| \*\*confidence\*\*\W+[01]\.\d\d that ", note)
    assert f"{TRIALS} of at most {TRIALS}" in note
    assert "stopped: the budget of trials is spent" in note
    assert f"Probability of being the fastest, after {TRIALS} trials" in note
    assert "out of memory" in note


def test_a_trials_note_says_what_happened(served):
    """Its configuration, what was predicted and measured, how it ended, and the end of its log as code."""
    note = served.trial(0)["note"]["body"]

    assert "`pp=1,tp=1,dp=2,cp=1,up=1,vpp=1,ep=1,mbs=1`, the current configuration" in note
    assert re.search(r"\| step\W+[\d.]+ m?s \([\d.]+ m?s to [\d.]+ m?s\), \+[\d.]+% off\W+143.5 ms", note)
    assert re.search(r"\| memory of the fullest device\W+[\d.]+ GiB of 2\.0 GiB\W+1\.5 GiB", note)
    assert "4 measured steps: 142 ms, 143 ms, 144 ms, 145 ms" in note
    assert note.count("```") == 2
    assert "step 5 took 145.0 ms" in note


def test_a_failed_trial_says_why(served):
    """The reason stands in its note and in the table of trials."""
    failed = [trial for trial in served.study()["trials"] if trial["state"] == "Fail"]

    assert failed
    for trial in failed:
        assert attributes(trial)["status"] == "out of memory"
        assert "Tried to allocate 2.00 GiB" in attributes(trial)["reason"]
        assert "**Reason**: torch.OutOfMemoryError" in trial["note"]["body"]


def test_attributes_are_figures_not_json(served):
    """Nobody has to read the JSON that a study resumes from."""
    study = served.study()

    for entry in (study, *study["trials"]):
        assert attributes(entry)
        assert not [value for value in attributes(entry).values() if value.startswith(("{", "["))]
    assert float(attributes(study)["times as fast as the current configuration"]) >= 1
    assert float(attributes(served.trial(0))["predicted step [s]"]) > 0


def test_whole_logs_can_be_downloaded(served):
    """Each trial offers the log that its command left, as it lies in the study's folder."""
    for trial in served.study()["trials"]:
        name = f"trial-{trial['number']:04}-host-0.log"
        [artifact] = trial["artifacts"]

        assert artifact["filename"] == name
        assert f"Complete logs: `{name}`" in trial["note"]["body"]
        status, content = served.ask(f"artifacts/{served.id}/{trial['trial_id']}/{artifact['artifact_id']}")
        assert (status, content) == (200, (served.folder / "logs" / name).read_bytes())


def test_the_report_is_written_when_it_is_asked_for(served):
    """The study's page offers its report, which is there without anybody having written one."""
    [artifact] = served.study()["artifacts"]

    assert artifact["filename"] == "report.html"
    status, content = served.ask(f"artifacts/{served.id}/{artifact['artifact_id']}")
    assert (status, content[:15]) == (200, b"<!DOCTYPE html>")
    assert b"<h1>own-command</h1>" in content


def test_looking_changes_nothing(served):
    """Pages, plots, tables and downloads leave the database as it was, to the last row."""
    before = content_of(served.folder / "study.db")

    paths = ["", f"/{served.id}", f"/{served.id}/param_importances", f"/{served.id}/plot/contour"]
    answers = [served.ask(f"api/studies{path}")[0] for path in paths] + [served.ask(f"csv/{served.id}")[0]]

    assert answers == [200] * 5
    assert content_of(served.folder / "study.db") == before


def test_nothing_but_notes_is_changed(served):
    """Whatever else a page could change is refused, with a reason; the database and the logs stay."""
    trial, before = served.trial(0), content_of(served.folder / "study.db")
    places = {"study": served.id, "trial": trial["trial_id"], "artifact": trial["artifacts"][0]["artifact_id"]}
    for method, path, body in (
        ("DELETE", "api/studies/{study}", {}),
        ("POST", "api/studies", {"study_name": "new", "directions": ["minimize"]}),
        ("POST", "api/studies/{study}/rename", {"study_name": "new"}),
        ("POST", "api/trials/{trial}/tell", {"state": "Fail"}),
        ("POST", "api/trials/{trial}/user-attrs", {"user_attrs": {"observation": 1}}),
        ("POST", "api/artifacts/{study}", {"file": "data:text/plain;base64,aGk=", "filename": "a"}),
        ("DELETE", "api/artifacts/{study}/{trial}/{artifact}", {}),
        ("PUT", "api/studies/{study}/preference_feedback_component", {"output_type": "note"}),
    ):
        status, content = served.ask(path.format(**places), method, body)

        assert status == 403, path
        assert "saves notes" in json.loads(content)["reason"]
    assert content_of(served.folder / "study.db") == before
    assert (served.folder / "logs" / "trial-0000-host-0.log").is_file()


OWN_NAMES = ("127.0.0.1:PORT", "localhost:PORT", "LOCALHOST.:PORT", "[::1]:PORT", "127.0.0.1:9")
"""The last one as behind a tunnel."""

OTHER_NAMES = (
    *("evil.example:PORT", "evil.example", "127.0.0.1.evil.example:PORT", "localhost.evil.example:PORT"),
    *("127.0.0.1@evil.example", "[::1].evil.example", ""),
)


def test_no_other_name_leads_here(served):
    """A page that has its own name resolve to this machine (DNS rebinding) reads nothing and writes nothing."""
    name = served.url.split("/")[2]
    requests = (("GET", "/api/studies"), ("GET", "/"), ("PUT", f"/api/studies/{served.id}/note"))
    with closing(http.client.HTTPConnection(name, timeout=60)) as connection:
        for host, (method, path) in itertools.product((*OWN_NAMES, *OTHER_NAMES), requests):
            connection.putrequest(method, path, skip_host=True)
            connection.putheader("Host", host.replace("PORT", name.partition(":")[2]))
            connection.putheader("Content-Length", "0")
            connection.endheaders()
            answer = connection.getresponse()
            content = answer.read()
            assert (answer.status == 403) == (host in OTHER_NAMES), (host, method, path, content)
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            if host in OTHER_NAMES:
                assert json.loads(content)["reason"].startswith("meshtune dashboard does not accept this host name")


ATTACK = """
<!DOCTYPE html><body>begun<script>
const done = [];
async function attempt(name, path, options) {
  try {
    const answer = await fetch("URL" + path, options);
    done.push(name + ": " + (await answer.text()).slice(0, 40));
  } catch (error) { done.push(name + ": refused"); }
}
(async () => {
  const note = JSON.stringify({version: 1, body: "stolen"}), json = {"Content-Type": "application/json"};
  await attempt("put", "api/studies/ID/note", {method: "PUT", body: note, headers: json});
  await attempt("simple put", "api/studies/ID/note", {method: "PUT", body: note});
  await attempt("post", "api/studies/ID/note", {method: "POST", body: note, mode: "no-cors"});
  await attempt("read", "api/studies", {});
  document.body.textContent = "tried: " + done.join(", ");
})();
</script></body>
"""


def test_a_page_from_elsewhere_reads_and_writes_nothing(served, tmp_path):
    """A page that a real browser has open from another origin can neither change a note nor read a study."""
    (tmp_path / "attack.html").write_text(
        ATTACK.replace("URL", served.url).replace("ID", str(served.id)), encoding="utf-8"
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as elsewhere:
        thread = Thread(target=elsewhere.serve_forever)
        thread.start()
        try:
            page = rendered_dom(f"http://localhost:{elsewhere.server_port}/attack.html")
        finally:
            elsewhere.shutdown()
            thread.join()

    assert "tried: put: refused, simple put: refused, post: , read: refused" in page
    assert served.study()["note"]["version"] == 0


def test_what_is_no_note_is_refused_with_a_reason(served):
    """A note in another form, or from a page of another origin, is refused and changes nothing."""
    name, path, before = served.url.split("/")[2], f"/api/studies/{served.id}/note", served.study()["note"]
    note, json_type = json.dumps({"version": 1, "body": "text"}), {"Content-Type": "application/json"}
    for status, headers, body in (
        (400, {"Content-Type": "text/plain"}, note),
        (400, json_type, "{"),
        (400, json_type, "[" * 100_000),
        (400, json_type, '{"version": "1", "body": "text"}'),
        (400, json_type, '{"version": 1, "body": null}'),
        (400, json_type, json.dumps({"version": 1, "body": "x" * 1_000_001})),
        (403, {**json_type, "Origin": "http://evil.example"}, note),
        (403, {**json_type, "Origin": "null"}, note),
    ):
        with closing(http.client.HTTPConnection(name, timeout=60)) as connection:
            connection.request("PUT", path, body, headers)
            answer = connection.getresponse()
            assert (answer.status, len(json.loads(answer.read())["reason"]) > 40) == (status, True), (
                headers,
                body[:60],
            )
    assert served.study()["note"] == before


def test_unreadable_stored_note_hides_no_study(file):
    """Notes in the storage under keys or with values that the dashboard does not write are left out."""
    config = load_study(file)
    storage, study = open_store(config.storage).storage, stored_study(config)
    view = StudyView(storage, study, config, StudyFiles(config))
    own = view.get_study_system_attrs(view.study_id)
    strange = {
        "dashboard:note_str:x": "a",
        "dashboard:note_str:7": "a part without those before it",
        "dashboard:note_ver": "new",
        "dashboard:0x1:note_ver": 1,
        "dashboard:3:note_str:0": 5,
    }
    for key, value in strange.items():
        storage.set_study_system_attr(view.study_id, key, value)

    with serving(file) as (_, served):
        assert served.study()["note"]["body"] == own["dashboard:note_str:0"]


def test_a_users_note_is_theirs(served):
    """What a user writes is kept and shown in place of ours; emptied, ours stands there again."""
    trial = served.trial(1)

    assert served.put_note(1, "ask Ann about this one", trial["trial_id"]) == 204
    assert served.trial(1)["note"] == {"version": 1, "body": "ask Ann about this one"}
    assert served.put_note(1, "too late", trial["trial_id"]) == 409
    assert served.put_note(2, "", trial["trial_id"]) == 204
    assert served.trial(1)["note"] == {"version": 2, "body": trial["note"]["body"]}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's list of sockets is Linux's")
def test_it_listens_on_this_machine_alone(served):
    """Nobody else reaches the dashboard of a user who has not said `--host`."""
    port = int(served.url.split("/")[2].rpartition(":")[2])

    assert listening_at(Path(f"/proc/{served.process}")) == {("0100007F", port)}


def test_no_secret_stands_in_the_pages(served):
    """The environment of the study's command is nowhere."""
    assert SECRET in (served.folder / "study.yaml").read_text(encoding="utf-8")
    assert SECRET not in json.dumps(served.study())


def eventually(found, wanted):
    """Asks until the answer is the wanted one: pages may be some seconds old."""
    give_up_s = time.monotonic() + 60
    while found() != wanted and time.monotonic() < give_up_s:
        time.sleep(0.2)
    assert found() == wanted


def test_it_follows_a_study_that_goes_on(tmp_path):
    """A study that runs on beside its pages is not disturbed, is told as it goes on, and leaves a user's note alone;
    terminated, it ends as other commands do, with status 130 and one line.
    """
    path = write_study(tmp_path, trials=2)
    config = run_here(path, "search.max_trials=1")

    with serving(path) as (process, served):
        assert "1 of at most 2: 1 ok" in served.study()["note"]["body"]
        assert served.put_note(1, "mine", served.trial(0)["trial_id"]) == 204
        held = claim(open_store(config.storage), "own-command", now_s=0.0)
        eventually(lambda: attributes(served.study())["search"], "running, 0 trials in progress")
        held.release()
        run_here(path)
        ended = {"Complete", "Fail"}  # the second trial may run out of memory
        eventually(lambda: [trial["state"] in ended for trial in served.study()["trials"]], [True, True])
        eventually(lambda: "2 of at most 2: " in served.study()["note"]["body"], True)
        notes = [trial["note"]["body"] for trial in served.study()["trials"]]
        process.terminate()
        _, told = process.communicate(timeout=60)

    assert [note == "mine" for note in notes] == [True, False]
    assert (process.returncode, told) == (130, "meshtune: interrupted\n")


def test_other_studies_of_the_storage_are_shown_as_they_are(served):
    """Only the study that was asked for is told in our words."""
    other = optuna.create_study(
        study_name="other", storage=open_store(StorageAddress.parse(f"sqlite:///{served.folder / 'study.db'}")).storage
    )
    other.set_user_attr("kept", [1, 2])

    ours, others = json.loads(served.ask("api/studies")[1])["study_summaries"]

    assert attributes(ours)["search"] == "stopped: the budget of trials is spent"
    assert attributes(others) == {"kept": "[1, 2]"}


def test_what_failed_to_be_read_is_read_again(file, tmp_path, monkeypatch):
    """A change that could not be read, as from a database that was locked, is told once it can be."""
    folder = shutil.copytree(file.parent, tmp_path / "copy")
    config = load_study(folder / file.name, storage=f"sqlite:///{folder / 'study.db'}")
    study, hour = stored_study(config), itertools.count()
    view = StudyView(study._storage, study, config, StudyFiles(config), clock=lambda: 3600.0 * next(hour))
    before = view.pages().facts
    study.set_user_attr(P_STAR, 0.125)

    with monkeypatch.context() as patched:
        patched.setattr("tuner.dashboard.view.snapshot_of", locked)
        with pytest.raises(sqlite3.OperationalError):
            view.pages()

    assert view.pages().facts != before


def test_the_losses_of_a_training_are_a_figure_of_the_study(file, tmp_path):
    """Where trials ran inside of a training, the study's page has the picture of the report, and else none."""
    folder = shutil.copytree(file.parent, tmp_path / "copy")
    config = load_study(folder / file.name, storage=f"sqlite:///{folder / 'study.db'}")

    def figures():
        study = stored_study(config)
        view = StudyView(study._storage, study, config, StudyFiles(config))
        return get_plotly_graph_objects(view.get_study_system_attrs(view.study_id))

    assert figures() == {}
    with closing(sqlite3.connect(folder / "study.db")) as connection, connection:
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = json_set(value_json, '$.losses', json('[[1, 4.5], [2, 4]]'))"
            " WHERE key = 'observation'"
        )

    [figure] = figures().values()
    assert json.loads(figure)["data"][0]["y"] == [4.5, 4] * TRIALS


def test_of_many_trials_the_fastest_and_the_latest_have_notes(file, monkeypatch):
    """Of more trials than may have notes the fastest and the latest have them, and all have their facts."""
    monkeypatch.setattr("tuner.dashboard.view.MOST_NOTES", 2)
    config = load_study(file, storage=f"sqlite:///{file.parent / 'study.db'}")
    study = stored_study(config)

    pages = StudyView(study._storage, study, config, StudyFiles(config)).pages()

    fastest = min((trial for trial in study.get_trials() if trial.value), key=lambda trial: trial.value)
    of_trials = {name for name in pages.notes if name != "dashboard:"}
    assert of_trials == {f"dashboard:{trial._trial_id}:" for trial in (fastest, study.get_trials()[-1])}
    assert all("step [s]" in str(trial.user_attrs) for trial in pages.trials if trial.value)


def locked(*_, **__):
    """What SQLite says while somebody else writes for too long."""
    raise sqlite3.OperationalError("database is locked")


def test_an_idle_connection_keeps_nobody_waiting(served):
    """A browser that has connected and asks for nothing does not hold up the others."""
    idle = http.client.HTTPConnection(served.url.split("/")[2], timeout=60)
    idle.connect()
    with closing(idle):
        assert served.ask("api/studies")[0] == 200


def test_on_postgresql(postgresql, tmp_path):
    """A study in PostgreSQL has the same pages, and its password is in none of them."""
    path = write_study(tmp_path, trials=1, storage=postgresql)
    config = run_here(path)
    opened = dashboard_server(config, Place(port=0))
    thread = Thread(target=opened.serve)
    thread.start()
    try:
        served = Served({"url": opened.url, "study_url": opened.study_url}, tmp_path)
        study = served.study()
        assert served.put_note(1, "mine") == 204
        assert served.study()["note"]["body"] == "mine"
    finally:
        opened.server.shutdown()
        thread.join()

    assert "1 of at most 1: 1 ok" in study["note"]["body"]
    assert study["trials"][0]["artifacts"]
    assert "canary" not in json.dumps(study)


def test_a_browser_draws_the_notes(served):
    """The pages show headings, tables and the log, not the marks that they are written with."""
    study, trial = rendered_dom(f"{served.page}/note"), rendered_dom(f"{served.page}/trials?numbers=0")

    assert "<h3>Best so far: " in study
    assert re.search(r"<td[^>]*><strong>confidence</strong>", study)
    assert re.search(r"<h3>143.5 ms per step, measured</h3>", trial)
    assert "&lt;b&gt;of&lt;/b&gt; `many` |" in re.sub(r"</?span[^>]*>", "", trial)
    assert "trial-0000-host-0.log" in trial


def test_text_means_itself_in_a_note():
    """What a program has printed can neither end its block nor format the note around it."""
    assert block("a ``` b\n\n````").splitlines() == ["`````text", "a ``` b", "", "````", "`````"]
    assert block("\x1b[32mtitan\x1b[0m - step") == "```text\ntitan - step\n```"
    assert plain("a *b*\n| <c> `d` [e](f) x_y") == r"a \*b\* \| \<c\> \`d\` \[e\](f) x\_y"


def test_long_lines_are_broken():
    """No line of a log makes the page wider than a window, and nothing of it is lost."""
    lines = block("word " * 100 + "x" * 500).splitlines()[1:-1]

    assert max(map(len, lines)) <= LINE
    assert "".join(lines) == "word " * 100 + "x" * 500


def test_columns_are_kept_apart():
    """Cells that stand side by side do not touch."""
    assert table(["a", "b"], [["1", "2"]]).splitlines() == [
        "| a\N{EM SPACE} | b\N{EM SPACE} |",
        "| :--- | :--- |",
        "| 1\N{EM SPACE} | 2\N{EM SPACE} |",
    ]


def ask_plainly(address, method, path, body=b""):
    """Status and content of an answer to a program that names no encoding."""
    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def answers_of(config):
    """Answers of a study's pages: its trials, a note, a file outside, and a request that makes them fail."""
    opened = dashboard_server(config, Place(port=0))
    thread = Thread(target=opened.serve, daemon=True)
    thread.start()
    ask = functools.partial(ask_plainly, opened.url.split("/")[2])
    study = f"/api/studies/{opened.study_url.split('/')[-2]}"
    found = [
        ask("GET", study),
        ask("PUT", f"{study}/note", b'{"version": 1, "body": "x"}'),
        ask("GET", "/static/..%2f..%2f..%2fetc%2fpasswd"),
        ask("GET", f"{study}?after=x"),
    ]
    opened.server.shutdown()
    thread.join(30)
    return found


def test_a_colleague_sees_the_pages_and_saves_no_note(file, capfd):
    """Pages of a database that may not be written, and whose logs may not be read, are served; a note is refused by
    that reason, and a request that fails is one line on standard error.
    """
    with reachable_folder() as folder:
        copy = folder / "study.db"
        source = sqlite3.connect(load_study(file).storage.file)
        with closing(source), closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        config = load_study(file, storage=f"sqlite:///{copy}")
        answers_of(config)  # what is imported late is imported with root's rights
        capfd.readouterr()
        with read_only(folder), without_roots_rights():
            page, note, outside, failed = answers_of(config)

    assert (page[0], len(json.loads(page[1])["trials"])) == (200, TRIALS)
    assert note[0] == 403
    assert "may read this study and not write it" in json.loads(note[1])["reason"]
    assert outside[0] in (403, 404)
    assert b"root:" not in outside[1]
    assert failed[0] == 500
    (told,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"meshtune: GET /api/studies/\d+ failed\. .*", told)
