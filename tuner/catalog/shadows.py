"""Notes on entries of the user's catalog that stand in place of Meshtune's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from costmodels.job.model_catalog import shipped_models
from costmodels.job.runtime import shipped_runtimes
from hardware.cluster import Cluster
from hardware.cluster_file import shipped_clusters
from hardware.device import shipped_spellings
from hardware.io.catalogs import Kind, user_files
from hardware.link import spelling_key

KEYS: Mapping[Kind, Callable[[str], str]] = {
    "devices": spelling_key,
    "clusters": spelling_key,
    "models": str,
    "runtimes": str,
}
"""Function that maps the spellings of a name to one; the names of models and runtimes have one spelling."""

SPELLINGS: Mapping[Kind, Callable[[], set[str]]] = {
    "devices": shipped_spellings,
    "clusters": lambda: {*map(spelling_key, shipped_clusters())},
    "models": lambda: {*shipped_models()},
    "runtimes": lambda: {*shipped_runtimes()},
}
"""Function that returns the keys of all spellings of the entries that Meshtune ships."""


def notes_on_shadows(cluster: Cluster, *, model: str | None, runtime: str | None) -> tuple[str, ...]:
    """Return a note for each entry of the user's that a study names, and that Meshtune ships under the same name.

    Args:
        cluster: Cluster of the study.
        model: Name of its model; None if it names none of the catalog.
        runtime: Name of its runtime profile, likewise.
    """
    groups = cluster.groups
    return (
        *_notes("clusters", [group.name for group in groups]),
        *_notes("devices", [group.device.name for group in groups]),
        *_notes("models", [model] if model else []),
        *_notes("runtimes", [runtime] if runtime else []),
    )


def _notes(kind: Kind, names: Iterable[str]) -> Iterator[str]:
    own = {KEYS[kind](name): file for name, file in user_files(kind).items()}
    known = SPELLINGS[kind]() if own else set()
    for key in dict.fromkeys(map(KEYS[kind], names)):
        if key in own and key in known:
            file = own[key]
            yield f"{kind[:-1]} {file.name} is that of your own catalog ({file.path}), in place of Meshtune's"
