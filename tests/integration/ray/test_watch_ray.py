"""`meshtune watch` on real raylets, of which one is killed and another joins."""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from benchmarks.support.ray_nodes import RayNodes
from tests.support.paced_hosts import PacedHosts
from tests.support.studies.watch_process import LIMIT_S, ROOT, watching

STUDY = f"""
name: watched
model: {ROOT}/configs/models/gpt-small.yaml
cluster: {{name: cpu-host, hosts: 3, devices_per_host: 2}}
job: {{sequence_length: 64, global_batch_size: 48, precision: fp32}}
trial: {{backend: simulated}}
"""

FAST_BYTES_PER_S, SLOW_BYTES_PER_S = 20_000_000, 2_000_000
QUICK = """
from trials.on_ray import probe
from tuner.watch import probing
probe.ANSWER_LIMIT_S, probing.TRANSFERS = 8.0, 2
"""
"""Settings with which a probe takes less time, and a node that hangs is told sooner."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes, their paces, and the environment of a driver, which has none."""

    nodes: RayNodes
    paced: PacedHosts
    driver: Mapping[str, str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head, and three nodes of two CPUs that send at the fast rate; the last test of the file kills one."""
    paced = PacedHosts(tmp_path_factory.mktemp("paced"), ("a", "b", "c"), FAST_BYTES_PER_S)
    with RayNodes(0) as nodes:
        driver = dict(nodes.environment)
        for name in ("a", "b", "c"):
            nodes.environment = {**driver, **paced.environment, "PACED_HOST": name}
            nodes.add(2)
        yield Cluster(nodes=nodes, paced=paced, driver=driver)


def test_a_link_slows_down_and_recovers(tmp_path, cluster):
    """A host that really sends at a tenth of its rate is named with its share, by a watch that goes on with what a
    killed one has measured; when it sends as before, its link is back. A host that hangs is told and changes nothing,
    and the watch ends in order when it is told to.
    """
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    nodes, paced = cluster.nodes, cluster.paced
    state = tmp_path / "watched.watch.json"
    options = ("--hosts-from", "ray", "--ray-address", nodes.address, "--probe", "0.1")
    with watching(tmp_path, *options, environment=cluster.driver, settings=QUICK) as watch:
        watch.wait_for("stay", 0)
        watch.wait_for_references(6, state)
    paced.set_pace("b", SLOW_BYTES_PER_S)
    with watching(tmp_path, *options, environment=cluster.driver, settings=QUICK) as watch:
        slow = watch.wait_for_event("h1 has 0.")
        paced.set_pace("b", FAST_BYTES_PER_S)
        back = watch.wait_for_event("h1 has 1 of")
        actors = [process for process, command in nodes.on_node(2).items() if "_ProbeHost" in command]
        for process in actors:
            os.kill(process, signal.SIGSTOP)
        watch.wait_for_trouble("the links of 127.0.0.4 cannot be probed: gave no answer within")
        later = watch.answers()[watch.answers().index(back) + 1 :]
        watch.process.send_signal(signal.SIGTERM)
        status = watch.process.wait(LIMIT_S)

    kept = json.loads(state.read_text(encoding="utf-8"))
    references = [pair["reference_bytes_per_s"] for pair in kept["links"]["pairs"]]
    share = float(slow["events"][0].split()[2])
    assert status == 75
    assert len(actors) == 1
    assert [answer["events"] for answer in later if answer["events"]] == []
    assert len(slow["events"]) == len(back["events"]) == 1
    assert 0.05 < share < 0.4
    assert max(references) < 2 * FAST_BYTES_PER_S


def test_a_raylet_is_killed_and_another_joins(tmp_path, cluster):
    """A killed raylet is answered with a layout of the two others; a new one takes its place, a weak one does not."""
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    nodes = cluster.nodes
    options = ("--hosts-from", "ray", "--settle", "2", "--switch-restart", "1", "--ray-address", nodes.address)
    with watching(tmp_path, *options, environment=cluster.driver) as watch:
        first = watch.wait_for("stay", 0)
        nodes.kill(2, workers=True)
        lost = watch.wait_for("change", 1)
        nodes.add(1)
        nodes.add(2)
        watch.wait_for("settle", 2)
        back = watch.wait_for("change", 3)

    assert first["running"]["names"] == ["127.0.0.3", "127.0.0.4", "127.0.0.5"]
    assert lost["events"] == ["h1 is lost"]
    assert lost["forced"]
    assert lost["best"]["names"] == ["127.0.0.3", "127.0.0.5"]
    assert back["events"] == []
    assert back["best"]["names"] == ["127.0.0.3", "127.0.0.7", "127.0.0.5"]
