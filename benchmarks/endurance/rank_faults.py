"""Disturb the ranks of a study that trains for real, and check the results of its trials.

    python -m benchmarks.endurance.rank_faults [--trials 20] [--seed 0] [--json]

A small model is tuned on four processes of this machine. At random moments a rank is killed (SIGKILL), made to hang
(SIGSTOP), or denied further memory (its limit is lowered to its present use, so that its next large allocation fails).
Afterwards five claims are checked from outside: every trial has ended with a status; no trial is missing; the answer is
the fastest of the successful trials; no configuration ran again after it had succeeded; and no process of the study is
left.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.process_table import marked_processes, running_ranks
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from tuner.run.loop import run_study
from tuner.study_file.config import load_study

STUDY = """
name: rank-faults
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 4}}
job: {{sequence_length: 64, global_batch_size: 16, precision: fp32, zero_stage: 1}}
runtime: torch-reference
search: {{max_trials: {trials}, seed: {seed}, prune: false, confidence: 1.0, repeats: 0}}
trial: {{backend: torch, clock: cpu, warmup_steps: 1, min_steps: 6, max_steps: 6, profile: false, hang_limit_s: 6}}
storage: sqlite:///{folder}/faults.db
"""
MODEL = Path(__file__).parents[2] / "configs" / "models" / "gpt-small.yaml"
FAULTS = ("kill", "hang", "memory")
MARK = "MESHTUNE_RANK_FAULTS"
"""Environment variable set for every process that the study starts."""
END_LIMIT_S = 10.0
"""Time limit for processes to end after the study [s]; Ray's agents outlive it by some seconds."""
PAUSE_S = (4.0, 16.0)
"""Shortest and longest time between two faults [s]."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and return the exit status."""
    parser = benchmark_parser("endurance.rank_faults", __doc__)
    parser.add_argument("--trials", type=count_at_least(1), default=20, help="trials of the study (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the study and of the faults (0)")
    return answer("rank_faults", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshtune-") as folder:
        study = Path(folder) / "rank-faults.yaml"
        study.write_text(
            STUDY.format(model=MODEL, trials=given.trials, seed=given.seed, folder=folder), encoding="utf-8"
        )
        config = load_study(study)
        faults = _Faults(given.seed)
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        os.environ[MARK] = mark
        faults.start()
        try:
            result = run_study(config, on_progress=lambda progress: tell(progress.note) if progress.note else None)
        finally:
            faults.stop()
            del os.environ[MARK]
    ended = [record for record in result.records if record.finished]
    well = [record for record in ended if record.step_time_s is not None]
    repeated = Counter(tuple(sorted(record.params.items())) for record in well)
    violations = [
        sentence
        for sentence, holds in (
            ("a trial has no status", all(record.status is not None for record in ended)),
            ("trials are missing", len(ended) == len(result.records)),
            ("the answer is not the fastest trial", _is_fastest(result.best, well)),
            ("a configuration ran again after it had ended well", not repeated or max(repeated.values()) == 1),
            ("processes are left", _are_gone_soon(f"{MARK}={mark}")),
        )
        if not holds
    ]
    return {
        "trials": len(ended),
        "by_status": dict(Counter(str(record.status) for record in ended)),
        "retried": sum("retried once" in (record.observation.reason if record.observation else "") for record in ended),
        "faults": dict(faults.done),
        "best_s": result.best.step_time_s if result.best else None,
        "stop_reason": result.stop_reason.value,
        "violations": violations,
    }


def _are_gone_soon(mark: str) -> bool:
    """Return whether all marked processes end within END_LIMIT_S."""
    deadline_s = time.monotonic() + END_LIMIT_S
    while marked_processes(mark):
        if time.monotonic() >= deadline_s:
            tell(f"left: {marked_processes(mark)}")
            return False
        time.sleep(0.1)
    return True


def _is_fastest(best: Any, well: Sequence[Any]) -> bool:
    if not well:
        return best is None
    return best is not None and best.step_time_s == min(record.step_time_s for record in well)


class _Faults(threading.Thread):
    """Thread that disturbs a random rank at random times."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self.done: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._over = threading.Event()

    def run(self) -> None:
        """Disturb ranks until `stop` is called."""
        while not self._over.wait(float(self._rng.uniform(*PAUSE_S))):
            ranks = sorted(running_ranks())
            if not ranks:
                continue
            fault = FAULTS[sum(self.done.values()) % len(FAULTS)]
            try:
                _disturb_rank(int(self._rng.choice(ranks)), fault)
            except ProcessLookupError:  # it has just ended
                continue
            self.done[fault] += 1

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._over.set()
        self.join()


def _disturb_rank(process: int, fault: str) -> None:
    if fault == "memory":
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[5])
        held = pages * resource.getpagesize()
        resource.prlimit(process, resource.RLIMIT_DATA, (held, held))
    else:
        os.kill(process, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def _print(figures: dict[str, Any]) -> None:
    publish(
        [
            {
                "trials": figures["trials"],
                **figures["by_status"],
                "retried": figures["retried"],
                **{f"{name} faults": count for name, count in figures["faults"].items()},
                "violations": len(figures["violations"]),
            }
        ],
        as_json=False,
    )
    for violation in figures["violations"]:
        print(violation)


if __name__ == "__main__":
    sys.exit(main())
