"""Provide the fixtures that many tests share, and set up Hypothesis."""

import json
import math
import os
import signal
import sys
import threading
import time

import pytest
from hypothesis import settings

from benchmarks.support.postgresql_server import postgresql_server
from tests.support.own_server import PASSWORD, new_storage, skip_without_postgresql
from tests.support.quick_xla import QUICK_FLAGS
from tests.support.studies.broken_studies import rows
from tuner.cli.main import main

LONG = (
    "tests/integration/project/test_newcomer.py",
    "tests/integration/studies/test_resume.py",
    "tests/integration/studies/test_slurm_study.py",
    "tests/chaos/test_chaos.py",
    "tests/integration/torch_training/test_ray_hosts.py",
    "tests/integration/ray/test_submitted_job.py",
    "tests/integration/ray/test_lost_node.py",
    "tests/integration/ray/test_lost_hosts.py",
    "tests/integration/studies/test_shared_study.py",
    "tests/integration/studies/test_password.py",
    "tests/integration/ray/test_ray_executor.py",
    "tests/integration/ray/test_placement.py",
    "tests/integration/ray/test_watch_ray.py",
    "tests/unit/tuner/run/test_proxy_study.py",
    "tests/integration/benchmarks/test_referee.py",
    "tests/integration/project/test_documented_commands.py",
)
"""Files with tests that take longest: they begin, so that no process is left alone with one of them at the end."""

# A busy machine may stop for a second anywhere, hence no deadline. A change must fail by what it does and not by luck,
# hence the same examples in every run; `pytest --hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("repeatable")


# A shell lets what it starts in the background ignore interrupts, and processes that tests start would inherit that.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# JAX reads it when it starts, here and in the processes that tests start.
if QUICK_FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}".strip()


# Plans that a user's studies kept say nothing of this checkout, and tests keep none for them.
os.environ["MESHTUNE_CACHE"] = "off"
# Nor does the catalog of whoever runs them.
os.environ["MESHTUNE_CATALOG"] = "off"


BEGIN_S = time.monotonic()
"""When this process began to test, in seconds of the monotonic clock."""


def pytest_addoption(parser):
    """Add the option that bounds how long tests take."""
    parser.addoption(
        "--begin-within",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no test after this time; those that are left skip and say so",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip a test that would begin too late."""
    limit_s = item.config.getoption("begin_within")
    if time.monotonic() - BEGIN_S > limit_s:
        pytest.skip(f"NOT RUN: it would have begun more than {limit_s:.0f} seconds after the first test")


QUICK = ("tests/unit/", "tests/integration/ray/test_whole_study.py")
"""Where tests are of the quick lane, unless they are marked as slow."""


def pytest_collection_modifyitems(items):
    """Put the files with long tests first, and mark everything outside the quick lane as slow."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in LONG)
    for item in items:
        if not item.nodeid.startswith(QUICK) or "postgresql" in item.fixturenames:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def write(tmp_path):
    """Writes a CSV file of measured runs; its path."""

    def write_rows(name, *changes):
        path = tmp_path / name
        path.write_text(rows(*changes), encoding="utf-8")
        return path

    return write_rows


@pytest.fixture
def answered(capsys):
    """Runs a program of benchmarks/ in this process with `--json`; its object."""

    def call(program, *arguments):
        status = program.main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return json.loads(captured.out)

    return call


@pytest.fixture(scope="session")
def postgresql():
    """The URL of a PostgreSQL server that runs as long as the tests do."""
    skip_without_postgresql()
    with postgresql_server(PASSWORD) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow), "journal"])
def database(request, tmp_path):
    """The URL of an empty storage of each kind."""
    return new_storage(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def sql_database(request, tmp_path):
    """The URL of an empty database of either kind."""
    return new_storage(request.param, request, tmp_path)


@pytest.fixture
def calibrate(capsys, monkeypatch):
    """Runs `meshtune calibrate` in this process; its status, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshtune", "calibrate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call
