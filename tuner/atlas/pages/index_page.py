"""First page: filters over all places, and links to the pages of models and devices, which need no scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hardware.cluster_file import find_cluster
from hardware.price_file import Prices
from tuner.atlas.answers import Answer
from tuner.atlas.pages.frame import DATA_FILE, FILTER_FILE, anchor, device_path, linked, model_path, page
from tuner.atlas.places import AtlasJob
from tuner.atlas.words import cost_of, days_of
from tuner.report.markup import Content, Html, concatenate, section, tag
from tuner.report.words import gibibytes, in_short, percent, predicted_seconds

FILTERS = (("model", "Model"), ("device", "Device"), ("cluster", "Cluster"), ("devices", "Devices"))
"""Keys of the filters, in the data and in permalinks, with their labels."""


def index_page(answers: Sequence[Answer], job: AtlasJob, prices: Prices | None) -> str:
    """Render the first page.

    Args:
        answers: All answers.
        job: Job of the atlas.
        prices: Prices of device-hours; None leaves costs out.
    """
    models = sorted({each.place.model for each in answers})
    devices = sorted({find_cluster(each.place.cluster).devices[0].name for each in answers})
    costs = () if prices is None else (f"{prices.currency}",)
    heads = ("model", "cluster", "devices", "layout", "step", "MFU", "memory", "fits", "days", *costs)
    numeric = {"devices", "step", "MFU", "memory", "fits", "days", *costs}
    header = tag(
        "tr",
        *(
            tag(
                "th",
                tag("button", name, type="button", data_column=str(at)),
                class_="number" if name in numeric else "",
                scope="col",
            )
            for at, name in enumerate(heads)
        ),
    )
    found = tag("div", tag("table", tag("thead", header), tag("tbody", id="rows")), class_="scroll")
    return page(
        "Layouts for training",
        section(
            "find",
            "Find a layout",
            tag("form", *(_filter(key, label) for key, label in FILTERS), id="filters", class_="filters"),
            tag("p", id="count", role="status", aria_live="polite"),
            found,
            tag("p", tag("button", "Show all", type="button", id="more", hidden="hidden")),
            tag("noscript", tag("p", "Filters need scripts; the pages below do not.")),
        ),
        section("models", "Models", _list(models, model_path)),
        section("devices", "Devices", _list(devices, device_path)),
        root="",
        job=job,
        scripts=(DATA_FILE, FILTER_FILE),
    )


def _filter(key: str, label: str) -> Html:
    return tag("label", label, tag("select", tag("option", "all", value=""), name=key))


def _list(names: Sequence[str], path: Any) -> Html:
    links: list[Content] = [tag("li", linked(name, path(name))) for name in names]
    return tag("ul", concatenate(*links), class_="links")


def data_script(answers: Sequence[Answer], job: AtlasJob, prices: Prices | None) -> str:
    """Return the script that holds a row of every place: its cells, the values that order them, and its address."""
    rows = [_row(each, job, prices) for each in answers]
    return f"const PLACES = {json.dumps(rows, ensure_ascii=False, separators=(',', ':'))};\n"


def _row(found: Answer, job: AtlasJob, prices: Prices | None) -> dict[str, Any]:
    place = found.place
    row: dict[str, Any] = {
        "model": place.model,
        "device": find_cluster(place.cluster).devices[0].name,
        "cluster": place.cluster,
        "devices": place.devices,
        "link": f"{model_path(place.model)}#{anchor(place)}",
    }
    if not found.layouts:
        return row | {"cells": [place.model, place.cluster, f"{place.devices:,}", "none fits"], "order": []}
    best = found.layouts[0]
    days, _, _ = days_of(best, job)
    cost = cost_of(place, days, prices)
    cells = [
        place.model,
        place.cluster,
        f"{place.devices:,}",
        in_short(best.values),
        predicted_seconds(best.step_time_s),
        percent(best.mfu),
        gibibytes(best.peak_memory_bytes),
        percent(best.fit_probability),
        f"{days:,.3g}" if days < 1000 else f"{days:,.0f}",
        *([] if prices is None else ["" if cost is None else f"{cost:,.0f}"]),
    ]
    order = [
        place.model,
        place.cluster,
        place.devices,
        cells[3],
        best.step_time_s,
        best.mfu,
        best.peak_memory_bytes,
        best.fit_probability,
        days,
        *([] if prices is None else [cost]),
    ]
    return row | {"cells": cells, "order": [round(each, 6) if isinstance(each, float) else each for each in order]}
