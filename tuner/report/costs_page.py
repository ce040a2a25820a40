"""Page of a comparison of clusters: cost over time of a whole training, with intervals, limits and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from hardware.io.output_file import write_output
from hardware.rounding import by_source
from hardware.time_units import DAY_S
from tuner.economics.cost_words import broken_in_words, days, limits_in_words, money, offer_in_words, prices_in_words
from tuner.economics.costs import KWH_J, CostComparison, Offer
from tuner.report.figures import CANDIDATES, DRAW_SCRIPT, FAILED, INK, drawing
from tuner.report.markup import Html, concatenate, section, tag
from tuner.report.page import head_of
from tuner.report.words import MISSING, gibibytes, in_short, percent, plural
from tuner.search.step_draws import BEYOND, BEYOND_IN_WORDS, chance_in_words
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem

HEIGHT = 520
"""Height of the figure [px]."""
MWH_J = 1e3 * KWH_J


def write_costs_page(request: StudyRequest, found: CostComparison, out: Path) -> Path:
    """Write the page and return its path.

    Raises:
        ConfigError: `out` cannot be written.
    """
    write_output(out, render_costs_page(request, found))
    return out


def render_costs_page(request: StudyRequest, found: CostComparison) -> str:
    """Render the whole page; equal comparisons give equal text."""
    job = request.problem.setting.job
    words = (
        f"{job.model.name} on {found.tokens:.4g} tokens: {plural(found.steps, 'step')} of {job.tokens_per_step:,} "
        f"tokens, {job.precision}, {request.problem.setting.runtime.name}; {prices_in_words(found)}"
    )
    told = found.basis.in_words_but(found.untaught_in_words)
    second = "cost" if found.has_cost else "energy"
    header = tag("header", tag("h1", f"{request.name}: what training costs"), tag("p", words), tag("p", told))
    main = tag(
        "main",
        section("answer", "Answer", *(tag("p", line) for line in _answer(found))),
        section(
            "front", f"Time and {second}", tag("p", _legend(found)), drawing(_figure(found), "front", height=HEIGHT)
        ),
        section("offers", "Clusters and sizes", tag("div", _table(request.problem, found), class_="scroll")),
        *([section("without", "What does not fit", _without(found))] if not all(o.fits for o in found.offers) else []),
    )
    body = tag("body", header, main, tag("footer", _footer(request.file)), tag("script", DRAW_SCRIPT))
    page = tag("html", head_of(f"{request.name}: costs"), body, lang="en")
    return concatenate(Html("<!DOCTYPE html>\n"), page, "\n")


def _answer(found: CostComparison) -> list[str]:
    """Return the sentences that a reader in a hurry needs."""
    told = [f"Limits: {limits_in_words(found)}."] if found.limits.are_set else []
    if found.fastest is not None:
        told.append(f"Fastest: {offer_in_words(found.fastest, found)}.")
    if found.cheapest is not None:
        told.append(f"{'Cheapest' if found.has_cost else 'Least energy'}: {offer_in_words(found.cheapest, found)}.")
    if found.nearest_miss is not None:
        miss = found.nearest_miss
        told.append(
            f"Nothing keeps the limits; nearest: {offer_in_words(miss, found)}, {broken_in_words(miss, found)}."
        )
    if not any(offer.fits for offer in found.offers):
        told.append("Nothing fits.")
    return told


def _legend(found: CostComparison) -> str:
    second = "cheaper" if found.has_cost else "of less energy"
    return (
        "Each point is one size of a cluster, with its number of hosts. Points on the line have no other that is both "
        f"faster and {second}. Bars are 95% intervals of the time, along which both values move together."
        + f" {BEYOND.capitalize()} is the {BEYOND_IN_WORDS}."
        * _has_chances(found)
    )


def _has_chances(found: CostComparison) -> bool:
    return any(chance_in_words(offer.slower_probability) for offer in found.offers)


def _figure(found: CostComparison) -> go.Figure:
    figure = go.Figure()
    names = list(dict.fromkeys(offer.cluster.name for offer in found.offers))
    drawn = [offer for offer in found.offers if _height(offer, found) is not None]
    for at, name in enumerate(names):
        own = [offer for offer in drawn if offer.cluster.name == name]
        if own:
            _add_cluster(figure, name, own, found, CANDIDATES[at % len(CANDIDATES)])
    front = sorted((offer for offer in drawn if offer.on_front), key=lambda offer: offer.seconds)
    if front:
        figure.add_scatter(
            x=[offer.days for offer in front],
            y=[_height(offer, found) for offer in front],
            mode="lines",
            name="front",
            line={"color": INK, "width": 1.5, "dash": "dot"},
            hoverinfo="skip",
        )
    limits = found.limits
    line = {"color": FAILED, "width": 1.5, "dash": "dash"}
    if limits.max_days is not None:
        figure.add_vline(x=limits.max_days, line=line)
    if limits.max_cost is not None and found.has_cost:
        figure.add_hline(y=limits.max_cost, line=line)
    if limits.are_set:
        figure.add_scatter(x=[None], y=[None], mode="lines", name="limits", line=line)
    currency = found.prices.currency if found.prices is not None else ""
    axis = {"type": "log", "dtick": "D2", "tickformat": "~s"}
    figure.update_xaxes(title="time of the training [days]", **(axis | {"tickformat": "~g"}))
    figure.update_yaxes(title=f"cost [{currency}]" if found.has_cost else "energy [MWh]", **axis)
    return figure


def _add_cluster(figure: go.Figure, name: str, own: Sequence[Offer], found: CostComparison, colour: str) -> None:
    """Add the points of one cluster, each with its interval: time and cost err together, so it is a slanted line."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for offer in own:
        height = _height(offer, found)
        assert height is not None, "only offers with both values are drawn"
        for seconds in offer.seconds_range:
            xs.append(seconds / DAY_S)
            ys.append(height * seconds / offer.seconds)
        xs.append(None)
        ys.append(None)
    figure.add_scatter(x=xs, y=ys, mode="lines", line={"color": colour, "width": 2}, opacity=0.5, hoverinfo="skip")
    figure.add_scatter(
        x=[offer.days for offer in own],
        y=[_height(offer, found) for offer in own],
        mode="markers+text",
        name=name,
        text=[f"{offer.size.hosts}" for offer in own],
        textposition="top right",
        marker={
            "color": colour,
            "size": 11,
            "symbol": ["circle" if not offer.breaks else "circle-open" for offer in own],
        },
        hovertext=[f"{offer_in_words(offer, found)}{_beyond(offer)}<br>{_config_words(offer)}" for offer in own],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _beyond(offer: Offer) -> str:
    """Return the chance of a time beyond the bar, in words; empty unless it is notable."""
    chance = chance_in_words(offer.slower_probability)
    return chance and f", {chance} {BEYOND}"


def _height(offer: Offer, found: CostComparison) -> float | None:
    """Return the vertical position of an offer: its cost, or its energy in MWh; None if that is not known."""
    if found.has_cost:
        return offer.cost
    return None if offer.energy_j is None else offer.energy_j / MWH_J


def _table(problem: Problem, found: CostComparison) -> Html:
    currency = found.prices.currency if found.prices is not None else "cost"
    heads = [
        "cluster",
        "hosts",
        "devices",
        "step [s]",
        "days",
        "95%",
        currency,
        "95%",
        "MWh",
        "memory",
        "fits",
        "front",
    ]
    texts = ("cluster",)
    head = tag(
        "tr", *(tag("th", name, class_="" if name in texts else "number") for name in heads), tag("th", "configuration")
    )
    rows = [_row(offer, problem) for offer in found.offers if offer.fits]
    return tag("table", tag("thead", head), tag("tbody", *rows))


def _row(offer: Offer, problem: Problem) -> Html:
    size = offer.size
    mark = "\N{BLACK STAR} " if offer.on_front else "! " if offer.breaks else ""
    numbers = [
        str(size.hosts),
        f"{size.devices:,}",
        by_source(size.step_time_s, size.source),
        days(offer.seconds),
        f"{days(offer.seconds_range[0])} to {days(offer.seconds_range[1])}{_beyond(offer)}",
        MISSING if offer.cost is None else money(offer.cost),
        MISSING if offer.cost_range is None else " to ".join(map(money, offer.cost_range)),
        MISSING if offer.energy_j is None else f"{offer.energy_j / MWH_J:,.3g}",
        gibibytes(size.peak_memory_bytes),
        percent(size.fit_probability),
        percent(offer.front_chance),
    ]
    cells = (tag("td", number, class_="number") for number in numbers)
    return tag(
        "tr", tag("td", f"{mark}{offer.cluster.name}"), *cells, tag("td", _config_words(offer, problem.dimensions))
    )


def _config_words(offer: Offer, dimensions: Sequence[str] | None = None) -> str:
    assert offer.size.config is not None, "only offers that fit are shown with a configuration"
    return in_short(offer.size.config.values(dimensions) if dimensions else offer.size.config.values())


def _without(found: CostComparison) -> Html:
    rows = [
        tag(
            "tr",
            tag("td", offer.cluster.name),
            tag("td", plural(offer.size.hosts, "host")),
            tag("td", offer.size.reason),
        )
        for offer in found.offers
        if not offer.fits
    ]
    return tag("div", tag("table", tag("tbody", *rows)), class_="scroll")


def _footer(file: str) -> str:
    return (
        f"Written by Meshtune from {file}. Restarts, evaluation and checkpoints are not counted, nor are the cooling "
        "and losses of the building."
    )
