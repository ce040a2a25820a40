"""Kinds of entries, and the entries of each: devices, clusters, models, runtimes and knobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodels.job.model_catalog import find_model, model_names, shipped_models
from costmodels.job.runtime import catalog_path, find_runtime, runtime_names, shipped_runtimes
from hardware.cluster_file import (
    CLUSTERS,
    broken_clusters,
    cluster_names,
    clusters_table,
    find_cluster,
    find_cluster_name,
    shipped_clusters,
)
from hardware.device import DEVICES, devices_table, find_device, shipped_devices
from hardware.device_figures import figures_of
from hardware.io.catalogs import SHIPPED, BrokenFile, CatalogFile, Kind, added_files, or_in_broken
from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError, UnknownNameError, did_you_mean
from tuner.catalog.entry import Entry, cited
from tuner.catalog.shadows import KEYS, SPELLINGS
from tuner.knobs.catalog import CATALOG as KNOBS
from tuner.knobs.catalog import FRAMEWORKS, known_knobs

_RUNS = re.compile(r"([\d,]+) runs of")
"""Beginning of `fitted_on` in a profile that was fitted to runs of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Entries of one kind.

    Attributes:
        singular: Noun for one of them.
        columns: Heads of a table's columns, by the keys of `Entry.row`.
        entries: Function that returns the entries in the order of the catalog; files that cannot work in their places.
        name_of: Function that returns the name of the entry that a text means.
    """

    singular: str
    columns: Mapping[str, str]
    entries: Callable[[], Iterator[Entry | BrokenFile]]
    name_of: Callable[[str], str]


def find_listing(kind: str) -> Listing:
    """Return the entries of a kind.

    Raises:
        ConfigError: There is no such kind.
    """
    if kind not in LISTINGS:
        raise ConfigError("is no kind of entry", key="KIND", value=kind, nearest=did_you_mean(kind, LISTINGS))
    return LISTINGS[kind]


def read_listing(listing: Listing) -> tuple[tuple[Entry, ...], tuple[BrokenFile, ...]]:
    """Return the entries of one kind, and the files of this kind that cannot work."""
    found = tuple(listing.entries())
    return (
        tuple(each for each in found if isinstance(each, Entry)),
        tuple(each for each in found if isinstance(each, BrokenFile)),
    )


def find_entries(kind: str, name: str) -> tuple[tuple[Entry, ...], tuple[BrokenFile, ...]]:
    """Return the entries that a name means (one, or a knob of several frameworks), and the files that cannot work.

    Raises:
        ConfigError: There is none, or its file cannot work.
    """
    listing = find_listing(kind)
    entries, broken = read_listing(listing)
    try:
        wanted = listing.name_of(name)
    except UnknownNameError as error:
        rule = f"is no {listing.singular} of the catalog"
        raise ConfigError(rule, key="NAME", value=name, nearest=error.nearest) from None
    for each in broken:
        if each.file.name == wanted:
            raise each.mistake
    return tuple(entry for entry in entries if entry.file.name == wanted), broken


_SHIPPED: Mapping[Kind, Callable[[], tuple[str, ...]]] = {
    "devices": shipped_devices,
    "clusters": shipped_clusters,
    "models": lambda: tuple(shipped_models()),
    "runtimes": shipped_runtimes,
}
_TABLES: Mapping[Kind, Callable[[], Mapping[str, Any]]] = {"devices": devices_table, "clusters": clusters_table}
"""Function that returns the table of the entries that Meshtune ships; entries of other kinds have a file each."""


_EntryOf = Callable[[CatalogFile, Mapping[str, Any], bool], Entry]
"""Function of a file, its content, and whether it stands in place of a shipped one."""


def _stated(kind: Kind, path_of: Callable[[str], Path], entry_of: _EntryOf) -> Iterator[Entry | BrokenFile]:
    """Yield the entries, without the shipped ones that something stands for. `path_of` returns a shipped one's file."""
    shipped = _SHIPPED[kind]()
    key, spellings = KEYS[kind], SPELLINGS[kind]()
    added = added_files(kind, spellings, key)
    replaced = {*map(key, added)}
    for name in shipped:
        if key(name) not in replaced:
            file = CatalogFile(name=name, path=path_of(name), origin=SHIPPED)
            yield entry_of(file, _TABLES[kind]() if kind in _TABLES else read_mapping(file.path), False)
    for file in added.values():
        try:
            yield entry_of(file, read_mapping(file.checked_path()), key(file.name) in spellings)
        except ConfigError as error:
            yield BrokenFile(file=file, mistake=error.in_file(str(file.path)))


def _of_table(kind: Kind, file: CatalogFile, content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys and sources of an entry of a kind of which Meshtune ships one table."""
    keys = dict(content[kind][file.name] if file.origin == SHIPPED else content)
    sources = keys.pop("sources", content.get("sources", {}))
    named = cited(keys)
    return keys, {name: text for name, text in sources.items() if name in named}


def _device(file: CatalogFile, content: Mapping[str, Any], shadows: bool) -> Entry:
    row = {figure.column: figure.value for figure in figures_of(find_device(file.name))}
    keys, sources = _of_table("devices", file, content)
    return Entry(file=file, keys=keys, row=row, sources=sources, shadows=shadows)


def _cluster(file: CatalogFile, content: Mapping[str, Any], shadows: bool) -> Entry:
    (group,) = find_cluster(file.name).groups
    keys, sources = _of_table("clusters", file, content)
    row = {
        "device": group.device.name,
        "devices_per_host": group.devices_per_host,
        "host_gb_per_s": sum(link.bandwidth_bytes_per_s for link in group.intra_links) / 1e9,
        "network_gb_per_s": sum(link.bandwidth_bytes_per_s for link in group.nic_links) / 1e9,
        "description": keys["description"],
    }
    return Entry(file=file, keys=keys, row=row, sources=sources, shadows=shadows)


def _model(file: CatalogFile, content: Mapping[str, Any], shadows: bool) -> Entry:
    model = find_model(file.name)
    row = {
        "parameters": model.num_parameters,
        "active_parameters": model.num_active_parameters,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "experts": model.num_experts or None,
    }
    return Entry(file=file, keys=content, row=row, sources={}, shadows=shadows)


def _runtime(file: CatalogFile, content: Mapping[str, Any], shadows: bool) -> Entry:
    profile, keys = find_runtime(file.name), dict(content)
    sources, fitted_on = keys.pop("sources"), keys["fitted_on"]
    runs = _RUNS.match(fitted_on)
    row = {
        "framework": profile.rule_set,
        "runs": int(runs[1].replace(",", "")) if runs else 0,
        "step_error": profile.step_error,
        "fitted_on": fitted_on,
    }
    return Entry(file=file, keys=keys, row=row, sources=sources, shadows=shadows)


def _knobs() -> Iterator[Entry]:
    for framework in FRAMEWORKS:
        path = KNOBS / f"{framework}.yaml"
        content = read_mapping(path)
        for name, knob in known_knobs(framework).items():
            keys = content["knobs"][name]
            yield Entry(
                file=CatalogFile(name=name, path=path, origin=SHIPPED),
                keys={"framework": framework, **keys},
                row={"framework": framework, "values": [known.value for known in knob.values], "text": knob.text},
                sources={
                    name: text
                    for name, text in content["sources"].items()
                    if name in (keys["source"], keys.get("basis"))
                },
            )


def _among(names: Callable[[], tuple[str, ...]]) -> Callable[[str], str]:
    """Return the function that finds a name among names with one spelling."""

    def name_of(text: str) -> str:
        if text not in names():
            raise UnknownNameError("is unknown", value=text, nearest=did_you_mean(text, names()))
        return text

    return name_of


def _cluster_of(text: str) -> str:
    name = find_cluster_name(text)
    if name is None:
        nearest = or_in_broken(did_you_mean(text, cluster_names()), broken_clusters())
        raise UnknownNameError("is unknown", value=text, nearest=nearest)
    return name


def _knob_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for framework in FRAMEWORKS for name in known_knobs(framework)))


LISTINGS: Mapping[str, Listing] = {
    "devices": Listing(
        singular="device",
        columns={
            "memory_gib": "memory [GiB]",
            "bf16_tflops": "bf16 [TFLOP/s]",
            "fp8_tflops": "fp8",
            "fp4_tflops": "fp4",
            "memory_gb_per_s": "memory [GB/s]",
            "host_gb_per_s": "in host [GB/s]",
            "network_gb_per_s": "network [GB/s]",
            "devices_per_host": "per host",
        },
        entries=lambda: _stated("devices", lambda _: DEVICES, _device),
        name_of=lambda text: find_device(text).name,
    ),
    "clusters": Listing(
        singular="cluster",
        columns={
            "device": "device",
            "devices_per_host": "per host",
            "host_gb_per_s": "in host [GB/s]",
            "network_gb_per_s": "network [GB/s]",
            "description": "what it is",
        },
        entries=lambda: _stated("clusters", lambda _: CLUSTERS, _cluster),
        name_of=_cluster_of,
    ),
    "models": Listing(
        singular="model",
        columns={
            "parameters": "parameters",
            "active_parameters": "active",
            "layers": "layers",
            "hidden_size": "hidden size",
            "experts": "experts",
        },
        entries=lambda: _stated("models", lambda name: shipped_models()[name], _model),
        name_of=_among(model_names),
    ),
    "runtimes": Listing(
        singular="runtime profile",
        columns={"framework": "rules of", "runs": "runs", "step_error": "error", "fitted_on": "fitted on"},
        entries=lambda: _stated("runtimes", catalog_path, _runtime),
        name_of=_among(runtime_names),
    ),
    "knobs": Listing(
        singular="known knob",
        columns={"framework": "framework", "values": "values", "text": "what it does"},
        entries=_knobs,
        name_of=_among(_knob_names),
    ),
}
