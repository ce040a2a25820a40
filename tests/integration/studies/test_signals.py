"""Signals that reach more than the driver: its process group, as from `timeout` and terminals, or all its processes."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress

import optuna
import pytest
from optuna.trial import TrialState

from benchmarks.support.process_table import below
from tests.support.studies.driver_process import LIMIT_S, ROOT, DriverProcess
from tuner.run.driver import DRIVER
from tuner.storage.opening import find_study
from tuner.study_file.storage_address import StorageAddress

TRIALS = 3
MODEL = ROOT / "configs" / "models" / "gpt-small.yaml"
STUDY = """
name: signalled
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 64, global_batch_size: 16, precision: fp32}}
search: {{max_trials: {trials}, parallel_trials: 2, prune: false, confidence: 1.0, repeats: 0, baseline: false}}
trial: {trial}
storage: {storage}
"""
STEPS = """
import os, time
print("started", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
for step in range(1, 6):
    print(f" iteration {step}/ 5 | elapsed time per iteration (ms): 100.0 |", flush=True)
"""
TRIAL = {
    "command": "{{backend: command, launch: once, steps: 3, warmup_steps: 1, command: [{python}, steps.py]}}",
    "simulated": "{{backend: simulated, seconds_per_trial: {seconds}}}",
}
LEFT_WITHIN_S = 10.0
"""Time after which nothing is left of a driver that has ended."""


class Signalled:
    """Study whose trials wait until `let_go` is called, with what its storage holds."""

    def __init__(self, folder, trials):
        self._folder, self._trials = folder, trials
        self.storage = f"sqlite:///{folder / 'study.db'}"
        (folder / "steps.py").write_text(STEPS, encoding="utf-8")
        self._write(300)

    def _write(self, seconds):
        trial = TRIAL[self._trials].format(python=sys.executable, seconds=seconds)
        text = STUDY.format(model=MODEL, trials=TRIALS, trial=trial, storage=self.storage)
        self.file.write_text(text, encoding="utf-8")

    @property
    def file(self):
        """The study file."""
        return self._folder / "study.yaml"

    def let_go(self):
        """Let trials come to their end."""
        (self._folder / "go").touch()
        self._write(0)

    def driver(self):
        """A driver of this study."""
        return DriverProcess(self.storage, study=self.file)

    def read(self):
        """The states of its trials by number, and who claims it."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        stored = find_study(StorageAddress.parse(self.storage), "signalled")
        if stored is None:
            return {}, None
        states = {trial.number: trial.state for trial in stored.get_trials()}
        stored._storage._backend.engine.dispose()
        return states, stored.user_attrs.get(DRIVER)

    def wait_for_work(self):
        """Wait until two trials run."""
        wait_until(lambda: [*self.read()[0].values()].count(TrialState.RUNNING) == 2)
        time.sleep(2.0 if self._trials == "simulated" else 4.0)  # until their workers are at them

    def assert_ended_in_order(self, driver, wanted):
        """The driver ends with this status and an answer, the study is free, no trial runs, and nothing is left."""
        status, out, err = driver.ended()
        left = driver.processes_after(LEFT_WITHIN_S)
        states, claim = self.read()
        found = subprocess.run(
            [sys.executable, "-m", "tuner", "doctor", str(self.file), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        told = [finding for finding in json.loads(found.stdout)["findings"] if finding["what"] != "processes"]

        assert status == wanted, err
        assert json.loads(out)["stop_reason"] == "interrupted"
        assert "Traceback" not in err
        assert claim is None
        assert TrialState.RUNNING not in states.values()
        assert told == []
        assert left == []

    def assert_goes_on(self):
        """The same command comes to the end of the study, and no trial is lost or repeated."""
        before, _ = self.read()
        self.let_go()
        with self.driver() as driver:
            status, out, err = driver.ended()
            left = driver.processes_after(LEFT_WITHIN_S)
        states, _ = self.read()

        assert status == 0, err
        assert json.loads(out)["trials"] == TRIALS
        assert states == dict.fromkeys(range(TRIALS), TrialState.COMPLETE)
        assert before.keys() <= states.keys()
        assert left == []


@pytest.fixture
def study(tmp_path, request):
    """A study whose trials wait, of the kind that the test names."""
    return Signalled(tmp_path, request.param)


def of(*kinds):
    """Run a test with studies of these trials."""
    return pytest.mark.parametrize("study", kinds, indirect=True)


def wait_until(holds):
    """Wait for a condition."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("study", "number", "status"),
    [
        ("command", signal.SIGTERM, 75),
        ("command", signal.SIGINT, 130),
        ("simulated", signal.SIGHUP, 75),
        ("simulated", signal.SIGUSR1, 75),
    ],
    indirect=["study"],
)
def test_a_signal_to_the_process_group_is_an_end_in_order(study, number, status):
    """A signal to the driver's process group ends the run as one to the driver alone does, and the study goes on."""
    with study.driver() as driver:
        study.wait_for_work()
        os.killpg(driver.process.pid, number)
        study.assert_ended_in_order(driver, status)

    study.assert_goes_on()


@of("command", "simulated")
def test_a_signal_to_all_processes_is_an_end_in_order(study):
    """SIGTERM to every process below the driver too, in whatever session, as from systemd, ends the run in order."""
    with study.driver() as driver:
        study.wait_for_work()
        for process in (*below(driver.process.pid), driver.process.pid):
            with suppress(ProcessLookupError):  # a short one has ended since it was found
                os.kill(process, signal.SIGTERM)
        study.assert_ended_in_order(driver, 75)

    study.assert_goes_on()


@of("simulated")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_group_while_ray_starts(study, number):
    """A signal to the group while Ray starts ends the run in order, too."""
    with study.driver() as driver:
        wait_until(lambda: any("raylet" in command for command in driver.processes().values()))
        os.killpg(driver.process.pid, number)
        study.assert_ended_in_order(driver, 75)


@of("command")
def test_signals_that_follow_do_not_disturb_the_end(study):
    """Further signals, at once as `timeout` sends them and again and again until Python has ended, change nothing."""
    with study.driver() as driver:
        study.wait_for_work()
        driver.process.send_signal(signal.SIGTERM)
        os.killpg(driver.process.pid, signal.SIGTERM)
        time.sleep(0.01)
        os.killpg(driver.process.pid, signal.SIGHUP)
        while driver.process.poll() is None:
            time.sleep(0.05)
            driver.process.send_signal(signal.SIGTERM)
        study.assert_ended_in_order(driver, 75)

    study.assert_goes_on()


@of("simulated")
def test_a_closed_terminal_is_an_end_in_order(study):
    """A run whose terminal is closed gives its study up and leaves nothing."""
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, "-m", "tuner", "run", str(study.file)])  # noqa: S606 # no shell wanted
    study.wait_for_work()
    os.close(terminal)
    _, status = os.waitpid(process, 0)

    states, claim = study.read()
    assert os.waitstatus_to_exitcode(status) == 75
    assert claim is None
    assert TrialState.RUNNING not in states.values()


@of("command")
def test_nothing_outlives_a_group_that_is_killed(study):
    """After SIGKILL of the whole process group, nothing is left after ten seconds, and the study goes on."""
    with study.driver() as driver:
        study.wait_for_work()
        os.killpg(driver.process.pid, signal.SIGKILL)
        assert driver.ended()[0] == -signal.SIGKILL
        assert driver.processes_after(LEFT_WITHIN_S) == []

    study.assert_goes_on()
