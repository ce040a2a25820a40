"""Program that drives a study as a process on another host would; its trials are short, and it records each start.

    python -m tests.support.studies.shared_driver STUDY STORAGE HOST BUDGET NOTES

It prints `ready`, waits for a line, and then drives the study. Its lease is short, so that tests wait only briefly.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

from hardware.io.errors import ConfigError
from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.run import driver
from tuner.run.loop import run_study
from tuner.study_file.config import load_study

LEASE_S = 2.0
TRIAL_S = 0.5


class Noting:
    """Backend that records trial and driver, sleeps, and then measures as another backend does."""

    def __init__(self, backend, host, notes):
        self.backend, self.host, self.notes = backend, host, notes

    def measure(self, config, *, trial_number):
        """Measure a trial as the executor requests."""
        with self.notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps([self.host, trial_number, str(config)]) + "\n")
        time.sleep(TRIAL_S)
        return self.backend.measure(config, trial_number=trial_number)


def main(study, storage, host, budget, notes):
    """Drive the study; exit with status 2 if another process drives it, or has taken it over."""
    socket.gethostname = lambda: host
    driver.STALE_AFTER_S, driver.RENEW_AFTER_S, driver.WATCHED_S = LEASE_S, LEASE_S / 4, LEASE_S
    overrides = ["search.confidence=1.0", "search.draws=10", f"search.max_trials={budget}"]
    config = load_study(Path(study), overrides=overrides, storage=storage)
    print("ready", flush=True)  # noqa: T201 # the test waits for it
    sys.stdin.readline()
    executor = InProcessExecutor(Noting(config.trials.backend, host, Path(notes)))
    try:
        run_study(config, on_progress=lambda _: None, executor=executor)
    except ConfigError as error:
        print(error, flush=True)  # noqa: T201 # the test reads it
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
