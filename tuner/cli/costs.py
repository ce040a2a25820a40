"""The part of `meshtune rank` that compares clusters and sizes by time, cost and energy of a whole training."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardware.io.errors import ConfigError
from hardware.rounding import by_source
from tuner.cli.options import FOUND_NOTHING, check_out, load, number, taught_study, tell_basis
from tuner.terminal.console import hosts_in_words, in_words, print_json, say
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # these load numpy
    from tuner.economics.costs import CostComparison, Offer
    from tuner.study_file.request import Economics, StudyRequest
    from tuner.subject.problem import Problem

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_tokens(text: str) -> float:
    """Parse a number of tokens such as 1e12, 300B or 15T."""
    from tuner.study_file.cost_keys import MOST_TOKENS

    suffix = text[-1:].upper()
    digits, scale = (text[:-1], _SUFFIXES[suffix]) if suffix in _SUFFIXES else (text, 1.0)
    try:
        count = scale * float(digits)
    except ValueError:
        count = math.nan
    if not 1 <= count <= MOST_TOKENS:  # as NaN is not
        rule = f"must be a number of tokens from 1 to {MOST_TOKENS:g}"
        raise ConfigError(rule, key="--tokens", value=text, nearest="for example 1e12, 300B or 15T")
    return count


def tokens_of(economics: Economics, text: str | None) -> float:
    """Return the number of tokens of a training: that of `--tokens`, or else of the study.

    Raises:
        ConfigError: There is none, or the option holds no number.
    """
    count = economics.limits.tokens if text is None else parse_tokens(text)
    if count is None:
        rule = "is needed to tell what a whole training takes"
        raise ConfigError(rule, key="--tokens", nearest="for example --tokens 1e12, or limits.tokens in the study")
    return count


def parse_share(option: str, text: str) -> float:
    """Parse a share such as 8% or 0.08 that an option holds."""
    share = math.nan
    with contextlib.suppress(ValueError):
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= share < 1:
        raise ConfigError("must be a share from 0% to below 100%", key=option, value=text, nearest="for example 8%")
    return share


def load_with_prices(study: Path, overrides: list[str], storage: str | None, prices: Path | None) -> StudyRequest:
    """Load a study file, with the prices of a file that `--prices` names in place of its own."""
    if prices is None:
        return load(study, overrides, storage)
    named = [f"cost.prices={json.dumps(str(prices.absolute()))}", "cost.price_per_device_hour=null"]
    request = load(study, [*overrides, *named], storage)
    economics = request.economics
    named_prices = economics.prices and replace(economics.prices, file=str(prices))
    return replace(request, economics=replace(economics, prices=named_prices))


def rank_costs(
    request: StudyRequest,
    *,
    clusters: str | None,
    hosts: str | None,
    tokens: str | None,
    max_days: str | None,
    max_cost: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print, and draw, what a whole training takes on each size of each cluster.

    Raises:
        ConfigError: An option cannot work.
    """
    from tuner.economics.costs import compare_costs
    from tuner.forecast.sizes import parse_clusters, parse_sizes
    from tuner.study_file.cost_keys import Limits
    from tuner.terminal.progress import SizesLine

    if out is not None:
        check_out(out)
    stated = request.economics.limits
    count = tokens_of(request.economics, tokens)
    limits = Limits(
        tokens=count,
        max_days=stated.max_days if max_days is None else number("--max-days", max_days, above_zero=True),
        max_cost=stated.max_cost if max_cost is None else number("--max-cost", max_cost, above_zero=True),
        free_memory=stated.free_memory,
    )
    if limits.max_cost is not None and request.economics.prices is None:
        raise ConfigError(
            "needs prices",
            key="--max-cost" if max_cost is not None else "limits.max_cost",
            value=limits.max_cost,
            nearest="give --prices FILE, or cost.price_per_device_hour in the study",
        )
    found_clusters = () if clusters is None else parse_clusters(clusters)
    sizes = parse_sizes(request, hosts or str(request.problem.cluster.num_hosts), found_clusters)
    prepared, basis = taught_study(request)
    with SizesLine() as line:
        found = compare_costs(
            prepared,
            basis,
            count,
            sizes,
            found_clusters,
            prices=request.economics.prices,
            limits=limits,
            on_size=line.show,
        )
    if out is not None:
        from tuner.report.costs_page import write_costs_page

        write_costs_page(request, found, out)
    if as_json:
        print_json(
            _as_json(request.problem, found) | basis.as_json() | ({"written": str(out)} if out is not None else {})
        )
    else:
        _print(request.problem, found)
        tell_basis(basis, found.untaught_in_words)
        if out is not None:
            typer.echo(f"wrote {out}", err=True)
    if not found.within:
        raise typer.Exit(FOUND_NOTHING)


def _as_json(problem: Problem, found: CostComparison) -> dict[str, Any]:
    dimensions = _dimensions(problem, found)

    def place(offer: Offer | None) -> int | None:
        return None if offer is None else found.offers.index(offer)

    prices = found.prices
    return {
        "tokens": found.tokens,
        "steps": found.steps,
        "prices": prices and {"currency": prices.currency, "date": prices.date or None, "file": prices.file or None},
        "limits": {"max_days": found.limits.max_days, "max_cost": found.limits.max_cost},
        "front": "cost" if found.has_cost else "energy",
        "offers": [offer.as_json(dimensions) for offer in found.offers],
        "fastest": place(found.fastest),
        "cheapest": place(found.cheapest),
        "nearest_miss": place(found.nearest_miss),
    }


def _dimensions(problem: Problem, found: CostComparison) -> tuple[str, ...]:
    """Return the dimensions that tell the configurations apart, the plan if one has another than that by hand."""
    from costmodels.job.parallel_config import HAND

    has_plans = any(offer.size.config is not None and offer.size.config.plan != HAND for offer in found.offers)
    return (*problem.dimensions, "plan") if has_plans and "plan" not in problem.dimensions else problem.dimensions


def _print(problem: Problem, found: CostComparison) -> None:
    from tuner.economics.cost_words import broken_in_words, limits_in_words, offer_in_words, prices_in_words
    from tuner.search.step_draws import BEYOND, BEYOND_IN_WORDS, chance_in_words

    per_step = problem.setting.job.tokens_per_step
    say(f"{found.tokens:.4g} tokens are {found.steps:,} steps of {per_step:,} tokens; {prices_in_words(found)}.")
    header = ["", "cluster", "hosts", "devices", "step [s]", "days", "95%"]
    header += ["cost", "95%"] if found.has_cost else []
    has_chances = any(chance_in_words(offer.slower_probability) for offer in found.offers)
    header += [BEYOND] if has_chances else []
    header += ["MWh", "fits", "front", "configuration"]
    dimensions = _dimensions(problem, found)
    rows = [_row(offer, found, dimensions, has_chances) for offer in found.offers if offer.fits]
    print_table(header, rows, left=(1, len(header) - 1))
    if has_chances:
        say(f"{BEYOND}: {BEYOND_IN_WORDS}")
    for offer in found.offers:
        if not offer.fits:
            say(f"{offer.cluster.name}, {hosts_in_words(offer.size.hosts)}: {offer.size.reason}")
    say(
        f"* on the front: no other is both faster and {'cheaper' if found.has_cost else 'of less energy'}. `front` and "
        "`fits` are probabilities, of being there and of fitting in memory."
    )
    for offer in found.offers:
        if offer.breaks:
            near = (
                ""
                if offer.nearest is None
                else f"; nearest within: {offer_in_words(found.offers[offer.nearest], found)}"
            )
            say(f"! {offer_in_words(offer, found)}: {broken_in_words(offer, found)}{near}")
    if found.limits.are_set:
        say(f"Limits: {limits_in_words(found)}.")
    named = {
        "Fastest": found.fastest,
        "Cheapest" if found.has_cost else "Least energy": found.cheapest,
        "Nothing keeps the limits; nearest": found.nearest_miss,
    }
    for name, one in named.items():
        if one is not None:
            say(f"{name}: {offer_in_words(one, found)}{_chance(one, found)}")


def _chance(offer: Offer, found: CostComparison) -> str:
    """Return the probability that an offer keeps the limits, in words."""
    return f"; keeps the limits with probability {offer.chance_within:.0%}" if found.limits.are_set else ""


def _row(offer: Offer, found: CostComparison, dimensions: tuple[str, ...], has_chances: bool) -> list[str]:
    from tuner.economics.cost_words import days, money
    from tuner.economics.costs import KWH_J
    from tuner.search.step_draws import chance_in_words

    assert offer.size.config is not None, "the table lists what fits"
    values = {name: value for name, value in offer.size.config.values(dimensions).items() if value != 1}
    low, high = offer.seconds_range
    cost = []
    if found.has_cost:
        cost = ["-", "-"]
        if offer.cost is not None and offer.cost_range is not None:
            cost = [money(offer.cost), " to ".join(map(money, offer.cost_range))]
    return [
        "*" if offer.on_front else "!" if offer.breaks else "",
        offer.cluster.name,
        str(offer.size.hosts),
        f"{offer.size.devices:,}",
        by_source(offer.size.step_time_s, offer.size.source),
        days(offer.seconds),
        f"{days(low)} to {days(high)}",
        *cost,
        *([chance_in_words(offer.slower_probability)] if has_chances else []),
        "-" if offer.energy_j is None else f"{offer.energy_j / KWH_J / 1e3:,.3g}",
        f"{offer.size.fit_probability:.0%}",
        f"{offer.front_chance:.0%}",
        in_words(values) or "all degrees 1",
    ]
