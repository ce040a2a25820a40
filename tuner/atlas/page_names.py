"""Names of entries as pages, anchors and studies of the atlas have them: distinct ones for distinct entries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache

from costmodels.job.model_catalog import model_names, shipped_models
from hardware.cluster_file import cluster_names, shipped_clusters
from hardware.device import device_names, shipped_devices
from hardware.io.catalogs import Kind

_NAMES: Mapping[Kind, tuple[Callable[[], tuple[str, ...]], Callable[[], tuple[str, ...]]]] = {
    "models": (model_names, lambda: tuple(shipped_models())),
    "devices": (device_names, shipped_devices),
    "clusters": (cluster_names, shipped_clusters),
}
"""Functions that return the names of all entries of a kind, and of those that Meshtune ships."""


def page_name(kind: Kind, name: str) -> str:
    """Return a name with nothing but letters, digits, dots, dashes and underscores.

    Names that would be the same, or that some file systems take for the same, end in a part of their digest; those that
    Meshtune ships stay as they are, so that no entry of one's own moves their pages.
    """
    plain = "".join(letter if letter.isalnum() or letter in ".-_" else "-" for letter in name)
    others = _by_folded(kind).get(_folded(name), frozenset()) - {name}
    if not others or name in _NAMES[kind][1]():
        return plain
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", name.casefold())


@cache
def _by_folded(kind: Kind) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for name in _NAMES[kind][0]():
        found[_folded(name)] = found.get(_folded(name), frozenset()) | {name}
    return found
