"""Measure time and memory per trial of one long study that runs real commands on Ray, 3,000 trials by default.

    python -m benchmarks.endurance.long_study [--trials 3000] [--parallel 2] [--json]

`meshtune run` is started as users start it, with SQLite and its own Ray. Its study tunes Llama-3-70B for 32 hosts of
eight H100; the command of a trial is a small program of this benchmark, which prints step times at once. So nearly all
of a trial's time is Meshtune's and Ray's. The program takes the configuration as its arguments and makes step times of
them.

A row describes the trials up to a number, since the row before: wall time per trial, CPU time per trial of the driver
and of Ray's processes with the trials, and at the end of the row the resident memory of the driver, the memory of Ray's
processes (shared pages in equal parts), their number, the driver's open files and threads, and the size of the
database. Figures that go on growing would mean a leak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from benchmarks.support.process_table import marked_processes, session_processes
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from hardware.io.errors import ConfigError

MARKS = (10, 100, 256, 500, 1000, 1500, 2000, 2500, 3000)
"""Numbers of trials at which a row ends; the last trial ends one too."""

PROGRAM = """
import sys, zlib
values = sys.argv[1:]
step_ms = 4000 + zlib.crc32(" ".join(values).encode()) % 4000 - 150 * int(values[1])
for step in range(1, 6):
    print(f"step {step} took {step_ms + step} ms", flush=True)
"""

STUDY = """
name: long
model: llama3-70b
cluster: {{name: dgx-h100, hosts: 32}}
job: {{sequence_length: 4096, global_batch_size: 1024}}
search: {{confidence: 1.0, baseline: false, repeats: 0, prune: false}}
trial:
  backend: command
  launch: once
  command: [{python}, -S, train.py, "{{pp}}", "{{tp}}", "{{cp}}", "{{up}}", "{{vpp}}", "{{ep}}", "{{mbs}}"]
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms"]}}
  warmup_steps: 1
  steps: 4
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Measurements at the end of a trial.

    Attributes:
        ended: Number of trials that have ended.
        time_s: Seconds since the epoch.
        driver_cpu_s: CPU time of the driver so far [s].
        others_cpu_s: CPU time so far of the processes that live now, and of those that they have waited for [s].
        driver_bytes: Resident memory of the driver.
        others_bytes: Memory of the other processes, shared pages in equal parts.
        processes: Number of the other processes.
        files: Number of open files of the driver.
        threads: Number of threads of the driver.
        database_bytes: Size of the database.
    """

    ended: int
    time_s: float
    driver_cpu_s: float
    others_cpu_s: float
    driver_bytes: int
    others_bytes: int
    processes: int
    files: int
    threads: int
    database_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = benchmark_parser("endurance.long_study", __doc__)
    parser.add_argument("--trials", type=count_at_least(1), default=3000, help="trials of the study; default 3000")
    parser.add_argument("--parallel", type=count_at_least(1), default=2, help="trials at the same time; default 2")
    return answer("long_study", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshtune-long-") as name:
        folder = Path(name)
        moments = list(_run(folder, given.trials, given.parallel))
    rows = [_row(before, after) for before, after in pairwise(moments)]
    return {"trials": moments[-1].ended, "parallel": given.parallel, "rows": rows}


def _run(folder: Path, trials: int, parallel: int) -> Iterator[Moment]:
    """Run the study, and yield a moment at its beginning and at the end of each row."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    study = folder / "study.yaml"
    study.write_text(STUDY.format(python=sys.executable), encoding="utf-8")
    mark = f"MESHTUNE_LONG={uuid.uuid4().hex}"
    variable, _, value = mark.partition("=")
    options = {"search.max_trials": trials, "search.parallel_trials": parallel}
    command = [sys.executable, "-m", "tuner", "run", study.name, "--log-format", "json"]
    command += [word for key, number in options.items() for word in ("--set", f"{key}={number}")]
    environment = {**os.environ, variable: value, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stderr is not None, "it is a pipe"
        try:
            yield from _moments(driver.pid, driver.stderr, mark, folder, {*MARKS, trials})
        finally:
            driver.terminate()
        status = driver.wait()
    if status:
        raise ConfigError(f"the study ended with status {status}")


def _moments(driver: int, events: IO[str], mark: str, folder: Path, marks: set[int]) -> Iterator[Moment]:
    ended = 0
    for line in events:
        event = json.loads(line) if line.startswith("{") else {}
        match event.get("event"):
            case "opening":
                yield _moment(driver, mark, folder, ended, event["time_s"])
            case "trial":
                ended += 1
                if ended in marks:
                    yield _moment(driver, mark, folder, ended, event["time_s"])
                    tell(f"{ended:,} trials")
            case None:
                tell(line.rstrip())


def _moment(driver: int, mark: str, folder: Path, ended: int, time_s: float) -> Moment:
    others = (marked_processes(mark) | session_processes(driver)).keys() - {driver}
    process = Path("/proc") / str(driver)
    return Moment(
        ended=ended,
        time_s=time_s,
        driver_cpu_s=_cpu_s(driver, children=False),
        others_cpu_s=sum(_cpu_s(other, children=True) for other in others),
        driver_bytes=_memory_bytes(driver, "Rss"),
        others_bytes=sum(_memory_bytes(other, "Pss") for other in others),
        processes=len(others),
        files=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        database_bytes=sum(file.stat().st_size for file in folder.glob("*.db*")),
    )


def _cpu_s(process: int, *, children: bool) -> float:
    """Return the CPU time of a process, with that of children that it has waited for if `children` [s]."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(process: int, kind: str) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), 0)


def _row(before: Moment, after: Moment) -> dict[str, Any]:
    count = after.ended - before.ended
    return {
        "trials": f"{before.ended + 1} to {after.ended}",
        "wall_s": (after.time_s - before.time_s) / count,
        "driver_cpu_s": (after.driver_cpu_s - before.driver_cpu_s) / count,
        "others_cpu_s": (after.others_cpu_s - before.others_cpu_s) / count,
        "driver_mib": after.driver_bytes / 2**20,
        "others_mib": after.others_bytes / 2**20,
        "processes": after.processes,
        "files": after.files,
        "threads": after.threads,
        "database_mib": after.database_bytes / 2**20,
    }


def _print(figures: dict[str, Any]) -> None:
    print(f"{figures['trials']} trials, {figures['parallel']} at the same time; time per trial, the rest at its end")
    publish(figures["rows"], as_json=False)


if __name__ == "__main__":
    sys.exit(main())
