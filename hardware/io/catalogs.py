"""Catalogs beside Meshtune's own: files of the user's, and of installed packages.

A catalog is a folder with the folders `devices`, `clusters`, `models` and `runtimes`, and a file for each entry, which
has the entry's name. The user's own stands in the configuration folder of the platform, or where `MESHTUNE_CATALOG`
says; packages declare theirs as an entry point of `meshtune.catalogs`. A name is looked for in the user's catalog, in
Meshtune's own, and in those of packages, in this order, so that a package changes no name that had a meaning before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from hardware.io.errors import ConfigError
from hardware.io.plugins import package_of, plugins, refused

Kind = Literal["devices", "clusters", "models", "runtimes"]

VARIABLE, OFF = "MESHTUNE_CATALOG", "off"
"""Environment variable that names the user's catalog, and its value for none."""

SHIPPED, YOURS = "shipped", "yours"
"""Origins of entries; that of another is the package that holds it."""

_ENDINGS: dict[Kind, tuple[str, ...]] = {
    "devices": (".yaml", ".yml"),
    "clusters": (".yaml", ".yml"),
    "models": (".yaml", ".yml", ".json"),
    "runtimes": (".yaml", ".yml"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogFile:
    """File of one entry.

    Attributes:
        name: Name of the entry.
        path: Path of the file.
        origin: Whose it is: `shipped`, `yours`, or the name of a package.
    """

    name: str
    path: Path
    origin: str


def user_catalog(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the user's own catalog; None if there shall be none. The usual one may be missing.

    Raises:
        ConfigError: The variable names no folder.
    """
    named = environment.get(VARIABLE, "")
    if named == OFF:
        return None
    if named:
        if not Path(named).is_dir():
            nearest = f"make it, or unset the variable; {OFF!r} reads none"
            raise ConfigError("is no folder", file=f"{VARIABLE}={named}", nearest=nearest)
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:  # the user has none
        return None
    usual = {"darwin": home / "Library" / "Application Support", "win32": home / "AppData" / "Local"}.get(
        sys.platform, home / ".config"
    )
    return Path(environment.get("XDG_CONFIG_HOME") or usual) / "meshtune"


@cache
def user_files(kind: Kind) -> Mapping[str, CatalogFile]:
    """Return the files of the user's catalog by the names of their entries, sorted.

    Raises:
        ConfigError: There is no such folder, it cannot be read, or two files have the same name.
    """
    folder = user_catalog()
    return {} if folder is None else _files(folder, kind, YOURS)


@cache
def package_files(kind: Kind) -> Mapping[str, CatalogFile]:
    """Return the files of the catalogs of installed packages by the names of their entries.

    Raises:
        ConfigError: An entry point names no package, or two packages hold the same name.
    """
    found: dict[str, CatalogFile] = {}
    for declared, point in plugins("catalogs").items():
        from importlib.util import find_spec  # noqa: PLC0415 # most machines have no such package

        try:
            spec = find_spec(point.value)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise refused("catalogs", declared, "is no package with a folder")
        for folder in spec.submodule_search_locations:
            for name, file in _files(Path(folder), kind, package_of(point)).items():
                other = found.setdefault(name, file)
                if other.origin != file.origin:
                    rule = f"is in the catalogs of two installed packages, {other.origin} and {file.origin}"
                    raise ConfigError(rule, key=kind, value=name, nearest="uninstall one of them")
    return found


def added_files(kind: Kind, shipped: Collection[str], spelling: Callable[[str], str] = str) -> dict[str, CatalogFile]:
    """Return the files of entries beside those that Meshtune ships; the user's may have the names of those, too.

    Args:
        kind: Kind of the entries.
        shipped: Spellings of the names that Meshtune ships.
        spelling: Function that maps the spellings of a name to one.

    Raises:
        ConfigError: A folder cannot be read, or two files of the user's have one name in other spellings.
    """
    own: dict[str, CatalogFile] = {}
    for name, file in user_files(kind).items():
        _check_is_alone(file, own.setdefault(spelling(name), file))
    known = {*map(spelling, shipped)}
    packages = {name: file for name, file in package_files(kind).items() if spelling(name) not in known}
    return {**packages, **user_files(kind)}


def _files(folder: Path, kind: Kind, origin: str) -> dict[str, CatalogFile]:
    """Return the files of one kind in a catalog, without hidden files of editors, and the empty one that `>` makes."""
    inner = folder / kind
    try:
        paths = sorted(path for path in inner.iterdir() if _holds_entry(path, kind)) if inner.is_dir() else []
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", file=str(inner)) from None
    found: dict[str, CatalogFile] = {}
    for path in paths:
        file = CatalogFile(name=path.stem, path=path, origin=origin)
        _check_is_alone(file, found.setdefault(file.name, file))
    return found


def _holds_entry(path: Path, kind: Kind) -> bool:
    is_entry = path.suffix in _ENDINGS[kind] and not path.name.startswith(".")
    return is_entry and not (path.is_file() and path.stat().st_size == 0)


def _check_is_alone(file: CatalogFile, other: CatalogFile) -> None:
    if other is not file:
        raise ConfigError(f"has the name of {other.path.name}; keep one", file=str(file.path))
