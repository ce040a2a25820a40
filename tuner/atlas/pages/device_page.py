"""Page of one device: its figures with their sources, and all models on its clusters at a glance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hardware.cluster_file import find_cluster
from hardware.device import Device, find_device
from hardware.device_figures import Figure, figures_of
from tuner.atlas.answers import Answer
from tuner.atlas.pages.frame import anchor, linked, model_path, page
from tuner.atlas.pages.matrix import matrix
from tuner.atlas.places import AtlasJob
from tuner.report.markup import Content, Html, section, table


def device_page(name: str, answers: Sequence[Answer], job: AtlasJob) -> str:
    """Render the page of a device.

    Args:
        name: Name of the device in the catalog.
        answers: Answers of the places on its clusters.
        job: Job of the atlas.
    """
    by_cluster: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    for each in answers:
        by_cluster[each.place.cluster][each.place.model].append(each)
    parts = (
        section(cluster, cluster, _models(models))
        for cluster, models in by_cluster.items()
        if find_cluster(cluster).devices[0].name == name
    )
    return page(name, section("figures", "Figures", _figures(find_device(name))), *parts, root="../", job=job)


def _models(models: dict[str, list[Answer]]) -> Html:
    return matrix(
        models,
        [linked(model, f"../{model_path(model)}") for model in models],
        lambda found: f"../{model_path(found.place.model)}#{anchor(found.place)}",
        head="model",
    )


def _figures(device: Device) -> Html:
    sources = dict(device.sources)
    rows: list[list[Content]] = [
        [figure.name, _in_words(figure, figure.value), sources[figure.field]]
        for figure in figures_of(device)
        if figure.value is not None
    ]
    return table(["", "", "source"], rows)


def _in_words(figure: Figure, value: float) -> str:
    number = f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    return " ".join(filter(None, (number, figure.unit))) + (f", {figure.kind}" if figure.kind else "")
