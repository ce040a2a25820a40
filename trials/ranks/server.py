"""Server that ranks are forked from. It has imported the modules, for example torch, so ranks start in milliseconds.

It runs as `python -m trials.ranks.server SOCKET LOG MODULE...` under a `RankProcesses` (see `processes.py`). It
exchanges messages with it on the descriptor SOCKET; the ranks' output goes to the descriptor LOG. The server is
single-threaded and only imports the modules, so that it is safe to fork, also with CUDA. Every trial gets fresh
processes: no memory, cache or broken device context of one trial is left for the next one, and the peak of memory is
that of the trial alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from trials.ranks.memory_limit import limit_data
from trials.ranks.messages import Exit, Kill, Launch, Place, Reserve, Reserved, Told
from trials.ranks.unheard_signals import hear_signals

LOST_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def main(descriptor: int, log: int, modules: Sequence[str]) -> None:
    """Serve requests until the other side closes its end; the ranks die with the server."""
    for name in modules:
        importlib.import_module(name)
    with Connection(descriptor) as client:
        _Server(client, log).serve()


class _Server:
    """Event loop between the requests of the trial and the messages of the ranks."""

    def __init__(self, client: Connection, log: int) -> None:
        self.client = client
        self.log = log
        self.listening: socket.socket | None = None
        self.ranks: dict[Connection, tuple[int, int]] = {}  # the end of each rank's pipe: its rank and process

    def serve(self) -> None:
        self.client.send(True)
        while True:
            for source in wait([self.client, *self.ranks]):
                assert isinstance(source, Connection), "nothing else is waited for"
                if source is not self.client:
                    self._hear(source)
                elif not self._serve_request():
                    self._kill()
                    return

    def _serve_request(self) -> bool:
        """Serve one request, and return whether the client is still there."""
        try:
            request = self.client.recv()
        except (EOFError, OSError):
            return False
        match request:
            case Reserve(host=host):
                self.listening = socket.create_server((host, 0))
                self.client.send(Reserved(port=self.listening.getsockname()[1]))
            case Launch():
                for local_rank, rank in enumerate(request.ranks):
                    self._fork(request, rank, local_rank)
                if self.listening is not None:
                    self.listening.close()
                    self.listening = None
            case Kill():
                self._kill()
        return True

    def _fork(self, launch: Launch, rank: int, local_rank: int) -> None:
        """Fork one rank. The child runs its function and ends; only the parent returns."""
        ours, theirs = _pipe()
        process = os.fork()
        if process:
            theirs.close()
            self.ranks[ours] = (rank, process)
            return
        code = 1
        try:
            _set_death_signal(os.getppid())
            ours.close()
            listening = self._close_inherited(keeps_listening=rank == 0)
            _set_up_rank(launch, rank, self.log)
            place = Place(
                rank=rank,
                local_rank=local_rank,
                world_size=launch.world_size,
                host=launch.host,
                port=launch.port,
                listening=listening,
                tell=theirs.send,
            )
            module, _, function = launch.function.partition(":")
            getattr(importlib.import_module(module), function)(place, *launch.arguments)
            code = 0
        except BaseException:  # noqa: BLE001 # a process ends here, whatever happened
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _close_inherited(self, *, keeps_listening: bool) -> int | None:
        """Close the server's own descriptors in a rank; return the listening one if this rank keeps it."""
        self.client.close()
        for connection in self.ranks:
            connection.close()
        if self.listening is not None and keeps_listening:
            return self.listening.detach()
        if self.listening is not None:
            self.listening.close()
        return None

    def _hear(self, source: Connection) -> None:
        """Pass a rank's message on, or report its end."""
        rank, process = self.ranks[source]
        try:
            self.client.send(Told(rank=rank, value=source.recv()))
        except (EOFError, OSError):  # the rank has ended; what it left half-sent is lost
            source.close()
            del self.ranks[source]
            _, status, usage = os.wait4(process, 0)
            self.client.send(
                Exit(
                    rank=rank,
                    code=os.waitstatus_to_exitcode(status),
                    peak_bytes=usage.ru_maxrss * 1024,
                    cpu_s=usage.ru_utime + usage.ru_stime,
                )
            )

    def _kill(self) -> None:
        for _, process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _pipe() -> tuple[Connection, Connection]:
    read, write = os.pipe()
    return Connection(read, writable=False), Connection(write, readable=False)


def _set_death_signal(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if it hangs or is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(LOST_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _set_up_rank(launch: Launch, rank: int, log: int) -> None:
    """Set the signals, variables, output and memory limit of one rank's process."""
    hear_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends the ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(launch.world_size))
    fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    if launch.memory_limit_bytes is not None:
        limit_data(launch.memory_limit_bytes)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
