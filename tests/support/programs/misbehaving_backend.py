"""Backend whose trials behave as the configuration says: end well, raise, die, or hang.

The micro-batch size encodes the behaviour, because only the configuration reaches a worker; see DEEDS.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from costmodels.job.parallel_config import ParallelConfig
from trials.backend import AbstractBackend, Observation, OnStart, OnStep, Origin, Status, ignore_start, ignore_step

DEEDS = (
    "succeed", "raise", "exit", "die", "die_once", "hang", "hang_with_child", "give_a_lambda",
    "step_on", "step_and_hang", "step_and_raise", "step_and_die", "report_nonsense",
)  # fmt: skip
STEPS_S = {
    "step_and_hang": (1.5, 2.5),
    "step_and_raise": (1.5,),
    "step_and_die": (1.5, 2.5),
    "report_nonsense": (math.nan,),
}
"""Step times that a trial reports before the rest of its behaviour [s]."""
SECONDS_AFTER_STEPS = 1.0
"""Time between the last step and the death of a worker [s]. A report needs a moment to leave the process, and up to a
second on a busy machine."""
NUM_STEPS = 1000
"""Number of steps of a trial that keeps stepping: more than any test waits for."""


def config_that(deed: str) -> ParallelConfig:
    """Return the configuration whose trial behaves as `deed` says."""
    return ParallelConfig(mbs=DEEDS.index(deed) + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MisbehavingBackend(AbstractBackend):
    """Backend with the behaviour that the micro-batch size encodes; `folder` marks a first attempt."""

    folder: str
    seconds_per_trial: float = 0.0

    @property
    def origin(self) -> Origin:
        """Origin of simulated times."""
        return "synthetic"

    def expected_steps(self, config: ParallelConfig) -> int | None:
        """Return many steps for a trial that keeps stepping, else None for unknown."""
        return NUM_STEPS if DEEDS[config.mbs - 1] == "step_on" else None

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,  # noqa: ARG002 # no trial waits
    ) -> Observation:
        """Behave as the configuration says."""
        time.sleep(self.seconds_per_trial)
        print("a backend must not print, but some program below it may")  # noqa: T201 # see the test of stdout
        deed = DEEDS[config.mbs - 1]
        for step_time_s in STEPS_S.get(deed, ()):
            on_step(step_time_s)
        match deed:
            case "raise" | "step_and_raise":
                raise ValueError("the loss is not a number")
            case "exit":
                sys.exit("wrong flag")
            case "die":
                os._exit(1)
            case "step_and_die":
                time.sleep(SECONDS_AFTER_STEPS)
                os._exit(1)
            case "die_once":
                flag = Path(self.folder) / f"died-{trial_number}"
                if not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            case "hang" | "step_and_hang":
                time.sleep(600)
            case "hang_with_child":
                child = subprocess.Popen(["sleep", "600"])  # noqa: S607 # any sleep will do
                (Path(self.folder) / "child").write_text(str(child.pid), encoding="ascii")
                child.wait()
            case "step_on":
                for _ in range(NUM_STEPS):
                    time.sleep(0.05)
                    on_step(3.0)
            case "give_a_lambda":
                return lambda: None  # type: ignore[return-value] # what a broken backend does
        return Observation(status=Status.OK, step_times_s=(1.0 + trial_number,), origin="synthetic")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriversBackend(MisbehavingBackend):
    """Backend that no worker can unpickle, as if only the driver had its module; `folder` counts the attempts."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle an object that raises when it is unpickled."""
        return _not_here, (self.folder,)


def _not_here(folder: str) -> None:
    (Path(folder) / f"worker-{os.getpid()}").touch()
    raise ModuleNotFoundError("No module named 'drivers_own'")
