"""Process that rehearses candidates beside a running study, at low priority, and prints one line for each answer.

    python -m tuner.rehearsal.beside < REQUEST

A driver has threads (Ray's, databases'), and a process with threads should not fork; so this one stands between the
driver and the boundary's processes. The request is JSON: device, limit_s, environment and candidates. A line is a
`CandidateAnswer`, or says why nothing can be rehearsed here: {"off": ...}. The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from hardware.device import Device
from hardware.io.errors import ConfigError
from tuner.capture.run_script import NoBoundaryError
from tuner.rehearsal.candidates import Candidate, by_program, whole_answers
from tuner.rehearsal.run import rehearse

NICENESS = 10
"""By how much the priority is lowered."""
_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Request to rehearse candidates.

    Attributes:
        device: Device that the programs believe to be on.
        limit_s: Time limit of all candidates together [s].
        environment: Variables of the study's driver.
        candidates: Candidates, in the order in which their answers are wanted.
        parent: Process number of the driver.
    """

    device: Device
    limit_s: float
    environment: Mapping[str, str]
    candidates: Sequence[Candidate]
    parent: int


REQUEST = TypeAdapter(Request)


def main() -> int:
    """Answer the request on standard input."""
    request = REQUEST.validate_json(sys.stdin.buffer.read())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != request.parent:
        return 1
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        for group in by_program(request.candidates):
            cases = [case for candidate in group for case in candidate.cases]
            answers = rehearse(cases, device=request.device, limit_s=request.limit_s, environment=request.environment)
            for answer in whole_answers(group, answers):
                _tell(answer.as_json())
    except NoBoundaryError as error:
        _tell({"off": f"nothing can be put between the program and this machine: {error}"})
    except (ConfigError, OSError) as error:
        _tell({"off": str(error)})
    return 0


def _tell(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
