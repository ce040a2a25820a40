"""Supervisor of a command, which leaves nothing behind: at its end all processes that the command started are gone.

The supervisor is a fork of the process that starts it. On Linux it adopts the orphans of the command's processes
(PR_SET_CHILD_SUBREAPER). It therefore sees all of them, also those with a session of their own, and knows when the last
one is gone. It lives as long as the other end of its life line is open. If the process that holds that end is killed,
the command ends too. If the supervisor itself is killed, a process that reads the output by `Supervised.read`, and has
called `adopt_orphans`, ends the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trials.ranks.unheard_signals import hear_signals, ignore_signals

GRACE_S = 3.0
"""Time that a command has to end by itself after SIGTERM [s]: launchers such as srun end processes on other hosts."""

LOOK_EVERY_S = 0.02
"""Interval at which the supervisor checks whether processes are gone [s]."""

READ_WITHIN_S = 0.5
"""Longest time after which a reader notices that the supervisor was killed [s]."""

NOT_STARTED = 127
"""Exit status of a command that could not be started, as in shells."""

_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervised:
    """Running command with its supervisor.

    Attributes:
        output: File descriptor of the command's output; at end of file all processes that wrote to it are gone.
        life_line: File descriptor that keeps the command alive; closing it ends the command.
        supervisor: Process number of the supervisor.
    """

    output: int
    life_line: int
    supervisor: int

    def read(self, most_bytes: int) -> bytes:
        """Return some of the output as it comes, nothing at its end; end the command if the supervisor is killed."""
        while True:
            if self._was_killed():
                end_descendants()
            if select.select([self.output], [], [], READ_WITHIN_S)[0]:
                return os.read(self.output, most_bytes)

    def _was_killed(self) -> bool:
        try:
            ended = os.waitid(os.P_PID, self.supervisor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # its end has been taken note of
            return False
        return ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)

    def poll(self) -> int | None:
        """Return what `wait` would, or None while processes are left; neither is called after an exit status."""
        supervisor, status = os.waitpid(self.supervisor, os.WNOHANG)
        return code_of_shell(os.waitstatus_to_exitcode(status)) if supervisor else None

    def wait(self) -> int:
        """Wait until all processes are gone; return the exit status, or the negative number of the killing signal."""
        try:
            _, status = os.waitpid(self.supervisor, 0)
        except ChildProcessError:  # it was killed, and its command ended by `read`
            return -signal.SIGKILL
        return code_of_shell(os.waitstatus_to_exitcode(status))


SIGNALLED = 128
"""Offset of a signal's number in a supervisor's exit status, as in shells; 255 is no signal, but a plain status."""


def code_of_shell(code: int) -> int:
    """Return an exit status as a process has it: a shell's status for a signal is that signal's negative number."""
    return SIGNALLED - code if code - SIGNALLED in signal.valid_signals() else code


def start_supervised(
    arguments: Sequence[str], environment: Mapping[str, str], directory: Path, *, linger_s: float = 0.0
) -> Supervised:
    """Start a command without input; its standard output and error become one stream.

    Args:
        arguments: Program and arguments of the command.
        environment: Environment variables of the command.
        directory: Working directory of the command.
        linger_s: Longest time that processes which the command leaves behind may run on after its end [s].
    """
    life_end, life_line = os.pipe()
    output, output_end = os.pipe()
    supervisor = os.fork()
    if supervisor:
        os.close(life_end)
        os.close(output_end)
        return Supervised(output=output, life_line=life_line, supervisor=supervisor)
    code = NOT_STARTED
    try:
        os.close(life_line)
        os.close(output)
        os.setsid()
        ignore_signals()
        adopt_orphans()
        code = _supervise(arguments, environment, directory, life_end, output_end, linger_s=linger_s)
    except OSError as error:
        os.write(output_end, f"{error}\n".encode())
    finally:
        os._exit(code)


def adopt_orphans() -> None:
    """Make orphans below this process its children, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT, 1)


def _supervise(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    life_end: int,
    output_end: int,
    *,
    linger_s: float,
) -> int:
    """Run the command to its end or until the life line breaks; return its exit status as shells do."""
    command = subprocess.Popen(  # noqa: S603 # the user's own command, and no shell
        list(arguments),
        stdin=subprocess.DEVNULL,
        stdout=output_end,
        stderr=output_end,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
        restore_signals=True,
        preexec_fn=hear_signals,  # noqa: PLW1509 # the process has one thread
    )
    os.close(output_end)
    while command.poll() is None:
        broken, _, _ = select.select([life_end], [], [], LOOK_EVERY_S)
        if broken:
            break
    if command.returncode is not None:
        deadline_s = time.monotonic() + linger_s
        while time.monotonic() < deadline_s and _has_descendants():
            broken, _, _ = select.select([life_end], [], [], LOOK_EVERY_S)
            if broken:
                break
    else:
        _signal_group(command.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(GRACE_S)
    _end_all(command)
    code = command.returncode
    assert code is not None, "it was waited for"
    return code if code >= 0 else SIGNALLED - code


def _has_descendants() -> bool:
    """Return whether processes are left that the command has started; those that have ended are taken note of."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _end_all(command: subprocess.Popen[bytes]) -> None:
    """Kill the command's group and all descendants of this process."""
    _signal_group(command.pid, signal.SIGKILL)
    command.wait()
    end_descendants()


def end_descendants() -> None:
    """Kill all descendants of this process, again and again until none is left."""
    while True:
        for process in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(LOOK_EVERY_S)  # some are left
            continue
        return


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def descendants(root: int) -> list[int]:
    """Return all processes below `root`; none if there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = entry.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    found, open_ = [], [root]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found
