"""Words for what a training takes, shared by the terminal and the page."""

from __future__ import annotations

from hardware.price_file import Prices
from hardware.time_units import DAY_S
from tuner.economics.costs import CostComparison, Offer
from tuner.economics.training import Training
from tuner.study_file.cost_keys import MAX_COST, MAX_DAYS, Limits
from tuner.study_file.request import Economics


def money(amount: float) -> str:
    """Format an amount with three digits or, above a thousand, whole units."""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.3g}"


def days(seconds: float) -> str:
    """Format a time in days with three digits."""
    found = seconds / DAY_S
    return f"{found:,.0f}" if found >= 1000 else f"{found:#.3g}".rstrip(".")


def offer_in_words(offer: Offer, found: CostComparison) -> str:
    """Return cluster, size, time and cost of an offer."""
    hosts = "1 host" if offer.size.hosts == 1 else f"{offer.size.hosts:,} hosts"
    told = f"{offer.cluster.name}, {hosts}: {days(offer.seconds)} days"
    if offer.cost is not None and found.prices is not None:
        told += f", {money(offer.cost)} {found.prices.currency}"
    return told


def broken_in_words(offer: Offer, found: CostComparison) -> str:
    """Describe the limits that an offer breaks, with the excess; empty if it breaks none."""
    return _excess_in_words(offer.days, offer.cost, found.limits, found.prices)


def limited_in_words(economics: Economics, training: Training | None) -> str:
    """Describe time and cost of the tokens of a study's `limits:`, and the limits that they break; empty without any.

    Limits of a training whose tokens nobody has said cannot be checked, and are said to be not.
    """
    if training is None:
        unchecked = " and ".join(f"limits.{name}" for name in economics.limits.names)
        return f"{unchecked}: not checked, because limits.tokens is not given" if unchecked else ""
    told = f"{economics.limits.tokens:g} tokens take {days(training.seconds)} days"
    if training.cost is not None and economics.prices is not None:
        told += f" and {money(training.cost)} {economics.prices.currency}"
    broken = _excess_in_words(training.seconds / DAY_S, training.cost, economics.limits, economics.prices)
    if not training.breaks:
        return told + (", within the limits" if economics.limits.are_set else "")
    return f"{told}: {broken}, which breaks {' and '.join(f'limits.{name}' for name in training.breaks)}"


def _excess_in_words(spent_days: float, cost: float | None, limits: Limits, prices: Prices | None) -> str:
    breaks, parts = limits.broken_by(spent_days, cost), []
    if MAX_DAYS in breaks and limits.max_days is not None:
        parts.append(f"{spent_days / limits.max_days - 1:.0%} more than {limits.max_days:g} days")
    if MAX_COST in breaks and limits.max_cost is not None and prices is not None:
        allowed = f"{money(limits.max_cost)} {prices.currency}"
        parts.append("has no price" if cost is None else f"{cost / limits.max_cost - 1:.0%} more than {allowed}")
    return " and ".join(parts)


def limits_in_words(found: CostComparison) -> str:
    """Return the limits of a training."""
    limits, parts = found.limits, []
    if limits.max_days is not None:
        parts.append(f"at most {limits.max_days:g} days")
    if limits.max_cost is not None and found.prices is not None:
        parts.append(f"at most {money(limits.max_cost)} {found.prices.currency}")
    return " and ".join(parts)


def prices_in_words(found: CostComparison) -> str:
    """Return currency, date and source of the prices, and which clusters have none."""
    if found.prices is None:
        return "no prices are given (--prices FILE)"
    missing = dict.fromkeys(offer.cluster.name for offer in found.offers if offer.fits and offer.cost is None)
    without = f"; no price of {', '.join(missing)}" if missing else ""
    return f"costs in {found.prices.currency} by {found.prices.origin}{without}"
