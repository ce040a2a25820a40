"""Worker processes of the benchmarks, each limited to one thread."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import optuna
from threadpoolctl import threadpool_limits


@contextmanager
def mapper(num_workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield a `map` over worker processes of one thread each; with one worker, `map` over this process."""
    if num_workers == 1:
        with threadpool_limits(1):
            _quieten()
            yield map
        return
    # spawned, since a fork would inherit the threads of numpy and torch
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_set_up_worker) as pool:
        yield pool.map


def _set_up_worker() -> None:
    threadpool_limits(1)
    _quieten()


def _quieten() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
