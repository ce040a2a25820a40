"""System calls of Linux that the standard library lacks, with their constants.

Sources: the manual pages unshare(2), mount(2), pivot_root(2), prctl(2), capabilities(7), seccomp(2) and landlock(7),
and the kernel's headers for numbers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence

NEW_USER = 0x10000000
NEW_MOUNTS = 0x00020000
NEW_PROCESSES = 0x20000000
NEW_NETWORK = 0x40000000
NEW_IPC = 0x08000000
NEW_HOST_NAME = 0x04000000

READ_ONLY = 1
NO_SETUID = 2
NO_DEVICES = 4
NO_PROGRAMS = 8
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
PRIVATE = 1 << 18

_DETACH = 2  # MNT_DETACH
_SET_DUMPABLE, _DROP_BOUND, _NO_NEW_PRIVILEGES = 4, 24, 38  # prctl
_SET_AMBIENT, _CLEAR_AMBIENT = 47, 4

NUMBERS = {
    "x86_64": {
        "unshare": 272,
        "clone": 56,
        "clone3": 435,
        "fork": 57,
        "vfork": 58,
        "execve": 59,
        "execveat": 322,
        "pivot_root": 155,
        "seccomp": 317,
        "socket": 41,
        "ptrace": 101,
        "process_vm_writev": 311,
        "io_uring_setup": 425,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "landlock_create_ruleset": 444,
        "landlock_add_rule": 445,
        "landlock_restrict_self": 446,
    },
    "aarch64": {
        "unshare": 97,
        "clone": 220,
        "clone3": 435,
        "execve": 221,
        "execveat": 281,
        "pivot_root": 41,
        "seccomp": 277,
        "socket": 198,
        "ptrace": 117,
        "process_vm_writev": 271,
        "io_uring_setup": 425,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "landlock_create_ruleset": 444,
        "landlock_add_rule": 445,
        "landlock_restrict_self": 446,
    },
}
"""Numbers of system calls by the machine's architecture."""
AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Names of the architectures for filters of system calls (AUDIT_ARCH_*)."""

LIBC = ctypes.CDLL(None, use_errno=True)


def is_known_machine() -> bool:
    """Return whether the numbers of this machine's system calls are known."""
    return sys.platform == "linux" and platform.machine() in NUMBERS


def number_of(name: str) -> int:
    """Return the number of a system call on this machine."""
    return NUMBERS[platform.machine()][name]


def numbers_of(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of those system calls that this machine has."""
    known = NUMBERS[platform.machine()]
    return tuple(known[name] for name in names if name in known)


def system_call(name: str, *arguments: object) -> int:
    """Make a system call by its name, and return what it returns.

    Raises:
        OSError: it failed.
    """
    return _checked(LIBC.syscall(ctypes.c_long(number_of(name)), *arguments), name)


def unshare(flags: int) -> None:
    """Put this process, or its next child for processes, into new namespaces."""
    system_call("unshare", flags)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, bind a place to another one, or change the flags of a mount."""
    words = (os.fsencode(source), os.fsencode(target), os.fsencode(kind) or None)
    _checked(LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(options) or None), f"mount {target}")


def enter_root(new: str, old: str) -> None:
    """Make the mount `new` the root of this process, and forget the old one, which stands at `old` for a moment."""
    system_call("pivot_root", os.fsencode(new), os.fsencode(new + old))
    os.chdir("/")
    _checked(LIBC.umount2(os.fsencode(old), _DETACH), "umount2")


def let_others_read(*, allowed: bool) -> None:
    """Say whether other processes may reach this one's memory and files through /proc, as they may a new program's."""
    _checked(LIBC.prctl(_SET_DUMPABLE, int(allowed), 0, 0, 0), "prctl")


def drop_privileges(kept: Sequence[int] = ()) -> None:
    """Give up all capabilities but the kept ones for what this process executes, and set-user-ID privileges."""
    LIBC.prctl(_SET_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    for capability in range(64):
        if capability not in kept:
            LIBC.prctl(_DROP_BOUND, capability, 0, 0, 0)  # fails beyond the last one, and where it is not held
    _checked(LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def filter_program(instructions: Sequence[tuple[int, int, int, int]]) -> tuple[ctypes.Array[ctypes.c_char], bytes]:
    """Return the instructions of a filter of system calls, and the structure that points to them."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    return code, struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
