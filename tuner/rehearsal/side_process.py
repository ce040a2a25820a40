"""Side process of a driver, in which candidates are rehearsed; see `beside.py` for what runs there."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardware.device import Device
from tuner.rehearsal.beside import REQUEST, Request
from tuner.rehearsal.candidates import Candidate

MODULE = "tuner.rehearsal.beside"
_BYTES_AT_ONCE = 1 << 16
_END_WITHIN_S = 10.0


class SideProcess:
    """Running rehearsals of some candidates.

    Args:
        candidates: Candidates, in the order in which their answers are wanted.
        device: Device that the programs believe to be on.
        limit_s: Time limit of all together [s].
        environment: Variables of the driver.

    Attributes:
        left: Keys of the candidates without an answer.

    Raises:
        OSError: it cannot be started.
        ValueError: a variable or an argument is no text that JSON takes.
    """

    def __init__(
        self, candidates: Sequence[Candidate], *, device: Device, limit_s: float, environment: Mapping[str, str]
    ) -> None:
        self.left = [candidate.key for candidate in candidates]
        request = Request(
            device=device, limit_s=limit_s, environment=dict(environment), candidates=candidates, parent=os.getpid()
        )
        ours = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(ours)), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile() as given:
            given.write(REQUEST.dump_json(request))
            given.seek(0)
            self._process = subprocess.Popen(  # noqa: S603 # our own module
                [sys.executable, "-m", MODULE],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
            )
        assert self._process.stdout is not None, "it is a pipe"
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._rest = b""
        self.is_over = False

    def read(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the lines that have come, waiting so long for the first [s]; at the end, `is_over` is set."""
        found: list[dict[str, Any]] = []
        ready = select.poll()  # select() knows no descriptors from 1,024 on
        ready.register(self._output, select.POLLIN)
        while not self.is_over and ready.poll(0 if found else round(1000 * timeout_s)):
            read = os.read(self._output, _BYTES_AT_ONCE)
            self.is_over = not read
            *lines, self._rest = (self._rest + read).split(b"\n")
            found += map(json.loads, lines)
        if self.is_over:
            self._process.wait()
        return found

    def close(self) -> None:
        """End it, with all that it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_WITHIN_S)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.is_over = True
