"""Program of the room: imports the user's framework once, and runs the script once for each case, in a fork.

    python -m tuner.rehearsal.torch_room.serve REQUEST

The request is a JSON file: script (file) or module (name), device (facts), steps, jobs (cases that run at once), and
cases with rank, world, most_micro_batches, most_before_last, arguments and environment; with `has_order` the order of
operators is recorded too. For each case, in their order, one line of JSON goes to standard output as soon as it and all
before it have ended, with the last that the script printed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import select
import sys
import time
import traceback
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import typing_extensions
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from tuner.rehearsal.both_rooms.places import is_ours, lines_on_the_way
from tuner.rehearsal.both_rooms.program import last_printed, run_program, set_environment
from tuner.rehearsal.torch_room import attention, distributed_tensors, norms, pipelining
from tuner.rehearsal.torch_room.autocast import stand_in_for_autocast
from tuner.rehearsal.torch_room.cuda import DeviceFacts, stand_in_for_cuda
from tuner.rehearsal.torch_room.frameworks import registry
from tuner.rehearsal.torch_room.frameworks.deep_ep import stand_in_for_deep_ep
from tuner.rehearsal.torch_room.frameworks.transformer_engine import stand_in_for_kernels
from tuner.rehearsal.torch_room.groups import stand_in_for_groups
from tuner.rehearsal.torch_room.loader import stand_in_for_loader
from tuner.rehearsal.torch_room.on_import import change_on_import, import_for_all_ranks, source_of
from tuner.rehearsal.torch_room.optimizers import Rounds
from tuner.rehearsal.torch_room.order import Order
from tuner.rehearsal.torch_room.placement import OnCpu
from tuner.rehearsal.torch_room.progress import EnoughError, Progress
from tuner.rehearsal.torch_room.reducer import stand_in_for_reducer
from tuner.rehearsal.torch_room.watch import NoStandInError, Watch, WatchMode

FakeError = (
    DataDependentOutputException
    | DynamicOutputShapeException
    | UnsupportedFakeTensorException
    | UnsupportedOperatorException
)
"""Errors of PyTorch about operators that tensors without data cannot run."""
_OF_NETWORKS = {"gaierror", "ConnectionError", "URLError", "ConnectError", "LocalEntryNotFoundError", "TimeoutError"}
"""Errors of the network by their names: those of Python, and of the libraries that programs load data with."""
_INSTALL = re.compile(r"\binstall", re.IGNORECASE)
"""Words of errors about the environment, not about the layout."""
_BYTES_AT_ONCE = 1 << 16


def main() -> int:
    """Answer the cases of a request."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    script = request["script"]
    order = Order() if request["has_order"] else None
    progress = Progress(watch=Watch(order=order), steps=request["steps"])
    sys.path[0] = str(Path.cwd()) if script is None else str(Path(script).resolve().parent)
    answers = os.dup(1)
    for descriptor in (1, 2):
        os.dup2(os.memfd_create("printed"), descriptor)
    has_engine = _exchange(request["device"], progress)
    source = source_of(request["module"]) if script is None else Path(script)
    if source is not None:
        import_for_all_ranks(source)
    import_cpu_s = time.process_time()
    gc.collect()
    gc.freeze()  # what is imported stays: the forks neither visit it nor copy it
    answered = _answered(request, progress, has_engine=has_engine)
    for case, (text, status) in zip(request["cases"], answered, strict=True):
        died = {"rank": case["rank"], "verdict": "unknown", "error": f"its process ended with status {status}"}
        _tell(answers, (json.loads(text) if text else died) | {"import_cpu_s": import_cpu_s})
    return 0


def _answered(request: dict[str, Any], progress: Progress, *, has_engine: bool) -> Iterator[tuple[bytes, int]]:
    """Run the cases in forks, as many at once as the request says, and yield answers and statuses in their order."""
    cases, jobs = request["cases"], request["jobs"]
    shared = _shared_by_candidate(cases)
    texts, statuses = [b""] * len(cases), dict[int, int]()
    begun = told = 0
    running: dict[int, tuple[int, int]] = {}
    while told < len(cases):
        while len(running) < jobs and begun < len(cases):
            read, write = os.pipe()
            if (child := os.fork()) == 0:
                pipelining.share(shared[begun], is_first=shared[begun] not in shared[:begun])
                _serve(cases[begun], write, progress, request, has_engine=has_engine)
            os.close(write)
            running[read] = begun, child
            begun += 1
        for read in select.select(list(running), [], [])[0]:
            number, child = running[read]
            if part := os.read(read, _BYTES_AT_ONCE):
                texts[number] += part
                continue
            os.close(read)
            del running[read]
            statuses[number] = os.waitpid(child, 0)[1]
            pipelining.no_more(shared[number])
        while told in statuses:
            yield texts[told], statuses[told]
            told += 1


def _shared_by_candidate(cases: Sequence[dict[str, Any]]) -> list[int]:
    """Return a file in memory for each case, which all cases of one candidate share."""
    candidates = [json.dumps([case[name] for name in ("world", "arguments", "environment")]) for case in cases]
    files = {candidate: os.memfd_create("shapes") for candidate in set(candidates)}
    return [files[candidate] for candidate in candidates]


def _serve(
    case: dict[str, Any], write: int, progress: Progress, request: dict[str, Any], *, has_engine: bool
) -> NoReturn:
    """Answer a case in this fork, and end it."""
    for descriptor in (1, 2):
        os.dup2(os.memfd_create("printed"), descriptor)
    answer = {"rank": case["rank"], **_run(case, progress, request, has_engine=has_engine)}
    with os.fdopen(write, "w") as pipe:
        json.dump(answer | {"printed": last_printed()}, pipe)
    os._exit(0)


def _exchange(device: dict[str, Any], progress: Progress) -> bool:
    """Exchange what only a device has, now or as soon as it is imported; return whether Transformer Engine is there."""
    stand_in_for_cuda(DeviceFacts(**device | {"capability": tuple(device["capability"])}))
    stand_in_for_autocast(progress.watch.invented)
    stand_in_for_reducer(progress.watch.storages)
    stand_in_for_loader()
    _replace_compilers(progress.watch)
    attention.stand_in_for_attention()
    norms.stand_in_for_norms()
    of_torch = attention.changes() | distributed_tensors.changes() | pipelining.changes()
    change_on_import(of_torch | registry.changes(progress))
    Rounds(progress).follow()
    if progress.watch.order is not None:
        progress.watch.order.follow_works()
    stand_in_for_deep_ep(progress.watch)
    return stand_in_for_kernels(progress.watch)


def _tell(answers: int, answer: dict[str, Any]) -> None:
    with os.fdopen(os.dup(answers), "w") as file:
        file.write(json.dumps(answer) + "\n")


def _replace_compilers(watch: Watch) -> None:
    """Let programs run uncompiled: compilers would want data, or a device."""
    module: Any = torch

    def leave_uncompiled(model: Any = None, *_: Any, **__: Any) -> Any:
        watch.invented["torch.compile: left uncompiled, so that no operators are fused"] += 1
        return model if model is not None else (lambda function: function)

    module.compile = leave_uncompiled
    nn.Module.compile = lambda *_, **__: (leave_uncompiled(), None)[1]  # type: ignore[method-assign]
    module.jit.script = lambda function, *_, **__: function
    if not hasattr(typing, "override"):  # Megatron-LM's newest versions are written for Python 3.12
        setattr(typing, "override", typing_extensions.override)  # noqa: B010 - mypy knows none for 3.11
    with contextlib.suppress(ImportError):
        triton: Any = importlib.import_module("triton")
        triton.runtime.driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))


def _run(case: dict[str, Any], progress: Progress, request: dict[str, Any], *, has_engine: bool) -> dict[str, Any]:
    """Run the program as one rank, and return what was seen; the process serves for nothing afterwards."""
    rank, world, per_host = case["rank"], case["world"], request["device"]["per_host"]
    set_environment(case["environment"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % per_host)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(per_host), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    progress.most_micro_batches = case["most_micro_batches"]
    progress.most_before_last = case["most_before_last"]
    stand_in_for_groups(rank, world)
    verdict, error, where = "accepted", None, []
    torch.set_grad_enabled(True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, OnCpu(), WatchMode(progress.watch):
        mode.static_shapes = True
        mode.cache_enabled = False  # results are made again by `repeats.py`
        try:
            run_program(request, case)
            sys.exit()
        except EnoughError:
            pass
        except BaseException as caught:  # noqa: BLE001 - whatever the framework says is the answer
            verdict = "unknown" if _is_ours(caught, has_engine=has_engine) else "refused"
            error, where = _told(caught, len(progress.peaks), progress.steps), lines_on_the_way(caught)
    return progress.as_json() | {
        "verdict": verdict,
        "error": error,
        "where": where,
        "case_cpu_s": time.process_time(),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _told(error: BaseException, made: int, steps: int) -> str:
    """Return the error in words, with what it misses."""
    if isinstance(error, SystemExit) and not error.code:
        return f"the program ended after {made} of {steps} steps"
    if isinstance(error, NoStandInError):
        return str(error)
    told = f"{type(error).__name__}: {error}"
    cause = _missing(error)
    return told if cause in (None, error) else f"{told} ({type(cause).__name__}: {cause})"


def _is_ours(error: BaseException, *, has_engine: bool) -> bool:
    """Return whether an error says that something of the rehearsal is missing, and nothing of the layout."""
    frames = traceback.extract_tb(error.__traceback__)
    is_missing = _missing(error) or _INSTALL.search(str(error)) is not None
    if is_missing or (frames and is_ours(frames[-1].filename)) or _is_call_of_ours(error):
        return True
    if isinstance(error, SystemExit) and not error.code:
        return True
    return not has_engine and re.search(r"transformer.?engine|\bTE\b", str(error), re.IGNORECASE) is not None


def _is_call_of_ours(error: BaseException) -> bool:
    """Return whether an error says that a stand-in was called with other arguments than it takes."""
    named = re.match(r"(\w+)(?:\.\S+)?\(\) ", str(error)) if isinstance(error, TypeError) else None
    ours = (module for name, module in list(sys.modules.items()) if name.startswith(f"{__package__}."))
    return named is not None and any(
        getattr(vars(module).get(named[1]), "__module__", None) == module.__name__ for module in ours
    )


def _missing(error: BaseException) -> BaseException | None:
    """Return the error that led to an error and misses what a rehearsal has not: a stand-in, package, file, network."""
    seen: BaseException | None = error
    while seen is not None:
        is_of_network = isinstance(seen, OSError) and not _OF_NETWORKS.isdisjoint(
            kind.__name__ for kind in type(seen).__mro__
        )
        if is_of_network or isinstance(seen, NoStandInError | FakeError | ImportError | FileNotFoundError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


if __name__ == "__main__":
    sys.exit(main())
