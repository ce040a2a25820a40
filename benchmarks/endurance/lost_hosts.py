"""Kill two of the four nodes that each trial of a study occupies, start two others later, and check the trials.

    python -m benchmarks.endurance.lost_hosts [--trials 16] [--seed 0] [--follow-after 30] [--json]

Five raylets start on this machine: a head, and four nodes of two CPUs. Each trial of the study runs a command on all
four. When two trials have ended, two raylets are killed by SIGKILL while a trial runs. When two more have ended on the
nodes that are left, two new raylets join; the trial that runs meanwhile waits for them. Then these claims are checked
from outside: the study ends with its budget of trials, all of which succeeded; each trial ran on as many nodes as its
study has hosts; the trial that had lost its nodes ended on the whole cluster under its own number, or counts as an
incident where its end was seen before the loss; the trials of the one study were history to the other; and a second
run finds nothing left to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support.process_table import marked_processes
from benchmarks.support.ray_nodes import RayNodes
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, tell
from trials.backend import Status
from tuner.answers.fewer_hosts import phases_in
from tuner.run.following import FOLLOW_AFTER_S
from tuner.storage.opening import find_study
from tuner.storage.record import HISTORY, TrialRecord, read_records
from tuner.study_file.storage_address import StorageAddress

ROOT = Path(__file__).resolve().parents[2]
NODES = (0, 2, 2, 2, 2)
KILLED = (2, 3)
DONE_BEFORE = 2
"""Number of trials that end before the nodes are killed, and again before others join."""

LIMIT_S = 400.0
RUN = """
from tuner.cli.main import main
from tuner.run import following

following.FOLLOW_AFTER_S = {follow_after_s}
main()
"""
"""The command `meshtune` that follows its cluster after another time."""
STUDY = """
name: lost-hosts
model: {model}
cluster: {{name: cpu-host, hosts: 4, devices_per_host: 2}}
job: {{sequence_length: 64, global_batch_size: 48, precision: fp32}}
search:
  {{max_trials: {trials}, seed: {seed}, prune: false, confidence: 1.0, repeats: 0, baseline: false}}
trial:
  backend: command
  command: [{python}, {program}, "{{trial}}", "{{host_rank}}", "{{num_hosts}}", {folder}]
"""
PROGRAM = """
import pathlib
import sys
import time

trial, host_rank, num_hosts, folder = sys.argv[1:]
with open(f"{folder}/started", "a") as file:
    file.write(f"{num_hosts} {trial} {host_rank} {time.time()}\\n")
for iteration in range(1, 8):
    time.sleep(0.3)
    while pathlib.Path(folder, "hold").exists():
        time.sleep(0.1)
    print(f" iteration {iteration}/ 7 | elapsed time per iteration (ms): 300.0 |", flush=True)
"""
MODEL = ROOT / "configs" / "models" / "gpt-small.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study once and return the exit status."""
    parser = benchmark_parser("endurance.lost_hosts", __doc__)
    parser.add_argument("--trials", type=count_at_least(7), default=16, help="trials of the study (16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the study (0)")
    parser.add_argument(
        "--follow-after",
        type=float,
        default=FOLLOW_AFTER_S,
        help="time for which nodes have to be gone or back before the study follows [s] (30)",
    )
    return answer("lost_hosts", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshtune-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        text = STUDY.format(
            model=MODEL,
            trials=given.trials,
            seed=given.seed,
            python=sys.executable,
            program=folder / "program.py",
            folder=folder,
        )
        (folder / "study.yaml").write_text(text, encoding="utf-8")
        return _run(folder, given.trials, given.follow_after)


def _run(folder: Path, trials: int, follow_after_s: float) -> dict[str, Any]:
    """Run the study, kill and start nodes meanwhile, and check what is stored."""
    storage, begin_s = f"sqlite:///{folder}/study.db", time.monotonic()
    marks: dict[str, float] = {}
    with RayNodes(*NODES) as nodes:
        driver = _Driver(folder, storage, nodes, follow_after_s)
        try:
            driver.wait(lambda: _ended(storage) >= DONE_BEFORE and _starts(folder, 4) > DONE_BEFORE)
            with _held(folder):
                for number in KILLED:
                    nodes.kill(number, workers=True)
            marks["killed_s"] = time.monotonic() - begin_s
            driver.wait(lambda: _starts(folder, 2) > 0)
            marks["first_trial_on_two_s"] = time.monotonic() - begin_s
            driver.wait(lambda: _ended(storage, on="lost-hosts.on-2-hosts") >= DONE_BEFORE)
            with _held(folder):
                for _ in KILLED:
                    nodes.add(2)
                marks["joined_s"] = time.monotonic() - begin_s
                time.sleep(follow_after_s)
            status = driver.process.wait(LIMIT_S)
            again = _Driver(folder, storage, nodes, follow_after_s)
            status_again = again.process.wait(LIMIT_S)
        finally:
            driver.process.kill()
            driver.process.wait()
    marks["ended_s"] = time.monotonic() - begin_s
    whole, fewer = (
        find_study(StorageAddress.parse(storage), "lost-hosts"),
        find_study(StorageAddress.parse(storage), "lost-hosts.on-2-hosts"),
    )
    on_all, on_two = (read_records(study) if study is not None else [] for study in (whole, fewer))
    started = [line.split() for line in (folder / "started").read_text(encoding="ascii").splitlines()]
    twice = {trial for hosts, trial, rank, _ in started if (hosts, rank) == ("4", "0")} & {
        str(record.number) for record in on_all if _count(started, record.number) > 1
    }
    result = json.loads(driver.out) if driver.out.strip() else {}
    claims = {
        f"the study ended with status {status}: {driver.told[-2000:]}": status == 0,
        f"{len(on_all)} and {len(on_two)} trials are not {trials}": len(on_all) + len(on_two) == trials,
        "some trials did not end, or failed": all(map(_ended_well, (*on_all, *on_two))),
        "a trial occupied other nodes than its study has": {hosts for hosts, *_ in started} == {"2", "4"}
        and all(_devices(record) == 8 for record in on_all)
        and all(_devices(record) == 4 for record in on_two),
        "no trial was run again on the whole cluster, and none counts as an incident": bool(twice)
        or any(record.status is Status.INCIDENT for record in on_all),
        "the whole study does not name its phase": whole is not None
        and phases_in(whole) == {"lost-hosts.on-2-hosts": (0, 1)},
        "the one study was no history to the other": all(
            study is not None and study.user_attrs.get(HISTORY, "").startswith("history: ") for study in (whole, fewer)
        ),
        f"the answer is not of all hosts: {result.get('hosts')}": result.get("hosts") == [0, 1, 2, 3],
        "a second run did more": status_again == 0 and len(started) == _lines(folder),
        "processes are left": not marked_processes(nodes.mark),
    }
    return {
        "trials_on_four_hosts": len(on_all),
        "trials_on_two_hosts": len(on_two),
        **{name: round(seconds, 1) for name, seconds in marks.items()},
        "violations": [sentence for sentence, holds in claims.items() if not holds],
    }


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Let no trial end within the block."""
    hold = folder / "hold"
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


def _ended_well(record: TrialRecord) -> bool:
    """Return whether a trial was measured, or lost its nodes before the driver knew: that says nothing about it."""
    return record.finished and (record.step_time_s is not None or record.status is Status.INCIDENT)


def _devices(record: TrialRecord) -> int:
    sizes = [record.params[name] for name in ("pp", "tp", "dp", "cp", "up")]
    product = 1
    for size in sizes:
        assert isinstance(size, int), "a degree is a whole number"
        product *= size
    return product


def _ended(storage: str, on: str = "lost-hosts") -> int:
    """Return the number of trials of a study that have ended."""
    study = find_study(StorageAddress.parse(storage), on)
    return 0 if study is None else sum(record.finished for record in read_records(study))


def _lines(folder: Path) -> int:
    return len((folder / "started").read_text(encoding="ascii").splitlines())


def _starts(folder: Path, num_hosts: int) -> int:
    """Return the number of trials that have started on so many hosts."""
    file = folder / "started"
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    return sum(line.split()[0] == str(num_hosts) and line.split()[2] == "0" for line in lines)


def _count(started: Sequence[Sequence[str]], number: int) -> int:
    return sum((hosts, trial, rank) == ("4", str(number), "0") for hosts, trial, rank, _ in started)


class _Driver:
    """Process that runs `meshtune run`."""

    def __init__(self, folder: Path, storage: str, nodes: RayNodes, follow_after_s: float) -> None:
        self.process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-c",
                    RUN.format(follow_after_s=follow_after_s),
                    "run",
                    str(folder / "study.yaml"),
                    "--json",
                ),
                *("--storage", storage, "--ray-address", nodes.address),
            ],
            cwd=ROOT,
            env=nodes.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.told = self.out = ""
        threading.Thread(target=self._listen, args=(self.process.stderr, "told"), daemon=True).start()
        threading.Thread(target=self._listen, args=(self.process.stdout, "out"), daemon=True).start()

    def _listen(self, stream: Any, name: str) -> None:
        for line in stream:
            setattr(self, name, getattr(self, name) + line)

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something has happened."""
        deadline_s = time.monotonic() + LIMIT_S
        while not until():
            assert self.process.poll() is None, f"the study ended: {self.told}"
            assert time.monotonic() < deadline_s, f"nothing happened: {self.told}"
            time.sleep(0.2)


def _print(figures: dict[str, Any]) -> None:
    tell("")
    for name, value in figures.items():
        if name != "violations":
            print(f"{name}: {value}")
    for violation in figures["violations"]:
        print(violation)


if __name__ == "__main__":
    sys.exit(main())
