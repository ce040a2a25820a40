"""Catalogs beside Meshtune's own: files of the user's, and of installed packages.

A catalog is a folder with the folders `devices`, `clusters`, `models` and `runtimes`, and a file for each entry, which
has the entry's name. The user's own stands in the configuration folder of the platform, or where `MESHTUNE_CATALOG`
says; packages declare theirs as an entry point of `meshtune.catalogs`. A name is looked for in the user's catalog, in
Meshtune's own, and in those of packages, in this order, so that a package changes no name that had a meaning before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar, get_args

from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.plugins import package_of, plugins, refused

Kind = Literal["devices", "clusters", "models", "runtimes"]

VARIABLE, OFF = "MESHTUNE_CATALOG", "off"
"""Environment variable that names the user's catalog, and its value for none."""

SHIPPED, YOURS = "shipped", "yours"
"""Origins of entries; that of another is the package that holds it."""

T = TypeVar("T")

_ENDINGS: dict[Kind, tuple[str, ...]] = {
    "devices": (".yaml", ".yml"),
    "clusters": (".yaml", ".yml"),
    "models": (".yaml", ".yml", ".json"),
    "runtimes": (".yaml", ".yml"),
}

_NOT_MEANT = ("~", ".bak", ".orig", ".swp", ".md")
"""Endings of what editors and people keep beside entries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogFile:
    """File of one entry.

    Attributes:
        name: Name of the entry.
        path: Path of the file.
        origin: Whose it is: `shipped`, `yours`, or the name of a package.
        clash: Mistake that another file has the same name; None for a file that is alone.
    """

    name: str
    path: Path
    origin: str
    clash: ConfigError | None = None

    def checked_path(self) -> Path:
        """Return the path.

        Raises:
            ConfigError: Another file has the same name.
        """
        if self.clash is not None:
            raise self.clash
        return self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenFile:
    """File of an entry that cannot work. It stops what names the entry, and nothing else.

    Attributes:
        file: The file.
        mistake: What is wrong with it.
    """

    file: CatalogFile
    mistake: ConfigError


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
        ConfigError: There is no such folder, or it cannot be read.
    """
    folder = user_catalog()
    return {} if folder is None else _files(folder, kind, YOURS)


@cache
def package_files(kind: Kind) -> Mapping[str, CatalogFile]:
    """Return the files of the catalogs of installed packages by the names of their entries.

    Raises:
        ConfigError: An entry point names no package.
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
                    clash = ConfigError(rule, key=kind, value=name, nearest="uninstall one of them")
                    found[name] = replace(other, clash=clash)
    return found


def added_files(kind: Kind, shipped: Collection[str], spelling: Callable[[str], str] = str) -> dict[str, CatalogFile]:
    """Return the files of entries beside those that Meshtune ships; the user's may have the names of those, too.

    Args:
        kind: Kind of the entries.
        shipped: Spellings of the names that Meshtune ships.
        spelling: Function that maps the spellings of a name to one.

    Raises:
        ConfigError: A folder cannot be read.
    """
    own = _alone(user_files(kind).values(), spelling)
    known = {*map(spelling, shipped)}
    packages = {name: file for name, file in package_files(kind).items() if spelling(name) not in known}
    return {**packages, **own}


def read_entries(
    files: Mapping[str, CatalogFile], read: Callable[[CatalogFile], T]
) -> tuple[dict[str, T], tuple[BrokenFile, ...]]:
    """Read files; return what those hold that can work, by name, and the others."""
    found: dict[str, T] = {}
    broken = []
    for name, file in files.items():
        try:
            file.checked_path()
            found[name] = read(file)
        except ConfigError as error:
            broken.append(BrokenFile(file=file, mistake=error.in_file(str(file.path))))
    return found, tuple(broken)


def or_in_broken(nearest: str, broken: Collection[BrokenFile]) -> str:
    """Add to the nearest of an unknown name the files that cannot be read, of which one may state it."""
    told = (f"{each.file.path} could not be read ({each.mistake.rule})" for each in broken)
    return "; ".join((nearest, *told))


def unread_in_user_catalog() -> Iterator[str]:
    """Yield a note for each file and folder of the user's catalog that no entry is read from, with a right name."""
    folder = user_catalog()
    kinds = get_args(Kind)
    for path in _visible(folder) if folder is not None and folder.is_dir() else ():
        if path.name not in kinds:
            nearest = did_you_mean(path.name, kinds) if path.is_dir() else f"entries stand in {', '.join(kinds)}"
            yield f"{path} is not read: {nearest}"
    for kind in kinds if folder is not None else ():
        inner = folder / kind
        for path in _visible(inner) if inner.is_dir() else ():
            if not _has_ending(path, kind):
                endings = " or ".join(_ENDINGS[kind])
                yield f"{path} is not read: a file of {kind} ends in {endings}, such as {path.stem}{_ENDINGS[kind][0]}"
            elif _is_empty(path) and not _is_printed_to(path):
                yield f"{path} is not read: it is empty"


def _files(folder: Path, kind: Kind, origin: str) -> dict[str, CatalogFile]:
    """Return the files of one kind in a catalog, without the empty one that `>` makes."""
    inner = folder / kind
    paths = [path for path in _visible(inner) if _has_ending(path, kind)] if inner.is_dir() else []
    filled = (path for path in paths if not _is_empty(path))
    return _alone((CatalogFile(name=path.stem, path=path, origin=origin) for path in filled), str)


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _is_printed_to(path: Path) -> bool:
    """Return whether the output of this command goes to the file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # there is no output, or it is no file
        return False


def _visible(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted, without hidden files and copies of editors.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", file=str(folder)) from None
    return [path for path in paths if not path.name.startswith(".") and not path.name.lower().endswith(_NOT_MEANT)]


def _has_ending(path: Path, kind: Kind) -> bool:
    return path.suffix.lower() in _ENDINGS[kind]


def _alone(files: Iterable[CatalogFile], spelling: Callable[[str], str]) -> dict[str, CatalogFile]:
    """Return the files by name, and of several that share one only the first, with their clash."""
    found: dict[str, CatalogFile] = {}
    for file in files:
        other = found.setdefault(spelling(file.name), file)
        if other is not file:
            clash = ConfigError(f"has the name of {other.path.name}; keep one", file=str(file.path))
            found[spelling(file.name)] = replace(other, clash=clash)
    return {file.name: file for file in found.values()}
