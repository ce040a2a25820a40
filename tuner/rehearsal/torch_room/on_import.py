"""Changes to modules of the user's program, each made as soon as the module is imported."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
"""Variables by which a program learns which rank it is."""


class RankAskedError(BaseException):
    """A module asks for its rank while it is imported for all ranks. No handler of the module takes it for its own."""


def change_on_import(changes: Mapping[str, Callable[[Any], None]]) -> None:
    """Call a function with each module, by its name, after it was imported; at once if it is there already."""
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder(changes))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as others do, and lets their loaders call a function at the end."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self._changes = changes
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of a module that is to be changed; None for others."""
        if fullname not in self._changes or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            found = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
            spec = next(filter(None, found), None)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute, change = loader.exec_module, self._changes[fullname]

            def exec_module(module: ModuleType) -> None:
                execute(module)
                change(module)

            loader.exec_module = exec_module
        return spec


def import_for_all_ranks(source: Path) -> None:
    """Import what a Python file imports at its top, as far as that depends on no rank; errors are left to each rank."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        names = list(_imported(ast.parse(source.read_bytes())))
        with _no_rank():
            for name in names:
                before = set(sys.modules)
                try:
                    importlib.import_module(name)
                except (Exception, SystemExit, RankAskedError):  # noqa: BLE001 - whatever it is, each rank meets it again
                    _forget(name.partition(".")[0], before)


def _forget(package: str, before: set[str]) -> None:
    """Forget the modules of a package that a failed import left behind, which each rank imports in its own order."""
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == package:
            del sys.modules[name]


def source_of(module: str) -> Path | None:
    """Return the file that `python -m` runs; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module


@contextlib.contextmanager
def _no_rank() -> Iterator[None]:
    """Let a module that asks for its rank fail, so that each rank imports it anew."""
    environment: Any = type(os.environ)
    get = environment.__getitem__

    def ask(own: Any, key: str) -> str:
        if key in _OF_A_RANK:
            raise RankAskedError(key)
        value: str = get(own, key)
        return value

    environment.__getitem__ = ask
    try:
        yield
    finally:
        environment.__getitem__ = get
