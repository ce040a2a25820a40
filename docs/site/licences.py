"""Licences of all packages that Meshtune installs: `python -m docs.site.licences` writes them into docs/licences.md.

The licences are read from the metadata of the installed packages, so run it in an environment with all extras. A
package that is not installed keeps the licence that the page already states.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.site.regions import filled

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "licences.md"
FOR_USERS = ("torch", "jax", "dashboard", "postgresql", "cluster", "tensorboard", "mlflow", "wandb")
"""Extras that add features for users; the other extras serve development."""

COPYLEFT = re.compile(r"\b(A|L)?GPL|GNU|MPL|Mozilla|EPL|Eclipse|CDDL|EUPL|SSPL", re.IGNORECASE)
STRONG = re.compile(r"(?<!L)(?<!Lesser )\b(A?GPL|SSPL)|Affero|GNU General", re.IGNORECASE)
_ROW = re.compile(r"^\| `([^`]+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)


def direct() -> Mapping[str, tuple[str, ...]]:
    """Return the names of the direct dependencies in pyproject.toml, by extra; the core's have an empty key."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: project["optional-dependencies"][name] for name in FOR_USERS}
    return {
        extra: tuple(canonicalize_name(Requirement(text).name) for text in texts)
        for extra, texts in {"": project["dependencies"], **extras}.items()
    }


def installed(name: str) -> Distribution | None:
    """Return the metadata of an installed package, or None if it is not installed."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def closure(names: Iterable[str]) -> Iterator[str]:
    """Yield the canonical names of packages and of all their dependencies on this platform, each name once."""
    seen, open_ = set(), list(names)
    while open_:
        name = canonicalize_name(open_.pop())
        if name in seen:
            continue
        seen.add(name)
        found = installed(name)
        yield name
        for text in (found.requires if found else None) or ():
            needed = Requirement(text)
            # An empty extra skips optional dependencies; the rest of a marker is evaluated for this platform.
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                open_.append(needed.name)


def licence_of(found: Distribution) -> str:
    """Return the licence that a package states in its metadata, or "not told".

    The newest field wins: the SPDX expression, then the classifiers, then the first line of the free text, of which
    at most 60 characters are kept, because some packages put the whole licence there.
    """
    told = found.metadata
    if told.get("License-Expression"):
        return str(told["License-Expression"])
    classified = [
        entry.rpartition(" :: ")[2]
        for entry in told.get_all("Classifier") or ()
        if entry.startswith("License :: ") and not entry.endswith("OSI Approved")
    ]
    if classified:
        return ", ".join(sorted(set(classified)))
    return next(iter((told.get("License") or "not told").strip().splitlines()), "not told")[:60].replace("|", "/")


def rows_of(page: str) -> dict[str, tuple[str, str]]:
    """Return the rows of a page's table: licence and requiring part of Meshtune, by package."""
    return {name: (licence, needed) for name, licence, needed in _ROW.findall(page)}


def table(before: Mapping[str, tuple[str, str]]) -> str:
    """Return the table of all packages with their licences, in Markdown.

    Args:
        before: Rows of the present page by package, which supply the licences of packages that are not installed.
    """
    rows = {}
    for extra, names in reversed(direct().items()):  # the core comes last and overwrites shared rows
        for name in closure(names):
            found = installed(name)
            licence = licence_of(found) if found else before.get(name, ("not told", ""))[0]
            rows[name] = (licence, f"the extra `{extra}`" if extra else "the core")
    lines = [f"| `{name}` | {licence} | {needed} |" for name, (licence, needed) in sorted(rows.items())]
    return "\n".join(["| package | licence | needed by |", "|---|---|---|", *lines])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(text, {"licences": table(rows_of(text))}), encoding="utf-8")
