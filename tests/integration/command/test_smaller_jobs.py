"""Smaller jobs of a user's own training program: torch and gloo train the sizes that its command is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_slurm import own_slurm

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "programs" / "layered_training.py"
MODEL = ROOT / "configs" / "models" / "gpt-small.yaml"

STUDY = f"""
name: smaller
model: {MODEL}
cluster: {{name: cpu-host, hosts: 8, devices_per_host: 2}}
job: {{sequence_length: 128, global_batch_size: 64}}
runtime: torch-reference
space: {{tp: [1], cp: [1], up: [1], vpp: [1], mbs: [1, 2], pp: [1, 2, 4]}}
search: {{max_trials: 3, seed: 1, parallel_trials: 1, baseline: false, prune: false, draws: 30, rehearse: "off"}}
trial:
  backend: command
  command: [{sys.executable}, -m, torch.distributed.run,
            "--nnodes={{num_hosts}}", "--nproc-per-node={{devices_per_host}}",
            "--node-rank={{host_rank}}", "--master-addr={{master_address}}", "--master-port={{master_port}}",
            {PROGRAM}, --layers, "{{num_layers}}", --pp, "{{pp}}", --mbs, "{{mbs}}", --batch, "{{global_batch_size}}",
            --steps, "{{total_steps}}"]
  log: megatron
  logs: logs
  warmup_steps: 1
  steps: 3
  proxy: {{hosts: 1, full_trials: 0}}
"""

ON_RAYLETS = """
import sys

from tests.support.studies.in_process_executor import run_study
from trials.on_ray.local import import_ray
from tuner.study_file.config import load_study

ray = import_ray()
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for _ in range(3):
    cluster.add_node(num_cpus=1)
run_study(load_study("study.yaml", storage="sqlite:///study.db"), ray_address=cluster.address)
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture
def study(tmp_path):
    """The study, and a function that runs a command of Meshtune on it and returns what it prints as JSON."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY, encoding="utf-8")
    return file


def meshtune(command, file, *arguments, environment=None):
    """What a command prints as JSON."""
    words = [
        sys.executable,
        "-m",
        "tuner",
        command,
        str(file),
        "--json",
        "--storage",
        f"sqlite:///{file.parent}/study.db",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {})
    done = subprocess.run(
        [*words, *arguments], cwd=file.parent, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def told_sizes(folder):
    """Sizes that the program of each trial got, which it prints first."""
    found = []
    for path in sorted(folder.glob("trial-*-host-0.log")):
        lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
        found.append(json.loads(lines[0]))
    return found


@pytest.mark.slow
def test_a_study_for_eight_hosts_runs_on_one(study):
    """With no trial at full size the machine needs the cores of one host; its programs train the layers, stages and
    batch of the smaller job on two ranks, and the answer for 16 devices says that it is extrapolated from them.
    """
    found = meshtune("run", study, "--ray-address", "local")

    sizes = told_sizes(study.parent / "logs")
    trials = meshtune("trials", study)["trials"]
    assert len(sizes) == len(trials) == found["trials"] == 3
    assert all(trial["is_proxy"] and trial["status"] == "ok" for trial in trials), trials
    for told, trial in zip(sizes, trials, strict=True):
        full_pp, dp = trial["config"]["pp"], 2 // told["pp"]
        assert (told["world"], told["pp"], told["mbs"]) == (2, min(full_pp, 2), trial["config"]["mbs"])
        # a stage keeps its layers, and micro-batches are as many per stage as in the full job
        assert told["layers"] == 8 // full_pp * told["pp"]
        rounds = min(4, max(1, round(64 * full_pp / 16 / told["mbs"] / full_pp)))
        assert told["batch"] == dp * told["mbs"] * told["pp"] * rounds
    assert found["extrapolated"] is True
    assert found["source"] == "predicted"
    best = meshtune("best", study)
    assert best["extrapolated"] is True
    assert best["config"]["dp"] * best["config"]["pp"] == 16


@pytest.mark.slow
def test_the_last_trial_takes_all_hosts_of_a_ray_cluster(study):
    """On four raylets the smaller jobs run on two hosts, as many ranks as told, and the last trial on all four."""
    changed = STUDY.replace("hosts: 8, devices_per_host: 2", "hosts: 4, devices_per_host: 1").replace(
        "hosts: 1, full_trials: 0", "hosts: 2, full_trials: 1"
    )
    study.write_text(changed, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", ON_RAYLETS],
        cwd=study.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    trials = meshtune("trials", study)["trials"]
    assert [trial["is_proxy"] for trial in trials] == [True, True, False], trials
    assert [told["world"] for told in told_sizes(study.parent / "logs")] == [2, 2, 4]
    assert told_sizes(study.parent / "logs")[-1]["layers"] == 8
    assert meshtune("best", study)["source"] == "measured"


@pytest.mark.slow
def test_jobs_of_slurm_ask_for_the_hosts_of_the_smaller_job(study):
    """A study for eight nodes runs in a Slurm cluster that has two: each job asks for two, whose ranks find each
    other.
    """
    changed = STUDY.replace("hosts: 8, devices_per_host: 2", "hosts: 8, devices_per_host: 1").replace(
        "hosts: 1, full_trials: 0", "hosts: 2, full_trials: 0"
    )
    changed = changed.replace("backend: command\n", "backend: command\n  launch: slurm\n")
    # this machine is every node, whose names nobody resolves
    study.write_text(changed.replace("{master_address}", "127.0.0.1"), encoding="utf-8")
    with own_slurm(num_nodes=2) as slurm:
        started = meshtune("trial", study, "--dry-run", "--proxy", "--config", "pp=4,dp=2,mbs=1")
        found = meshtune("run", study, environment=slurm.environment)

    assert "--nodes=2" in started["submit"]
    assert "--layers 4 --pp 2 " in " ".join(started["command"])
    assert (found["trials"], found["extrapolated"]) == (3, True)
    assert [told["world"] for told in told_sizes(study.parent / "logs")] == [2, 2, 2]
