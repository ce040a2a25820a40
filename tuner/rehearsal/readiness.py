"""Whether a study's program is likely to be one that can be rehearsed here, told without running anything."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping

from hardware.io.input_file import open_input
from tuner.rehearsal.identity import package_folders
from tuner.rehearsal.program import Program

_MOST_BYTES = 4_000_000


def reason_it_is_not(program: Program, environment: Mapping[str, str]) -> str:
    """Return why a program is no program of torch that can run here; empty if it may be one.

    Args:
        program: Program of a trial.
        environment: Variables of this process.
    """
    if program.script is not None and _needs_nothing_installed(program):
        return "its program imports nothing beside Python's own modules"
    path = program.environment.get("PYTHONPATH", environment.get("PYTHONPATH")) or ""
    folders = package_folders(program.interpreter, path)
    if not any((folder / "torch").is_dir() for folder in folders):
        return f"torch is not installed beside {program.interpreter}"
    return ""


def _needs_nothing_installed(program: Program) -> bool:
    """Return whether the script imports modules of Python alone."""
    assert program.script is not None
    with open_input(program.script) as file:
        text = file.read(_MOST_BYTES)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add("" if node.level else (node.module or "").partition(".")[0])
    return imported <= sys.stdlib_module_names
