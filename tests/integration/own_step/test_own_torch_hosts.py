"""A user's module on several hosts of a Ray cluster: raylets on this machine stand for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="steps in torch need torch: pip install 'meshtune[torch]'")

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import torch
from torch import nn


def step():
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return module, (torch.randn(8, 32),), lambda module, x: (module(x) ** 2).mean()
"""

TRIAL = """
import json

from costmodels.job.parallel_config import ParallelConfig
from trials.on_ray.executor import RayExecutor
from trials.on_ray.local import import_ray
from tuner import load_study

ray = import_ray()
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
backend = load_study("study.yaml").trials.backend
with RayExecutor(backend, parallel_trials=1, address=cluster.address) as executor:
    executor.submit(0, ParallelConfig(dp=2, zero_stage=3))
    found = {}
    while not found:
        found = executor.poll(1.0)
    print(json.dumps(found[0][1].as_json()))
ray.shutdown()
cluster.shutdown()
"""


def test_ranks_of_a_trial_are_on_all_hosts(new_study, tmp_path):
    """With `spread`, each host of the study is a machine of the cluster, and together they train the module."""
    trial = {"backend": "torch", "spread": True, "min_steps": 2, "max_steps": 2, "clock": "wall"}
    new_study("torch", PROGRAM)(cluster={"name": "cpu-host", "hosts": 2, "devices_per_host": 1}, trial=trial)
    (tmp_path / "trial.py").write_text(TRIAL, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "trial.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["status"] == "ok", found
    assert found["conditions"]["ranks"] == 2
    assert "cores" not in found["conditions"]  # known of one machine alone
