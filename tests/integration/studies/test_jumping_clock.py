"""Runs whose date jumps: a driver, its Ray and its trials, which a preloaded library tells another date."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.studies.driver_process import DriverProcess
from tuner.run.driver import DRIVER
from tuner.storage.opening import find_study
from tuner.study_file.storage_address import StorageAddress

SOURCE = Path(__file__).parents[2] / "support" / "programs" / "jumping_clock.c"
TRIALS = 6
DAY_S = 86_400
JUMPS_S = (400 * DAY_S, -400 * DAY_S, 0)
"""Seconds between the date that the run is told and the real one."""


@pytest.fixture
def clock(tmp_path):
    """The environment of a run whose date is shifted, and a function that shifts it."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler is installed (Debian: gcc)")
    library, file = tmp_path / "jumping_clock.so", tmp_path / "clock"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    file.write_text("0", encoding="utf-8")

    environment = {**os.environ, "LD_PRELOAD": str(library), "JUMPING_CLOCK": str(file)}
    return environment, lambda seconds: file.write_text(f"{seconds}\n", encoding="utf-8")


def test_a_date_that_jumps_changes_no_trial(clock, tmp_path):
    """A run whose date goes 400 days ahead, then 800 days back, makes the trials of one whose date stays."""
    environment, jump = clock
    search = {"seed": 3, "confidence": 1.0, "max_trials": TRIALS, "parallel_trials": 1}
    options = [f"search.{key}={value}" for key, value in search.items()]
    storages = [f"sqlite:///{tmp_path / name}.db" for name in ("jumping", "calm")]

    with DriverProcess(storages[0], *options, environment=environment) as driver:
        for number, seconds in enumerate(JUMPS_S):
            driver.wait_for(f"trial {number} ")
            jump(seconds)
        status, told, complaints = driver.end()
    with DriverProcess(storages[1], *options) as driver:
        calm_status, calm, _ = driver.end()

    assert (status, calm_status) == (0, 0), complaints
    answers = [json.loads(each) for each in (told, calm)]
    assert answers[0]["best"] == answers[1]["best"]
    jumping, undisturbed = (
        find_study(StorageAddress.parse(storage), "ultrascale-llama-8b-128") for storage in storages
    )
    assert [trial.params for trial in jumping.get_trials()] == [trial.params for trial in undisturbed.get_trials()]
    began = [trial.datetime_start for trial in jumping.get_trials()]
    assert (max(began) - min(began)).days >= 399, "the date did jump"
    assert jumping.user_attrs[DRIVER] is None
