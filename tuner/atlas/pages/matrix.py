"""Table of model FLOP utilisation over sizes, in which every cell leads to its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tuner.atlas.answers import Answer
from tuner.report.markup import Content, Html, tag
from tuner.report.words import predicted_seconds

LEVELS, SHARE_OF_LEVEL = 5, 0.13
"""Number of shades of cells, and the utilisation that each spans."""


def matrix(
    rows: Mapping[str, Sequence[Answer]], names: Sequence[Content], link: Callable[[Answer], str], *, head: str
) -> Html:
    """Render a table with one row for each key, and one column for each number of devices.

    Args:
        rows: Answers by the name of their row.
        names: First cells of the rows.
        link: Function that returns where the cell of an answer leads.
        head: Heading of the first column.
    """
    sizes = sorted({each.place.devices for answers in rows.values() for each in answers})
    heads = tag(
        "tr", tag("th", head, scope="col"), *(tag("th", f"{size:,}", class_="number", scope="col") for size in sizes)
    )
    body = []
    for name, answers in zip(names, rows.values(), strict=True):
        by_size = {each.place.devices: each for each in answers}
        cells = (_cell(by_size.get(size), link) for size in sizes)
        body.append(tag("tr", tag("th", name, scope="row"), *cells))
    caption = tag(
        "caption",
        "Model FLOP utilisation of the recommended layout, and its step time, by the number of devices. An empty cell "
        "has no layout that fits.",
    )
    return tag("div", tag("table", caption, tag("thead", heads), tag("tbody", *body), class_="matrix"), class_="scroll")


def _cell(found: Answer | None, link: Callable[[Answer], str]) -> Html:
    if found is None:
        return tag("td", class_="number")
    if not found.layouts:
        return tag("td", tag("a", "\N{EN DASH}", href=link(found), title=found.reason), class_="number none")
    layout = found.layouts[0]
    level = min(int(layout.mfu / SHARE_OF_LEVEL), LEVELS - 1)
    words = (f"{layout.mfu:.0%}", tag("small", predicted_seconds(layout.step_time_s)))
    return tag("td", tag("a", *words, href=link(found)), class_=f"number level{level}")
