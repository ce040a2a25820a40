"""Ranks of one trial on several hosts of a Ray cluster: raylets on this machine stand for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
from ray.cluster_utils import Cluster
import ray

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
from tests.trials.torch_training.small_backends import DP, backend_of, cluster_of
from costmodels.parallel import ParallelConfig
import dataclasses
from trials.ray_executor import RayExecutor
from trials.backend import Status

backend = dataclasses.replace(
    backend_of(chosen_clock="virtual", hang_limit_s=60.0), cluster=cluster_of(2, hosts=2), spreads=True
)
chosen = ParallelConfig(dp=2, pp=2, mbs=2, sequence_parallel=False)
with RayExecutor(backend, parallel_trials=1, address=cluster.address) as executor:
    print("slots", executor.num_slots, executor.slots_note)
    for number in range(2):
        executor.submit(number, chosen)
        ended = {}
        while not ended:
            ended = dict(executor.poll(1.0))
        found = ended[number]
        print("trial", number, found.status, len(found.step_times_s), dict(found.conditions)["ranks"])
        if found.status is not Status.OK:
            print(found.log_tail)
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def told():
    """What a driver on two raylets prints; a process of its own, because the tests' own may have a Ray already."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_trial_runs_on_two_hosts_and_so_does_the_next(told):
    """Four ranks fill two hosts of two cores each, form one group, and train; the second trial finds warm hosts."""
    assert told[:3] == ["slots 1 ", "trial 0 ok 3 4", "trial 1 ok 3 4"]
