"""Rank unlike devices and changing bandwidth as `meshtune rank` does: a published Figure 6, and an explanation of it.

    python -m benchmarks.papers.heterogeneous [--models NAME ...] [--json]

The paper is "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", section 4. RTX
4090D beside L20 gain 1.01 to 1.03 over Megatron's equal split, and 4090D beside V100 1.74 to 4.69 (figures 6a, 6b). On
V100 with PCIe, doubling tp costs 25% to 52% at low bandwidth and 2% to 8% at high bandwidth (figure 6c).

The studies are those of configs/studies/heterogeneous, and every step is the first that `meshtune rank` prints of one
of them, with keys replaced as by `--set`: `space.assignment=[]` ranks equal layers in the given order of hosts. The
paper states no batch, no degrees and no bandwidth. The studies give every device four sequences of 2,048 tokens, and
leave all degrees open.

Take two kinds of devices in equal numbers, one r times as slow as the other. The slow half sets the pace of an equal
split, and a perfect split would gain (1 + r) / 2. Equal layers are not equal work, since the last stage also has the
head, and an equal split has a bubble. `bound` is the gain if nothing waited and no host were idle, with the
degrees of the uneven plan.

One assumption about V100 cannot be said in a study: bf16 emulated at the rate of fp32, as for any job in bf16 on a
device without such units. It is a row of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.timing import answer, publish, tell
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import Assignment
from costmodels.simulator.simulated_step import simulate_step
from hardware.cluster import Cluster
from hardware.host_group import HostGroup
from hardware.link import Link
from tuner.forecast.ranked import predicted_ranking
from tuner.run.studies import prepared_of
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest

STUDIES = Path(__file__).parents[2] / "configs" / "studies" / "heterogeneous"

MODELS = ("llama-7b", "gpt-13b", "gpt-22b", "gpt-175b")
EVEN = "space.assignment=[]"
"""Key with which a study ranks equal layers in the given order of hosts, which is Megatron's default."""
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0, 64.0)
"""Bandwidths of figure 6c, as multiples of the catalog's."""
LOW_BAND, HIGH_BAND = (0.25, 0.52), (0.02, 0.08)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Studies of two kinds of hosts, under one assumption.

    Attributes:
        figure: Figure of the paper.
        hosts: End of the studies' names.
        assumption: Assumption, in words.
        paper: Gains that the paper reports.
        overrides: Keys that are replaced.
        emulates_bf16: Whether a device without bf16 units computes bf16 at its fp32 rate.
    """

    figure: str
    hosts: str
    assumption: str
    paper: str
    overrides: tuple[str, ...] = ()
    emulates_bf16: bool = False

    def config(self, model: str, *overrides: str) -> StudyRequest:
        """Return the study of a model."""
        config = load_study(STUDIES / f"{model}-{self.hosts}.yaml", overrides=(*self.overrides, *overrides))
        if not self.emulates_bf16:
            return config
        cluster = config.problem.setting.cluster
        slow = replace(cluster, groups=tuple(map(_with_bf16, cluster.groups)))
        return replace(config, problem=replace(config.problem, subject=config.problem.subject.on_cluster(slow)))


def _with_bf16(group: HostGroup) -> HostGroup:
    """Give a device without bf16 units the rate of fp32."""
    device = group.device
    if device.bf16_flop_per_s is not None:
        return group
    return replace(group, device=replace(device, bf16_flop_per_s=device.fp32_flop_per_s))


CASES = (
    Case(figure="6a", hosts="4090d-l20", assumption="catalog peaks, bf16", paper="1.01 to 1.03"),
    Case(figure="6b", hosts="4090d-v100", assumption="catalog peaks, fp16", paper="1.74 to 4.69"),
    Case(
        figure="6b",
        hosts="4090d-v100",
        assumption="bf16 at the fp32 rate",
        paper="1.74 to 4.69",
        overrides=("job.precision=bf16",),
        emulates_bf16=True,
    ),
)


def main() -> int:
    """Print the tables of figure 6 and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers.heterogeneous",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="names of the models (all)")
    return answer("heterogeneous", parser.parse_args(), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows of all tables."""
    splits, doubling = [], []
    for case in CASES:
        for model in (model for model in MODELS if model in given.models):
            tell(f"figure {case.figure}, {case.assumption}: {model}")
            splits.append(unlike(case, model))
    for model in (model for model in MODELS if model in given.models):
        tell(f"figure 6c: {model}")
        doubling += doubled(model)
    return {"unlike": splits, "doubling": doubling, "bands": list(bands(doubling))}


def show(figures: dict[str, Any]) -> None:
    """Print the tables, each below its title."""
    titles = {
        "unlike": "Figures 6a and 6b: gain of uneven layers over equal ones",
        "doubling": "Figure 6c: cost of doubling tp on V100 with PCIe by bandwidth, and gain of planning anew",
        "bands": "Bandwidths at which doubling tp costs what the paper says, as multiples of the catalog's",
    }
    for key, title in titles.items():
        if figures[key]:
            print(f"{title}\n")
            publish(figures[key], as_json=False)
            print()


def first_of_rank(config: StudyRequest) -> tuple[float, ParallelConfig] | None:
    """Return the step time and the configuration that `meshtune rank` prints first; None if nothing fits."""
    prepared = prepared_of(config)
    ranked = predicted_ranking(prepared)
    if not len(ranked.order) or not ranked.fits[ranked.order[0]]:
        return None
    best = int(ranked.order[0])
    return float(ranked.step_time_s[best]), prepared.candidates.space.grid.config(best)


def unlike(case: Case, model: str) -> dict[str, Any]:
    """Compute the gain of uneven work over Megatron's equal split, and r."""
    config = case.config(model)
    hosts = config.problem.setting.cluster.num_hosts // 2
    row: dict[str, Any] = {
        "figure": case.figure,
        "assumption": case.assumption,
        "model": model,
        "hosts": f"{hosts} + {hosts}",
    }
    even, uneven = first_of_rank(case.config(model, EVEN)), first_of_rank(config)
    if even is None or uneven is None:
        nothing = ("r", "(1 + r) / 2", "even [s]", "uneven [s]", "gain", "bound")
        return row | dict.fromkeys(nothing, "nothing fits") | {"paper": case.paper, "even": "-", "uneven": "-"}
    (even_s, of_even), (uneven_s, of_uneven) = even, uneven
    work_s = works_s(config.problem.setting, of_uneven)
    ratio = work_s[1] / work_s[0]
    return row | {
        "r": ratio,
        "(1 + r) / 2": (1 + ratio) / 2,
        "even [s]": even_s,
        "uneven [s]": uneven_s,
        "gain": even_s / uneven_s,
        "bound": even_s / undivided_s(config.problem.setting, of_uneven, work_s),
        "paper": case.paper,
        "even": str(of_even),
        "uneven": str(of_uneven),
    }


def works_s(setting: Setting, config: ParallelConfig) -> tuple[float, ...]:
    """Return the work of one micro-batch over all stages on the hosts of either kind alone [s]."""
    found = []
    for group in setting.cluster.groups:
        # All hosts become this kind, so that the same degrees fit without the other kind.
        cluster = Cluster(name=group.name, groups=(replace(group, hosts=setting.cluster.num_hosts),))
        alone = simulate_step(replace(setting, cluster=cluster), replace(config, assignment=Assignment()))
        found.append(sum(sum(work.parts_s().values()) for work in alone.stages[0]))
    return tuple(found)


def undivided_s(setting: Setting, config: ParallelConfig, work_s: Sequence[float]) -> float:
    """Return the step time if all hosts worked all the time on any part of any micro-batch [s]."""
    # Each kind has this many groups of devices that compute a layer together.
    cells = [group.num_devices / (config.tp * config.cp * config.up) for group in setting.cluster.groups]
    speed = sum(count / seconds for count, seconds in zip(cells, work_s, strict=True))
    return setting.job.global_batch_size / config.mbs / speed


def doubled(model: str) -> list[dict[str, Any]]:
    """Compute the best step with either tp of figure 6c at every bandwidth."""
    (path,) = STUDIES.glob(f"{model}-v100-*.yaml")
    study = load_study(path)
    low, high = dict(study.problem.options.allowed)["tp"]
    best: dict[float, list[tuple[float, ParallelConfig]]] = {}
    settings: dict[float, Setting] = {}
    for share in SHARES:
        slower = at_bandwidth(study.problem.setting.cluster, share)
        settings[share] = load_study(path, overrides=slower).problem.setting
        found = [first_of_rank(load_study(path, overrides=(*slower, f"space.tp=[{tp}]"))) for tp in (low, high)]
        best[share] = [one for one in found if one is not None]
    if any(len(of_share) < 2 for of_share in best.values()):
        return []
    # The nominal plan is the best one at the catalog's bandwidth; planning anew is judged against keeping it.
    _, nominal = min(best[1.0], key=lambda timed: timed[0])
    rows = []
    for share, ((low_s, of_low), (high_s, of_high)) in best.items():
        kept_s = simulate_step(settings[share], nominal).step_time_s
        rows.append(
            {
                "model": model,
                "devices": study.problem.setting.cluster.num_devices,
                "tp": f"{low} to {high}",
                "bandwidth": share,
                "low [s]": low_s,
                "high [s]": high_s,
                "cost": high_s / low_s - 1,
                "anew": kept_s / min(low_s, high_s) - 1,
                "low config": str(of_low),
                "high config": str(of_high),
            }
        )
    return rows


def at_bandwidth(cluster: Cluster, share: float) -> tuple[str, ...]:
    """Return the keys that give a cluster of equal hosts a share of its bandwidth, inside hosts and between them."""
    (group,) = cluster.groups
    links = {"intra_links": group.intra_links, "nic_links": group.nic_links}
    return tuple(f"cluster.{key}=[{', '.join(_link(link, share) for link in own)}]" for key, own in links.items())


def _link(link: Link, share: float) -> str:
    """Return a link with a share of its bandwidth, as a study file has it."""
    return (
        f"{{kind: {link.kind}, bandwidth_gb_per_s: {share * link.bandwidth_bytes_per_s / 1e9!r}, "
        f"latency_us: {link.latency_s * 1e6!r}, sharers: {link.sharers}}}"
    )


def bands(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Find the bandwidths at which doubling tp costs as much as in the paper, and the largest gain of planning anew.

    Between two bandwidths the cost is interpolated linearly over the logarithm of the bandwidth.
    """
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        # np.interp needs increasing costs; the running minimum removes small rises with the bandwidth.
        cost = np.minimum.accumulate([row["cost"] for row in own])[::-1]
        log_share = np.log2([row["bandwidth"] for row in own])[::-1]
        inside = {}
        for name, (least, most) in (("25% to 52%", LOW_BAND), ("2% to 8%", HIGH_BAND)):
            narrow, wide = (2.0 ** np.interp(limit, cost, log_share) for limit in (most, least))
            is_reached = cost[0] <= most and cost[-1] >= least
            inside[name] = f"{narrow:.2g} to {wide:.2g}" if is_reached else "not reached"
        yield {
            "model": model,
            **inside,
            "at the catalog's": next(row["cost"] for row in own if row["bandwidth"] == 1.0),
            "least cost": min(row["cost"] for row in own),
            "most cost": max(row["cost"] for row in own),
            "planning anew gains, at most": max(row["anew"] for row in own),
        }


if __name__ == "__main__":
    raise SystemExit(main())
