"""`meshtune trial`: what a trial starts, and one trial outside of the search."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.studies.command_line import ROOT, assert_users_mistake

PROGRAM = """
import os, sys
print("GREETING", os.environ["GREETING"], "SECRET", len(os.environ.get("SECRET", "")), flush=True)
if os.environ.get("FAILS"):
    sys.exit("ValueError: no such data")
for step in range(1, 6):
    print(f"step {step} took {100 / int(sys.argv[1]) + step} ms, 1.5 GiB", flush=True)
"""

STUDY = """
name: checked
model: gpt-small.yaml
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 128, global_batch_size: 16}}
current: {{tp: 2, mbs: 2}}
measured: {{step_time_s: 0.0535, source: old.log}}
search: {{max_trials: 3, seed: 1, draws: 10}}
limits: {{free_memory: 0.0}}
trial:
  backend: command
  command: [{python}, train.py, "{{tp}}", --key, "{{env:SECRET}}"]
  environment: {{GREETING: "hello world", REMOVED: null, NAMED: "{{trial}}-{{env:SECRET}}"}}
  launch: once
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms, (?P<memory_gib>[\\\\d.]+) GiB"]}}
  warmup_steps: 1
  steps: 4
"""


@pytest.fixture
def commanded(tmp_path, monkeypatch) -> Path:
    """A study whose trials run a command of some milliseconds, with a secret of the environment."""
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    path = tmp_path / "study.yaml"
    shutil.copy(ROOT / "configs" / "models" / "gpt-small.yaml", tmp_path)
    path.write_text(STUDY.format(python=sys.executable), encoding="utf-8")
    return path


def test_a_dry_run_prints_what_the_trial_would_start(commanded, meshtune):
    """The words, variables and directory are those of the trial; a secret stands by its name."""
    told = meshtune("trial", commanded, "--dry-run", "--json")

    assert told.status == 0, told.err
    assert told.json["command"] == [sys.executable, "train.py", "2", "--key", "$SECRET"]
    assert told.json["environment"] == {"GREETING": "hello world", "REMOVED": None, "NAMED": "0-$SECRET"}
    assert (told.json["directory"], told.json["batch_file"]) == (str(commanded.parent), None)
    assert told.json["config"]["tp"] == 2


def test_the_shown_command_runs_in_a_shell(commanded, meshtune):
    """What a dry run shows can be pasted: the shell gets the same words, and expands the named secret."""
    shown = meshtune("trial", commanded, "--dry-run").out.splitlines()
    command = shown[shown.index("Command:") + 1].replace("train.py", "-c 'import sys; print(sys.argv[1:])'")

    ran = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "['2', '--key', 'hunter2']"
    assert "  GREETING='hello world'" in shown
    assert "  unset REMOVED" in shown


def test_a_dry_run_shows_the_batch_file(commanded, meshtune, monkeypatch):
    """As a job of Slurm, a trial is shown with its batch file and the words that submit it; no value of a secret is."""
    monkeypatch.delenv("SECRET")
    told = meshtune("trial", commanded, "--dry-run", "--json", "--set", "trial.launch=slurm").json

    assert told["submit"][:2] == ["sbatch", "--parsable"]
    assert "--nodes=1" in told["submit"]
    assert told["batch_file"].startswith("#!/bin/bash\n")
    assert f"exec {sys.executable} train.py 2 --key" in told["batch_file"]
    assert "hunter2" not in str(told)


def test_hosts_differ_by_names_only(commanded, meshtune):
    """On several hosts, what only a host knows stays as its placeholder."""
    command = "trial.command=[torchrun, --node-rank, '{host_rank}', '{master_address}:{master_port}', '{tp}']"
    changes = ("cluster.hosts=2", "trial.launch=per_host", command, "current={tp: 2, dp: 2}")
    options = [word for change in changes for word in ("--set", change)]
    told = meshtune("trial", commanded, "--dry-run", "--json", *options)

    assert told.status == 0, told.err
    assert told.json["command"] == ["torchrun", "--node-rank", "{host_rank}", "{master_address}:{master_port}", "2"]
    assert "each of 2 hosts" in told.json["starts"]


SMALLER = "trial.proxy={hosts: 1, full_trials: 0}"
SIZES = "'{num_layers}', '{global_batch_size}', '{num_hosts}'"
COMMAND = f"trial.command=[{sys.executable}, train.py, '{{tp}}', {SIZES}]"


def test_a_smaller_job_shows_its_own_command(commanded, meshtune):
    """`--proxy` shows what the study runs in place of the configuration, with its sizes; without `trial.proxy` it is a
    mistake.
    """
    today = ("cluster.hosts=8", "current={pp: 4, dp: 4, mbs: 2}", "runtime=torch-reference", COMMAND)
    today = (*today, "trial.launch=per_host")
    options = [word for change in (*today, SMALLER) for word in ("--set", change)]
    full = meshtune("trial", commanded, "--dry-run", "--json", *options)
    told = meshtune("trial", commanded, "--dry-run", "--proxy", "--json", *options)
    shown = meshtune("trial", commanded, "--dry-run", "--proxy", *options).out.splitlines()

    assert full.status == told.status == 0, told.err
    assert (full.json["proxy"], full.json["command"][-3:]) == (None, ["8", "16", "8"])
    assert told.json["proxy"]["config"]["pp"] == 2
    # two stages keep their two layers each, and two micro-batches of two sequences run for each
    assert told.json["command"][-3:] == ["4", "4", "1"]
    assert shown[0].startswith("In place of pp=4,")
    assert shown[0].endswith(": a smaller job on 1 host: 4 layers, pp=2, dp=1, global batch 4")
    without = [word for change in today for word in ("--set", change)]
    assert_users_mistake(meshtune("trial", commanded, "--dry-run", "--proxy", *without), "--proxy", "trial.proxy")


@pytest.mark.usefixtures("no_ray")
def test_a_smaller_job_is_tried_and_kept(commanded, meshtune):
    """`--once --proxy` runs the smaller job, predicts it, and leaves a trial that the study's proxies go on from."""
    today = ("cluster.hosts=8", "current={pp: 4, dp: 4, mbs: 2}", "runtime=torch-reference", COMMAND, SMALLER)
    today = (*today, "measured=null", "trial.launch=per_host")
    options = [word for change in today for word in ("--set", change)]

    told = meshtune("trial", commanded, "--once", "--proxy", "--json", *options)

    assert told.status == 0, told.err
    assert told.json["proxy"]["layers"] == 4
    assert (told.json["kept_as"], told.json["ratio_to_log"]) == (0, None)
    assert told.json["predicted_s"] > 0
    (row,) = meshtune("trials", commanded, "--json", *options).json["trials"]
    assert (row["is_proxy"], row["status"]) == (True, "ok")
    assert meshtune("best", commanded, "--json", *options).json["extrapolated"] is True


def test_other_backends_say_what_their_trials_are(simulated, replay, meshtune):
    """A trial that starts no command says so in a sentence."""
    computed = meshtune("trial", simulated, "--dry-run")
    replayed = meshtune("trial", replay, "--config", "tp=8", "--dry-run", "--json")

    assert computed.out == (
        "A trial of this study starts no program: its step time is computed, in a simulated world.\n"
    )
    assert (replayed.json["command"], replayed.json["starts"]) == (
        None,
        "A trial of this study starts no program: it reads a measured run from the rows of the study.",
    )


@pytest.mark.usefixtures("no_ray")
def test_one_trial_is_held_against_the_log_and_kept(commanded, meshtune):
    """`--once` shows the log, compares the step time with the log's, and leaves a trial that `run` need not repeat."""
    told = meshtune("trial", commanded, "--once", "--json")

    assert told.status == 0, told.err
    assert "  | step 5 took 55.0 ms, 1.5 GiB" in told.err.splitlines()
    assert told.json["step_time_s"] == pytest.approx(0.0535)
    assert told.json["ratio_to_log"] == pytest.approx(1.0)
    assert (told.json["kept_as"], told.json["not_kept"]) == (0, None)
    listed = meshtune("trials", commanded, "--json").json["trials"]
    assert [(row["trial"], row["status"], row["config"]["tp"]) for row in listed] == [(0, "ok", 2)]
    ran = meshtune("run", commanded, "--json")
    assert ran.json["trials"] == 3
    rows = meshtune("trials", commanded, "--json").json["trials"]
    measured_again = [row for row in rows if row["config"] == listed[0]["config"] and "old.log" not in row["reason"]]
    assert [row["trial"] for row in measured_again] == [0]


@pytest.mark.usefixtures("no_ray")
def test_a_step_far_from_the_logs_is_doubted(commanded, meshtune):
    """A trial that takes twice the log's step is another program: it says what to compare, and keeps nothing."""
    shown = meshtune("trial", commanded, "--once", "--set", "measured.step_time_s=0.02675").out

    assert "2.00 times the log's 0.02675 s (old.log)" in shown
    assert "compare --dry-run with the command of the log" in shown
    assert "Not kept in the study: its step time is far from the log's" in shown
    assert_users_mistake(meshtune("trials", commanded), "has no trials")


@pytest.mark.usefixtures("no_ray")
def test_a_failure_is_shown_and_not_kept(commanded, meshtune):
    """A trial that fails ends with status 1, its log and its reason; the study knows nothing of it."""
    done = meshtune("trial", commanded, "--once", "--set", "trial.environment={GREETING: hi, FAILS: '1'}")

    assert done.status == 1
    assert "ValueError: no such data" in done.out
    assert "  | GREETING hi SECRET 7" in done.err.splitlines()
    assert_users_mistake(meshtune("trials", commanded), "has no trials")


@pytest.mark.usefixtures("no_ray")
def test_a_configuration_outside_the_search_runs_and_is_not_kept(commanded, meshtune):
    """What the study does not search can be tried, under the same values of what it searches too."""
    other = meshtune("trial", commanded, "--once", "--config", "tp=2,mbs=2,recompute=full", "--json")
    outside = meshtune("trial", commanded, "--once", "--config", "tp=1,dp=2", "--json", "--set", "space.tp=[2]")

    for done in (other, outside):
        assert done.status == 0, done.err
        assert done.json["step_time_s"] > 0
        assert (done.json["kept_as"], done.json["not_kept"]) == (None, "it is no candidate that the study searches")
        assert done.json["ratio_to_log"] is None


@pytest.mark.usefixtures("no_ray")
def test_a_trial_of_another_program_is_not_kept(commanded, meshtune):
    """Where the stored trials ran another program, the trial runs, and the study stays as it was."""
    meshtune("trial", commanded, "--once")
    again = meshtune("trial", commanded, "--once", "--json", "--set", "trial.steps=3")

    assert again.status == 0, again.err
    assert again.json["kept_as"] is None
    assert "its trials would no longer mean the same" in again.json["not_kept"]
    assert "note: the study will not keep this trial: " in again.err
    assert len(meshtune("trials", commanded, "--json").json["trials"]) == 1


def test_mistakes_with_a_trial(commanded, meshtune):
    """An unknown configuration, one without a current one to name, and neither mode are refused with the choice."""
    assert_users_mistake(meshtune("trial", commanded), "--dry-run", "--once")
    assert_users_mistake(meshtune("trial", commanded, "--dry-run", "--once"), "--dry-run", "--once")
    assert_users_mistake(meshtune("trial", commanded, "--dry-run", "--config", "curent"), "--config", "current")
    assert_users_mistake(meshtune("trial", commanded, "--dry-run", "--config", "tq=2"), "tq", "tp")
    assert_users_mistake(meshtune("trial", commanded, "--dry-run", "--config", "tp=3"), "tp")
    nameless = ("--set", "current=null", "--set", "measured=null")
    assert_users_mistake(meshtune("trial", commanded, "--dry-run", *nameless), "current", "pp=4")
