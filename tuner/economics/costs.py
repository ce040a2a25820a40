"""Time, cost and energy of a whole training on several clusters and sizes, with limits and a Pareto front.

A training takes its number of steps times the predicted step time. Its cost is that time on all devices of the cluster
at the price of a device-hour, and its energy that time at the mean power of the hosts (hardware/power.py). Restarts,
evaluation and checkpoints are not counted. Price and power are taken as exact: intervals are those of the step time.

Letters: n offers, M draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodels.surrogates.joint_errors import draw_log_errors, error_sources
from costmodels.surrogates.uncertainty import likely_range
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.price_file import Prices
from hardware.time_units import DAY_S, HOUR_S
from tuner.answers.basis import Basis
from tuner.answers.predictions import judge_of
from tuner.forecast.pareto import front_chances, pareto_front
from tuner.forecast.prepared import Prepared
from tuner.forecast.sizes import PREDICTED, Size, best_by_size
from tuner.search.step_draws import SLOWER, StepRange
from tuner.study_file.cost_keys import NO_LIMITS, Limits

KWH_J = 3.6e6
NUM_DRAWS = 1_000
"""Number of joint draws, which give chances to about a percent."""

OnSize = Callable[[int, int], None]
"""Function that is told how many sizes are predicted, and how many there are."""


def ignore_size(_done: int, _count: int) -> None:
    """Do nothing, for callers who do not follow the progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Whole training on one size of one cluster.

    Attributes:
        size: Cluster with its best predicted configuration, or the reason why there is none.
        seconds: Time of all steps [s]; inf where nothing fits.
        seconds_range: 95% interval of it [s].
        slower_probability: Probability of a time beyond that interval; None where trials say nothing of it.
        cost: Cost; None without a price.
        cost_range: 95% interval of it; None without a price.
        energy_j: Energy of all hosts [J]; None where no power is known.
        on_front: Whether no other offer within the limits is both faster and cheaper.
        front_chance: Share of the draws in which it is on the front of all offers.
        breaks: Names of the limits that it breaks.
        chance_within: Share of the draws in which it keeps all limits.
        nearest: Position of the offer on the front that is nearest to this one; None for one within the limits.
    """

    size: Size
    seconds: float = math.inf
    seconds_range: tuple[float, float] = (math.inf, math.inf)
    slower_probability: float | None = None
    cost: float | None = None
    cost_range: tuple[float, float] | None = None
    energy_j: float | None = None
    on_front: bool = False
    front_chance: float = 0.0
    breaks: tuple[str, ...] = ()
    chance_within: float = 0.0
    nearest: int | None = None

    @property
    def fits(self) -> bool:
        """Whether a configuration fits at all."""
        return self.size.config is not None

    @property
    def days(self) -> float:
        """Time of all steps [days]."""
        return self.seconds / DAY_S

    @property
    def device_hours(self) -> float:
        """Time of all steps on all devices [h]."""
        return self.size.devices * self.seconds / HOUR_S

    @property
    def cluster(self) -> Cluster:
        """Cluster of this size."""
        return self.size.setting.cluster

    def as_json(self, dimensions: Sequence[str]) -> dict[str, Any]:
        """Return the offer as an object; null stands for values that are not known."""
        return {
            "cluster": self.cluster.name,
            **self.size.as_json(dimensions),
            "days": self.days if self.fits else None,
            "days_range": [seconds / DAY_S for seconds in self.seconds_range] if self.fits else None,
            SLOWER: self.slower_probability,
            "device_hours": self.device_hours if self.fits else None,
            "cost": self.cost,
            "cost_range": None if self.cost_range is None else list(self.cost_range),
            "energy_kwh": None if self.energy_j is None else self.energy_j / KWH_J,
            "fit_probability": self.size.fit_probability if self.fits else None,
            "on_front": self.on_front,
            "front_chance": self.front_chance if self.fits else None,
            "breaks": list(self.breaks),
            "chance_within": self.chance_within if self.fits else None,
            "nearest": self.nearest,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CostComparison:
    """Answer to where a training costs what.

    Attributes:
        tokens: Number of tokens.
        steps: Number of steps.
        offers: Offers in the order of the clusters and sizes that were asked for.
        limits: Limits of the training.
        prices: Prices that the costs follow from; None without any.
        has_cost: Whether the front is that of time and cost; else it is that of time and energy.
        basis: What the step times rest on; those of other hosts than the study's own are always predicted.
    """

    tokens: float
    steps: int
    offers: tuple[Offer, ...]
    limits: Limits
    prices: Prices | None
    has_cost: bool
    basis: Basis

    @property
    def untaught_in_words(self) -> str:
        """Clause on the clusters of which the trials say nothing; empty if there are none, or no trials."""
        if self.basis.taught is None:
            return ""
        names = list(dict.fromkeys(each.cluster.name for each in self.offers if each.size.source == PREDICTED))
        have, are = ("has", "is") if len(names) == 1 else ("have", "are")
        return f"{' and '.join(names)} {have} other hosts and {are} predicted" if names else ""

    @property
    def within(self) -> list[Offer]:
        """Offers that fit and keep every limit."""
        return [offer for offer in self.offers if offer.fits and not offer.breaks]

    @property
    def fastest(self) -> Offer | None:
        """Fastest offer within the limits."""
        return min(self.within, key=lambda offer: offer.seconds, default=None)

    @property
    def cheapest(self) -> Offer | None:
        """Cheapest offer within the limits, or the one of least energy where the front is that of energy."""
        return min(
            (offer for offer in self.within if _second(offer, self.has_cost) is not None),
            key=lambda offer: _second(offer, self.has_cost) or 0.0,
            default=None,
        )

    @property
    def nearest_miss(self) -> Offer | None:
        """Offer that exceeds the limits least, if none keeps them."""
        if self.within:
            return None
        return min(
            (offer for offer in self.offers if offer.fits), key=lambda each: _excess(each, self.limits), default=None
        )


def compare_costs(
    prepared: Prepared,
    basis: Basis,
    tokens: float,
    hosts: Sequence[int],
    clusters: Sequence[Cluster],
    *,
    prices: Prices | None = None,
    limits: Limits = NO_LIMITS,
    on_size: OnSize = ignore_size,
) -> CostComparison:
    """Compare what a training takes on each size of each cluster.

    Args:
        prepared: Study.
        basis: What its answers rest on.
        tokens: Number of tokens.
        hosts: Numbers of hosts of each cluster.
        clusters: Clusters of equal hosts; empty for the study's own.
        prices: Prices of device-hours.
        limits: Limits of the training.
        on_size: Function that is told the progress.

    Raises:
        ConfigError: A size has too many configurations to predict, or the storage cannot be read.
    """
    problem = prepared.problem
    steps = math.ceil(tokens / problem.setting.job.tokens_per_step)
    offers: list[Offer] = []
    count = len(hosts) * max(len(clusters), 1)
    on_size(0, count)
    judge = judge_of(prepared, basis)
    for size in best_by_size(problem, hosts, clusters, file=prepared.request.file, judge=judge):
        if size.config is None:
            offers.append(Offer(size=size))
            continue
        seconds = steps * size.step_time_s
        per_hour = prices.per_hour(size.setting.cluster) if prices else None
        offers.append(
            Offer(
                size=size,
                seconds=seconds,
                cost=None if per_hour is None else per_hour * seconds / HOUR_S,
                energy_j=None if size.power_w is None else size.power_w * seconds,
            )
        )
        on_size(len(offers), count)
    has_cost = any(offer.cost is not None for offer in offers)
    return CostComparison(
        tokens=tokens,
        steps=steps,
        offers=tuple(_with_nearest(_with_chances(offers, *_draw_factors(offers, basis), limits, has_cost))),
        limits=limits,
        prices=prices,
        has_cost=has_cost,
        basis=basis,
    )


def _draw_factors(offers: Sequence[Offer], basis: Basis) -> tuple[FloatArray, dict[int, StepRange]]:
    """Draw true over told step times of the offers that fit jointly [M, n], by the trials or else by the cost model.

    With them comes the range of each step that trials told, by its place among those that fit.
    """
    fitting = [offer.size for offer in offers if offer.fits]
    sources = [error_sources(size.setting, size.config) for size in fitting if size.config is not None]
    if not sources:
        return np.ones((NUM_DRAWS, 0)), {}
    log_factors = draw_log_errors(sources, NUM_DRAWS, np.random.default_rng(0))
    ranges: dict[int, StepRange] = {}
    learned = [at for at, size in enumerate(fitting) if size.source != PREDICTED]
    if basis.taught and learned:
        chosen = [size.config for size in fitting if size.source != PREDICTED and size.config is not None]
        drawn = basis.taught.draw_steps(chosen, NUM_DRAWS, [fitting[at].setting for at in learned])
        assert drawn is not None, "the trials have told of these"
        log_factors[:, learned] = drawn.log_step_s - np.log([fitting[at].step_time_s for at in learned])
        ranges = dict(zip(learned, drawn.ranges(), strict=True))
    return np.exp(log_factors), ranges


def _with_chances(
    offers: Sequence[Offer], factors: FloatArray, ranges: Mapping[int, StepRange], limits: Limits, has_cost: bool
) -> list[Offer]:
    """Return the offers with their intervals, chances, broken limits, and whether they are on the front.

    Args:
        offers: Offers.
        factors: Draws of true over told step times of the offers that fit [M, n].
        ranges: Range of each step that trials told, by its place among those that fit.
        limits: Limits of the training.
        has_cost: Whether the front is that of time and cost.
    """
    at = [position for position, offer in enumerate(offers) if offer.fits]
    fitting = [offers[position] for position in at]
    if not fitting:
        return list(offers)
    values = np.array([_values(offer, has_cost) for offer in fitting])  # [n, 2]
    chances = front_chances(values * factors[:, :, None])
    found = list(offers)
    for place, (position, offer) in enumerate(zip(at, fitting, strict=True)):
        factor = factors[:, place]
        told = ranges.get(place)
        ends = _ends_of(offer.size, told)
        found[position] = replace(
            offer,
            seconds_range=(offer.seconds * ends[0], offer.seconds * ends[1]),
            slower_probability=None if told is None else told.slower_probability,
            cost_range=None if offer.cost is None else (offer.cost * ends[0], offer.cost * ends[1]),
            breaks=limits.broken_by(offer.days, offer.cost),
            chance_within=float(np.mean(_keeps(offer, limits, factor))),
            front_chance=float(chances[place]),
        )
    kept = [position for position in at if not found[position].breaks]
    is_front = pareto_front(np.array([_values(found[position], has_cost) for position in kept]).reshape(-1, 2))
    for position, is_on in zip(kept, is_front, strict=True):
        found[position] = replace(found[position], on_front=bool(is_on))
    return found


def _ends_of(size: Size, told: StepRange | None) -> tuple[float, float]:
    """Return both ends of the 95% interval of true over told step time, by trials or else as the cost model has it."""
    if told is not None:
        return told.low_s / size.step_time_s, told.high_s / size.step_time_s
    assert size.config is not None, "it fits"
    return likely_range(1.0, error_sources(size.setting, size.config).log_error_95)


def _with_nearest(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers, each that breaks a limit with the one of the front that is nearest in time and cost."""
    within = [position for position, offer in enumerate(offers) if offer.on_front]
    return [
        replace(offer, nearest=min(within, key=lambda position, offer=offer: _distance(offer, offers[position])))  # type: ignore[misc] # mypy takes the default for a parameter of the key
        if offer.breaks and within
        else offer
        for offer in offers
    ]


def _distance(one: Offer, other: Offer) -> float:
    """Return how far two offers are apart, in octaves of time and of cost."""
    apart = abs(math.log2(one.seconds / other.seconds))
    return apart + (abs(math.log2(one.cost / other.cost)) if one.cost and other.cost else 0.0)


def _second(offer: Offer, has_cost: bool) -> float | None:
    """Return the value of an offer beside its time."""
    return offer.cost if has_cost else offer.energy_j


def _values(offer: Offer, has_cost: bool) -> tuple[float, float]:
    """Return time and cost, or time and energy; inf where it is not known."""
    second = _second(offer, has_cost)
    return offer.seconds, math.inf if second is None else second


def _keeps(offer: Offer, limits: Limits, factor: FloatArray) -> Any:
    """Return whether an offer keeps all limits if its step takes `factor` times as long as predicted [M]."""
    days = math.inf if limits.max_days is None else limits.max_days
    cost = math.inf if limits.max_cost is None else limits.max_cost
    cost_of = (0.0 if limits.max_cost is None else math.inf) if offer.cost is None else offer.cost
    return (offer.days * factor <= days) & (cost_of * factor <= cost)


def _excess(offer: Offer, limits: Limits) -> float:
    """Return the largest ratio of an offer's days or cost to their limit; 0 without a limit."""
    ratios = [0.0]
    if limits.max_days is not None:
        ratios.append(offer.days / limits.max_days)
    if limits.max_cost is not None:
        ratios.append(math.inf if offer.cost is None else offer.cost / limits.max_cost)
    return max(ratios)
