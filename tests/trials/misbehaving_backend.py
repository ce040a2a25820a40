"""A backend whose trials do what the configuration tells them: end well, raise, die, or hang.

The degrees stand for the deed, since they are all that reaches a worker: see DEEDS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from costmodels.parallel import ParallelConfig
from trials.backend import AbstractBackend, Observation, Origin, Status

DEEDS = ("succeed", "raise", "exit", "die", "die_once", "hang", "hang_with_child", "give_a_lambda")


def config_that(deed: str) -> ParallelConfig:
    """The configuration that makes a trial do `deed`."""
    return ParallelConfig(mbs=DEEDS.index(deed) + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MisbehavingBackend(AbstractBackend):
    """Does the deed that the micro-batch size names; `folder` tells a second attempt from the first."""

    folder: str
    seconds_per_trial: float = 0.0

    @property
    def origin(self) -> Origin:
        """Invented."""
        return "synthetic"

    def measure(self, config: ParallelConfig, *, trial_number: int) -> Observation:
        """Does the deed."""
        time.sleep(self.seconds_per_trial)
        print("a backend must not print, but some program below it may")  # noqa: T201 # see the test of stdout
        match DEEDS[config.mbs - 1]:
            case "raise":
                raise ValueError("the loss is not a number")
            case "exit":
                sys.exit("wrong flag")
            case "die":
                os._exit(1)
            case "die_once":
                flag = Path(self.folder) / f"died-{trial_number}"
                if not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
            case "hang_with_child":
                child = subprocess.Popen(["sleep", "600"])  # noqa: S607 # any sleep will do
                (Path(self.folder) / "child").write_text(str(child.pid), encoding="ascii")
                child.wait()
            case "give_a_lambda":
                return lambda: None  # type: ignore[return-value] # what a broken backend does
        return Observation(status=Status.OK, step_times_s=(1.0 + trial_number,), origin="synthetic")
