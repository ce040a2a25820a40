"""Run of a JAX program in the room, and what it says."""

from __future__ import annotations

import resource
import time
import traceback
from collections import Counter
from typing import Any

from costmodels.xla.compiler import has_gpu_compiler
from tuner.rehearsal.both_rooms.places import is_ours, lines_on_the_way
from tuner.rehearsal.both_rooms.program import run_program, set_environment
from tuner.rehearsal.jax_room.arrays import INVENTED, register
from tuner.rehearsal.jax_room.calls import replace_calls
from tuner.rehearsal.jax_room.hlo import Collective, read_program
from tuner.rehearsal.jax_room.steps import EnoughError, Steps, memory_of
from tuner.rehearsal.jax_room.target import Target, show

_OF_NO_DEVICE = ("UNIMPLEMENTED", "Unknown backend: 'gpu'", "only supported for addressable")
"""Words of errors of JAX about devices that only a compiler has: functions of the host that a step calls, and such."""


def run(cases: list[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    """Run the program, and return what was seen; the process serves for nothing afterwards."""
    began_s, case = time.process_time(), cases[0]
    set_environment(case["environment"])
    try:
        steps = _prepare(case["world"], request)
    except ValueError as missing:
        return {"verdict": "unknown", "error": str(missing)}
    verdict, where = "accepted", list[str]()
    error: str | None = None
    try:
        run_program(request, case)
    except EnoughError:
        pass
    except SystemExit as left:
        if left.code not in (None, 0):
            verdict, error = "refused", f"SystemExit: {left.code}"
    except BaseException as caught:  # noqa: BLE001 - whatever the program says is the answer
        verdict = "unknown" if _is_ours(caught) else "refused"
        error, where = f"{type(caught).__name__}: {caught}", lines_on_the_way(caught)
    if verdict == "accepted" and not steps.step():
        verdict, error = "unknown", "the program ended, and no compiled function of its own took most of what it holds"
    wanted = [one["rank"] for one in cases] if verdict == "accepted" else []
    return _seen(steps, wanted, began_s=began_s) | {
        "verdict": verdict,
        "error": error,
        "where": where,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _prepare(world: int, request: dict[str, Any]) -> Steps:
    """Exchange what JAX would ask of devices; return the record of steps."""
    target = Target(world, request["target"] if has_gpu_compiler() else None, request["device"]["memory_bytes"])
    show(target)
    register()
    steps = Steps(target, request["steps"])
    replace_calls(target, steps)
    return steps


def _seen(steps: Steps, ranks: list[int], *, began_s: float) -> dict[str, Any]:
    """Return what the program's last step is and needs, with the collectives of some ranks, as JSON types."""
    found: dict[str, Any] = {"compiled_for": "gpu" if steps.target.is_gpu else "cpu", "invented": dict(INVENTED)}
    if not ranks:
        return found
    memories = [memory_of(made) for made in steps.step()]
    largest = max(memories, key=lambda one: one.peak)
    operators: Counter[str] = Counter()
    collectives: dict[int, Counter[Collective]] = {rank: Counter() for rank in ranks}
    for made in steps.step():
        compiled = made.call.compiled
        partitions = [device.id for device in compiled._unloaded_executable.device_list]
        program = read_program(compiled.as_text())
        operators += program.operators
        for rank in ranks:
            collectives[rank] += program.collectives_of(rank, partitions)
        if program.unknown_loops:
            words = f"{made.call.maker}: turns of {program.unknown_loops} loops, counted as one"
            found["invented"][words] = 1
    return found | {
        "parameters": max(one.parameters for one in memories),
        "peaks": [largest.peak],
        "peak_parts": largest.parts,
        "functions": [made.call.maker for made in steps.step()],
        "cpu_s": [time.process_time() - began_s],
        "operators": [[name, [], count] for name, count in operators.most_common()],
        "collectives_of": {
            rank: [[one.name, one.size, one.ranks, one.peer, count] for one, count in kinds.items()]
            for rank, kinds in collectives.items()
        },
    }


def _is_ours(error: BaseException) -> bool:
    """Return whether an error says that something of the rehearsal is missing, and nothing of the layout."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ModuleNotFoundError):
        return True
    if isinstance(error, NotImplementedError):  # JAX and XLA say so of what a backend lacks, here one without a device
        return True
    if frames and is_ours(frames[-1].filename) and not isinstance(error, ValueError | RuntimeError):
        return True
    return any(words in str(error) for words in _OF_NO_DEVICE)
