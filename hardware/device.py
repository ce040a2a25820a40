"""Devices of the catalog: peaks, memory and links, each number with its source."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from hardware.io.catalogs import BrokenFile, CatalogFile, added_files, or_in_broken, read_entries
from hardware.io.config_file import (
    SourcedCount,
    SourcedNumber,
    SourcedShare,
    SourcedSize,
    StrictModel,
    read_mapping,
    validate_mapping,
)
from hardware.io.errors import ConfigError, UnknownNameError, did_you_mean
from hardware.link import Link, is_misspelt_kind, link_spellings, spelling_key

CATALOG = Path(__file__).parent / "catalog"
DEVICES = CATALOG / "devices.yaml"
PRECISIONS = ("bf16", "fp16", "nvfp4", "fp8", "tf32", "fp32")
MAX_MIXED_DEVICES = 1_000_000
GIB = 2**30

LEAST_SEEN, MOST_SEEN = 0.9, 1.01
"""Memory that a process can see over the size in a device's name [GiB/GB]: from 14.7 of a T4-16 and 178.3 of a B200-192
to 64 of 64; the names of tools may be rounded down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator as a training process sees it.

    Attributes:
        name: Name of the device as the catalog spells it.
        bf16_flop_per_s: Dense peak of bf16 matrix products [FLOP/s]; any peak is None where the device has none.
        fp16_flop_per_s: Dense peak with fp16 inputs and fp32 sums [FLOP/s].
        fp8_flop_per_s: Dense peak with fp8 inputs [FLOP/s].
        fp4_flop_per_s: Dense peak with fp4 inputs [FLOP/s].
        fp32_flop_per_s: Peak in IEEE single precision, without TF32 [FLOP/s].
        memory_bytes: Device memory that one process can see [bytes].
        memory_bandwidth_bytes_per_s: Peak bandwidth of the device memory [bytes/s].
        num_sms: Number of streaming multiprocessors, or of another vendor's units of this kind; None where a device
            has no such units, or their number is unknown.
        scale_up: Link to the other devices of its host.
        scale_out: Link to other hosts, the device's share of the host's network.
        host_link: Link to the host's memory; None where no figure is known.
        devices_per_host: Usual number of devices in one host; all of a rack that is one domain (`hosts_per_domain`).
        sources: Pairs of a field's name and its source with the confidence, for every number above.
    """

    name: str
    bf16_flop_per_s: float | None
    fp16_flop_per_s: float | None
    fp8_flop_per_s: float | None
    fp4_flop_per_s: float | None
    fp32_flop_per_s: float | None
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    scale_up: Link
    scale_out: Link
    host_link: Link | None
    devices_per_host: int
    sources: tuple[tuple[str, str], ...]
    num_sms: int | None = None

    @property
    def is_processor(self) -> bool:
        """Whether the device is a core of a host's own processor, which communicates through the kernel's loopback."""
        return self.scale_up.kind == "loopback"

    def peak_flop_per_s(self, precision: str) -> float:
        """Return the dense peak of matrix products in `precision` [FLOP/s].

        bf16 and fp16 stand in for each other where a device has only one: on a V100 a bf16 job runs in fp16, on a TPU
        the other way round, as users of these devices do.

        Raises:
            ConfigError: the precision is unknown, or this device has no such unit.
        """
        peaks = {
            "bf16": self.bf16_flop_per_s or self.fp16_flop_per_s,
            "fp16": self.fp16_flop_per_s or self.bf16_flop_per_s,
            "nvfp4": self.fp4_flop_per_s,
            "fp8": self.fp8_flop_per_s,
            "tf32": self.bf16_flop_per_s / 2 if self.bf16_flop_per_s and self.num_sms else None,
            "fp32": self.fp32_flop_per_s,
        }
        if precision not in peaks:
            nearest = did_you_mean(precision, PRECISIONS)
            raise ConfigError("is not a known precision", key="precision", value=precision, nearest=nearest)
        peak = peaks[precision]
        if peak is None:
            nearest = f"use one of: {', '.join(name for name, value in peaks.items() if value is not None)}"
            raise ConfigError(f"has no known peak on {self.name}", key="precision", value=precision, nearest=nearest)
        return peak


class LinkEntry(StrictModel):
    """Link in a catalog: bandwidth per device and direction."""

    kind: str
    bandwidth_gb_per_s: SourcedSize
    latency_us: SourcedSize
    mesh_peers: SourcedCount | None = None
    efficiency: SourcedShare | None = None
    sharers: SourcedCount | None = None

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        """Check that a kind is not spelled almost like a known one, whose efficiencies it would lack."""
        if is_misspelt_kind(kind):
            raise ValueError(f"is almost a kind of link that is known; {did_you_mean(kind, link_spellings())}")
        return kind

    def link(self) -> Link:
        """Return the link in SI units."""
        return Link(
            kind=self.kind,
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s.value * 1e9,
            latency_s=self.latency_us.value * 1e-6,
            mesh_peers=self.mesh_peers.value if self.mesh_peers else None,
            efficiency=self.efficiency.value if self.efficiency else None,
            sharers=self.sharers.value if self.sharers else 1,
        )


class _DeviceEntry(StrictModel):
    aliases: list[str] = Field(default_factory=list)
    note: str | None = None
    bf16_tflops: SourcedSize | None = None
    fp16_tflops: SourcedSize | None = None
    fp8_tflops: SourcedSize | None = None
    fp4_tflops: SourcedSize | None = None
    fp32_tflops: SourcedSize | None = None
    memory_gib: SourcedSize
    memory_bandwidth_gb_per_s: SourcedSize
    power_w: SourcedSize | None = None
    num_sms: SourcedCount | None = None
    devices_per_host: SourcedCount
    hosts_per_domain: SourcedCount | None = None
    scale_up: LinkEntry
    scale_out: LinkEntry
    host_link: LinkEntry | None = None

    @model_validator(mode="after")
    def _check_rack(self) -> Self:
        """Check that the hosts of a rack have as many devices each."""
        if self.hosts_per_domain and self.devices_per_host.value % self.hosts_per_domain.value:
            raise ValueError(
                f"hosts_per_domain = {self.hosts_per_domain.value} must divide devices_per_host = "
                f"{self.devices_per_host.value}, the devices of the whole domain"
            )
        return self

    def device(self, name: str, source_texts: dict[str, str]) -> Device:
        return Device(
            name=name,
            bf16_flop_per_s=_flop_per_s(self.bf16_tflops),
            fp16_flop_per_s=_flop_per_s(self.fp16_tflops),
            fp8_flop_per_s=_flop_per_s(self.fp8_tflops),
            fp4_flop_per_s=_flop_per_s(self.fp4_tflops),
            fp32_flop_per_s=_flop_per_s(self.fp32_tflops),
            memory_bytes=int(self.memory_gib.value * GIB),
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_gb_per_s.value * 1e9,
            scale_up=self.scale_up.link(),
            scale_out=self.scale_out.link(),
            host_link=self.host_link.link() if self.host_link else None,
            devices_per_host=self.devices_per_host.value,
            num_sms=self.num_sms.value if self.num_sms else None,
            sources=tuple(
                (field, f"{source_texts[number.source]} ({number.confidence})")
                for field, number in numbers_of(self)
                if field
                not in (
                    "power_w",
                    "hosts_per_domain",
                )  # no field of a device, so that stored studies keep their meaning
            ),
        )


class _Catalog(StrictModel):
    sources: dict[str, str]
    devices: dict[str, _DeviceEntry]


class _DeviceFile(_DeviceEntry):
    """File of one device in a catalog beside Meshtune's own."""

    sources: dict[str, str] = Field(default_factory=dict)


_VENDOR = re.compile(r"^\s*(NVIDIA|AMD|Instinct|Tesla|Huawei|Intel|Google|AWS)[\s_-]+(Instinct[\s_-]+)?", re.IGNORECASE)


def find_device(name: str) -> Device:
    """Return the device of this name or alias.

    Case, spaces, dashes, underscores, a vendor's name and a remark in parentheses don't matter: `nvidia-smi` prints
    NVIDIA H100 NVL. A remark counts only where the catalog knows it: "Ascend-910B (900 A2 PoDc)" is a device of its
    own. The size of the memory may stand anywhere, with any unit or none, if it is the device's: A100-40G-PCIe.

    Raises:
        UnknownNameError: no device has this name.
        ConfigError: the file of the device that has it cannot work.
    """
    by_key, broken = _devices_by_key(), _broken_by_key()
    without_remark = re.sub(r"\s*\(.*\)\s*$", "", name, flags=re.DOTALL)
    without_vendor = _VENDOR.sub("", without_remark)
    # a remark may be the size of the memory
    texts = (name, re.sub(r"[()]", " ", name))
    spellings = (*texts, *(_VENDOR.sub("", text) for text in texts), without_remark, without_vendor)
    keys = (re.sub(r"(?<=\d)gib", "gb", spelling_key(spelling)) for spelling in spellings)
    key = next((key for key in keys if key in by_key or key in broken), None)
    if key in broken:
        raise broken[key].mistake
    device = by_key[key] if key is not None else _find_by_memory(_VENDOR.sub("", texts[1]))
    if device is None:
        known = [*device_names(), *(alias for entry in _entries().values() for alias in entry.aliases)]
        nearest = or_in_broken(did_you_mean(without_vendor, known), broken_devices())
        raise UnknownNameError("is not a known device", key="device", value=name, nearest=nearest)
    return device


def _find_by_memory(name: str) -> Device | None:
    """Return the device that a name with the size of its memory in another place or unit means; None if none is.

    Tools and drivers see 90 to 100% of the size in a name. Of several devices, the one of the nearest size is meant.
    """
    words, sizes_gb = _words_and_sizes(name)
    if len(sizes_gb) != 1:
        return None
    (size_gb,) = sizes_gb
    kinds = [(device, device.memory_bytes / GIB / size_gb) for device in _devices_by_words().get(words, ())]
    kinds = [(device, seen) for device, seen in kinds if LEAST_SEEN <= seen <= MOST_SEEN]
    return min(kinds, key=lambda kind: abs(math.log(kind[1])))[0] if kinds else None


def _words_and_sizes(name: str) -> tuple[tuple[str, ...], list[int]]:
    """Split a name into its letters and numbers, sorted, and the sizes of memory among its words [GB]."""
    words = re.split(r"[\s_()-]+", re.sub(r"(?<=\d)[\s_-]*(gib|gb|g)\b", "", name.lower()))
    sizes = [word for word in words[1:] if re.fullmatch(r"[1-9]\d{1,2}", word)]
    rest = [part for word in words if word not in sizes for part in re.findall(r"[a-z]+|\d+", word)]
    return tuple(sorted(rest)), [int(size) for size in sizes]


def find_devices(text: str) -> tuple[tuple[int, Device], ...]:
    """Parse the `device` column of a measured file into pairs (count, device).

    "mixed:8xV100-SXM-16+12xT4-16" gives two pairs. A plain name gives one pair with the count 0: it names the kind of
    device and leaves the number open.

    Raises:
        ConfigError: a part is not `COUNTxNAME`, or no device has this name.
    """
    kind, _, parts = text.partition(":")
    if kind.strip().lower() != "mixed":
        return ((0, find_device(text)),)
    pairs = []
    for part in parts.split("+"):
        match = re.fullmatch(r"\s*(\d{1,7})\s*x\s*(\S.*)", part)
        if match is None or not 1 <= int(match[1]) <= MAX_MIXED_DEVICES:
            rule = "must be `mixed:` and then COUNTxNAME, joined by +"
            nearest = "for example mixed:8xV100-SXM-16+12xT4-16"
            raise ConfigError(rule, key="device", value=text, nearest=nearest)
        pairs.append((int(match[1]), find_device(match[2])))
    return tuple(pairs)


def power_limit_w(device: Device) -> float | None:
    """Return the power limit of a device's board [W]; None where the catalog has no figure."""
    entry = _entries().get(device.name)
    return entry.power_w.value if entry and entry.power_w else None


def hosts_per_domain(device: Device) -> int:
    """Return the number of hosts that have `devices_per_host` devices: 1, or those of a rack that is one domain."""
    entry = _entries().get(device.name)
    return entry.hosts_per_domain.value if entry and entry.hosts_per_domain else 1


def device_names() -> tuple[str, ...]:
    """Return the catalog's names of devices, without aliases, in its order."""
    return tuple(_entries())


def shipped_devices() -> tuple[str, ...]:
    """Return the names of the devices that Meshtune ships, in the order of its catalog."""
    return tuple(_catalog().devices)


def shipped_spellings() -> set[str]:
    """Return the keys of all spellings of the devices that Meshtune ships."""
    entries = _catalog().devices.items()
    return {spelling_key(spelling) for name, entry in entries for spelling in (name, *entry.aliases)}


@functools.cache
def devices_table() -> dict[str, Any]:
    """Return the content of the table of the devices that Meshtune ships."""
    return read_mapping(DEVICES)


@functools.cache
def _catalog() -> _Catalog:
    return validate_mapping(_Catalog, devices_table(), file=str(DEVICES))


def broken_devices() -> tuple[BrokenFile, ...]:
    """Return the files of devices that cannot work."""
    return _read()[1]


def _added() -> dict[str, _DeviceFile]:
    """Return the devices of the user's catalog and of packages."""
    return _read()[0]


@functools.cache
def _read() -> tuple[dict[str, _DeviceFile], tuple[BrokenFile, ...]]:
    return read_entries(added_files("devices", shipped_spellings(), spelling_key), _read_device)


def _read_device(file: CatalogFile) -> _DeviceFile:
    entry = validate_mapping(_DeviceFile, read_mapping(file.path), file=str(file.path))
    check_sources(entry, entry.sources, file=str(file.path))
    return entry


@functools.cache
def _entries() -> dict[str, _DeviceEntry]:
    """Return the devices of all catalogs by name, Meshtune's own first, without those that the user's stand for."""
    replaced = {*map(spelling_key, _added()), *_broken_by_key()}
    kept = {name: entry for name, entry in _catalog().devices.items() if spelling_key(name) not in replaced}
    return {**kept, **_added()}


@functools.cache
def _broken_by_key() -> dict[str, BrokenFile]:
    """Return the files that cannot work by their names and by all spellings of the shipped devices of these names."""
    found = {spelling_key(each.file.name): each for each in broken_devices()}
    for name, entry in _catalog().devices.items() if found else ():
        if spelling_key(name) in found:
            found |= dict.fromkeys(map(spelling_key, entry.aliases), found[spelling_key(name)])
    return found


@functools.cache
def _devices_by_key() -> dict[str, Device]:
    catalog = _catalog()
    added = {spelling_key(name): entry.device(name, entry.sources) for name, entry in _added().items()}
    by_key: dict[str, Device] = {}
    for name, entry in catalog.devices.items():
        device = added.get(spelling_key(name)) or entry.device(name, catalog.sources)
        for spelling in {spelling_key(name), *map(spelling_key, entry.aliases)}:
            assert spelling not in by_key, f"{name} and {by_key[spelling].name} share the spelling {spelling}"
            by_key[spelling] = device
    by_key |= added
    for name, own in _added().items():
        for alias in own.aliases:  # which a copied entry has from a shipped one, whose they stay
            by_key.setdefault(spelling_key(alias), added[spelling_key(name)])
    return by_key


@functools.cache
def _devices_by_words() -> dict[tuple[str, ...], tuple[Device, ...]]:
    """Return the devices by the sorted words of their names and aliases without sizes of memory."""
    found: dict[tuple[str, ...], dict[str, Device]] = {}
    for name, entry in _entries().items():
        for spelling in (name, *entry.aliases):
            device = _devices_by_key()[spelling_key(spelling)]
            if device.name == name:  # and no other's, from whose entry this one was copied
                found.setdefault(_words_and_sizes(spelling)[0], {})[name] = device
    return {words: tuple(devices.values()) for words, devices in found.items()}


def _flop_per_s(tflops: SourcedNumber | None) -> float | None:
    return None if tflops is None else tflops.value * 1e12


def numbers_of(entry: StrictModel, prefix: str = "") -> list[tuple[str, SourcedNumber]]:
    """Return every number of a catalog entry, with the dotted name of its field."""
    found: list[tuple[str, SourcedNumber]] = []
    for field in type(entry).model_fields:
        value = getattr(entry, field)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, SourcedNumber):
                found.append((f"{prefix}{field}", part))
            elif isinstance(part, LinkEntry):
                found += numbers_of(part, prefix=f"{prefix}{field}.")
    return found


def check_sources(entry: StrictModel, sources: Mapping[str, str], *, file: str) -> None:
    """Check that a file says what each source of its numbers is.

    Raises:
        ConfigError: A number names another source.
    """
    for field, number in numbers_of(entry):
        if number.source not in sources:
            nearest = did_you_mean(number.source, sources) if sources else "sources: {datasheet: its title or address}"
            rule = "is no key of `sources`"
            raise ConfigError(rule, key=f"{field}.source", value=number.source, nearest=nearest, file=file)
