"""Program of the room: runs the user's JAX program as far as two steps of training, each compiled and none computed.

    python -m tuner.rehearsal.jax_room.serve REQUEST

The request is that of the room of PyTorch, with `target`, XLA's description of the device or null. All ranks of a JAX
program run one compiled program: cases that differ in their rank alone are run once, and answered one by one.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import resource
import runpy
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> int:
    """Answer the cases of a request."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    script = request["script"]
    sys.path[0] = str(Path.cwd()) if script is None else str(Path(script).resolve().parent)
    answers = os.dup(1)
    for descriptor in (1, 2):
        os.dup2(os.memfd_create("printed"), descriptor)
    importlib.import_module("jax")  # once for all cases; it starts no thread before a device is asked for
    for _, group in itertools.groupby(request["cases"], key=_without_rank):
        cases = list(group)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.close(read)
            answer = {"framework": "jax", **_run(cases, request), "printed": _printed()}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        died = {"framework": "jax", "verdict": "unknown", "error": f"its process ended with status {status}"}
        answer = json.loads(text) if text else died | {"printed": _printed()}
        collectives = answer.pop("collectives_of", {})
        for case in cases:
            own = {"collectives": collectives.get(str(case["rank"]), [])}
            with os.fdopen(os.dup(answers), "w") as file:
                file.write(json.dumps({"rank": case["rank"], **answer, **own}) + "\n")
    return 0


def _without_rank(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name != "rank"}


def _run(cases: list[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    """Run the program, and return what was seen; the process serves for nothing afterwards."""
    began_s, case = time.process_time(), cases[0]
    for name, text in case["environment"].items():
        os.environ.pop(name, None)
        if text is not None:
            os.environ[name] = text
    try:
        steps = _prepare(case["world"], request)
    except (ImportError, AttributeError, ValueError, RuntimeError) as error:
        return {"verdict": "unknown", "error": f"the rehearsal cannot begin: {error}"}
    from tuner.rehearsal.jax_room.steps import EnoughError

    sys.argv = [request["script"] or "-m", *case["arguments"]]
    verdict, error, where = "accepted", None, []
    try:
        if request["script"] is None:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(request["script"], run_name="__main__")
    except EnoughError:
        pass
    except SystemExit as left:
        if left.code not in (None, 0):
            verdict, error = "refused", f"SystemExit: {left.code}"
    except BaseException as caught:  # noqa: BLE001 - whatever the program says is the answer
        verdict = "unknown" if _is_ours(caught) else "refused"
        error, where = f"{type(caught).__name__}: {caught}", _where(caught)
    if verdict == "accepted" and not steps.step():
        verdict, error = "unknown", "the program ended, and no compiled function of its own took most of what it holds"
    wanted = [one["rank"] for one in cases] if verdict == "accepted" else []
    return _seen(steps, wanted, began_s=began_s) | {
        "verdict": verdict,
        "error": error,
        "where": where,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _prepare(world: int, request: dict[str, Any]) -> Any:
    """Exchange what JAX would ask of devices; return the record of steps."""
    from tuner.rehearsal.jax_room.arrays import register
    from tuner.rehearsal.jax_room.calls import replace_calls
    from tuner.rehearsal.jax_room.steps import Steps
    from tuner.rehearsal.jax_room.target import Target, has_gpu_compiler, show

    target = Target(world, request["target"] if has_gpu_compiler() else None)
    show(target)
    register()
    steps = Steps(target, request["steps"])
    replace_calls(target, steps)
    return steps


def _seen(steps: Any, ranks: list[int], *, began_s: float) -> dict[str, Any]:
    """Return what the program's last step is and needs, with the collectives of some ranks, as JSON types."""
    from tuner.rehearsal.jax_room.arrays import INVENTED
    from tuner.rehearsal.jax_room.hlo import read_program
    from tuner.rehearsal.jax_room.steps import memory_of

    found: dict[str, Any] = {"compiled_for": "gpu" if steps.target.is_gpu else "cpu", "invented": dict(INVENTED)}
    if not ranks:
        return found
    memories = [memory_of(made) for made in steps.step()]
    largest = max(memories, key=lambda one: one.peak)
    operators: Counter[str] = Counter()
    collectives: dict[int, Counter[Any]] = {rank: Counter() for rank in ranks}
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


def _printed() -> str:
    """Return the last that the program printed."""
    found = ""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(ValueError):  # the program closed it
            stream.flush()
        size = os.fstat(descriptor).st_size
        found += os.pread(descriptor, 2_000, max(size - 2_000, 0)).decode(errors="replace")
    return found


def _is_ours(error: BaseException) -> bool:
    """Return whether an error says that something of the rehearsal is missing, and nothing of the layout."""
    from tuner.rehearsal.jax_room.places import is_ours

    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ModuleNotFoundError | NotImplementedError):
        return True
    if frames and is_ours(frames[-1].filename) and not isinstance(error, ValueError | RuntimeError):
        return True
    return "UNIMPLEMENTED" in str(error)


def _where(error: BaseException) -> list[str]:
    """Return the program's own lines on the way to an error, the innermost last."""
    from tuner.rehearsal.jax_room.places import is_beneath, shown_file

    frames = [one for one in traceback.extract_tb(error.__traceback__) if not is_beneath(one.filename)]
    return [f"{shown_file(one.filename)}:{one.lineno} {one.name}" for one in frames[-7:]]


if __name__ == "__main__":
    sys.exit(main())
