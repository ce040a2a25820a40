"""Ranks of trials on one host: start them, receive their messages, and learn how they ended.

The processes are forked by a server that is started once (`server.py`). The modules that they need are imported there
and not here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trials.ranks.contract import AbstractRanks, RankSetup, RanksLostError
from trials.ranks.messages import Exit, Kill, Launch, Reserve, Reserved, Told

LOOPBACK = "127.0.0.1"

START_LIMIT_S = 120.0
"""Time that the server may take to start [s], for example to import torch on a busy machine."""

KEPT_BYTES = 1_000_000
"""Bytes that are kept of the ranks' output; torch prints a pipeline's schedules after the line that names a failure."""

END_LIMIT_S = 10.0
"""Time that killed ranks may take to be gone [s]."""


class RankProcesses(AbstractRanks):
    """Ranks of a trial on this host: all of them, or this host's part.

    `start` takes as long as the modules of its setup take to import. As a context manager it starts and closes itself.

    Args:
        setup: Modules and variables that ranks find ready.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._running: set[int] = set()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # as long as this object

    def __enter__(self) -> RankProcesses:
        """Start the server."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """End the server and all ranks."""
        self.close()

    def start(self) -> RankProcesses:
        """Start the server and wait until it has imported the modules of its setup.

        Raises:
            RanksLostError: The server did not start.
        """
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[2]), *filter(None, sys.path)])),
            **dict(self._setup.environment),
        }
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603 # our own module
                [
                    sys.executable,
                    "-m",
                    "trials.ranks.server",
                    str(theirs.fileno()),
                    str(self._log.fileno()),
                    *self._setup.modules,
                ],
                pass_fds=[theirs.fileno(), self._log.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the driver
            )
        self._connection = Connection(ours.detach())
        try:
            if not self._connection.poll(START_LIMIT_S):
                raise RanksLostError(f"the server of ranks did not start within {START_LIMIT_S:.0f} s")
            self._connection.recv()
        except BaseException as error:
            text = self._end()
            if isinstance(error, (EOFError, OSError)):
                raise RanksLostError(f"the server of ranks did not start: {text}") from None
            raise
        return self

    def close(self) -> None:
        """End the server and all ranks."""
        self._end()

    @property
    def running(self) -> frozenset[int]:
        """Ranks whose end `events` has not reported yet."""
        return frozenset(self._running)

    def reserve(self, host: str = LOOPBACK) -> int:
        """Reserve a free port at the address `host` of this machine for rank 0 of the next launch."""
        assert not self._running, "one trial after the other"
        self._send(Reserve(host=host))
        try:
            answer = self._open().recv()
        except (EOFError, OSError):
            raise self._close_lost() from None
        assert isinstance(answer, Reserved), answer
        return answer.port

    def launch(self, function: str, *arguments: Any, num_ranks: int, memory_limit_bytes: int | None = None) -> None:
        """Start all ranks of a trial on this host."""
        self.launch_part(
            Launch(
                function=function,
                arguments=arguments,
                ranks=tuple(range(num_ranks)),
                world_size=num_ranks,
                host=LOOPBACK,
                port=self.reserve(),
                memory_limit_bytes=memory_limit_bytes,
            )
        )

    def launch_part(self, launch: Launch) -> None:
        """Start the ranks of a trial that belong to this host."""
        assert not self._running, "one trial after the other"
        self._log.seek(0)
        self._log.truncate()
        self._send(launch)
        self._running = set(launch.ranks)

    def events(self, timeout_s: float) -> list[Told | Exit]:
        """Return the events since the last call, waiting up to `timeout_s` for the first one.

        Raises:
            RanksLostError: The server itself has died, and with it all ranks.
        """
        connection = self._open()
        found: list[Told | Exit] = []
        while connection.poll(0 if found else timeout_s):
            try:
                event = connection.recv()
            except (EOFError, OSError):
                raise self._close_lost() from None
            if isinstance(event, Exit):
                self._running.discard(event.rank)
            found.append(event)
        return found

    def kill(self) -> list[Exit]:
        """Kill all ranks at once, also hanging and stopped ones, and return their exits."""
        if not self._running:
            return []
        self._send(Kill())
        deadline_s = time.monotonic() + END_LIMIT_S
        ends: list[Exit] = []
        while self._running and time.monotonic() < deadline_s:
            ends += [event for event in self.events(0.1) if isinstance(event, Exit)]
        if self._running:
            left = sorted(self._running)
            self._end()
            raise RanksLostError(f"ranks {left} did not end within {END_LIMIT_S:.0f} s of being killed")
        return ends

    def printed(self) -> str:
        """Return the end of what the ranks of the last launch have printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), KEPT_BYTES, max(size - KEPT_BYTES, 0)).decode(errors="replace")

    def _open(self) -> Connection:
        if self._connection is None:
            raise RanksLostError("the server of ranks has ended")
        return self._connection

    def _send(self, request: Reserve | Launch | Kill) -> None:
        try:
            self._open().send(request)
        except OSError:
            raise self._close_lost() from None

    def _close_lost(self) -> RanksLostError:
        return RanksLostError(f"the server of ranks has died: {self._end()}")

    def _end(self) -> str:
        """End the server with its ranks, and return the end of its standard error."""
        connection, self._connection = self._connection, None
        server, self._server = self._server, None
        self._running.clear()
        if connection is not None:
            connection.close()
        if server is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, text = server.communicate(timeout=END_LIMIT_S)
            return text.decode(errors="replace").strip()[-2000:]
        server.kill()
        server.wait()
        return ""
