"""Keys on what a training costs and may cost: prices of device-hours, and limits of the whole training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hardware.io.config_file import DocumentedModel
from hardware.io.errors import ConfigError
from hardware.price_file import HIGHEST_PRICE, LOWEST_PRICE, Prices, read_prices

MAX_DAYS, MAX_COST = "max_days", "max_cost"
"""Names of limits."""
MOST_TOKENS = 1e18
"""Most tokens of a training: ten thousand times those of the largest that are known."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CostKeys(DocumentedModel):
    """`cost:`."""

    prices: str | None = None
    """A YAML file of prices of device-hours, relative to this one; see [costs](costs.md#prices).

    Default: none; one of the two keys gives costs
    """

    price_per_device_hour: Annotated[float, Field(ge=LOWEST_PRICE, le=HIGHEST_PRICE, allow_inf_nan=False)] | None = None
    """Price of every device for one hour.

    Default: none; one of the two keys gives costs
    """

    currency: Annotated[str, Field(min_length=1, max_length=12)] = "USD"
    """Currency of `price_per_device_hour`, as it is printed."""

    idle_hosts: Literal["paid", "released"] = "paid"
    """Whether hosts that a layout leaves idle are paid for and stay powered on (`paid`), or are given back and cost
    nothing (`released`).
    """


class Limits(DocumentedModel):
    """`limits:` of the whole training; None stands for no limit."""

    tokens: Annotated[float, Field(ge=1, le=MOST_TOKENS)] | None = None
    """Number of tokens of the whole training, to which the other limits belong.

    Default: none; `--tokens` gives it
    """

    max_days: Positive | None = None
    """Longest time of the whole training [days].

    Default: no limit
    """

    max_cost: Positive | None = None
    """Highest cost of the whole training, in the currency of the prices.

    Default: no limit
    """

    free_memory: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of each device's memory that must stay free, by prediction and by measurement: 0.08 is 8%. A candidate is
    dropped only if it is unlikely to keep that much free under every runtime profile, given the errors of predicted
    memory; if the study's own was fitted to peaks of your cluster, that one alone decides. A trial whose measured peak
    leaves less counts as out of memory.

    Default: 0.08 by prediction, and what ran has fitted
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the limits of time and cost that are set."""
        return (MAX_DAYS,) * (self.max_days is not None) + (MAX_COST,) * (self.max_cost is not None)

    @property
    def are_set(self) -> bool:
        """Whether time or cost is limited."""
        return bool(self.names)

    def broken_by(self, days: float, cost: float | None) -> tuple[str, ...]:
        """Return the names of the limits that a training breaks; one without a price may cost anything."""
        too_long = self.max_days is not None and days > self.max_days
        too_dear = self.max_cost is not None and (cost is None or cost > self.max_cost)
        return (MAX_DAYS,) * too_long + (MAX_COST,) * too_dear


NO_LIMITS = Limits()
"""Limits of a training that may take and cost anything."""


def build_prices(keys: CostKeys, base_dir: Path) -> Prices | None:
    """Return the prices that a study names; None without any.

    Raises:
        ConfigError: Two sources of prices are named, or the file cannot be read.
    """
    if keys.prices is not None and keys.price_per_device_hour is not None:
        raise ConfigError(
            "cannot stand beside prices, which has a price of each device",
            key="price_per_device_hour",
            value=keys.price_per_device_hour,
            nearest="keep one of the two",
        )
    if keys.prices is not None:
        return read_prices(base_dir / keys.prices)
    if keys.price_per_device_hour is not None:
        return Prices(currency=keys.currency, of_all=keys.price_per_device_hour)
    return None
