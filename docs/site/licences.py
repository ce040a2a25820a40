"""Licences of all that Meshtune installs: `python -m docs.site.licences` writes them into docs/licences.md.

They are read from what is installed here, so it is run where all extras are; a package that is missing keeps its row.
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
FOR_USERS = ("torch", "jax", "dashboard", "postgresql")
"""Extras that add to what Meshtune can do; the others are for its developers."""

COPYLEFT = re.compile(r"\b(A|L)?GPL|GNU|MPL|Mozilla|EPL|Eclipse|CDDL|EUPL|SSPL", re.IGNORECASE)
STRONG = re.compile(r"(?<!L)(?<!Lesser )\b(A?GPL|SSPL)|Affero|GNU General", re.IGNORECASE)
_ROW = re.compile(r"^\| `([^`]+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)


def direct() -> Mapping[str, tuple[str, ...]]:
    """The names of what pyproject.toml asks for, by extra; the core's under an empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: project["optional-dependencies"][name] for name in FOR_USERS}
    return {
        extra: tuple(canonicalize_name(Requirement(text).name) for text in texts)
        for extra, texts in {"": project["dependencies"], **extras}.items()
    }


def installed(name: str) -> Distribution | None:
    """A package that is here."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def closure(names: Iterable[str]) -> Iterator[str]:
    """Packages, and all that these need here, by their canonical names."""
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
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                open_.append(needed.name)


def licence_of(found: Distribution) -> str:
    """What a package says of its licence, in a few words."""
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
    """The licences that a page tells, by package, with what each is needed for."""
    return {name: (licence, needed) for name, licence, needed in _ROW.findall(page)}


def table(before: Mapping[str, tuple[str, str]]) -> str:
    """All packages with their licences; those of `before` that are not here keep theirs."""
    rows = {}
    for extra, names in reversed(direct().items()):  # what the core needs is told as the core's
        for name in closure(names):
            found = installed(name)
            licence = licence_of(found) if found else before.get(name, ("not told", ""))[0]
            rows[name] = (licence, f"the extra `{extra}`" if extra else "the core")
    lines = [f"| `{name}` | {licence} | {needed} |" for name, (licence, needed) in sorted(rows.items())]
    return "\n".join(["| package | licence | needed by |", "|---|---|---|", *lines])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(text, {"licences": table(rows_of(text))}), encoding="utf-8")
