"""What the trials of a disturbed study run: it keeps the ledger, takes a moment, and leaves a child behind.

    python trial_program.py LEDGER TRIAL NAME=VALUE ...

How long a step takes it makes of the configuration, so that everybody can tell what should have been measured.
Nothing of Meshtune is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib

ITERATIONS = 7
PAUSE_S = 0.2
HELD_BYTES = 16 * 2**20
"""What an iteration allocates, and what fails first where the memory has a limit."""


def step_ms(configuration: str) -> float:
    """The step time that is printed: one of its own for each configuration, 100 to 200 ms."""
    return 100 + zlib.crc32(configuration.encode()) % 100_000 / 1000


def note(ledger: str, **entry: object) -> None:
    """Appends a line that is whole and on the disk when this returns."""
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, (json.dumps(entry) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def main() -> None:
    """One trial."""
    ledger, number, *values = sys.argv[1:]
    who = {"trial": int(number), "configuration": " ".join(values), "pid": os.getpid()}
    note(ledger, event="begin", time_s=time.time(), **who)
    if "SLURM_JOB_ID" not in os.environ:  # what a job leaves behind Slurm ends, where it tracks processes by cgroup
        subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: S607 # the trial's end must find it
    for iteration in range(1, ITERATIONS + 1):
        time.sleep(PAUSE_S)
        held = bytearray(HELD_BYTES)
        told_ms = step_ms(who["configuration"])
        if iteration == ITERATIONS:
            note(ledger, event="end", time_s=time.time(), step_s=told_ms / 1000, **who)
        print(f" iteration {iteration}/ {ITERATIONS} | elapsed time per iteration (ms): {told_ms:.3f} |", flush=True)  # noqa: T201 # its log
        del held


if __name__ == "__main__":
    main()
