"""Page of one model: all clusters and sizes at a glance, then each place with its layouts and its study file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.model_catalog import find_model
from hardware.cluster_file import find_cluster
from hardware.price_file import Prices
from hardware.rounding import predicted
from tuner.atlas.answers import Answer, Layout
from tuner.atlas.pages.frame import PLACE_FILE, anchor, device_path, lines, linked, page
from tuner.atlas.pages.matrix import matrix
from tuner.atlas.pages.measured_part import measured_part
from tuner.atlas.places import AtlasJob
from tuner.atlas.words import bound_in_words, cost_of, days_of, next_in_words, slower, tokens_in_words
from tuner.economics.cost_words import money
from tuner.report.markup import Content, Html, concatenate, section, table, tag
from tuner.report.words import gibibytes, in_short, percent, plural, predicted_seconds


def model_page(
    name: str, answers: Sequence[Answer], job: AtlasJob, prices: Prices | None, measured: Sequence[MeasuredRun]
) -> str:
    """Render the page of a model.

    Args:
        name: Name of the model in the catalog.
        answers: Answers of its places.
        job: Job of the atlas.
        prices: Prices of device-hours; None leaves costs out.
        measured: Measured runs of the model.
    """
    model = find_model(name)
    by_cluster: dict[str, list[Answer]] = defaultdict(list)
    for each in answers:
        by_cluster[each.place.cluster].append(each)
    overview = matrix(
        by_cluster,
        [linked(cluster, f"#{cluster}") for cluster in by_cluster],
        lambda found: f"#{anchor(found.place)}",
        head="cluster",
    )
    clusters = (_cluster(cluster, own, job, prices) for cluster, own in by_cluster.items())
    sizes = f"{model.num_parameters / 1e9:,.1f} billion parameters in {model.num_layers} layers; {model.source}"
    return page(
        name,
        section("overview", "At a glance", lines(sizes), overview),
        *([measured_part(measured, answers)] if measured else []),
        *clusters,
        root="../",
        job=job,
        scripts=(PLACE_FILE,),
    )


def _cluster(name: str, answers: Sequence[Answer], job: AtlasJob, prices: Prices | None) -> Html:
    cluster = find_cluster(name)
    device = cluster.devices[0].name
    place = answers[0].place
    rack = f", of which {place.hosts_per_domain} form a domain" if place.hosts_per_domain > 1 else ""
    intro = tag(
        "p",
        f"Hosts of {place.devices_per_host} ",
        linked(device, f"../{device_path(device)}"),
        f"{rack}; {place.precision}, as {place.runtime} runs it.",
    )
    return section(name, name, intro, *(_place(each, job, prices) for each in answers))


def _place(found: Answer, job: AtlasJob, prices: Prices | None) -> Html:
    place = found.place
    devices = tag("b", f"{place.devices:,} devices")
    if not found.layouts:
        return tag("details", tag("summary", devices, f": {found.reason}"), id=anchor(place))
    best = found.layouts[0]
    told = f": {in_short(best.values)} \N{EM DASH} {predicted_seconds(best.step_time_s)}, {best.mfu:.0%} MFU"
    identity = anchor(place)
    contents: list[Content] = [
        tag("summary", devices, told),
        _layouts(found),
        lines(f"The recommended step is {bound_in_words(best)}.", next_in_words(found)),
        lines(_training(found, best, job, prices)),
        tag("p", f"Chosen among {plural(found.num_candidates, 'layout')} that obey every rule and fit. ", _to_use()),
        tag(
            "div",
            tag("button", "Copy", type="button", class_="copy", data_copies=f"study-{identity}"),
            tag("pre", found.study, id=f"study-{identity}"),
            class_="copyable",
        ),
    ]
    return tag("details", *contents, id=identity)


def _to_use() -> Html:
    rank, run, export = (tag("code", f"meshtune {command}") for command in ("rank", "run", "export"))
    tried = " tries some, and "
    return concatenate("With this study file ", rank, " shows them all, ", run, tried, export, " writes flags:")


def _layouts(found: Answer) -> Html:
    best = found.layouts[0]
    rows: list[list[Content]] = [
        [
            in_short(layout.values),
            predicted_seconds(layout.step_time_s),
            " to ".join(predicted_seconds(end) for end in layout.step_time_range_s),
            "" if layout is best else slower(best, layout),
            percent(layout.mfu),
            predicted(layout.tokens_per_s_per_device),
            gibibytes(layout.peak_memory_bytes),
            " to ".join(f"{size / 2**30:.1f}" for size in layout.peak_memory_range_bytes),
            percent(layout.fit_probability),
        ]
        for layout in found.layouts
    ]
    memory = f"memory of {found.capacity_bytes / 2**30:.1f} GiB"
    heads: list[Content] = ["layout", "step", "95%", "slower", "MFU", "tokens/s per device", memory, "95%", "fits"]
    return table(heads, rows, numeric=frozenset(range(1, len(heads))))


def _training(found: Answer, best: Layout, job: AtlasJob, prices: Prices | None) -> str:
    days, low, high = days_of(best, job)
    told = f"{tokens_in_words(job.tokens)} tokens take {days:,.3g} days ({low:,.3g} to {high:,.3g})"
    cost = cost_of(found.place, days, prices)
    return f"{told}." if prices is None or cost is None else f"{told} and cost {money(cost)} {prices.currency}."
