"""Prices of device-hours, read from a file of the user's: no price is built in, because prices grow stale."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from hardware.cluster import Cluster
from hardware.cluster_file import find_cluster_name, nearest_cluster_or_device
from hardware.device import find_device
from hardware.host_group import HostGroup
from hardware.io.config_file import DocumentedModel, read_mapping, validate_mapping
from hardware.io.errors import ConfigError, UnknownNameError
from hardware.link import spelling_key

HIGHEST_PRICE, LOWEST_PRICE = 1e6, 1e-6
"""Highest and lowest price of a device-hour that is not free; anything beyond is taken for a mistake."""


def _checked_price(price: float) -> float:
    if 0 < price < LOWEST_PRICE:
        raise ValueError(f"must be 0, or a price of at least {LOWEST_PRICE:g}")
    return price


def _checked_date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("must be a date such as 2026-08-26") from None


class PriceKeys(DocumentedModel):
    """Entry of `prices:`."""

    per_device_hour: Annotated[
        float, Field(ge=0, le=HIGHEST_PRICE, allow_inf_nan=False), AfterValidator(_checked_price)
    ]
    """Price of one device for one hour, its share of the host included."""

    source: Annotated[str, Field(min_length=1, max_length=1000)]
    """Where the price comes from: a public price list, a contract, an own calculation."""


class PricesKeys(DocumentedModel):
    """A file of prices."""

    currency: Annotated[str, Field(min_length=1, max_length=12)]
    """Currency of all prices, as it is to be printed, for example `USD`."""

    date: Annotated[str, AfterValidator(_checked_date)]
    """Date at which the prices held."""

    prices: Annotated[dict[str, PriceKeys], Field(min_length=1)]
    """Prices by the name of a cluster of the catalog, or else of a device; a cluster's own price wins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of device-hours.

    Attributes:
        currency: Currency of all prices.
        date: Date at which they held, as text; empty for a price that a study states.
        file: Path of the file; empty for a price that a study states.
        of_clusters: Price of one device-hour by the name of a cluster in the catalog.
        of_devices: Price of one device-hour by the name of a device in the catalog.
        of_all: Price of every device-hour, whatever the device; None where names decide.
    """

    currency: str
    date: str = ""
    file: str = ""
    of_clusters: tuple[tuple[str, float], ...] = ()
    of_devices: tuple[tuple[str, float], ...] = ()
    of_all: float | None = None

    def per_device_hour(self, group: HostGroup) -> float | None:
        """Return the price of one device of a group for one hour; None where there is none."""
        if self.of_all is not None:
            return self.of_all
        own = {spelling_key(name): price for name, price in self.of_clusters}.get(spelling_key(group.name))
        return own if own is not None else dict(self.of_devices).get(group.device.name)

    def per_hour(self, cluster: Cluster) -> float | None:
        """Return the price of a whole cluster for one hour; None where a device has no price."""
        prices = [self.per_device_hour(group) for group in cluster.groups]
        known = [
            group.num_devices * price for group, price in zip(cluster.groups, prices, strict=True) if price is not None
        ]
        return sum(known) if len(known) == len(prices) else None

    @property
    def origin(self) -> str:
        """Source of the prices, in words."""
        return f"prices of {self.date} from {self.file}" if self.file else "the price that the study states"


def read_prices(path: Path) -> Prices:
    """Read a file of prices.

    Raises:
        ConfigError: The file cannot be read, a key is wrong, or a name is neither a cluster nor a device.
    """
    file = str(path)
    form = validate_mapping(PricesKeys, read_mapping(path), file=file)
    of_clusters: dict[str, float] = {}
    of_devices: dict[str, float] = {}
    for name, entry in form.prices.items():
        key = f"prices.{name}"
        cluster = find_cluster_name(name)
        known, found = (of_clusters, cluster) if cluster else (of_devices, _device_name(name, key, file))
        if found in known:
            rule = f"is another name of {found}, which has a price already"
            raise ConfigError(rule, file=file, key=key, nearest="keep one of the two")
        known[found] = entry.per_device_hour
    # the name of a cluster may be that of its device too, which then has this price in other clusters
    for name, price in of_clusters.items():
        with contextlib.suppress(ConfigError):
            of_devices.setdefault(find_device(name).name, price)
    return Prices(
        currency=form.currency,
        date=form.date,
        file=file,
        of_clusters=tuple(of_clusters.items()),
        of_devices=tuple(of_devices.items()),
    )


def _device_name(name: str, key: str, file: str) -> str:
    try:
        return find_device(name).name
    except UnknownNameError:
        rule = "is no cluster and no device of the catalog"
        raise ConfigError(rule, file=file, key=key, nearest=nearest_cluster_or_device(name)) from None
