"""Ranks of one trial on several hosts of a Ray cluster: raylets on this machine stand for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

HEAD = """
import dataclasses
import json

from costmodels.job.parallel_config import ParallelConfig
from tests.support.programs.small_backends import backend_of, cluster_of
from trials.ray_executor import RayExecutor
from trials.ray_local import import_ray

ray = import_ray()
from ray.cluster_utils import Cluster

CHOSEN = ParallelConfig(dp=2, pp=2, mbs=2, sequence_parallel=False)


def backend(**changes):
    return dataclasses.replace(
        backend_of(chosen_clock="virtual", hang_limit_s=60.0, **changes), cluster=cluster_of(2, hosts=2), spreads=True
    )


def observed(executor, number):
    executor.submit(number, CHOSEN)
    return ended(executor)


def ended(executor):
    found = {}
    while not found:
        found = executor.poll(1.0)
    return found[0][1]

"""

TWO_TRIALS = """
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
with RayExecutor(backend(), parallel_trials=1, address=cluster.address) as executor:
    print(json.dumps([executor.num_free_slots, executor.slots_note]))
    for number in range(2):
        print(json.dumps(observed(executor, number).as_json()))
ray.shutdown()
cluster.shutdown()
"""

LOST_HOST = """
soon = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": soon}
)
hosts = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]
ray.init(address=cluster.address, log_to_driver=False)
long = backend(min_steps=1000, max_steps=1000)
with RayExecutor(long, parallel_trials=1, address=cluster.address) as executor:
    executor.submit(0, CHOSEN)
    while not executor.reported[0]:
        assert not executor.poll(1.0)
    (group,) = ray.util.placement_group_table().values()
    second = group["bundles_to_node_id"][1]
    cluster.remove_node(next(host for host in hosts if host.node_id == second), allow_graceful=False)
    print(json.dumps(ended(executor).as_json()))
ray.shutdown()
cluster.shutdown()
"""


def _told(program):
    """What a driver on some raylets prints; a process of its own, because the tests' own may have a Ray already."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_trial_runs_on_two_hosts_and_so_does_the_next():
    """Four ranks fill two hosts of two cores each, form one group, and train; the second trial finds warm hosts."""
    slots, *trials = _told(TWO_TRIALS)

    assert slots == [1, ""]
    assert [(found["status"], len(found["step_times_s"])) for found in trials] == [("ok", 3)] * 2, trials
    assert [found["conditions"]["ranks"] for found in trials] == [4, 4]


def test_a_lost_host_ends_its_trial():
    """A trial whose host dies is an incident that says so, and its second attempt waits little for another host."""
    (lost,) = _told(LOST_HOST)

    assert lost["status"] == "incident"
    assert "a host of the trial is lost" in lost["reason"]
    assert "the cluster provided no host in place of a lost one" in lost["reason"]
