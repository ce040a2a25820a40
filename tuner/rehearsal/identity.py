"""What decides the answer of a rehearsal, as one text: equal texts have equal answers, so that none is run twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hardware.device import Device

if TYPE_CHECKING:
    from tuner.rehearsal.run import Case

MOST_FILES = 5_000
"""Largest number of Python files below the script's folder that are looked at."""
_REHEARSAL = Path(__file__).parent
_FOLDERS = ("site-packages", "dist-packages")


def identity_of(cases: Sequence[Case], device: Device, environment: Mapping[str, str]) -> str:
    """Return the text that two candidates share if and only if they run the same.

    In it are the interpreter, the script, its arguments and variables, the sizes and times of change of the Python
    files below its folder, the distributions that the interpreter finds, the device, and the rehearsal itself.

    Args:
        cases: Runs of the candidate.
        device: Device that the program believes to be on.
        environment: Variables of this process.
    """
    program = cases[0].program
    path = program.environment.get("PYTHONPATH", environment.get("PYTHONPATH")) or ""
    told = {
        "interpreter": program.interpreter,
        "script": str(program.script),
        "module": program.module,
        "directory": str(program.directory),
        "files": _files_below(program.directory if program.script is None else program.script.resolve().parent),
        "distributions": _distributions(program.interpreter, path),
        "device": [device.name, device.memory_bytes, device.num_sms, device.devices_per_host],
        "room": _room(),
        "cases": [
            [case.world, case.rank, case.most_micro_batches, case.program.arguments, dict(case.program.environment)]
            for case in cases
        ],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def package_folders(interpreter: str, python_path: str) -> list[Path]:
    """Return the folders in which an interpreter finds packages, as far as their usual places tell.

    Args:
        interpreter: Path of the interpreter, which is not started.
        python_path: Value of `PYTHONPATH` that it gets.
    """
    prefix = Path(interpreter).parent.parent
    found = [Path(folder) for folder in python_path.split(os.pathsep) if folder]
    for place in (prefix, prefix / "local", Path.home() / ".local"):
        for name in _FOLDERS:
            found += sorted(place.glob(f"lib*/python3*/{name}"))
    return found


@lru_cache(maxsize=8)
def _distributions(interpreter: str, python_path: str) -> tuple[str, ...]:
    """Return the names and versions of all installed distributions."""
    folders = package_folders(interpreter, python_path)
    return tuple(sorted(path.name for folder in folders for path in folder.glob("*.dist-info")))


@lru_cache(maxsize=8)
def _files_below(folder: Path) -> str:
    """Return what tells the Python files below a folder apart from others, as of this process's first look."""
    found: list[tuple[str, int, int]] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(names):
            if name.endswith(".py") and len(found) < MOST_FILES:
                path = Path(place, name)
                facts = path.lstat()
                found.append((str(path), facts.st_size, facts.st_mtime_ns))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


@lru_cache(maxsize=1)
def _room() -> str:
    """Return what tells this version of the rehearsal, its rooms among them, apart from others."""
    texts = [path.read_bytes() for path in sorted(_REHEARSAL.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()
