"""`meshtune watch` on a real Slurm cluster, whose node goes down and comes back."""

import pytest

from tests.support.own_slurm import own_slurm
from tests.support.paced_hosts import PacedHosts
from tests.support.studies.watch_process import ROOT, watching
from trials.command.slurm.nodes import read_nodes, slurm_nodes
from trials.command.slurm.queue import QueueError

STUDY = f"""
name: watched
model: {ROOT}/configs/models/gpt-small.yaml
cluster: {{name: cpu-host, hosts: 3, devices_per_host: 2}}
job: {{sequence_length: 64, global_batch_size: 48, precision: fp32}}
trial: {{backend: simulated}}
"""

QUICK = """
from tuner.watch import probing
probing.TRANSFERS = 2
"""
"""Settings with which a probe takes less time."""


def test_a_node_goes_down_and_comes_back(tmp_path):
    """A node that goes down is answered with a layout of the two others, its return with one of all three."""
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    with own_slurm(num_nodes=3) as cluster:
        options = ("--hosts-from", "slurm", "--settle", "2", "--switch-restart", "1")
        with watching(tmp_path, *options, environment=cluster.environment) as watch:
            first = watch.wait_for("stay", 0)
            cluster.ask("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=test")
            lost = watch.wait_for("change", 1)
            cluster.ask("scontrol", "update", "NodeName=node1", "State=RESUME")
            watch.wait_for("settle", 2)
            back = watch.wait_for("change", 3)
        with watching(tmp_path, *options, "--nodes", "node[0,2]", environment=cluster.environment) as watch:
            fewer = watch.wait_for("change", 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
            with pytest.raises(QueueError, match=r"node9"):
                slurm_nodes("node9")

    assert first["running"]["names"] == ["node0", "node1", "node2"]
    assert lost["events"] == ["h1 is lost"]
    assert lost["best"]["names"] == ["node0", "node2"]
    assert lost["best"]["config"]["dp"] * lost["best"]["config"]["tp"] * lost["best"]["config"]["pp"] == 4
    assert back["best"]["names"] == ["node0", "node1", "node2"]
    assert fewer["forced"]
    assert fewer["best"]["names"] == ["node0", "node2"]


def test_a_link_slows_down_and_recovers(tmp_path):
    """In a job of two nodes, one of which really sends at a tenth of its rate, the path between them is named with its
    share, and as whole when it is; a node that the job lacks is told and not guessed.
    """
    (tmp_path / "study.yaml").write_text(STUDY.replace("hosts: 3", "hosts: 2"), encoding="utf-8")
    with own_slurm(num_nodes=3) as cluster:
        paced = PacedHosts(tmp_path, cluster.nodes, 20_000_000)
        job = cluster.submit("--nodes=2", "--nodelist=node[0-1]", "--wrap=sleep 600")
        options = ("--hosts-from", "slurm", "--settle", "1e9", "--probe", "0.1", "--nodes")
        environment = {**cluster.environment, **paced.environment, "SLURM_JOB_ID": job}
        with watching(tmp_path, *options, "node[0-1]", environment=environment, settings=QUICK) as watch:
            watch.wait_for_references(2, tmp_path / "watched.watch.json")
            paced.set_pace("node1", 2_000_000)
            slow = watch.wait_for_event("h0-h1 has 0.")
            paced.set_pace("node1", 20_000_000)
            back = watch.wait_for_event("h0-h1 has 1 of")
        with watching(tmp_path, *options, "node[1-2]", environment=environment) as watch:
            watch.wait_for_trouble("the links of node1, node2 cannot be probed")

    assert len(slow["events"]) == len(back["events"]) == 1
    assert 0.05 < float(slow["events"][0].split()[2]) < 0.4


def test_states_and_gpus_are_read():
    """Nodes that are drained, down or silent are not up, and GPUs of several kinds are added."""
    lines = (
        "NodeName=a State=IDLE CPUTot=96 Gres=gpu:h100:8(S:0-1),nvme:1 Reason=none",
        "NodeName=b State=MIXED+PLANNED CPUTot=96 Gres=gpu:a100:4,gpu:h100:4(IDX:0-3)",
        "NodeName=c State=ALLOCATED+DRAIN CPUTot=96 Gres=gpu:8",
        "NodeName=d State=DOWN*+CLOUD CPUTot=96 Gres=(null)",
        "NodeName=e State=IDLE+NOT_RESPONDING CPUTot=2",
    )
    nodes = read_nodes("\n".join(lines))

    assert [node.name for node in nodes if node.is_up] == ["a", "b"]
    assert [node.gpus for node in nodes] == [8, 8, 8, None, None]
    with pytest.raises(QueueError, match="printed no node"):
        read_nodes("slurm_load_node error")
