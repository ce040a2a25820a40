"""`meshtune watch` on real raylets, of which one is killed and another joins."""

from benchmarks.support.ray_nodes import RayNodes
from tests.support.studies.watch_process import ROOT, watching

STUDY = f"""
name: watched
model: {ROOT}/configs/models/gpt-small.yaml
cluster: {{name: cpu-host, hosts: 3, devices_per_host: 2}}
job: {{sequence_length: 64, global_batch_size: 48, precision: fp32}}
trial: {{backend: simulated}}
"""


def test_a_raylet_is_killed_and_another_joins(tmp_path):
    """A killed raylet is answered with a layout of the two others; a new one takes its place, a weak one does not."""
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    with RayNodes(0, 2, 2, 2) as nodes:
        options = ("--hosts-from", "ray", "--settle", "2", "--switch-restart", "1", "--ray-address", nodes.address)
        with watching(tmp_path, *options, environment=nodes.environment) as watch:
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
