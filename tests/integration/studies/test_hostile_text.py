"""Names, logs and failures that would like to be scripts, links, formats or a terminal's orders, shown everywhere."""

import re
import sys

import pytest
import yaml

from tests.support.browser import rendered_dom
from tests.support.studies.command_line import in_process
from tests.support.studies.commanded_study import MODEL, run_here, write_study
from tests.support.studies.served_study import serving
from tuner.cli.main import main

HOSTILE = (
    "<script>document.title='pwned'</script>",
    "\"'><img src=x onerror=document.title='pwned'>",
    "</script><script>document.title='pwned'</script><!--",
    "</title></style></textarea></code></pre><svg onload=document.title='pwned'>",
    "[link](javascript:document.title='pwned') <a href=\"javascript:document.title='pwned'\">a</a>",
    "${7*7} {{7*7}} %{x} \u2028 | `code` ~~~ ``` # *bold*",
)
STEERING = "\x1b[31m\x1b]0;pwned\x07\x9b2J\r\n\u202e\b"
WORST = " ".join(HOSTILE)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A study that has run, with such names in all its files; its program prints them and fails with them."""
    folder = tmp_path_factory.mktemp("hostile")
    path = write_study(folder, trials=4)
    name = f"{WORST} {STEERING}"
    model = yaml.safe_load(MODEL.read_text(encoding="utf-8")) | {"name": name, "source": name}
    (folder / "model.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
    study = yaml.safe_load(path.read_text(encoding="utf-8"))
    cluster = {"name": name, "device": "cpu-core", "hosts": 1, "devices_per_host": 2}
    path = folder / "a&b<i>'study.yaml"
    path.write_text(yaml.safe_dump(study | {"model": "model.yaml", "cluster": cluster}), encoding="utf-8")
    program = (folder / "train.py").read_text(encoding="utf-8")
    program = program.replace("for step in", f"print({name!r})\nfor step in")
    program = program.replace("memory. Tried", "memory. {} Tried").replace('GiB.")', f'GiB.".format({name!r}))')
    (folder / "train.py").write_text(program, encoding="utf-8")
    run_here(path)
    return path


def assert_harmless(page):
    """A page that a browser has drawn: no script of ours has run, and nothing that we gave became an element."""
    assert "pwned" in page, "the names are there"
    assert "<title>pwned" not in page
    tags = "".join(re.findall(r"<[a-zA-Z][^<>]*>", page))
    assert not re.search(r"onerror|onload=|javascript:", tags), re.findall(
        r"<[^<>]*(?:onerror|onload=|javascript:)[^<>]*>", page
    )


@pytest.fixture(scope="module")
def report(file):
    """The report of that study."""
    done = in_process("report", file, "--out", "report.html", cwd=file.parent)
    assert done.status == 0, done.err
    return file.parent / "report.html"


def test_a_report_of_hostile_names_is_drawn(report):
    """In a real browser every picture of such a study's report is drawn, and none of its names runs."""
    page = rendered_dom(report.as_uri())

    assert_harmless(page)
    assert page.count('class="drawn"') == page.count('class="js-plotly-plot"') > 3
    assert "&lt;script&gt;document.title='pwned'&lt;/script&gt;" in page


def test_a_report_runs_no_script_but_its_own(report):
    """Were some text not escaped, the browser would refuse to run it: the page's policy names its scripts by digest."""
    raw = "<script>document.title = 'pwned'</script><img src=x onerror=\"document.title = 'pwned'\">"
    text = report.read_text(encoding="utf-8")
    unescaped = report.with_name("unescaped.html")
    unescaped.write_text(text.replace("</main>", f"{raw}</main>"), encoding="utf-8")
    without = report.with_name("without.html")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)[0]
    without.write_text(text.replace(policy, "").replace("</main>", f"{raw}</main>"), encoding="utf-8")

    assert "<title>own-command: Meshtune</title>" in (page := rendered_dom(unescaped.as_uri()))
    assert page.count('class="drawn"') == page.count('class="js-plotly-plot"') > 3
    assert "<title>pwned</title>" in rendered_dom(without.as_uri()), "the attack works where nothing stops it"


def test_a_dashboard_of_hostile_names_is_drawn(file):
    """Nor do the notes, tables and logs of the dashboard run any of them, or take them for Markdown."""
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (the extra `dashboard`)")
    with serving(file) as (_, served):
        failed = next(trial["number"] for trial in served.study()["trials"] if trial["state"] == "Fail")
        for path in (f"trials?numbers=0,{failed}", "note", "trialTable"):
            page = rendered_dom(f"{served.page}/{path}")
            assert "<title>pwned" not in page
            if path != "trialTable":
                assert_harmless(page)


def assert_steers_nothing(*streams):
    """Lines of characters that stand for themselves."""
    for text in streams:
        assert all(char.isprintable() or char == "\n" for char in text), [c for c in text if not c.isprintable()]


def test_a_terminal_is_not_steered(file, capfd, monkeypatch):
    """No command prints anything of them that would move a cursor, change a colour or turn the writing round."""
    monkeypatch.chdir(file.parent)
    for command, *options in (
        ("status",),
        ("best",),
        ("space",),
        ("rank",),
        ("predict", "--config", "tp=2"),
        ("simulate", "--config", "tp=2"),
        ("plan", "--config", "tp=2"),
        ("export", "--to", "megatron"),
        ("export", "--to", "nanotron"),
        ("export", "--to", "json"),
        ("report",),
    ):
        monkeypatch.setattr(sys, "argv", ["meshtune", command, str(file), *options])
        with pytest.raises(SystemExit) as ended:
            main()

        assert ended.value.code == 0, command
        assert_steers_nothing(*capfd.readouterr())


def test_a_run_steers_no_terminal(file):
    """Nor does a run, which tells how trials have failed, and mistakes, which quote what they find."""
    done = in_process("run", file, cwd=file.parent)
    mistake = in_process("run", file, "--set", f"model={STEERING}", "--set", f"{STEERING}=1", cwd=file.parent)

    assert (done.status, mistake.status) == (0, 2), done.err
    assert "pwned" in done.out
    assert_steers_nothing(done.out, done.err, mistake.out, mistake.err)
