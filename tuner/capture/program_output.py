"""Output of a Python program that a captured script reads, as in `--data-path $(python3 blend.py)`."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tuner.capture.record import output_of

WITHIN_S = 15.0
"""Time that the program has [s]."""
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")


def is_read_by_shell() -> bool:
    """Return whether a shell around this process reads what it prints.

    In `$(command)` the shell itself holds the other end of the pipe; in `command | tee log` another program does.
    """
    status = os.fstat(1)
    if not stat.S_ISFIFO(status.st_mode):
        return False
    pipe, process = f"pipe:[{status.st_ino}]", os.getppid()
    while process > 1:
        folder = Path(f"/proc/{process}")
        try:
            held = [str(one.readlink()) for one in (folder / "fd").iterdir() if one.name not in ("1", "2")]
            if pipe in held and (folder / "exe").readlink().name in _SHELLS:
                return True
            process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def output_of_program(words: Sequence[str], *, path: str, python: str, folder: str) -> bytes:
    """Return what a program prints, or the words of its command in `$( )` if it fails or does not end.

    Args:
        words: Interpreter, program and arguments.
        path: Search path of real programs.
        python: Interpreter that runs it where the search path has none, or only a shim that goes by its own name.
        folder: Folder of the capture, whose modules would stand in for the program again.
    """
    found = shutil.which(words[0], path=path)
    program = own_path(python if found is None or _is_script(found) else found, folder)
    own = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and not one.startswith(folder)]
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(own)}
    try:
        process = subprocess.Popen([program, *words[1:]], env=environment, stdout=subprocess.PIPE)  # noqa: S603 # the script's own
    except OSError:
        return output_of(words).encode()
    try:
        printed, _ = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return printed if process.returncode == 0 else output_of(words).encode()


def own_path(program: str, folder: str) -> str:
    """Return a path in the capture's folder through which a program is not taken for one of the script."""
    link = Path(folder) / "records" / os.urandom(16).hex()
    link.symlink_to(program)
    return str(link)


def _is_script(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) == b"#!"
