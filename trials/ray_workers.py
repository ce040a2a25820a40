"""Workers for planners, on Ray: many tasks at once, and one number that all of them lower.

It fits the contract `AbstractWorkers` in `tuner/planners/engine/workers.py` by its shape, because trials and planners
do not import each other.

Lifecycle: `with RayWorkers(...)` uses the Ray that this program has joined, for example through a `RayExecutor`, or
else starts one on this machine; `map` runs a function on every task and waits; leaving the block shuts down what was
started here. The bound is an actor that needs no CPU. A worker asks it now and then without waiting, so that a look
at the bound costs nothing; it may then see an old one, which only makes it search more than it had to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from hardware.io.errors import ConfigError
from trials.ray_local import imported_ray, start_local_ray

Task = TypeVar("Task")
Result = TypeVar("Result")

ASK_EVERY_S = 0.05
"""How often a worker asks for the bound."""


class _Bound:
    """The actor that holds the least cost of one `map` after the other."""

    def __init__(self) -> None:
        self.number = 0
        self.best = math.inf

    def begin(self, number: int, best_known: float) -> None:
        """The bound of the map with this number; what others still offer is of no interest."""
        self.number, self.best = number, best_known

    def offer(self, number: int, cost: float) -> None:
        """Lowers the bound."""
        if number == self.number:
            self.best = min(self.best, cost)

    def get(self) -> float:
        """The least cost offered."""
        return self.best


class RayBound:
    """The bound as a task sees it.

    Args:
        ray: The library.
        actor: Holds the bound.
        number: Of the map.
        best_known: Where it began.
    """

    def __init__(self, ray: Any, actor: Any, number: int, best_known: float) -> None:
        self._ray = ray
        self._actor = actor
        self._number = number
        self._best = best_known
        self._asked: Any = None
        self._due_s = 0.0

    def get(self) -> float:
        """The least cost known here."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + ASK_EVERY_S
            if self._asked is None:
                self._asked = self._actor.get.remote()
            elif self._ray.wait([self._asked], timeout=0)[0]:
                self._best = min(self._best, self._ray.get(self._asked))
                self._asked = None
        return self._best

    def offer(self, cost: float) -> None:
        """Lowers the bound to `cost` if that is less."""
        if cost < self._best:
            self._best = cost
            self._actor.offer.remote(self._number, cost)


def _run(function: Any, task: Any, actor: Any, number: int, best_known: float) -> Any:
    return function(task, RayBound(imported_ray(), actor, number, best_known))


class RayWorkers:
    """Tasks of one CPU each, on Ray.

    Args:
        num_workers: Tasks that run at once.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ConfigError("must be at least 1", key="num_workers", value=num_workers)
        self._num_workers = num_workers
        self._ray: Any = None
        self._owns_connection = False
        self._actor: Any = None
        self._remote: Any = None
        self._number = 0

    def __enter__(self) -> RayWorkers:
        """Starts Ray here, unless the program has joined one."""
        self._owns_connection = start_local_ray(self._num_workers)
        self._ray = imported_ray()
        self._actor = self._ray.remote(_Bound).options(num_cpus=0).remote()
        self._remote = self._ray.remote(_run).options(num_cpus=1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the actor, and Ray if it was started here."""
        if self._owns_connection:
            self._owns_connection = False
            self._ray.shutdown()
        elif self._ray is not None and self._ray.is_initialized():
            self._ray.kill(self._actor)
        self._actor = None

    @property
    def num_workers(self) -> int:
        """Tasks that run at once."""
        return self._num_workers

    def map(
        self,
        function: Callable[[Task, RayBound], Result],
        tasks: Sequence[Task],
        *,
        best_known: float = math.inf,
    ) -> list[Result]:
        """The function's result for each task, in the order of the tasks.

        What the function raises is raised here, as an exception that is of its type and of Ray's too.

        Args:
            function: Takes a task and the bound that this call shares with the others.
            tasks: As many as one likes.
            best_known: Where the bound begins.
        """
        assert self._actor is not None, "workers run tasks inside their `with` block"
        self._number += 1
        self._ray.get(self._actor.begin.remote(self._number, best_known))
        sent = self._ray.put(function)
        running = [self._remote.remote(sent, task, self._actor, self._number, best_known) for task in tasks]
        results: list[Result] = self._ray.get(running)
        return results
