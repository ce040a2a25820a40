"""Map of the search space: facets by tp and pp, cells coloured by step time, drawn without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from tuner.report.data import ReportData
from tuner.report.markup import Html, empty_section, section, tag
from tuner.report.sections.map_cells import Cell, SpaceMap, space_map
from tuner.report.words import GIB, in_short, percent, plural, predicted_seconds, seconds
from tuner.subject.ability import Ability

TITLE = "Map of the search space"

WITHIN = (0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0)
"""Upper limits of each colour: by which share a step is longer than the shortest; the last colour is for the rest."""

INNER = "cp\N{MULTIPLICATION SIGN}up"

MAX_CELLS = 12_000
"""Largest number of cells; of more, the rows with the largest cp*up are omitted."""

_SIZES = (26, 20, 15, 11)
"""Sizes of a cell [px]: the largest is used with which a facet fits a narrow page and all fit a wide screen."""
_WIDTH, _HEIGHT, _NARROW = 1190, 900, 335
_LABELS, _GAP, _TOP = 74, 9, 44
_MOST_RULES = 4


def map_section(data: ReportData) -> Html:
    """Render the map with its legend and an explanation."""
    if not len(data.candidates.space.grid):
        return empty_section("map", TITLE, "There is no candidate to show.")
    found = space_map(data)
    shown = _select_rows(found)
    words = (
        f"Each cell stands for the candidates with its tp, pp, mbs and {INNER}. Its colour shows the step time "
        "of the fastest of them: measured if the cell has a mark, else "
    )
    words += f"as {plural(found.num_trials, 'trial')} taught" if found.num_trials else "as predicted before any trial"
    words += ". Point at a cell to see its configuration, or why it has none."
    if len(shown) < len(found.inner):
        words += f" Rows with the largest {INNER} are omitted: {_listed(found.inner[len(shown) :])}."
    return section("map", TITLE, tag("p", words), _legend(data, found), _draw_facets(data, found))


def _select_rows(found: SpaceMap) -> tuple[int, ...]:
    """Select the values of cp*up for which there is room."""
    per_row = len(found.tp) * len(found.pp) * len(found.mbs)
    return found.inner[: max(MAX_CELLS // per_row, 1)]


def _draw_facets(data: ReportData, found: SpaceMap) -> Html:
    """Draw a facet for each tp; they are stacked on narrow pages."""
    inner = _select_rows(found)
    size = next((size for size in _SIZES if _height(found, inner, size) <= _HEIGHT), _SIZES[-1])
    shortest_s = min(cell.step_time_s for cell in found.cells.values() if cell.step_time_s is not None)
    facets = [_draw_facet(data, found, tp, inner, size, shortest_s) for tp in found.tp]
    pattern = tag(
        "pattern",
        tag("rect", width="6", height="6", class_="none"),
        tag("path", d="M-1,7 L7,-1", class_="hatch"),
        id="removed",
        width="6",
        height="6",
        patternUnits="userSpaceOnUse",
    )
    shared = tag("svg", tag("defs", pattern), width="0", height="0", aria_hidden="true", class_="map shared")
    return tag("div", shared, *facets, class_="facets")


def _height(found: SpaceMap, inner: Sequence[int], size: int) -> float:
    """Compute the height of all facets on a wide page [px]; infinite if one is too wide for a narrow page."""
    width = _LABELS + size * len(found.mbs)
    per_line = _WIDTH // (width + _GAP)
    if width > _NARROW or not per_line:
        return float("inf")
    highest = max(_facet_height(_blocks(found, tp, inner), size) for tp in found.tp)
    return -(-len(found.tp) // per_line) * highest


def _blocks(found: SpaceMap, tp: int, inner: Sequence[int]) -> dict[int, list[int]]:
    """List by pp the rows of cp*up that have a cell."""
    rows = {
        pp: [value for value in inner if any((tp, pp, mbs, value) in found.cells for mbs in found.mbs)]
        for pp in found.pp
    }
    return {pp: values for pp, values in rows.items() if values}


def _facet_height(blocks: Mapping[int, Sequence[int]], size: int) -> int:
    return _TOP + sum(_block_height(values, size) for values in blocks.values())


def _block_height(values: Sequence[int], size: int) -> int:
    return max(size * len(values), 15) + _GAP


def _draw_facet(data: ReportData, found: SpaceMap, tp: int, inner: Sequence[int], size: int, shortest_s: float) -> Html:
    """Draw all cells of one tp: a block for each pp, a row for each cp*up and a column for each mbs."""
    blocks = _blocks(found, tp, inner)
    width, height = _LABELS + size * len(found.mbs), _facet_height(blocks, size)
    widest = max(len(_short(mbs)) for mbs in found.mbs)
    every_mbs, every_row = (
        -(-(7 * widest + 4) // size),
        -(-12 // size),
    )  # label only as many rows and columns as have room for text
    has_rows = len(inner) > 1
    parts = [
        _text(_LABELS, 14, f"tp {tp}", kind="strong"),
        _text(_LABELS - 6, 32, f"{INNER}, mbs" if has_rows else "mbs", anchor="end"),
    ]
    parts += [
        _text(_LABELS + (at + 0.5) * size, 32, _short(mbs), anchor="middle")
        for at, mbs in enumerate(found.mbs)
        if at % every_mbs == 0
    ]
    top = _TOP
    for pp, values in blocks.items():
        parts.append(_text(0, top + 11, f"pp {pp}", kind="strong"))
        for at, value in enumerate(values):
            if at % every_row == 0 and has_rows:
                parts.append(_text(_LABELS - 6, top + at * size + size / 2 + 4, _short(value), anchor="end"))
            row = [found.cells.get((tp, pp, mbs, value)) for mbs in found.mbs]
            parts += _draw_row(data, row, (_LABELS, top + at * size, size), found, (tp, pp, value), shortest_s)
        top += _block_height(values, size)
    return tag(
        "svg",
        *parts,
        class_="map",
        width=str(width),
        height=str(height),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"Step times of the candidates with tp {tp} by pp, mbs and {INNER}",
    )


def _draw_row(
    data: ReportData,
    row: Sequence[Cell | None],
    place: tuple[float, float, int],
    found: SpaceMap,
    facet: tuple[int, int, int],
    shortest_s: float,
) -> list[Html]:
    """Draw the cells of one tp, pp and cp*up; neighbouring empty cells with the same explanation are merged."""
    left, top, size = place
    tp, pp, inner = facet
    told = [
        (at, cell, _describe_cell(data, cell, is_learned=found.num_trials > 0))
        for at, cell in enumerate(row)
        if cell is not None
    ]
    parts = []
    for (is_empty, words), run in groupby(told, key=lambda entry: (not entry[1].candidates, entry[2])):
        members = list(run)
        first, cell, _ = members[0]
        where = f"tp {tp}, pp {pp}, {INNER} {inner}, mbs {found.mbs[first]}"
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
                **({"fill": "url(#removed)"} if is_empty else {"class_": f"s{_colour(cell, shortest_s)}"}),
            )
        )
        if not is_empty:
            parts += _draw_marks(cell, x + size / 2, top + size / 2, size)
    return parts


def _draw_marks(cell: Cell, x: float, y: float, size: int) -> list[Html]:
    """Draw a ring on measured cells, a disc on the best, and a cross where a trial failed."""
    radius = f"{max(size * 0.24, 3.5):g}"
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


def _describe_cell(data: ReportData, cell: Cell, *, is_learned: bool) -> str:
    """Compose the text shown when the pointer is on a cell."""
    if not cell.candidates:
        return _explain_empty(data, cell)
    known = "measured" if cell.measured else "learned from other trials" if is_learned else "predicted"
    step = (seconds if cell.measured else predicted_seconds)(cell.step_time_s)
    told = f"{in_short(cell.fastest)}, {step} {known}"
    told += ", the best of the study" if cell.is_best else ""
    told += f"; the fastest known of {plural(cell.candidates, 'candidate')}" if cell.candidates > 1 else ""
    return told + (f"; a trial failed: {cell.failed.in_words}" if cell.failed else "")


def _explain_empty(data: ReportData, cell: Cell) -> str:
    """List the rules that removed the cell's combinations, the most effective first."""
    ranked = sorted(cell.removed.items(), key=lambda entry: (-entry[1], entry[0]))
    total = sum(cell.removed.values())
    told = []
    for rule, count in ranked[:_MOST_RULES]:
        reason = data.reasons.get(rule, rule)
        if rule == "memory" and cell.least_bytes is not None:
            reason = f"it needs at least {cell.least_bytes / GIB:.1f} GiB, and {reason}"
        told.append(reason if len(ranked) == 1 else f"{reason} ({percent(count / total)})")
    more = [f"and {len(ranked) - _MOST_RULES} more rules"] if len(ranked) > _MOST_RULES else []
    return "removed: " + "; ".join(told + more)


def _legend(data: ReportData, found: SpaceMap) -> Html:
    """Render a legend entry for every colour and mark on the map."""
    bounds = [f"within {share:.0%}" for share in WITHIN[:1]] + [f"{share:.0%}" for share in WITHIN[1:]] + ["slower"]
    entries = [tag("span", "step longer than the shortest by at most:")]
    entries += [tag("span", tag("i", class_=f"swatch s{at}"), words) for at, words in enumerate(bounds)]
    cells = found.cells.values()
    if any(cell.measured for cell in cells):
        entries += [
            tag("span", tag("i", "\N{WHITE CIRCLE}"), "measured"),
            tag("span", tag("i", "\N{BLACK CIRCLE}"), "best"),
        ]
    if any(cell.failed and not cell.measured for cell in cells):
        entries.append(tag("span", tag("i", "\N{HEAVY MULTIPLICATION X}"), "a trial failed"))
    if any(not cell.candidates for cell in cells):
        entries.append(tag("span", tag("i", class_="swatch removed"), "removed"))
    blank = "does not divide the devices" if data.problem.subject.has(Ability.RULES) else "not measured"
    if len(found.cells) < len(found.tp) * len(found.pp) * len(found.mbs) * len(found.inner):
        entries.append(tag("span", tag("i", class_="swatch blank"), blank))
    return tag("div", *entries, class_="legend map-legend")


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> Html:
    return tag("text", words, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor, **({"class_": kind} if kind else {}))


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
