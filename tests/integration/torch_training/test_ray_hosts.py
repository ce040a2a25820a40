"""Ranks of one trial on several hosts of a Ray cluster: raylets on this machine stand for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import dataclasses
import json

from costmodels.job.parallel_config import ParallelConfig
from tests.support.programs.small_backends import backend_of, cluster_of
from trials.on_ray.executor import RayExecutor
from trials.on_ray.local import import_ray

ray = import_ray()
from ray.cluster_utils import Cluster

CHOSEN = ParallelConfig(dp=2, pp=2, mbs=2, sequence_parallel=False)
SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}


def opened(**changes):
    backend = backend_of(chosen_clock="virtual", hang_limit_s=60.0, **changes)
    backend = dataclasses.replace(backend, cluster=cluster_of(2, hosts=2), spreads=True)
    return RayExecutor(backend, parallel_trials=1, address=cluster.address)


def tell_end(executor):
    found = {}
    while not found:
        found = executor.poll(1.0)
    print(json.dumps(found[0][1].as_json()))


head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SOON}
cluster = Cluster(initialize_head=True, head_node_args=head)
hosts = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]
ray.init(address=cluster.address, log_to_driver=False)
with opened() as executor:
    print(json.dumps([executor.num_free_slots, executor.slots_note]))
    for number in range(2):
        executor.submit(number, CHOSEN)
        tell_end(executor)
with opened(min_steps=1000, max_steps=1000) as executor:
    executor.submit(0, CHOSEN)
    while not executor.reported[0]:
        assert not executor.poll(1.0)
    groups = ray.util.placement_group_table().values()
    second = next(group for group in groups if group["state"] == "CREATED")["bundles_to_node_id"][1]
    cluster.remove_node(next(host for host in hosts if host.node_id == second), allow_graceful=False)
    tell_end(executor)
ray.shutdown()
cluster.shutdown()
"""


def test_a_trial_runs_on_two_hosts():
    """Four ranks on two hosts of two cores each train as one group, trial after trial in warm hosts; a trial whose host
    dies is an incident that says so, and its second attempt waits little for another host.
    """
    # a process of its own, because the tests' own may have a Ray already
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    slots, *trials, lost = [json.loads(line) for line in done.stdout.splitlines()]

    assert slots == [1, ""]
    assert [(found["status"], len(found["step_times_s"])) for found in trials] == [("ok", 3)] * 2, trials
    assert [found["conditions"]["ranks"] for found in trials] == [4, 4]
    assert lost["status"] == "incident"
    assert "a host of the trial is lost" in lost["reason"]
    assert "the cluster provided no host in place of a lost one" in lost["reason"]
