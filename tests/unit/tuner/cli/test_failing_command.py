import os
import sys

import pytest

from tests.support.studies.commanded_study import MODEL
from trials.backend import Status
from tuner.run.studies import stored_study
from tuner.storage.record import read_records
from tuner.study_file.config import load_study

PROGRAM = """
import random
print("loading data")
print(f"listening on port {random.randint(1000, 9999)}")
raise FileNotFoundError("/data/wiki.idx is missing")
"""
SILENT = """
for step in range(5):
    print(f"iteration {step} done")
"""
STUDY = """
name: failing
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 128, global_batch_size: 16}}
current: {{dp: 2}}
trial:
  backend: command
  command: [{python}, train.py]
  launch: once
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms"]}}
storage: sqlite:///{folder}/study.db
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a study with a program, and returns its file."""

    def write_study(program):
        (tmp_path / "train.py").write_text(program, encoding="utf-8")
        path = tmp_path / "study.yaml"
        path.write_text(STUDY.format(model=MODEL, python=sys.executable, folder=tmp_path), encoding="utf-8")
        return path

    return write_study


@pytest.mark.usefixtures("no_ray")
def test_a_command_that_always_fails_says_so_after_three_trials(meshtune, write):
    """The run ends with status 1, the log's last lines and what to do; its JSON names the reason."""
    path = write(PROGRAM)

    done = meshtune("run", path, "--json")

    assert done.status == 1
    assert (done.json["stop_reason"], done.json["trials"], done.json["failed"]) == ("fails_alike", 3, 3)
    assert "the command fails whatever the layout. Trials 0, 1 and 2 failed alike" in done.err
    assert "    | FileNotFoundError: /data/wiki.idx is missing" in done.err
    assert "What to do: run the command once by hand" in done.err
    assert "the command fails whatever the layout" in meshtune("status", path).out


@pytest.mark.usefixtures("no_ray")
def test_status_counts_as_the_report_does(meshtune, write, tmp_path):
    """Trials that failed alike count against nothing in `status`, in the report, and at the end of the run."""
    path = write(PROGRAM)
    meshtune("run", path)

    status, report = meshtune("status", path), meshtune("report", path, "--out", tmp_path / "report.html")

    excused = "3 more failed alike, whatever the layout, and count against nothing"
    assert report.status == 0, report.err
    assert f"0 trials, 0 failed; {excused}" in status.out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"none failed; {excused}" in page


@pytest.mark.usefixtures("no_ray")
def test_a_log_without_step_times_is_shown(meshtune, write):
    """Where `trial.log` finds nothing, the last lines of the log are shown, and the advice names the key."""
    done = meshtune("run", write(SILENT))

    assert done.status == 1
    assert done.out == ""
    assert "crashed: ended without a log line in which trial.log finds a step time" in done.err
    assert "    | iteration 4 done" in done.err
    assert "mend trial.log" in done.err


@pytest.fixture
def refusing_queue(tmp_path, monkeypatch):
    """Programs of Slurm that are first on the PATH: sbatch refuses every job."""
    programs = tmp_path / "slurm"
    programs.mkdir()
    refusal = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    for name, text in (("sbatch", f"echo '{refusal}' >&2; exit 1"), ("squeue", ""), ("scontrol", ""), ("scancel", "")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("no_ray", "refusing_queue")
def test_a_refused_job_is_shown_and_is_no_failure_of_its_layout(meshtune, write):
    """The options and the words of sbatch are shown, the advice is about them, and no candidate counts as failed."""
    path = write(SILENT)
    slurm = ("--set", "trial.launch=slurm", "--set", "trial.sbatch=[--account=nobody, --partition=big]")

    done = meshtune("run", path, *slurm)

    assert done.status == 1
    assert "incident: sbatch refused the job: Batch job submission failed: Invalid account" in done.err
    assert "    | [sbatch --account=nobody --partition=big --job-name=meshtune-failing-" in done.err
    assert "What to do: mend what sbatch names: its options above come from trial.sbatch" in done.err
    assert "trial.log" not in done.err
    records = read_records(stored_study(load_study(path)))
    assert [record.status for record in records] == [Status.INCIDENT] * 3
    status = meshtune("status", path, *slurm).out
    assert "failing: 0 trials, 0 failed; 3 more failed alike, whatever the layout" in status
