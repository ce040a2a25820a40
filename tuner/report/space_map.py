"""The space as a picture: facets of tp and pp, cells coloured by step time, drawn without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tuner.report.data import ReportData
from tuner.report.map_cells import Cell, SpaceMap, space_map
from tuner.report.markup import Html, section, tag
from tuner.report.words import GIB, in_short, percent, plural, seconds

TITLE = "The space as a map"

WITHIN = (0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0)
"""Shares by which a step of each colour is at most longer than the shortest; the last colour is for all others."""

MAX_CELLS = 12_000
"""Beyond which rows of cp*up are left out, the slowest ones first."""

_SIZES = (26, 20, 15, 11)
"""Of a cell in pixels, the largest with which the picture is no wider than _WIDTH."""
_WIDTH, _LABELS, _GAP, _TOP = 1150, 104, 9, 44
_MOST_RULES = 4


def map_section(data: ReportData) -> Html:
    """The map with its legend, and in words what it cannot show."""
    if not len(data.candidates.space.grid):
        return section("map", TITLE, tag("p", "There is no candidate to show.", class_="empty"))
    found = space_map(data)
    shown = _less_rows(found)
    words = (
        f"Each cell holds the candidates that have its tp, pp, mbs and cp\N{MULTIPLICATION SIGN}up, and has the colour "
        "of the fastest of them: measured where a mark stands, else as predicted before any trial"
    )
    if found.correction != 1:
        words += f", times {found.correction:.3g}, the median of measured over predicted"
    words += ". The pointer on a cell shows which it is, or why there is none."
    if len(shown) < len(found.inner):
        words += f" Rows of the largest cp\N{MULTIPLICATION SIGN}up are left out: {_listed(found.inner[len(shown) :])}."
    return section("map", TITLE, tag("p", words), _legend(data, found), tag("div", _drawn(data, found), class_="scroll"))


def _less_rows(found: SpaceMap) -> tuple[int, ...]:
    """The values of cp*up for which there is room."""
    per_row = len(found.tp) * len(found.pp) * len(found.mbs)
    return found.inner[: max(MAX_CELLS // per_row, 1)]


def _drawn(data: ReportData, found: SpaceMap) -> Html:
    inner = _less_rows(found)
    columns = len(found.tp) * len(found.mbs)
    gaps = _GAP * (len(found.tp) - 1)
    size = next((size for size in _SIZES if _LABELS + gaps + columns * size <= _WIDTH), _SIZES[-1])
    facet_width, facet_height = size * len(found.mbs) + _GAP, max(size * len(inner), 15) + _GAP
    width, height = _LABELS + facet_width * len(found.tp), _TOP + facet_height * len(found.pp)
    shortest_s = min(cell.step_time_s for cell in found.cells.values() if cell.step_time_s is not None)
    parts: list[Html] = [_text(_LABELS - 8, 32, "mbs", anchor="end")]
    widest = max(len(_short(mbs)) for mbs in found.mbs)
    every_mbs, every_row = -(-(7 * widest + 4) // size), -(-12 // size)  # numbers need some room
    for x, tp in enumerate(found.tp):
        left = _LABELS + x * facet_width
        parts.append(_text(left + (facet_width - _GAP) / 2, 14, f"tp {tp}", anchor="middle", kind="strong"))
        for at, mbs in enumerate(found.mbs):
            if at % every_mbs == 0:
                parts.append(_text(left + (at + 0.5) * size, 32, _short(mbs), anchor="middle"))
    for y, pp in enumerate(found.pp):
        top = _TOP + y * facet_height
        parts.append(_text(0, top + 11, f"pp {pp}", kind="strong"))
        for at, value in enumerate(inner):
            if at % every_row == 0 and len(inner) > 1:
                parts.append(_text(_LABELS - 8, top + at * size + size / 2 + 4, _inner(value, at), anchor="end"))
        for x, tp in enumerate(found.tp):
            left = _LABELS + x * facet_width
            for at, value in enumerate(inner):
                row = [found.cells.get((tp, pp, mbs, value)) for mbs in found.mbs]
                parts += _row(data, row, (left, top + at * size, size), found, (tp, pp, value), shortest_s)
    label = f"Step times of {plural(len(data.candidates.space.grid), 'candidate')} by tp, pp, mbs and cp*up"
    return tag(
        "svg",
        tag(
            "defs",
            tag(
                "pattern",
                tag("rect", width="6", height="6", class_="none"),
                tag("path", d="M-1,7 L7,-1", class_="hatch"),
                id="removed",
                width="6",
                height="6",
                patternUnits="userSpaceOnUse",
            ),
        ),
        *parts,
        class_="map",
        width=str(width),
        height=str(height),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
    )


def _row(
    data: ReportData,
    row: Sequence[Cell | None],
    place: tuple[float, float, int],
    found: SpaceMap,
    facet: tuple[int, int, int],
    shortest_s: float,
) -> list[Html]:
    """The cells of one tp, pp and cp*up; neighbours without a candidate are one where they tell the same."""
    left, top, size = place
    tp, pp, inner = facet
    told = [
        (at, cell, _words(data, cell, found.correction)) for at, cell in enumerate(row) if cell is not None
    ]
    parts = []
    for (is_empty, words), run in groupby(told, key=lambda entry: (not entry[1].candidates, entry[2])):
        members = list(run)
        first, cell, _ = members[0]
        where = f"tp {tp}, pp {pp}, cp\N{MULTIPLICATION SIGN}up {inner}, mbs {found.mbs[first]}"
        if len(members) > 1:
            where += f" to {found.mbs[members[-1][0]]}"
        x, across = left + first * size, len(members) * size
        parts.append(
            tag(
                "rect",
                tag("title", f"{where}: {words}"),
                x=f"{x + 0.5:g}",
                y=f"{top + 0.5:g}",
                width=f"{across - 1:g}",
                height=f"{size - 1:g}",
                class_="removed" if is_empty else f"s{_colour(cell, shortest_s)}",
            )
        )
        if not is_empty:
            parts += _marks(cell, x + size / 2, top + size / 2, size)
    return parts


def _marks(cell: Cell, x: float, y: float, size: int) -> list[Html]:
    """A ring where something was measured, a disc on the best, a cross where a trial failed."""
    radius = f"{max(size * 0.24, 3):g}"
    if cell.measured:
        return [tag("circle", cx=f"{x:g}", cy=f"{y:g}", r=radius, class_="best" if cell.is_best else "tried")]
    if cell.failed is not None:
        arm = max(size * 0.2, 3)
        path = f"M{x - arm:g},{y - arm:g} L{x + arm:g},{y + arm:g} M{x - arm:g},{y + arm:g} L{x + arm:g},{y - arm:g}"
        return [tag("path", d=path, class_="failed-edge"), tag("path", d=path, class_="failed")]
    return []


def _colour(cell: Cell, shortest_s: float) -> int:
    assert cell.step_time_s is not None, "a cell with a candidate has its step time"
    longer = cell.step_time_s / shortest_s - 1
    return next((at for at, share in enumerate(WITHIN) if longer <= share), len(WITHIN))


def _words(data: ReportData, cell: Cell, correction: float) -> str:
    """What the pointer on a cell shows."""
    if not cell.candidates:
        return _why_empty(data, cell)
    known = "measured" if cell.measured else "predicted" if correction == 1 else "predicted and corrected"
    told = f"{in_short(cell.fastest)}, {seconds(cell.step_time_s)} {known}"
    told += ", the best of the study" if cell.is_best else ""
    told += f"; the fastest known of {plural(cell.candidates, 'candidate')}" if cell.candidates > 1 else ""
    return told + (f"; a trial ended: {cell.failed.value.replace('_', ' ')}" if cell.failed else "")


def _why_empty(data: ReportData, cell: Cell) -> str:
    """The rules that removed all its combinations, those that removed the most first."""
    ranked = sorted(cell.removed.items(), key=lambda entry: (-entry[1], entry[0]))
    total = sum(cell.removed.values())
    told = []
    for rule, count in ranked[:_MOST_RULES]:
        reason = data.reasons.get(rule, rule)
        if rule == "memory" and cell.least_bytes is not None:
            reason = f"it needs {cell.least_bytes / GIB:.1f} GiB or more, and {reason}"
        told.append(reason if len(ranked) == 1 else f"{reason} ({percent(count / total)})")
    more = [f"and {len(ranked) - _MOST_RULES} more rules"] if len(ranked) > _MOST_RULES else []
    return "removed: " + "; ".join(told + more)


def _legend(data: ReportData, found: SpaceMap) -> Html:
    """Every colour and mark that the picture has."""
    bounds = [f"within {share:.0%}" for share in WITHIN[:1]] + [f"{share:.0%}" for share in WITHIN[1:]] + ["slower"]
    entries = [tag("span", "step longer than the shortest by at most:")]
    entries += [tag("span", tag("i", class_=f"swatch s{at}"), words) for at, words in enumerate(bounds)]
    cells = found.cells.values()
    if any(cell.measured for cell in cells):
        entries += [tag("span", tag("i", "\N{WHITE CIRCLE}"), "measured"), tag("span", tag("i", "\N{BLACK CIRCLE}"), "best")]
    if any(cell.failed and not cell.measured for cell in cells):
        entries.append(tag("span", tag("i", "\N{HEAVY MULTIPLICATION X}"), "a trial failed"))
    if any(not cell.candidates for cell in cells):
        entries.append(tag("span", tag("i", class_="swatch removed"), "removed"))
    blank = "not measured by anybody" if data.config.measured is not None else "does not divide the devices"
    if len(found.cells) < len(found.tp) * len(found.pp) * len(found.mbs) * len(found.inner):
        entries.append(tag("span", tag("i", class_="swatch blank"), blank))
    return tag("div", *entries, class_="legend map-legend")


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> Html:
    return tag("text", words, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor, **({"class_": kind} if kind else {}))


def _inner(value: int, at: int) -> str:
    """The label of a row; the first one says what it counts."""
    return str(value) if at else f"cp\N{MULTIPLICATION SIGN}up {value}"


def _short(number: int) -> str:
    """A number in few characters."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
