"""Parts that installed packages add to Meshtune, by the entry points that they declare.

A package declares them in its pyproject.toml, for example `[project.entry-points."meshtune.exporters"]`;
docs/extending.md has the contract of each group. Packages are looked through when a command asks for the first name,
and a package's code is imported when its name is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from hardware.io.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Group = Literal["catalogs", "exporters", "importers", "backends", "blocks"]


@cache
def plugins(group: Group) -> Mapping[str, EntryPoint]:
    """Return the entry points of `meshtune.GROUP` by name, sorted.

    Raises:
        ConfigError: Two packages declare the same name.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 # it takes longer than the quick commands

    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=f"meshtune.{group}"), key=lambda point: point.name):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"is declared by two installed packages, {package_of(other)} and {package_of(point)}",
                key=f"meshtune.{group}",
                value=point.name,
                nearest="uninstall one of them",
            )
    return found


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return point.dist.name if point.dist is not None else point.module


def load_plugin(group: Group, name: str) -> Any:
    """Import the object that a package declares under a name of `plugins(group)`.

    Raises:
        ConfigError: It cannot be imported.
    """
    point = plugins(group)[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise refused(group, name, f"cannot be imported ({error})") from None


def refused(group: Group, name: str, rule: str) -> ConfigError:
    """Return the error about an object that a package declares."""
    point = plugins(group)[name]
    return ConfigError(f"{point.value} of the package {package_of(point)} {rule}", key=f"meshtune.{group}.{name}")
