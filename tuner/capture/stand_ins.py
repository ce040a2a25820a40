"""Folder of stand-ins: one small program for each name, and what shells and interpreters load first."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from tuner.capture.launchers import ALIASES, ANSWERED, ANY, HELD_BACK, THROUGH, TRAINING
from tuner.capture.prelude import SHELLS, prelude, shell
from tuner.capture.stand_in import Home

NAMES = tuple(
    dict.fromkeys(
        (*TRAINING, *ALIASES, *(f"python3.{minor}" for minor in range(6, 20)), *THROUGH, *HELD_BACK, *ANSWERED, ANY)
    )
)
"""Names of all programs that have a stand-in, without shells."""
_SITE = """\
import os, sys
words = getattr(sys, "orig_argv", None)
if words is None:
    with open("/proc/self/cmdline") as file:
        words = file.read().split("\\0")[:-1]
rest = [word for word in words[1:]]
at = 0
while at < len(rest) and rest[at].startswith("-") and rest[at] not in ("-c", "-m", "-", "-V", "--version"):
    at += 2 if rest[at] in ("-W", "-X") else 1
if at < len(rest) and (rest[at] == "-m" or not rest[at].startswith("-")):
    os.execv({stand_in!r}, [{stand_in!r}, *rest])
"""


def write_stand_ins(folder: Path, path: str) -> None:
    """Write the stand-ins into `bin` of the folder, and beside it what shells and interpreters load first.

    Args:
        folder: Folder of the capture.
        path: Search path of real programs.
    """
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    # Under a path of the capture, an interpreter is not taken for one of the script's.
    interpreter = folder / "interpreter"
    interpreter.symlink_to(sys.executable)
    root = str(Path(__file__).resolve().parents[2])
    home = Home(folder=str(folder), path=path, python=sys.executable)
    start = (
        f"import sys; sys.path.insert(0, {root!r}); from tuner.capture import stand_in; "
        f"stand_in.main(sys.argv[1:], stand_in.Home(**{home.as_values()!r}))"
    )
    bash = shutil.which("bash")
    # bash keeps exported functions, which other shells drop; with -p it loads nothing first
    first = f"#!{bash} -p" if bash else "#!/bin/sh"
    words = shlex.join((str(interpreter), "-I", "-S", "-B", "-c", start))
    for name in NAMES:
        _write_program(f"{stand_ins}/{name}", f'{first}\nexec {words} {name} "$@"\n')
    if bash is not None:
        # where sh is a smaller shell, a script for bash would fail under it
        for name in SHELLS:
            _write_program(f"{stand_ins}/{name}", shell(bash))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        _SITE.format(stand_in=str(stand_ins / "python")), encoding="utf-8"
    )
    (folder / "prelude.sh").write_text(prelude(stand_ins), encoding="utf-8")


def _write_program(path: str, text: str) -> None:
    """Write a program in two system calls, since there are many of them."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o755)
    os.write(file, text.encode())
    os.close(file)
