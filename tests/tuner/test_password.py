"""A password in a storage URL, looked for in everything that a study leaves behind."""

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import MetaData, create_engine, select, text

from tests.tuner.cli.command_line import environment, write_replay

CANARY = "c@n%ry:/{7f3a} $x"
SPELLINGS = (CANARY.encode(), quote(CANARY, safe="").encode())


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
    for spelling in SPELLINGS:
        assert spelling not in content, f"{place} tells {spelling!r}"


def test_a_password_is_nowhere(tmp_path, storage):
    """Output of commands, the report, the database and Ray's logs of a run hold no part of the password."""
    write_replay(tmp_path, expert="{tp: 8}")
    with tempfile.TemporaryDirectory(prefix="ray-") as ray_folder:  # short, because Ray's sockets lie there
        told = environment() | {"RAY_TMPDIR": ray_folder}
        for arguments in (
            ["run", "--trials", "3"],
            ["status", "--json"],
            ["best"],
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
