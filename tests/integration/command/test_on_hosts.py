"""Commands on several hosts of a Ray cluster: raylets on this machine stand for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import json
import os
import sys
import time

from pathlib import Path

host_rank, num_hosts, address, port, visible, first_log = sys.argv[1:7]
print(json.dumps({"host_rank": host_rank, "num_hosts": num_hosts, "at": f"{address}:{port}"}), flush=True)
if host_rank == "1":
    while not (Path(first_log).exists() and Path(first_log).stat().st_size):  # the trial ends as soon as this one does
        time.sleep(0.01)
    for iteration in range(1, 1000):
        time.sleep(0.02)
        print(f"iteration {iteration}/ 1000 | elapsed time per iteration (ms): 20.0 |", flush=True)
time.sleep(3600)
"""

SCRIPT = """
import json
import sys
from pathlib import Path

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster_file import read_described_cluster
from tests.support.programs.small_commands import backend_of
from trials.command.backend import COMMAND_RANKS
from trials.ranks.contract import RanksLostError
from trials.on_ray.executor import RayExecutor
from trials.on_ray.hosts import RayRanks
from trials.on_ray.local import import_ray

ray = import_ray()
from ray.cluster_utils import Cluster

program, logs = sys.argv[1:3]
hosts = read_described_cluster({"name": "cpu-host", "hosts": 2, "devices_per_host": 2}, Path()).cluster
log = f"{logs}/trial-000{{trial}}-host-0.log"
told = ("{host_rank}", "{num_hosts}", "{master_address}", "{master_port}", "{num_devices}", log)
command = (sys.executable, program, *told)
backend = backend_of(arguments=command, cluster=hosts, logs=Path(logs))
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
with RayExecutor(backend, parallel_trials=1, address=cluster.address) as executor:
    for number in range(2):
        executor.submit(number, ParallelConfig(dp=4))
        found = {}
        while not found:
            found = executor.poll(1.0)
        print(json.dumps(found[0][1].as_json()))
group = ray.util.placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD")
ranks = RayRanks(group, backend.hosts, COMMAND_RANKS, is_retry=False, name="ours").start()
arguments = ("trials.command.host_program:run_host", backend.plan(ParallelConfig(dp=4), 2))
ranks.launch(*arguments, num_ranks=2)
ray.kill(ranks._hosts[1])
for again in (ranks.kill, lambda: ranks.launch(*arguments, num_ranks=2)):
    try:
        again()
    except RanksLostError:
        print("lost")
ranks.close()
ray.shutdown()
cluster.shutdown()
"""


def test_a_command_runs_on_every_host(tmp_path):
    """Each host of a placement group runs the command once, told its rank and one address; times come from any host,
    the commands are ended together, and a second trial follows at once. A host that is lost while ranks are ended is
    lost to the next launch too.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(program), str(tmp_path / "logs")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trials = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [trial["status"] for trial in trials] == ["ok", "ok"]
    assert done.stdout.splitlines()[2:] == ["lost", "lost"]
    assert all(trial["step_times_s"] == [0.02, 0.02, 0.02] for trial in trials)

    for number in range(2):
        first_lines = [
            json.loads((tmp_path / "logs" / f"trial-000{number}-host-{host}.log").read_text().splitlines()[0])
            for host in range(2)
        ]
        assert [line["host_rank"] for line in first_lines] == ["0", "1"]
        assert {line["num_hosts"] for line in first_lines} == {"2"}
        assert len({line["at"] for line in first_lines}) == 1
