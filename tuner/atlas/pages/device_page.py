"""Page of one device: its figures with their sources, and all models on its clusters at a glance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hardware.cluster_file import find_cluster
from hardware.device import Device, find_device
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
    peaks = (
        ("bf16", device.bf16_flop_per_s),
        ("fp16", device.fp16_flop_per_s),
        ("fp8", device.fp8_flop_per_s),
        ("fp4", device.fp4_flop_per_s),
    )
    told = [(f"{name} peak", f"{peak / 1e12:,.0f} TFLOP/s", f"{name}_tflops") for name, peak in peaks if peak]
    told += [
        ("memory", f"{device.memory_bytes / 2**30:.1f} GiB", "memory_gib"),
        ("memory bandwidth", f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s", "memory_bandwidth_gb_per_s"),
    ]
    links = ("link in a host", "scale_up", device.scale_up), ("link between hosts", "scale_out", device.scale_out)
    for name, field, link in links:
        value = f"{link.bandwidth_bytes_per_s / 1e9:,.4g} GB/s, {link.kind}"
        told.append((name, value, f"{field}.bandwidth_gb_per_s"))
    sources = dict(device.sources)
    rows: list[list[Content]] = [[name, value, sources[field]] for name, value, field in told]
    return table(["", "", "source"], rows)
