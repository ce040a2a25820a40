"""Questions to frameworks, each in a process of its own that is forked once everything is imported.

Frameworks keep process groups and settings in globals, so that a process can be one rank of one layout only.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S = 300
"""Time after which a rank ends without an answer [s]."""


class Reached(Exception):  # noqa: N818 # no error: all that could refuse a layout has accepted it
    """A micro-batch has come to the kernels, which no CPU runs."""


def reach(*_: Any, **__: Any) -> Any:
    """Stand for a kernel."""
    raise Reached


def ask(question: Callable[[], object], limit_s: int = LIMIT_S) -> Any:
    """Call a function in a forked process and return what it returns, which must be JSON.

    What it prints is lost, unless the variable ORACLE_LOG names a file for it.

    Raises:
        ChildProcessError: The process ended without an answer.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(limit_s)
        said = os.open(os.environ.get("ORACLE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        try:
            with os.fdopen(write, "w") as pipe:
                json.dump(_answered(question), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found = json.loads(text or "{}")
    if "answer" not in found:
        raise ChildProcessError(found.get("error", "the process was ended"))
    return found["answer"]


def _answered(question: Callable[[], object]) -> dict[str, object]:
    try:
        return {"answer": question()}
    except Exception:  # noqa: BLE001 # told to the process that asked
        return {"error": traceback.format_exc()}


def on_ranks(ranks: Iterable[int], question: Callable[[int], object]) -> str | None:
    """Ask each rank in a process of its own, and return the first refusal; None if all accept.

    What the processes import is imported here too, so that the next ones need not.
    """
    for rank in dict.fromkeys(ranks):
        said, loaded = ask(lambda rank=rank: (refusal(lambda: question(rank)), sorted(sys.modules)))
        for name in loaded:
            if name not in sys.modules and name not in _TRIED:
                _TRIED.add(name)
                with suppress(Exception):
                    importlib.import_module(name)
        if said:
            return f"rank {rank}: {said}"
    return None


_TRIED: set[str] = set()


def refusal(question: Callable[[], object]) -> str | None:
    """Return the words with which a function refuses, and where it does; None if it returns."""
    try:
        question()
    except (Exception, SystemExit) as error:  # noqa: BLE001 # whatever a framework raises is its answer
        last = traceback.extract_tb(error.__traceback__)[-1]
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first or last.line} ({Path(last.filename).name}:{last.lineno})"
    return None


def name_rank(world: int, rank: int) -> None:
    """Set the variables by which a launcher tells a process its rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "NGPU": str(world)}


def join(world: int, rank: int) -> None:
    """Make this process a rank of a world that does not exist: its process groups send nothing."""
    import torch  # most processes need no torch

    name_rank(world, rank)
    if torch.distributed.is_initialized():  # in the process that this one was forked from
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=rank, world_size=world)
