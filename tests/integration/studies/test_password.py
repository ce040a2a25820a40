"""Secrets of storages, environments and commands, looked for in everything that a study leaves behind."""

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import MetaData, create_engine, select, text

from hardware.io.errors import ConfigError
from tests.support.studies.broken_studies import GOOD, study
from tests.support.studies.command_line import environment, write_replay
from tests.support.studies.commanded_study import run_here, write_study
from tuner.report import collect, render_report
from tuner.study_file.config import load_study

CANARY = "c@n%ry:/{7f3a} $x"
SPELLINGS = (CANARY.encode(), quote(CANARY, safe="").encode())

TOKEN = "hf-canary-51c0ffee"  # noqa: S105 # looked for
ENVIRONMENT = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"), TOKEN)


@pytest.fixture
def storage(postgresql):
    """The URL of an empty database whose user has a password of odd characters."""
    name = f"odd_{uuid.uuid4().hex[:8]}"
    engine = create_engine(postgresql.replace("postgresql:", "postgresql+psycopg2:"))
    with engine.begin() as connection:
        escaped = CANARY.replace(":", r"\:")  # SQLAlchemy's text takes :name for a parameter
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD '{escaped}'"))
        connection.execute(text(f"CREATE SCHEMA AUTHORIZATION {name}"))
    engine.dispose()
    server = postgresql.rpartition("@")[2]
    return f"postgresql://{name}:{quote(CANARY, safe='')}@{server}"  # the schema of its name comes first


def assert_silent(place, content):
    """Nothing of the canary stands there, as it is or as the URL spells it."""
    for spelling in (*SPELLINGS, TOKEN.encode()):
        assert spelling not in content, f"{place} tells {spelling!r}"


def test_a_password_is_nowhere(tmp_path, storage):
    """Output of commands, the report, the database and Ray's logs of a run hold no part of the password, and none of
    the tokens in the environment.
    """
    write_replay(tmp_path, current="{tp: 8}")
    with tempfile.TemporaryDirectory(prefix="ray-") as ray_folder:  # short, because Ray's sockets lie there
        told = environment() | ENVIRONMENT | {"RAY_TMPDIR": ray_folder}
        for arguments in (
            ["run", "--trials", "3"],
            ["status", "--json"],
            ["report", "--out", "report.html"],
            ["export", "--to", "nowhere"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "tuner", arguments[0], "replay.yaml", *arguments[1:], "--storage", storage],
                cwd=tmp_path,
                env=told,
                capture_output=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == (2 if "nowhere" in arguments else 0), done.stderr
            assert_silent(arguments, done.stdout + done.stderr)
        logs = [Path(folder, name) for folder, _, names in os.walk(ray_folder) for name in names]
        assert any("driver" in path.name for path in logs), "Ray has written here"
        for path in filter(Path.is_file, logs):
            assert_silent(path, path.read_bytes())
    assert_silent("the report", (tmp_path / "report.html").read_bytes())
    engine = create_engine(storage.replace("postgresql:", "postgresql+psycopg2:"))
    tables = MetaData()
    tables.reflect(engine)
    with engine.connect() as connection:
        rows = [str(row) for table in tables.sorted_tables for row in connection.execute(select(table))]
    engine.dispose()
    assert len(rows) > 3, "the study is in it"
    assert_silent("the database", "\n".join(rows).encode())


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_commands_variables_are_nowhere(kind, tmp_path, monkeypatch):
    """What a study gives its command as environment, and what it inherits, is in no file that the study leaves, logs
    included, and not in its report; the command itself has it. What the study only names reaches the command, and
    stands in no other process's command line.
    """
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, TOKEN)
    monkeypatch.setenv("HUB_TOKEN", f"{TOKEN}-{uuid.uuid4().hex}")  # no other process has it
    path = write_study(tmp_path, trials=2, storage=f"{kind}:///{tmp_path}/study.{kind}")
    text = path.read_text(encoding="utf-8").replace("hunter2-canary", f'{CANARY_IN_YAML}, COPY: "{{env:HUB_TOKEN}}"')
    path.write_text(text.replace('"{mbs}"]', '"{mbs}", "--hub={env:HUB_TOKEN}"]'), encoding="utf-8")
    program = tmp_path / "train.py"
    check = f"import os, sys\nassert os.environ['API_KEY'][::-1] == {CANARY[::-1]!r}\nassert 'HF_TOKEN' in os.environ\n"
    check += (
        "import pathlib\nassert sys.argv[3] == '--hub=' + os.environ['COPY']\n"
        "for line in pathlib.Path('/proc').glob('[0-9]*/cmdline') if sys.platform == 'linux' else ():\n"
        "    try:\n        shown = os.environ['COPY'].encode() in line.read_bytes()\n"
        "    except OSError:\n        continue\n"
        "    assert not shown or line.parent.name == str(os.getpid()), line\n"
    )
    program.write_text(check + program.read_text(encoding="utf-8"), encoding="utf-8")

    config = run_here(path)

    left = [file for file in tmp_path.rglob("*") if file.is_file() and file != path]
    assert {"study.db", f"study.{kind}", "trial-0000-host-0.log"} & {file.name for file in left}
    for file in left:
        assert_silent(file, file.read_bytes())
    data = collect(config)
    assert data.best is not None
    assert_silent("the report", render_report(data).encode())


CANARY_IN_YAML = f'"{CANARY}"'.replace("{", "{{").replace("}", "}}")  # a brace of a variable is written twice
COMMAND = "{{backend: command, command: [x], {}}}"
URL = f"postgresql://user:{TOKEN}@127.0.0.1/name"


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"trial": COMMAND.format(f"environment: {{HF_TOKEN: 'a{{b}}{TOKEN}'}}")}, ()),
        ({"trial": COMMAND.format(f"environment: {{HF_TOKEN: '{{{TOKEN}'}}")}, ()),
        ({"trial": COMMAND.format(f"environment: {{HF_TOKEN: [{TOKEN}]}}")}, ()),
        ({"trial": COMMAND.format(f"environment: [HF_TOKEN={TOKEN}]")}, ()),
        ({"trial": COMMAND.format(f"enviroment: {{HF_TOKEN: {TOKEN}}}")}, ()),
        ({"trial": COMMAND.format(f"HF_TOKEN: {TOKEN}")}, ()),
        ({"trial": f"{{environment: {{HF_TOKEN: {TOKEN}}}}}"}, ()),
        ({"HF_TOKEN": TOKEN}, ()),
        ({"storge": URL}, ()),
        ({"storage": f"[{URL}]"}, ()),
        ({"storage": URL.replace("postgresql", "oracle")}, ()),
        ({"history": f"[{URL}, {URL}]"}, ()),
        ({"model": URL}, ()),
        ({}, (f"trial.environment.HF_TOKEN=[{TOKEN}",)),
        ({}, (f"trial={{environment: {{HF_TOKEN: {TOKEN}",)),
        ({}, (f"storage=[{URL}",)),
        ({}, (f"{URL}",)),
    ],
    ids=lambda given: None if not given else next(iter(given)).partition("=")[0][:24],
)
def test_no_mistake_repeats_a_secret(changes, overrides, tmp_path):
    """A study that cannot be read is refused without the value that its owner put in the wrong place or form."""
    path = tmp_path / "study.yaml"
    path.write_text(study(GOOD, **changes), encoding="utf-8")

    with pytest.raises(ConfigError) as refused:
        load_study(path, overrides=overrides)

    assert TOKEN not in str(refused.value)
    assert TOKEN not in str(refused.value.__cause__)


def test_a_file_that_is_no_study_is_not_quoted(tmp_path):
    """A file of secrets that is taken for a study, or named as a model, is refused without a word of it."""
    (tmp_path / "secrets.yaml").write_text(f"HF_TOKEN={TOKEN}\n", encoding="utf-8")
    (tmp_path / "list.yaml").write_text(f"- {TOKEN}\n", encoding="utf-8")
    (tmp_path / "study.yaml").write_text(study(GOOD, model="secrets.yaml"), encoding="utf-8")

    for name in ("secrets.yaml", "list.yaml", "study.yaml"):
        with pytest.raises(ConfigError, match="must hold a mapping") as refused:
            load_study(tmp_path / name)
        assert TOKEN not in str(refused.value)
