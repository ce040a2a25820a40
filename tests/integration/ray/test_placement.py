"""What a Ray cluster has room for; raylets on this machine stand for its hosts, with GPUs that only Ray counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trials.backend import HostNeeds
from trials.on_ray.placement import Machine, machines_in_words, machines_of, no_room, reserve_hosts, room_for

ROOT = Path(__file__).resolve().parents[3]
BIG, SMALL, HEAD = Machine(cpus=64, gpus=8), Machine(cpus=32, gpus=4), Machine(cpus=4, gpus=0)
WHOLE, HALF = HostNeeds(gpus=8, processes=1), HostNeeds(gpus=4, processes=1)

HEADER = """
import json
import os
import signal
import sys
from pathlib import Path

from hardware.cluster_file import read_described_cluster
from hardware.io.errors import ConfigError
from tests.support.programs.small_commands import backend_of
from trials.on_ray.executor import RayExecutor
from trials.on_ray.local import import_ray

ray = import_ray()
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})


def backend(hosts, gpus, **changes):
    described = {"device": "H100-SXM-80", "hosts": hosts, "devices_per_host": gpus}
    return backend_of(cluster=read_described_cluster(described, Path()).cluster, **changes)


def tell(backend, slots, **options):
    notes, limits = [], {"placement_wait_s": 600.0} | options
    executor = RayExecutor(backend, parallel_trials=slots, address=cluster.address, on_note=notes.append, **limits)
    found = {"notes": notes}
    try:
        with executor:
            groups = [ray.util.placement_group_table(place.group) for place in executor._places if place.group]
            nodes = [sorted(group["bundles_to_node_id"].values()) for group in groups]
            found |= {"slots": executor.num_free_slots, "note": executor.slots_note, "nodes": nodes}
    except (ConfigError, KeyboardInterrupt) as error:
        found |= {"error": str(error), "kind": type(error).__name__}
    left = [group["state"] for group in ray.util.placement_group_table().values()]
    print(json.dumps(found | {"left": sum(state != "REMOVED" for state in left)}), flush=True)


"""

TRIALS = """
cluster.add_node(num_cpus=4, num_gpus=8)
cluster.add_node(num_cpus=4, num_gpus=8)
ray.init(address=cluster.address, log_to_driver=False)
tell(backend(3, 8), 1)
tell(backend(1, 16), 1)
tell(backend(1, 4), 4)
tell(backend(1, 4), 4, share_hosts=True)
tell(backend(2, 4, launch="once"), 2)
held = ray.util.placement_group([{"GPU": 8}] * 2, strategy="STRICT_SPREAD")
held.wait(30)
tell(backend(2, 8), 1, placement_wait_s=0.5)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.alarm(3)
tell(backend(2, 8), 1)
cluster.add_node(num_cpus=4, num_gpus=8, labels={"ray.io/node-group": "gpus"})
tell(backend(4, 8), 2, placement_wait_s=0.5)
"""


def _told(program):
    """What a driver on some raylets prints; a process of its own, because the tests' own may have a Ray already."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"{HEADER}{program}\nray.shutdown()\ncluster.shutdown()"],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_cluster_is_asked_for_what_it_has():
    """What can never be is refused at once with the nearest that can; trials get hosts of their own unless they may
    share them; a wait ends at its limit or when it is interrupted, and then holds nothing; a cluster that may grow gets
    the wait, and the run says so.
    """
    too_many, too_large, alone, shared, elsewhere, busy, interrupted, growing = _told(TRIALS)

    assert "wants 1 CPU and 8 GPUs on each of 3 hosts for a trial" in too_many["error"]
    assert "it has 2 with 8 GPUs and 4 CPUs, 1 with 1 CPU" in too_many["error"]
    assert "cluster: {hosts: 2}, or start Ray on 1 more" in too_many["error"]
    assert "cluster: {hosts: 1, devices_per_host: 8}" in too_large["error"]

    assert alone["slots"] == 2
    assert alone["nodes"][0] != alone["nodes"][1]
    assert alone["note"].startswith("2 trials run at once instead of 4: each wants 1 CPU and 4 GPUs")
    assert "search.share_hosts: true lets trials share hosts, and then 4 run at once" in alone["note"]
    assert (shared["slots"], shared["note"]) == (4, "")
    assert (elsewhere["slots"], "reaches its hosts by itself" in elsewhere["note"]) == (1, True)

    assert "no slot of 1 CPU and 8 GPUs on each of 2 hosts within 0.5 s" in busy["error"]
    assert "search.placement_wait_s" in busy["error"]
    assert interrupted["kind"] == "KeyboardInterrupt"
    assert [told["left"] for told in (too_many, alone, shared)] == [0, 0, 0]
    (note,) = growing["notes"]
    assert note.startswith("a trial wants 1 CPU and 8 GPUs on each of 4 hosts, and of the 2 asked for the cluster has")
    assert "room for 0, with 3 with 8 GPUs" in note
    assert "it may grow, and gets 0.5 s for that" in note
    assert "within 0.5 s" in growing["error"]
    assert [told["left"] for told in (busy, interrupted, growing)] == [1] * 3  # what stands for another user's


@pytest.mark.parametrize(
    ("hosts", "machines", "alone", "shared"),
    [
        ((WHOLE,) * 2, (BIG, BIG, BIG, HEAD), 1, 1),
        ((HALF,) * 2, (BIG, BIG, BIG), 1, 3),
        ((HALF,), (BIG, BIG, SMALL), 2, 5),
        ((HALF,), (SMALL, SMALL), 2, 2),
        ((HALF,) * 3, (BIG, BIG, HEAD), 0, 0),
        ((HostNeeds(cpus=4),), (Machine(cpus=8, gpus=0), HEAD), 1, 3),
        ((HostNeeds(cpus=1, gpus=8),), (Machine(cpus=0, gpus=8),), 0, 0),
    ],
    ids=["whole", "half-of-two", "half-of-one", "small", "too-few", "cores", "no-cores"],
)
def test_room_is_counted(hosts, machines, alone, shared):
    """A trial's hosts are machines of their own, and what is reserved keeps a second trial off each of them."""
    assert room_for(reserve_hosts(hosts, machines), machines) == alone
    assert room_for(hosts, machines) == shared


def test_machines_are_those_that_live():
    """A dead node counts no more; like ones are told together."""
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}, "Labels": {"ray.io/node-group": "a"}}
    machines = machines_of([node, node, node | {"Alive": False}, {"Alive": True, "Resources": {}, "Labels": None}])

    assert machines_in_words(machines) == "2 with 2 GPUs and 8 CPUs, 1 with 0 CPUs"
    assert [machine.may_multiply for machine in machines] == [True, True, False]


@pytest.mark.parametrize(
    ("hosts", "machines", "nearest"),
    [
        ((HostNeeds(cpus=2, gpus=8),), (Machine(cpus=1, gpus=8),), "start Ray with --num-cpus=2 or more on every host"),
        ((HALF,) * 2, (HEAD,), "join a cluster that has some"),
        ((HostNeeds(cpus=8),) * 2, (HEAD,), "cluster: {hosts: 1, devices_per_host: 4}"),
        ((WHOLE,) * 2, (SMALL, SMALL, SMALL), "cluster: {hosts: 2, devices_per_host: 4}"),
    ],
    ids=["cores", "no-gpus", "fewer-cores", "fewer-gpus"],
)
def test_the_nearest_is_named(hosts, machines, nearest):
    """What is refused comes with what would do."""
    assert nearest in str(no_room(hosts, machines))
