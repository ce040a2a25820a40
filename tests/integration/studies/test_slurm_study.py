"""Studies whose trials are jobs of a real Slurm cluster: `meshtune run` as its own process, which is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.own_slurm import own_slurm
from tests.support.studies.commanded_study import MODEL
from tests.support.studies.driver_process import ROOT, DriverProcess

PROGRAM = """
import sys, time
tp, mbs = int(sys.argv[1]), int(sys.argv[2])
for step in range(1, 1000):
    time.sleep(float(open("pause_s").read()))
    print(f"step {step} took {40 / tp + 100 / mbs + step} ms", flush=True)
"""

STUDY = """
name: jobs
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 128, global_batch_size: 16}}
search: {{max_trials: 4, seed: 1, parallel_trials: 2, baseline: false, repeats: 1, prune: false}}
trial:
  backend: command
  command: [{python}, train.py, "{{tp}}", "{{mbs}}"]
  launch: slurm
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms"]}}
  warmup_steps: 1
  steps: 4
"""
GONE_LIMIT_S = 15.0
"""Time in which nothing of a killed driver may be left in the queue [s]: Ray's workers end seconds after it."""


@pytest.fixture(scope="module")
def slurm():
    """A cluster of two nodes."""
    with own_slurm(num_nodes=2) as cluster:
        yield cluster


def write_study(folder, pause_s):
    """Write the study and its program, whose steps pause so long, and return the study's path."""
    (folder / "pause_s").write_text(str(pause_s), encoding="utf-8")
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    study = folder / "study.yaml"
    study.write_text(STUDY.format(model=MODEL, python=sys.executable), encoding="utf-8")
    return study


@pytest.fixture
def run(slurm, tmp_path):
    """Starts `meshtune run` of one study, whose steps take some seconds altogether or forever."""

    def start(pause_s, *overrides):
        study = write_study(tmp_path, pause_s)
        storage = f"sqlite:///{tmp_path / 'study.db'}"
        return DriverProcess(storage, *overrides, study=study, environment=slurm.environment)

    yield start
    slurm.cancel_all()


def trials_of(folder, storage="sqlite:///study.db"):
    """All trials of the study, as other programs read them."""
    command = [sys.executable, "-m", "tuner", "trials", "study.yaml", "--json", "--storage", storage]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True
    )
    return json.loads(done.stdout)["trials"]


def wait_for_jobs(slurm, count, but=()):
    """Wait until so many jobs run, except some; return their numbers and names."""
    deadline_s = time.monotonic() + 60
    while True:
        running = [(number, name) for number, name, state in slurm.queue() if state == "RUNNING" and number not in but]
        if len(running) == count:
            return running
        assert time.monotonic() < deadline_s, slurm.queue()
        time.sleep(0.1)


def gone(slurm, but=()):
    """Wait until the queue is empty, except for some jobs; return whether it is."""
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while True:
        left = [number for number, *_ in slurm.queue() if number not in but]
        if not left or time.monotonic() >= deadline_s:
            return not left
        time.sleep(0.1)


def test_killed_drivers_lose_nothing_and_leave_no_job(slurm, run, tmp_path):
    """Jobs leave the queue within seconds of their driver's SIGKILL; if nobody was left to cancel them, the next run
    finds them by their names, says so, and cancels only them; and the last run measures the same trials.
    """
    other = slurm.submit("--hold", "--job-name=meshtune-jobs-other-0000", "--wrap=true")
    with run(60) as driver:
        jobs = wait_for_jobs(slurm, 2)
        assert sorted(name.rpartition("-")[2] for _, name in jobs) == ["0000", "0001"]
        driver.process.kill()
        assert gone(slurm, but=(other,))

    with run(60) as dead:
        wait_for_jobs(slurm, 2)
        followers = [pid for pid, command in dead.processes().items() if "trials.ranks.server" in command]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (*followers, dead.process.pid):
                os.kill(pid, number)
        time.sleep(3.0)
        left = wait_for_jobs(slurm, 2)
        with run(0.05) as driver:
            status, found, told = driver.end()

    trials = trials_of(tmp_path)
    assert status == 0
    assert "ended 2 jobs that an earlier run of this study had left" in told
    assert not {number for number, _ in left} & {number for number, _, _ in slurm.queue()}
    assert other in [number for number, _, _ in slurm.queue()]
    assert [trial["trial"] for trial in trials] == [0, 1, 2, 3]
    assert {trial["status"] for trial in trials} == {"ok"}
    assert json.loads(found)["step_time_s"] == min(trial["step_time_s"] for trial in trials)
    assert gone(slurm, but=(other,))


def test_a_driver_that_is_a_job_is_warned_and_goes_on_once_requeued(slurm, tmp_path):
    """A driver in a batch job that is warned of its limit gives up in order; requeued, it completes the same trials."""
    write_study(tmp_path, 60)
    storage = f"sqlite:///{tmp_path / 'job.db'}"
    command = f"exec {sys.executable} -m tuner run study.yaml --storage {storage} --json"
    told = ("--open-mode=append", f"--output={tmp_path / 'told'}")
    options = ("--requeue", "--signal=B:USR1@120", f"--chdir={tmp_path}", *told, "--job-name=driver")
    environment = f"--export=ALL,PYTHONPATH={ROOT}"
    job = slurm.ask("sbatch", "--parsable", *options, environment, f"--wrap={command}").strip()

    wait_for_jobs(slurm, 3)  # the driver's and two trials'
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    assert gone(slurm)
    assert "ExitCode=75:0" in slurm.ask("scontrol", "show", "job", job)
    write_study(tmp_path, 0.05)
    slurm.ask("scontrol", "requeue", job)
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets requeued jobs wait for two minutes
    deadline_s = time.monotonic() + 120
    while "JobState=COMPLETED" not in (seen := slurm.ask("scontrol", "show", "job", job)):  # the queue may look empty
        assert time.monotonic() < deadline_s, (seen, (tmp_path / "told").read_text(encoding="utf-8"))
        time.sleep(0.1)

    assert "ExitCode=0:0" in seen
    assert gone(slurm)
    trials = trials_of(tmp_path, storage)
    assert [(trial["trial"], trial["status"]) for trial in trials] == [(number, "ok") for number in range(4)]


def test_waiting_takes_no_time_and_a_cancelled_job_runs_again(slurm, run, tmp_path):
    """A trial that waits for longer than its time limit is not cut off, and its wait is not among the device-hours; its
    job, which somebody cancels, is tried once more, and the trial says why.
    """
    blocker = slurm.submit("--nodes=2", "--exclusive", "--wrap=sleep 600")
    limits = ("trial.time_limit=8", "trial.hang_limit_s=5", "search.parallel_trials=1", "search.max_trials=1")
    with run(1.0, *limits) as driver:
        while len(slurm.queue()) < 2:
            assert driver.process.poll() is None, driver.told
            time.sleep(0.1)
        time.sleep(9.0)
        assert [state for _, name, state in slurm.queue() if name.startswith("meshtune-")] == ["PENDING"]
        released_s = time.monotonic()
        slurm.ask("scancel", blocker)
        ((number, _),) = wait_for_jobs(slurm, 1, but=(blocker,))
        slurm.ask("scancel", number)
        (tmp_path / "pause_s").write_text("0.05", encoding="utf-8")
        status, told, _ = driver.end()
        most_s = 2 * (time.monotonic() - released_s)

    (trial,) = trials_of(tmp_path)
    assert status == 0
    assert trial["status"] == "ok"
    assert "retried once, because was cancelled from outside" in trial["reason"]
    assert json.loads(told)["device_hours"] * 3600 < most_s


def test_one_trial_before_the_sweep_is_a_job(slurm, tmp_path):
    """`trial --once` submits the batch file that `--dry-run` prints, shows the job's log, and keeps the trial."""
    study = write_study(tmp_path, 0.05)
    environment = {**os.environ, **slurm.environment, "PYTHONPATH": str(ROOT)}

    def trial(*options):
        command = [sys.executable, "-m", "tuner", "trial", str(study), "--config", "tp=2,mbs=2", "--json", *options]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr.splitlines()

    shown, _ = trial("--dry-run")
    found, log = trial("--once")

    assert shown["command"] == [sys.executable, "train.py", "2", "2"]
    assert f"exec {sys.executable} train.py 2 2" in shown["batch_file"]
    assert any(line.startswith("  | [Slurm: job ") for line in log)
    assert "  | step 5 took 75.0 ms" in log
    assert (found["status"], found["kept_as"], found["step_time_s"]) == ("ok", 0, pytest.approx(0.0735))
    assert [row["config"]["tp"] for row in trials_of(tmp_path, "sqlite:///meshtune.db")] == [2]
    assert gone(slurm)


def test_options_that_slurm_refuses_end_the_run_before_any_trial(slurm, tmp_path):
    """One message has Slurm's own words and the options, and the study has no trial that failed for them."""
    study = write_study(tmp_path, 0.05)
    command = [sys.executable, "-m", "tuner", "run", str(study), "--set", "trial.sbatch=[--partition=nowhere]"]
    environment = {**os.environ, **slurm.environment, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    told = subprocess.run(
        [sys.executable, "-m", "tuner", "trials", str(study)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("meshtune: ")]
    assert "trial.sbatch = 'sbatch --partition=nowhere --nodes=1 " in message
    assert "is refused by sbatch before any trial: invalid partition specified: nowhere" in message
    assert "No trial has begun yet." in told.stdout or "has no trials in its storage yet" in told.stderr
    assert not slurm.queue()
