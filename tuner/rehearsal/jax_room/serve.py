"""Program of the room: runs the user's JAX program as far as two steps of training, each compiled and none computed.

    python -m tuner.rehearsal.jax_room.serve REQUEST

The request is that of the room of PyTorch, with `target`, XLA's description of the device or null. All ranks of a JAX
program run one compiled program: cases that differ in their rank alone are run once, and answered one by one.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tuner.rehearsal.both_rooms.program import last_printed


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
            answer: dict[str, Any] = {"framework": "jax", **_answered(cases, request), "printed": last_printed()}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        died: dict[str, Any] = {
            "framework": "jax",
            "verdict": "unknown",
            "error": f"its process ended with status {status}",
        }
        answer = json.loads(text) if text else died | {"printed": last_printed()}
        collectives: dict[str, Any] = answer.pop("collectives_of", {})
        for case in cases:
            own = {"collectives": collectives.get(str(case["rank"]), [])}
            with os.fdopen(os.dup(answers), "w") as file:
                file.write(json.dumps({"rank": case["rank"], **answer, **own}) + "\n")
    return 0


def _without_rank(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name != "rank"}


def _answered(cases: list[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    """Run the program; the process serves for nothing afterwards."""
    try:
        found: dict[str, Any] = importlib.import_module("tuner.rehearsal.jax_room.program").run(cases, request)
    except (ImportError, AttributeError) as error:  # of another version of JAX
        return {"verdict": "unknown", "error": f"the rehearsal does not know this version of JAX: {error}"}
    return found


if __name__ == "__main__":
    sys.exit(main())
