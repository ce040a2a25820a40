"""A storage is often somebody else's: reading it makes text and numbers of it, no objects of the writer's choice."""

import subprocess
import sys

import pytest

from tests.support.studies.command_line import environment
from tests.support.studies.commanded_study import run_here, write_study

WATCHED = """
import pickle, sys
def refuse(event, arguments):
    if event == "pickle.find_class":
        print("unpickles", arguments, flush=True)
        sys.exit(9)
sys.addaudithook(refuse)
if sys.argv[1:] == ["check"]:
    pickle.loads(pickle.dumps(ValueError()))
from tuner.cli.main import main
main()
"""
"""The command line in a process that ends at the first object that anything unpickles; Python tells it of each."""


def watched(*arguments, cwd):
    """How such a process ends, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_reading_a_study_unpickles_nothing(kind, tmp_path):
    """Neither we nor Optuna unpickle anything of a database or a journal: not what studies hold, not snapshots."""
    file = write_study(tmp_path, trials=3, storage=f"{kind}:///{tmp_path}/study.{kind}")
    run_here(file)

    status, told = watched("report", file, cwd=tmp_path)

    assert status == 0, told


def test_the_watch_works(tmp_path):
    """A process that unpickles is ended and says so."""
    assert watched("check", cwd=tmp_path)[0] == 9
