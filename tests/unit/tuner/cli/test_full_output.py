import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.studies.driver_process import ROOT, STUDY

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")


def meshtune(*arguments, **streams):
    """A finished process of the command line."""
    command = [sys.executable, "-m", "tuner", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, text=True, **{"stderr": subprocess.PIPE, **streams})


def test_result_that_finds_no_room_is_told_once_with_a_status_of_its_own():
    """A full disk behind standard output is told in one message, and the status says that the result is not there."""
    with FULL.open("w") as full:
        done = meshtune("space", STUDY, "--json", stdout=full)

    assert done.returncode == 1
    assert done.stderr == "meshtune: standard output could not take the whole result (No space left on device)\n"


@pytest.mark.slow
def test_full_standard_error_changes_no_result():
    """What can't be printed on standard error leaves result and status as they are, for mistakes too."""
    with FULL.open("w") as full:
        done = meshtune("space", STUDY, "--json", stdout=subprocess.PIPE, stderr=full)
        mistaken = meshtune("space", "no/such/study.yaml", stdout=subprocess.PIPE, stderr=full)

    assert (done.returncode, done.stdout) == (0, meshtune("space", STUDY, "--json", stdout=subprocess.PIPE).stdout)
    assert (mistaken.returncode, mistaken.stdout) == (2, "")


def test_reader_that_has_read_enough_is_no_problem():
    """A closed pipe, as behind `| head -1`, ends in silence and status 0."""
    done = subprocess.run(
        ["/bin/bash", "-c", f'set -o pipefail; "{sys.executable}" -m tuner rank "{STUDY}" --json | head -1'],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")
