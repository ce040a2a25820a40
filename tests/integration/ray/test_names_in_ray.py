"""Names of a study in Ray's own lists, on a cluster with a dashboard."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from benchmarks.support.ray_nodes import RayNodes
from tests.support.studies.command_line import ROOT

LIMIT_S = 120.0

STUDY = """
name: tuned-here
model: {model}
cluster: {{name: cpu-host, devices_per_host: 2, hosts: 2}}
job: {{sequence_length: 64, global_batch_size: 4}}
search: {{parallel_trials: 1, max_trials: 1, draws: 10}}
trial:
  backend: command
  launch: per_host
  command: [sleep, "600"]
  time_limit: 60
"""


@pytest.fixture(scope="module")
def nodes():
    """A head, and two nodes that are the hosts of a trial."""
    pytest.importorskip("opencensus", reason="ray[default] is not installed")
    with RayNodes(0, 2, 2, jobs=True) as running:
        yield running


def listed(nodes, kind):
    """What `ray list KIND` prints."""
    done = nodes.ray("list", kind, "--address", nodes.jobs_address, "--format", "json", "--detail")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("[") :])


def test_rays_lists_name_the_study(nodes, tmp_path):
    """`ray list` shows study and trial on actors, tasks and placement groups, and the study in the job's metadata."""
    (tmp_path / "study.yaml").write_text(STUDY.format(model=ROOT / "configs/models/gpt-tiny.yaml"), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "tuner", "run", "study.yaml", "--ray-address", nodes.address],
        cwd=tmp_path,
        env=os.environ | nodes.environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        try:
            deadline_s = time.monotonic() + LIMIT_S
            while sum("sleep 600" in command for command in nodes.processes().values()) < 2:
                assert driver.poll() is None, driver.stdout.read()
                assert time.monotonic() < deadline_s, "the trial did not start"
                time.sleep(0.3)
            actors, tasks, groups, jobs = (
                listed(nodes, kind) for kind in ("actors", "tasks", "placement-groups", "jobs")
            )
        finally:
            driver.terminate()
            driver.communicate(timeout=LIMIT_S)

    named = sorted(re.sub(r"-\d+", "-N", actor["name"]) for actor in actors if actor["state"] == "ALIVE")
    assert named == [
        *("tuned-here/mailbox-N", "tuned-here/slot-N", "tuned-here/slot-N/host-N", "tuned-here/slot-N/host-N")
    ]
    assert "tuned-here/0.0" in {task["name"] for task in tasks}
    assert [re.sub(r"-\d+", "-N", group["name"]) for group in groups] == ["tuned-here/hosts-N"]
    assert [job["metadata"]["meshtune_study"] for job in jobs if job["metadata"]] == ["tuned-here"]
