"""Watch of program starts: a program that has a stand-in is replaced by it, by whatever path it is started.

Starts of processes are asked about too, so that a script cannot have more of them than it may, however fast it is.

A filter of system calls (seccomp) asks the keeper before every execve. Where the last part of the path is the name of a
stand-in, the keeper writes the stand-in's own path over it in the memory of the process that asks, and lets it go on.
The stand-ins' paths are short, so that they fit in the place of real ones. This holds for paths that do not exist, and
for programs started by shells, `env -i`, `timeout`, make or Python.

The watch is for recording commands, and no boundary by itself: a process can change its path after the keeper has read
it. The boundaries are those of `mounts.py` and `guard.py`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuner.capture.launchers import is_program, is_python
from tuner.capture.room.system_calls import AUDIT_ARCHITECTURE, filter_program, number_of, numbers_of, system_call

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: load a word, jump, return
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # struct seccomp_data
_ALLOW, _ASK, _FAIL = 0x7FFF0000, 0x7FC00000, 0x00050000
_OTHER_INTERFACE = 0x40000000  # x32 on x86_64
_SET_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_REQUEST = struct.Struct("QIIiIQ6Q")
_ANSWER = struct.Struct("QqiI")
_CONTINUE = 1
_LONGEST_PATH = 4096
_MOST_WORDS = 32
_OF_THREADS = 0x00010000  # CLONE_THREAD
_NETLINK = 16  # AF_NETLINK: a host's own addresses are read through it

NEVER = ("add_key", "request_key", "keyctl")
"""System calls that no captured script needs: keys outlive it."""
NEVER_WITHOUT_NAMESPACES = (*NEVER, "ptrace", "process_vm_writev", "io_uring_setup")
"""System calls that reach other processes, or go around the filter."""


def instructions(*, never: tuple[str, ...], network: bool) -> list[tuple[int, int, int, int]]:
    """Return the filter: starts of programs and processes are asked about, and some system calls fail.

    Args:
        never: Names of the system calls that fail as if the kernel lacked them.
        network: Whether sockets may be made; otherwise those of netlink only.
    """
    fail = (_RETURN, 0, 0, _FAIL | errno.ENOSYS)
    found = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, AUDIT_ARCHITECTURE[platform.machine()]),
        fail,
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _OTHER_INTERFACE),
        fail,
    ]
    for name in ("execve", "execveat"):
        found += [(_IF_EQUAL, 0, 1, number_of(name)), (_RETURN, 0, 0, _ASK)]
    for number in numbers_of(("fork", "vfork")):
        found += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ASK)]
    found += [
        (_IF_EQUAL, 0, 4, number_of("clone")),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_IF_ANY_BIT, 1, 0, _OF_THREADS),
        (_RETURN, 0, 0, _ASK),
        (_RETURN, 0, 0, _ALLOW),
        # its flags are in memory; libraries then use the older call
        (_IF_EQUAL, 0, 1, number_of("clone3")),
        fail,
    ]
    for name in never:
        found += [(_IF_EQUAL, 0, 1, number_of(name)), fail]
    if not network:
        found += [
            (_IF_EQUAL, 0, 3, number_of("socket")),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (_IF_EQUAL, 1, 0, _NETLINK),
            (_RETURN, 0, 0, _FAIL | errno.EACCES),
        ]
    return [*found, (_RETURN, 0, 0, _ALLOW)]


def start_watch(*, never: tuple[str, ...], network: bool) -> int:
    """Put the filter on this process and all that it starts, and return the descriptor on which it asks.

    Raises:
        OSError: the kernel has no such filter, or it is not allowed here.
    """
    _code, program = filter_program(instructions(never=never, network=network))
    return system_call("seccomp", _SET_FILTER, _NEW_LISTENER, ctypes.create_string_buffer(program))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecWatch:
    """Keeper's end of the watch.

    Attributes:
        listener: Descriptor on which the filter asks.
        short_paths: Short path of each stand-in, by the name of its program.
        own_folders: Beginnings of the paths that are started as they are.
    """

    listener: int
    short_paths: Mapping[str, str]
    own_folders: tuple[str, ...]

    def answer(self, refuse_process: Callable[[], int]) -> None:
        """Answer one question; the process may have ended before.

        Args:
            refuse_process: Function that returns the error with which a start of a process fails, or 0.
        """
        buffer = bytearray(_REQUEST.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, buffer)
        except OSError:  # it was killed while it waited
            return
        number, process, _, call, _, _, *arguments = _REQUEST.unpack(buffer)
        if call in (number_of("execve"), number_of("execveat")):
            path, words = arguments[0:2] if call == number_of("execve") else arguments[1:3]
            refusal = self._send_to_stand_in(process, path, words)
        else:
            refusal = refuse_process()
        reply = _ANSWER.pack(number, 0, -refusal, 0 if refusal else _CONTINUE)
        try:
            fcntl.ioctl(self.listener, _SEND, bytearray(reply))
        except OSError:
            return

    def _send_to_stand_in(self, process: int, address: int, words: int) -> int:
        """Write the path of the stand-in over the program's own, where there is one; return the error to fail with.

        The addresses are those of the path and the list of arguments. An interpreter that evaluates a short text runs.
        """
        try:
            memory = os.open(f"/proc/{process}/mem", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            has_ended = error.errno in (errno.ENOENT, errno.ESRCH)
            return 0 if has_ended else errno.EACCES
        try:
            path = _text_at(memory, address)
            name = path.rpartition(b"/")[2].decode(errors="replace")
            new = self.short_paths.get(name)
            if new is None or path.startswith(tuple(map(os.fsencode, self.own_folders))):
                return 0
            if is_python(name) and not is_program(_words_at(memory, words)):
                return 0
            if len(new) > len(path):
                return errno.EACCES
            os.pwrite(memory, os.fsencode(new) + b"\0", address)
        except OSError:
            return 0
        finally:
            os.close(memory)
        return 0


def _words_at(memory: int, address: int) -> list[str]:
    """Return the first words of a list of arguments."""
    found = []
    for at in range(_MOST_WORDS):
        (word,) = struct.unpack("Q", os.pread(memory, 8, address + 8 * at))
        if not word:
            break
        found.append(_text_at(memory, word).decode(errors="replace"))
    return found


def _text_at(memory: int, address: int) -> bytes:
    """Return the text at an address up to its end; a page that is not mapped may follow it."""
    found = b""
    while len(found) < _LONGEST_PATH:
        read = os.pread(memory, 256 - (address + len(found)) % 256, address + len(found))
        found += read
        if b"\0" in read or not read:
            break
    return found.partition(b"\0")[0]
