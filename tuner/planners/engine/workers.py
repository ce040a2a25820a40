"""Workers that run many tasks at once and share a bound that each of them may lower.

Lifecycle: a `with` block opens the workers. `map` runs a function on every task and waits for all of them. While it
runs, all calls share a bound: the least cost that any of them knows. A call that finds a cheaper solution offers its
cost, and the others then search for cheaper ones only. Solutions themselves are returned as results.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

from hardware.io.errors import ConfigError

Task = TypeVar("Task")
Result = TypeVar("Result")


@runtime_checkable
class AbstractBound(Protocol):
    """Least cost that any worker knows. It only falls, and a worker may see it late."""

    def get(self) -> float:
        """Return the least cost known here; inf while there is none."""

    def offer(self, cost: float) -> None:
        """Lower the bound to `cost` if that is less."""


@runtime_checkable
class AbstractWorkers(Protocol):
    """Workers that run tasks; one `map` at a time."""

    @property
    def num_workers(self) -> int:
        """Number of tasks that run at once."""

    def map(
        self, function: Callable[[Task, AbstractBound], Result], tasks: Sequence[Task], *, best_known: float = math.inf
    ) -> list[Result]:
        """Return the function's result for each task, in the order of the tasks.

        Exceptions of the function are raised here. Function, tasks and results are pickled on their way to another
        process.

        Args:
            function: Function of a task and of the bound that all calls of this `map` share.
            tasks: Any number of tasks.
            best_known: Initial value of the bound.
        """


class LocalBound:
    """Bound of calls in one process."""

    def __init__(self, best_known: float = math.inf) -> None:
        """Begin with a known cost."""
        self._best = best_known

    def get(self) -> float:
        """Return the least cost known here."""
        return self._best

    def offer(self, cost: float) -> None:
        """Lower the bound to `cost` if that is less."""
        self._best = min(self._best, cost)


class InProcessWorkers:
    """One worker: this process, which runs one task after the other."""

    def __enter__(self) -> InProcessWorkers:
        """Return the workers; nothing has to be started."""
        return self

    def __exit__(self, *error: object) -> None:
        """Return at once; nothing has to be ended."""

    @property
    def num_workers(self) -> int:
        """Number of tasks that run at once: one."""
        return 1

    def map(
        self, function: Callable[[Task, AbstractBound], Result], tasks: Sequence[Task], *, best_known: float = math.inf
    ) -> list[Result]:
        """Run the tasks one after the other; see `AbstractWorkers.map`."""
        bound = LocalBound(best_known)
        return [function(task, bound) for task in tasks]


class ProcessWorkers:
    """A pool of processes on this machine.

    They are forked from a server that has loaded nothing of this process, because a fork of a process with threads,
    such as Ray's or BLAS's, may hang.

    Args:
        num_workers: Number of processes.
    """

    def __init__(self, num_workers: int) -> None:
        """Prepare the shared bound; the pool starts in a `with` block."""
        if num_workers < 1:
            raise ConfigError("must be at least 1", key="num_workers", value=num_workers)
        self._num_workers = num_workers
        self._context = multiprocessing.get_context("forkserver")
        self._shared: Any = self._context.Value("d", math.inf)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ProcessWorkers:
        """Start the pool; its processes start with the first tasks."""
        self._pool = ProcessPoolExecutor(
            self._num_workers, mp_context=self._context, initializer=_keep, initargs=(self._shared,)
        )
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for running tasks, and end the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    @property
    def num_workers(self) -> int:
        """Number of processes."""
        return self._num_workers

    def map(
        self, function: Callable[[Task, AbstractBound], Result], tasks: Sequence[Task], *, best_known: float = math.inf
    ) -> list[Result]:
        """Run the tasks in the pool; see `AbstractWorkers.map`."""
        assert self._pool is not None, "workers run tasks inside their `with` block"
        # One `map` runs at a time, so that the shared number belongs to this call.
        self._shared.value = best_known
        return [future.result() for future in [self._pool.submit(_run, function, task) for task in tasks]]


class _ProcessBound:
    """Number that all processes of a pool share."""

    def __init__(self, shared: Any) -> None:
        """Wrap the shared number."""
        self._shared = shared

    def get(self) -> float:
        """Return the shared number."""
        return float(self._shared.value)

    def offer(self, cost: float) -> None:
        """Lower the shared number to `cost` if that is less."""
        with self._shared.get_lock():
            self._shared.value = min(self._shared.value, cost)


_kept: list[_ProcessBound] = []
"""Bound of a process in a pool; it can only be handed over when the process starts."""


def _keep(shared: Any) -> None:
    """Keep the shared number of a pool in a process that starts."""
    _kept.append(_ProcessBound(shared))


def _run(function: Callable[[Task, AbstractBound], Result], task: Task) -> Result:
    return function(task, _kept[0])
