"""Workers: many tasks at once, and one number that all of them lower.

Lifecycle: a `with` block opens the workers; `map` runs a function on every task and waits for all of them. While it
runs, each call holds a bound: the least cost that any of them knows. A call that finds a cheaper solution offers its
cost, and the others then search for what is cheaper still. Solutions themselves come back as results.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

from hardware.io.errors import ConfigError

Task = TypeVar("Task")
Result = TypeVar("Result")


@runtime_checkable
class AbstractBound(Protocol):
    """The least cost that any worker knows. It only falls, and a worker may see it late."""

    def get(self) -> float:
        """The least cost known here; inf while there is none."""

    def offer(self, cost: float) -> None:
        """Lowers the bound to `cost` if that is less."""


@runtime_checkable
class AbstractWorkers(Protocol):
    """Runs tasks; one `map` at a time."""

    @property
    def num_workers(self) -> int:
        """Tasks that run at once."""

    def map(
        self,
        function: Callable[[Task, AbstractBound], Result],
        tasks: Sequence[Task],
        *,
        best_known: float = math.inf,
    ) -> list[Result]:
        """The function's result for each task, in the order of the tasks.

        What the function raises is raised here. Function, tasks and results are pickled on their way to another
        process.

        Args:
            function: Takes a task and the bound that this call shares with the others.
            tasks: As many as one likes.
            best_known: Where the bound begins.
        """


class LocalBound:
    """The bound of calls in one process."""

    def __init__(self, best_known: float = math.inf) -> None:
        self._best = best_known

    def get(self) -> float:
        """The least cost known here."""
        return self._best

    def offer(self, cost: float) -> None:
        """Lowers the bound to `cost` if that is less."""
        self._best = min(self._best, cost)


class InProcessWorkers:
    """One worker: this process, which runs one task after the other."""

    def __enter__(self) -> InProcessWorkers:
        """Nothing has to be started."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing has to be ended."""

    @property
    def num_workers(self) -> int:
        """One."""
        return 1

    def map(
        self,
        function: Callable[[Task, AbstractBound], Result],
        tasks: Sequence[Task],
        *,
        best_known: float = math.inf,
    ) -> list[Result]:
        """See `AbstractWorkers.map`."""
        bound = LocalBound(best_known)
        return [function(task, bound) for task in tasks]


class ProcessWorkers:
    """A pool of processes on this machine.

    They are started by a server that has loaded nothing of this process: a fork of a process with threads, such as
    Ray's or BLAS's, may hang.

    Args:
        num_workers: Processes.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ConfigError("must be at least 1", key="num_workers", value=num_workers)
        self._num_workers = num_workers
        self._context = multiprocessing.get_context("forkserver")
        self._shared: Any = self._context.Value("d", math.inf)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ProcessWorkers:
        """Starts the pool; its processes start with the first tasks."""
        self._pool = ProcessPoolExecutor(
            self._num_workers, mp_context=self._context, initializer=_keep, initargs=(self._shared,)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for what runs and ends the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    @property
    def num_workers(self) -> int:
        """Processes."""
        return self._num_workers

    def map(
        self,
        function: Callable[[Task, AbstractBound], Result],
        tasks: Sequence[Task],
        *,
        best_known: float = math.inf,
    ) -> list[Result]:
        """See `AbstractWorkers.map`."""
        assert self._pool is not None, "workers run tasks inside their `with` block"
        self._shared.value = best_known
        return [future.result() for future in [self._pool.submit(_run, function, task) for task in tasks]]


class _ProcessBound:
    """The number that all processes of a pool share."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def get(self) -> float:
        return float(self._shared.value)

    def offer(self, cost: float) -> None:
        with self._shared.get_lock():
            self._shared.value = min(self._shared.value, cost)


_kept: list[_ProcessBound] = []
"""In a process of a pool: its bound, which can be handed over when the process starts, and no later."""


def _keep(shared: Any) -> None:
    _kept.append(_ProcessBound(shared))


def _run(function: Callable[[Task, AbstractBound], Result], task: Task) -> Result:
    return function(task, _kept[0])
