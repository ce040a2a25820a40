"""Kill a node of a Ray cluster while a study runs on it, repeatedly, and check the trials afterwards.

    python -m benchmarks.endurance.lost_node [--rounds 5] [--trials 6] [--seed 0] [--json]

Each round starts four raylets on this machine, a head and three nodes of two CPUs, and runs two studies on them one
after the other. The trials of the first are simulated. The trials of the second run a command that leaves a child in a
session of its own. When two trials have ended, a node that works on a trial is killed by SIGKILL of its raylet. If
trials are simulated, its workers are killed too, because they might otherwise end their trials before they notice. Then
these claims are checked from outside: the study ends, every trial has ended once and successfully, each candidate was
tried once, exactly the lost trials were started a second time, the processes of the dead node end soon, and no process
is left.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.process_table import below, marked_processes
from benchmarks.support.ray_nodes import RayNodes
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from tuner.storage.opening import find_study
from tuner.storage.record import TrialRecord, read_records
from tuner.study_file.storage_address import StorageAddress

ROOT = Path(__file__).resolve().parents[2]
NODES = (0, 2, 2, 2)
KINDS = ("simulated", "command")
STUDY = """
name: lost-node
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 64, global_batch_size: 16, precision: fp32}}
search:
  {{max_trials: {trials}, parallel_trials: 3, seed: {seed}, prune: false, confidence: 1.0, repeats: 0, baseline: false}}
trial: {trial}
"""
SIMULATED = "{backend: simulated, seconds_per_trial: 3}"
COMMAND = "{{backend: command, command: [{python}, {program}, '{{trial}}', {folder}]}}"
PROGRAM = """
import os
import subprocess
import sys
import time

trial, folder = sys.argv[1:]
with open(f"{folder}/trial-{trial}", "a") as file:
    file.write(f"{os.getpid()}\\n")
subprocess.Popen(["sleep", "3600"], start_new_session=True)
for iteration in range(1, 8):
    time.sleep(0.4)
    print(f" iteration {iteration}/ 7 | elapsed time per iteration (ms): 400.0 |", flush=True)
"""
MODEL = ROOT / "configs" / "models" / "gpt-small.yaml"
DONE_BEFORE = 2
"""Number of trials that have ended when the node is killed."""
STUDY_LIMIT_S = 300.0
GONE_LIMIT_S = 30.0
"""Time limit for the processes of a dead node to end [s]: its workers look for their raylet once a second."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all rounds and return the exit status."""
    parser = benchmark_parser("endurance.lost_node", __doc__)
    parser.add_argument("--rounds", type=count_at_least(1), default=5, help="rounds, each with fresh nodes (5)")
    parser.add_argument("--trials", type=count_at_least(4), default=6, help="trials of each study (6)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of trials (both)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first study (0)")
    return answer("lost_node", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for number in range(given.rounds):
        for kind in given.kinds:
            tell(f"round {number + 1} of {given.rounds}, {kind}")
            with tempfile.TemporaryDirectory(prefix="meshtune-") as folder:
                rows.append({"round": number + 1, **_run_round(kind, Path(folder), given.trials, given.seed + number)})
            tell(f"  {rows[-1]['retried']} retried, {rows[-1]['violations'] or 'all holds'}")
    violations = [f"round {row['round']}, {row['kind']}: {told}" for row in rows for told in row.pop("violations")]
    return {"rounds": rows, "violations": violations}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lost:
    """Processes lost with a node.

    Attributes:
        processes: Processes below the raylet, and those that these started before they ended: a worker that has not yet
            noticed the loss begins its next trial.
        gone_s: Time until all of them had ended [s]; None if some did not.
    """

    processes: frozenset[int]
    gone_s: float | None


def _run_round(kind: str, folder: Path, trials: int, seed: int) -> dict[str, Any]:
    """Run one study whose node is killed."""
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    trial = SIMULATED if kind == "simulated" else COMMAND.format(python=sys.executable, program=program, folder=folder)
    study = folder / "study.yaml"
    study.write_text(STUDY.format(model=MODEL, trials=trials, seed=seed, trial=trial), encoding="utf-8")
    storage = f"sqlite:///{folder}/study.db"
    begin_s = time.monotonic()
    with RayNodes(*NODES) as nodes:
        driver = _Driver(study, storage, nodes)
        try:
            lost = _kill_one(nodes, driver, kind)
            status = driver.process.wait(STUDY_LIMIT_S)
        finally:
            driver.process.kill()
            driver.process.wait()
    left = marked_processes(nodes.mark)
    stored = find_study(StorageAddress.parse(storage), "lost-node")
    records = read_records(stored) if stored is not None else []
    starts = {
        int(file.name.partition("-")[2]): [int(line) for line in file.read_text(encoding="ascii").splitlines()]
        for file in folder.glob("trial-*")
    }
    return {
        "kind": kind,
        "status": status,
        "trials": sum(record.finished for record in records),
        "retried": len(_retried(records)),
        "lost": len(lost.processes),
        "gone_s": lost.gone_s,
        "seconds": time.monotonic() - begin_s,
        "violations": [
            sentence
            for sentence, holds in (
                (f"the study ended with status {status}: {driver.told[-2000:]}", status == 0),
                (
                    f"some trials did not end, or failed: {[r.observation.reason for r in records if r.observation]}",
                    len(records) == trials and all(map(_ended_well, records)),
                ),
                ("a candidate was tried twice", len({str(record.params) for record in records}) == len(records)),
                ("no trial was lost with the node", bool(_retried(records))),
                (
                    "other trials than the lost ones were started again",
                    kind == "simulated" or _only_lost_ran_again(records, starts, lost),
                ),
                ("processes of the dead node did not end", lost.gone_s is not None),
                (f"processes are left: {left}", not left),
            )
            if not holds
        ],
    }


def _ended_well(record: TrialRecord) -> bool:
    return record.finished and record.step_time_s is not None


def _retried(records: Sequence[TrialRecord]) -> set[int]:
    """Return the trials that report that they lost their worker."""
    return {
        record.number
        for record in records
        if record.observation is not None and record.observation.reason.startswith("retried once, because")
    }


def _only_lost_ran_again(records: Sequence[TrialRecord], starts: dict[int, list[int]], lost: _Lost) -> bool:
    """Return whether exactly the trials that lost their worker were started twice, first on the dead node.

    A trial of the dead node whose result arrived just before the end counts as one of the others.
    """
    retried = _retried(records)
    counts = {number: len(commands) for number, commands in starts.items()}
    return all(starts[number][0] in lost.processes for number in retried) and counts == {
        record.number: 2 if record.number in retried else 1 for record in records
    }


class _Driver:
    """Process that runs `meshtune run`."""

    def __init__(self, study: Path, storage: str, nodes: RayNodes) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tuner", "run", str(study), "--json"),
                *("--storage", storage, "--ray-address", nodes.address),
            ],
            cwd=ROOT,
            env=nodes.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.told = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None, "it is a pipe"
        for line in self.process.stderr:
            self.told += line


def _kill_one(nodes: RayNodes, driver: _Driver, kind: str) -> _Lost:
    """Wait until some trials have ended, kill a node that works on a trial, and wait for its processes to end."""
    at_work = "ray::lost-node/" if kind == "simulated" else "sleep 3600"
    deadline_s = time.monotonic() + STUDY_LIMIT_S
    while True:
        assert driver.process.poll() is None, driver.told
        assert time.monotonic() < deadline_s, f"no node to kill: {driver.told}"
        time.sleep(0.1)
        if not any(f"\n  {done}/" in driver.told for done in range(DONE_BEFORE, 100)):
            continue
        for number in range(1, len(NODES)):
            there = nodes.on_node(number)
            if any(at_work in command for command in there.values()):
                nodes.kill(number, workers=kind == "simulated")
                begin_s = time.monotonic()
                lost, gone = _wait_until_gone(set(there), nodes)
                return _Lost(processes=frozenset(lost), gone_s=time.monotonic() - begin_s if gone else None)


def _wait_until_gone(lost: set[int], nodes: RayNodes) -> tuple[set[int], bool]:
    """Wait until these processes and their children have ended.

    Returns all of the processes, and whether they ended within GONE_LIMIT_S.
    """
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while left := lost & nodes.processes().keys():
        if time.monotonic() >= deadline_s:
            tell(f"left on the dead node: {[nodes.processes().get(process) for process in left]}")
            return lost, False
        lost |= {child for process in left for child in below(process)}
        time.sleep(0.05)
    return lost, True


def _print(figures: dict[str, Any]) -> None:
    publish(
        [
            {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}
            for row in figures["rounds"]
        ],
        as_json=False,
    )
    for violation in figures["violations"]:
        print(violation)


if __name__ == "__main__":
    sys.exit(main())
