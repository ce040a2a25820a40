"""Slot of the executor: the actor that measures trials in a worker process."""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import AbstractBackend, Observation, Status, tail_of
from trials.on_ray.hosts import RayRanks
from trials.on_ray.mailbox import Start, Step
from trials.ranks.contract import AbstractRanks, RanksLostError
from trials.ranks.processes import RankProcesses


class Slot:
    """Actor that measures one trial after the other in a process of its own; `name` is its name in Ray."""

    def __init__(self, backend: AbstractBackend, group: Any, name: str) -> None:
        self.backend = backend
        self.group = group
        self.name = name
        self.opened: AbstractBackend | None = None

    def ready(self) -> bool:
        """Return True once the process runs and the backend has arrived."""
        return True

    def take(self, backend: AbstractBackend) -> None:
        """Measure later trials on another backend."""
        self.backend, self.opened = backend, None

    def measure(
        self, config: ParallelConfig, reduction: Reduction | None, trial_number: int, attempt: int, mailbox: Any
    ) -> Observation:
        """Run one trial. This is the boundary at which an exception becomes an observation."""
        begin_s: float | None = None if self.backend.waits_in_queue else time.monotonic()
        steps_s: list[float] = []
        measured_after_s: float | None = None

        def elapsed() -> float:
            return 0.0 if begin_s is None else time.monotonic() - begin_s

        def on_start() -> None:
            nonlocal begin_s
            begin_s = time.monotonic()
            mailbox.put.remote(Start(trial_number, attempt))

        def on_step(step_time_s: float) -> None:
            nonlocal measured_after_s
            assert 0 < step_time_s < math.inf, f"a step takes some time, not {step_time_s!r} s"
            steps_s.append(float(step_time_s))
            if measured_after_s is None:
                own_s = steps_s[0] if self.backend.clock == "wall" else 0.0
                measured_after_s = max(elapsed() - own_s, 0.0)
            mailbox.put.remote(Step(trial_number, attempt, steps_s[-1], measured_after_s))

        try:
            if self.opened is None:
                self.opened = self.backend.opened(self._ranks(is_retry=attempt > 0))
            backend = self.opened if reduction is None else self.opened.reduced(reduction)
            observation = backend.measure(config, trial_number=trial_number, on_step=on_step, on_start=on_start)
            assert isinstance(observation, Observation), f"`measure` gives an Observation, not {observation!r}"
        except RanksLostError:
            raise  # as a lost worker: the trial is tried once more in a fresh one
        except (Exception, SystemExit):  # noqa: BLE001 # the trial boundary: a failure is a result
            text = traceback.format_exc()
            observation = Observation(
                status=Status.CRASHED,
                step_times_s=tuple(steps_s),
                log_tail=tail_of(text),
                reason=text.rstrip().rpartition("\n")[2][:500],
                origin=self.backend.origin,
                clock=self.backend.clock,
            )
        return dataclasses.replace(observation, elapsed_s=elapsed(), measured_after_s=measured_after_s)

    def _ranks(self, *, is_retry: bool) -> AbstractRanks:
        hosts = self.backend.hosts
        setup = self.backend.rank_setup
        if len(hosts) == 1:
            return RankProcesses(setup)
        return RayRanks(self.group, hosts, setup, is_retry=is_retry, name=self.name)
