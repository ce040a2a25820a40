"""The same study, seed and observations give the same trials, wherever and however fast a search runs."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.support.own_server import new_storage
from tests.support.studies import repeated_searches
from tests.support.studies.driver_process import ROOT
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.repeated_searches import replayed, searched, sequence, simulated
from tuner.run.loop import run_study
from tuner.study_file.config import load_study

LIMIT_S = 120
HERE = {"PYTHONHASHSEED": "1", "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C", "TZ": "Asia/Kathmandu"}
ELSEWHERE = {"PYTHONHASHSEED": "2", "OPENBLAS_NUM_THREADS": "2", "LC_ALL": "tr_TR.UTF-8", "TZ": "America/St_Johns"}


def started(folder, environment, *options):
    """The program in a process of its own, which runs in `folder`."""
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.studies.repeated_searches", str(folder), *options],
        cwd=folder,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process):
    """What it told."""
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return json.loads(out)


def test_processes_search_and_plan_the_same(tmp_path):
    """Two processes with other hash seeds, threads of linear algebra, folders, locales, time zones and clocks try the
    same trials, believe the same of them to the last digit, and plan the same layers.
    """
    first = started(tmp_path / "a", HERE)
    second = started(tmp_path / "another folder", ELSEWHERE, "--impatient")
    one, other = told(first), told(second)

    assert [len(one["told"][name]) for name in ("replayed", "simulated")] == [6, 4]
    assert set(one["threads"]) == {1}
    assert set(other["threads"]) == {min(2, len(os.sched_getaffinity(0)))}
    assert one["told"] == other["told"]


def test_all_storages_give_the_same_trials(tmp_path, request):
    """A file, a PostgreSQL server and a journal lead to the same trials, one after the other and two at a time, of a
    study that reads what another one has left in the same storage.
    """
    found = []
    for kind in ("sqlite", "postgresql", "journal"):
        folder = tmp_path / kind
        folder.mkdir()
        storage = new_storage(kind, request, folder)
        found.append([searched(replayed(folder), storage), searched(simulated(folder, storage), storage)])

    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The search of a driver that was left alone."""
    folder = tmp_path_factory.mktemp("straight")
    return searched(replayed(folder), f"sqlite:///{folder / 'study.db'}")


def test_killed_and_resumed_it_tries_the_same(tmp_path, database, straight):
    """A driver that is killed in the midst of its trials, and resumed, tries those of one that was left alone, on every
    kind of storage.
    """
    replayed(tmp_path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([repeated_searches.__name__, run_study.__module__])
    for number in (3, 3):
        driver = context.Process(
            target=searched, args=(tmp_path / "replayed.yaml", database), kwargs={"dies_at": number}
        )
        driver.start()
        driver.join(LIMIT_S)
        assert driver.exitcode == -signal.SIGKILL

    assert searched(tmp_path / "replayed.yaml", database) == straight


@dataclass
class TogetherExecutor(InProcessExecutor):
    """Two trials end between two looks of the driver, in either order."""

    is_reversed: bool = False

    def poll(self, timeout_s, /):
        """As the loop calls it."""
        ended = [one for _ in range(len(self.waiting)) for one in InProcessExecutor.poll(self, timeout_s)]
        return ended[::-1] if self.is_reversed else ended


def test_trials_that_end_together_may_end_in_any_order(tmp_path):
    """Of trials side by side it counts which have ended when the next one is chosen, not which of them was first."""
    found = []
    for is_reversed in (False, True):
        folder = tmp_path / str(is_reversed)
        folder.mkdir()
        config = load_study(
            replayed(folder), storage=f"sqlite:///{folder / 'study.db'}", overrides=["search.parallel_trials=2"]
        )
        executor = TogetherExecutor(config.trials.backend, 2, is_reversed=is_reversed)
        found.append(sequence(run_study(config, on_progress=lambda _: None, executor=executor).records))

    assert [trial[:3] + trial[4:] for trial in found[0]] == [trial[:3] + trial[4:] for trial in found[1]]
