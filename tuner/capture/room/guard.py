"""Guard of a script where namespaces are not allowed: Landlock and a filter of system calls.

Files outside of the capture's own folder can be read and run, and not changed, made or removed; programs outside get no
signal; there are no sockets. Modes, owners and times of the user's own files are not guarded, because Landlock does not
know them.

Source: the kernel's documentation of Landlock, interface version 3 (truncation) to 6 (signals).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence

from tuner.capture.room.system_calls import system_call

LEAST_VERSION = 3
"""First version of Landlock that keeps files from being cut short."""
_TELL_VERSION = 1
_WRITE_FILE = 1 << 1
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 15))  # removing, making, moving and cutting
_DEVICES = 1 << 15
_DEVICES_SINCE, _NETWORK_SINCE, _SCOPES_SINCE = 5, 4, 6
_CONNECTIONS = 3  # binding and connecting of TCP
_SCOPES = 3  # abstract sockets and signals
_BENEATH = 1
_OPEN_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


def landlock_version() -> int:
    """Return the version of Landlock's interface.

    Raises:
        OSError: the kernel has none, or it is not allowed here.
    """
    return system_call("landlock_create_ruleset", None, ctypes.c_size_t(0), _TELL_VERSION)


def allow_changes_in(folders: Sequence[str]) -> None:
    """Forbid this process, and all that it starts, to change anything outside of the folders.

    Raises:
        OSError: the kernel has no Landlock, one that is too old, or it is not allowed here.
    """
    version = landlock_version()
    if version < LEAST_VERSION:
        raise OSError(f"Landlock's version {version} does not keep files from being cut short; {LEAST_VERSION} does")
    handled = _CHANGES | (_DEVICES if version >= _DEVICES_SINCE else 0)
    attribute = struct.pack("Q", handled)
    attribute += struct.pack("Q", _CONNECTIONS) if version >= _NETWORK_SINCE else b""
    attribute += struct.pack("Q", _SCOPES) if version >= _SCOPES_SINCE else b""
    rules = system_call(
        "landlock_create_ruleset", ctypes.create_string_buffer(attribute), ctypes.c_size_t(len(attribute)), 0
    )
    try:
        for folder in folders:
            _allow(rules, folder, handled)
        for device in _OPEN_DEVICES:
            with contextlib.suppress(OSError):  # a container may lack it
                _allow(rules, device, handled & (_WRITE_FILE | _DEVICES))
        system_call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, changes: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", changes, place))
        system_call("landlock_add_rule", rules, _BENEATH, rule, 0)
    finally:
        os.close(place)
