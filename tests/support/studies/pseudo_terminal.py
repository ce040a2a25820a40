"""Commands on a pseudo terminal: what a person sees on a screen of some width."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

from tests.support.studies.command_line import environment

STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Pattern of the control sequences that colour a text and move the cursor."""


def on_terminal(*arguments: object, cwd: Path, columns: int = 80, timeout_s: float = 60, **variables: str) -> str:
    """Run the command as a process whose streams are a terminal, and return all that it wrote there.

    Args:
        arguments: Words of the command, the command's name first.
        cwd: Folder that it runs in.
        columns: Width of the terminal.
        timeout_s: Time after which the command is killed [s].
        variables: Environment variables.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {name: value for name, value in environment().items() if name not in {"NO_COLOR", "COLUMNS", "FORCE_COLOR"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner", *map(str, arguments)],
        cwd=cwd,
        env=kept | {"TERM": "xterm-256color"} | variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    written = bytearray()
    with contextlib.suppress(OSError):  # the terminal is gone once the last process has closed it
        while part := os.read(ours, 1 << 16):
            written += part
    os.close(ours)
    process.wait()
    killer.cancel()
    return written.decode().replace("\r\n", "\n")


def without_styles(text: str) -> str:
    """Return a text without colours and movements of the cursor."""
    return STYLES.sub("", text)
