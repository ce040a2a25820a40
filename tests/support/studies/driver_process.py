"""Separate process of `meshtune run`, which tests kill and interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from benchmarks.support.process_table import marked_processes, session_processes

ROOT = Path(__file__).resolve().parents[3]
STUDY = ROOT / "configs" / "studies" / "ultrascale-llama-8b-128.yaml"
LIMIT_S = 120.0


class DriverProcess:
    """Process of one `meshtune run --json STUDY`.

    It leads a process group and a session. All its processes, children of Ray included, are found by a mark in their
    environment.
    """

    def __init__(
        self, storage: str, *overrides: str, study: Path = STUDY, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.mark = f"MESHTUNE_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        options = [part for override in overrides for part in ("--set", override)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tuner", "run", str(study), "--json", "--storage", storage, *options],
            cwd=ROOT,
            env={**environment, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as `timeout`, shells and batch systems start programs
        )
        self._told: dict[str, str] = {"stdout": "", "stderr": ""}
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in self._told]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: str) -> None:
        for line in getattr(self.process, stream):
            self._told[stream] += line

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all remaining processes, whatever the result of the test."""
        self.process.kill()
        self.process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    @property
    def told(self) -> str:
        """Standard error so far."""
        return self._told["stderr"]

    def wait_for(self, text: str) -> None:
        """Wait until stderr contains `text`."""
        deadline_s = time.monotonic() + LIMIT_S
        while text not in self._told["stderr"]:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self._told}"
            assert time.monotonic() < deadline_s, f"never said {text!r}: {self._told}"
            time.sleep(0.01)

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        """Send a signal, if one is given, wait for the end, and return exit status, stdout and stderr."""
        if number is not None:
            self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str, str]:
        """Wait for the end, and return exit status, stdout and stderr."""
        status = self.process.wait(LIMIT_S)
        for reader in self._readers:
            reader.join(LIMIT_S)
        return status, self._told["stdout"], self._told["stderr"]

    def processes(self) -> dict[int, str]:
        """Return the living processes of this run, except the driver itself, with their command lines."""
        found = marked_processes(self.mark)
        found.pop(self.process.pid, None)
        return found

    def processes_after(self, limit_s: float) -> list[str]:
        """Return the command lines of processes that live after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while True:
            left = [*(self.processes() | session_processes(self.process.pid)).values()]
            if not left or time.monotonic() >= deadline_s:
                return left
            time.sleep(0.2)
