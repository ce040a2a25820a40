import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.studies.driver_process import ROOT, STUDY

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
def test_run_goes_on_when_nothing_can_be_printed(tmp_path):
    """A run whose output and errors find no room measures all its trials, keeps them, and says so by its status."""
    storage = ("--storage", f"sqlite:///{tmp_path}/study.db")
    command = [sys.executable, "-m", "tuner"]
    with FULL.open("w") as full:
        done = subprocess.run(
            [*command, "run", STUDY, "--trials", "2", *storage], cwd=ROOT, check=False, stdout=full, stderr=full
        )
    kept = subprocess.run(
        [*command, "status", STUDY, "--json", *storage], cwd=ROOT, check=True, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert json.loads(kept.stdout)["trials"] == 2
