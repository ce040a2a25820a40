"""First program of a rehearsal's process: it finds out whether the user's program is of PyTorch or JAX, and serves it.

    python -m tuner.rehearsal.entrance REQUEST

It runs in the program's own environment, with the standard library alone. Imports are read and not run: those of the
program, then of the modules in its own folders that it imports, the nearest first.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

JAX, TORCH = "jax", "torch"
_OF_JAX = ("jax", "flax", "optax", "haiku", "equinox")
_MOST_FILES = 400
"""Largest number of files that are read; the program is one of PyTorch if they import neither."""
_TRAINS = ("torch.distributed", "torch.optim", "torch.nn")
"""Modules by which a program trains with PyTorch, and does not only load data."""


def main() -> int:
    """Serve a request in the room of the program's framework."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    script = request["script"]
    folder = Path.cwd() if script is None else Path(script).resolve().parent
    before, sys.path[0] = sys.path[0], str(folder)
    source = file_of(request["module"]) if script is None else Path(script)
    sys.path[0] = before
    framework = TORCH if source is None else framework_of(source, folder)
    served: int = importlib.import_module(f"tuner.rehearsal.{framework}_room.serve").main()
    return served


def framework_of(source: Path, folder: Path) -> str:
    """Return the framework of a Python file, by what it and the modules below its folder and package import."""
    roots = {folder, _package_root(source)}
    seen, waiting = {source}, [source]
    while waiting and len(seen) <= _MOST_FILES:
        nearest: list[Path] = []
        names: set[str] = set()
        for file in waiting:
            for name in _imported(file):
                names.add(name)
                nearest += [one for root in roots for one in _files(root, name) if one not in seen]
                seen |= set(nearest)
        is_jax = any(name.split(".")[0] in _OF_JAX for name in names)
        if is_jax or any(name.split(".")[0] == TORCH for name in names):
            trains = any(name == one or name.startswith(f"{one}.") for one in _TRAINS for name in names)
            return JAX if is_jax and not trains else TORCH
        waiting = nearest
    return TORCH


def file_of(module: str) -> Path | None:
    """Return the file that `python -m` runs; None if it is not found without running anything."""
    parts = module.split(".")
    for root in sys.path:
        place = Path(root or ".").joinpath(*parts)
        if (place / "__main__.py").is_file():
            return place / "__main__.py"
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
    return None


def _package_root(source: Path) -> Path:
    """Return the folder above the outermost package of a file."""
    folder = source.resolve().parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _files(root: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module's name below a folder: packages, module, or the module that has the name."""
    place = root
    for part in name.split("."):
        place /= part
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file


def _imported(file: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports at any place, with those of what it takes from them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    sys.exit(main())
