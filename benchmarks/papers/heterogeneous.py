"""Simulate unlike devices and changing bandwidth: a published Figure 6, and an explanation of its gains.

    python -m benchmarks.papers.heterogeneous [--models NAME ...] [--json]

The paper is "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", section 4. RTX
4090D beside L20 gain 1.01 to 1.03 over Megatron's equal split, and 4090D beside V100 1.74 to 4.69 (figures 6a, 6b). On
V100 with PCIe, doubling tp costs 25% to 52% at low bandwidth and 2% to 8% at high bandwidth (figure 6c).

Take two kinds of devices in equal numbers, one r times as slow as the other. The slow half sets the pace of an equal
split, and a perfect split would gain (1 + r) / 2. Equal layers are not equal work, since the last stage also has the
head, and an equal split has a bubble. `bound` is the gain if all work were divided perfectly and nothing waited; no
plan of the same degrees can exceed it. The paper states no batch, no degrees and no bandwidth. The assumptions here are
in the table or below:

* Hosts have eight devices, as in the catalog. Models and numbers of hosts are those of the paper's figure, in its
order.
* Megatron's defaults apply: equal shares of layers, hosts of one kind after those of the other, no recomputation.
* Degrees are those of the best equal split that fits. The uneven split keeps these degrees, or takes its own.

Assumptions about V100 are separate rows: its catalog peaks in fp16; no fused attention, which FlashAttention-2 lacks
for it; bf16 emulated at the rate of fp32, as for any job in bf16 on a device without such units.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.timing import answer, publish, tell
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import Assignment
from costmodels.operators.kernels import execution_s
from costmodels.operators.layer_operators import step_operators
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster import Cluster, HostGroup, cluster_from_mapping, find_cluster
from tuner.planners.pipeline.uneven import PARTS, plan_uneven_work
from tuner.space.enumeration import SpaceOptions, enumerate_space, setting_for

PAIRS = (("llama-7b", 8), ("gpt-13b", 16), ("gpt-22b", 32), ("gpt-175b", 256))
"""Models and numbers of hosts of figures 6a and 6b; half of the hosts are of either kind."""
TP_PAIRS = (("llama-7b", 8, 2, 4), ("gpt-13b", 16, 4, 8), ("gpt-22b", 64, 8, 16), ("gpt-175b", 256, 16, 32))
"""Models, numbers of devices and the two tensor parallel degrees of figure 6c."""
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0, 64.0)
"""Bandwidths of figure 6c, as multiples of the catalog's."""
SEQUENCE_LENGTH = 2048
BATCH_PER_DEVICE = 4
PLANNED, SIMULATED = 60, 6
"""Configurations for which uneven work is planned, and of each kind those that are simulated: the best by closed form.
"""
HEADROOM = 0.08
LOW_BAND, HIGH_BAND = (0.25, 0.52), (0.02, 0.08)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One assumption about two kinds of hosts."""

    kinds: tuple[str, str]
    assumption: str
    precision: str
    fused_attention: bool = True
    emulates_bf16: bool = False

    def cluster(self, hosts: int) -> Cluster:
        """Build the cluster; half of the hosts are of either kind."""
        groups = [{"name": name, "hosts": hosts // 2} for name in self.kinds]
        cluster = cluster_from_mapping({"groups": groups}, Path())
        return replace(cluster, groups=tuple(map(self._group, cluster.groups))) if self.emulates_bf16 else cluster

    @staticmethod
    def _group(group: HostGroup) -> HostGroup:
        """Give a device without bf16 units the rate of fp32."""
        device = group.device
        if device.bf16_flop_per_s is not None:
            return group
        return replace(group, device=replace(device, bf16_flop_per_s=device.fp32_flop_per_s))


CASES = (
    Case(kinds=("rtx4090d", "l20"), assumption="catalog peaks, bf16", precision="bf16"),
    Case(kinds=("rtx4090d", "v100-pcie"), assumption="catalog peaks, fp16", precision="fp16"),
    Case(
        kinds=("rtx4090d", "v100-pcie"), assumption="no fused attention, fp16", precision="fp16", fused_attention=False
    ),
    Case(kinds=("rtx4090d", "v100-pcie"), assumption="bf16 at the fp32 rate", precision="bf16", emulates_bf16=True),
    Case(
        kinds=("rtx4090d", "v100-pcie"),
        assumption="bf16 at the fp32 rate, no fused attention",
        precision="bf16",
        fused_attention=False,
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
    parser.add_argument(
        "--models", nargs="+", default=[model for model, _ in PAIRS], metavar="NAME", help="names of the models (all)"
    )
    return answer("heterogeneous", parser.parse_args(), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows of all tables."""
    ratios, splits, doubling = [], [], []
    for case in CASES:
        for model, hosts in PAIRS:
            if model in given.models:
                tell(f"{' + '.join(case.kinds)}, {case.assumption}: {model} on {hosts} hosts")
                row, of_kinds = unlike(case, model, hosts)
                splits.append(row)
                ratios += of_kinds
    for model, devices, low, high in TP_PAIRS:
        if model in given.models:
            tell(f"V100 with PCIe: {model} on {devices} devices, tp {low} and {high}")
            doubling += doubled(model, devices, low, high)
    return {"ratios": ratios, "unlike": splits, "doubling": doubling, "bands": list(bands(doubling))}


def show(figures: dict[str, Any]) -> None:
    """Print the tables, each below its title."""
    titles = {
        "ratios": "r: time on the second kind over that on the first, of one layer's forward and backward pass",
        "unlike": "Unlike devices: gain over equal layers (paper: 4090D + L20 1.01 to 1.03, + V100 1.74 to 4.69)",
        "doubling": "V100 with PCIe: cost of doubling tp by bandwidth, and gain of planning anew over the nominal plan",
        "bands": "Bandwidths at which doubling tp costs what the paper says, as multiples of the catalog's",
    }
    for key, title in titles.items():
        if figures[key]:
            print(f"{title}\n")
            publish(figures[key], as_json=False)
            print()


def unlike(case: Case, model: str, hosts: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Compute the gain of uneven layers over Megatron's equal split, and r for each kind of operator."""
    cluster = case.cluster(hosts)
    setting = setting_of(model, cluster, case.precision, fused_attention=case.fused_attention)
    grid, _ = enumerate_space(setting, SpaceOptions())
    even = fastest(setting, grid)
    row: dict[str, Any] = {
        "kinds": " + ".join(case.kinds),
        "assumption": case.assumption,
        "model": model,
        "hosts": hosts,
    }
    if not len(even):
        return row | dict.fromkeys(("r", "(1 + r) / 2", "same degrees", "bound", "own degrees", "all parts"), "-") | {
            "even [s]": "nothing fits",
            "degrees": "-",
            "assignment": "-",
        }, []
    even_s, best = quickest(setting, even)
    same = plan(setting, ConfigGrid.from_configs([best]), ("layers", "hosts")).config(0)
    # Planning is slow, so only the configurations that are best with equal layers are planned anew.
    several = fastest(setting, grid, PLANNED)
    own, every = (fastest(setting, plan(setting, several, parts)) for parts in (("layers", "hosts"), PARTS))
    work_s = works_s(setting, best)
    # r of the work of all stages at the chosen degrees.
    ratio = max(work_s) / min(work_s)
    return row | {
        "r": ratio,
        "(1 + r) / 2": (1 + ratio) / 2,
        "same degrees": even_s / simulated_s(setting, same),
        "bound": even_s / undivided_s(setting, best, work_s),
        "own degrees": even_s / quickest(setting, own)[0],
        "all parts": even_s / quickest(setting, every)[0],
        "even [s]": even_s,
        "degrees": f"pp={best.pp},tp={best.tp},dp={best.dp},vpp={best.vpp},mbs={best.mbs}",
        "assignment": str(same.assignment) or "even",
    }, kernel_ratios(case, setting, best, model)


def quickest(setting: Setting, grid: ConfigGrid) -> tuple[float, ParallelConfig]:
    """Return the shortest simulated step time and its configuration."""
    timed = [(simulated_s(setting, config), position, config) for position, config in enumerate(configs_of(grid))]
    seconds, _, config = min(timed)
    return seconds, config


def setting_of(model: str, cluster: Cluster, precision: str, *, fused_attention: bool = True) -> Setting:
    """Build the setting of the job as Megatron-LM would run it."""
    job = TrainingJob(
        model=find_model(model),
        sequence_length=SEQUENCE_LENGTH,
        global_batch_size=BATCH_PER_DEVICE * cluster.num_devices,
        precision=precision,
    )
    runtime = replace(find_runtime("megatron-core"), fused_attention=fused_attention, residuals=())
    return setting_for(job, cluster, runtime, SpaceOptions())


def fastest(setting: Setting, grid: ConfigGrid, most: int = SIMULATED) -> ConfigGrid:
    """Return the fastest configurations that fit, by the closed form."""
    memory = estimate_memory(setting, grid)
    fitting = np.flatnonzero(memory.fits(HEADROOM) & (grid.cp * grid.up == 1))
    kept = grid.take(fitting)
    seconds = estimate_step(setting, kept).step_time_s
    return kept.take(np.argsort(seconds)[:most])


def plan(setting: Setting, grid: ConfigGrid, parts: Sequence[str]) -> ConfigGrid:
    """Plan uneven work for every configuration."""
    return plan_uneven_work(setting, grid, parts, memory_headroom=HEADROOM)


def configs_of(grid: ConfigGrid) -> Iterator[ParallelConfig]:
    """Return the configurations of a grid."""
    return (grid.config(position) for position in range(len(grid)))


def simulated_s(setting: Setting, config: ParallelConfig) -> float:
    """Return the step time in the event simulator [s]."""
    return simulate_step(setting, config).step_time_s


def works_s(setting: Setting, config: ParallelConfig) -> tuple[float, ...]:
    """Return the work of one micro-batch over all stages on the hosts of either kind alone [s]."""
    found = []
    for group in setting.cluster.groups:
        # All hosts become this kind, so that the same degrees fit without the other kind.
        cluster = Cluster(name=group.name, groups=(replace(group, hosts=group.hosts * 2),))
        alone = simulate_step(replace(setting, cluster=cluster), replace(config, assignment=Assignment()))
        found.append(sum(sum(work.parts_s().values()) for work in alone.stages[0]))
    return tuple(found)


def undivided_s(setting: Setting, config: ParallelConfig, work_s: Sequence[float]) -> float:
    """Return the step time if both kinds of hosts worked all the time on any part of any micro-batch [s]."""
    # Each kind has this many groups of devices that compute a layer together.
    cells = config.num_devices // (config.tp * config.cp * config.up) / len(work_s)
    return setting.job.global_batch_size / config.mbs / sum(cells / seconds for seconds in work_s)


def kernel_ratios(case: Case, setting: Setting, config: ParallelConfig, model: str) -> list[dict[str, Any]]:
    """Return r for each kind of operator."""
    # Times of all operators of one kind are summed, so that frequent operators weigh more.
    job, runtime = setting.job, setting.runtime
    grid = ConfigGrid.from_configs([config])
    first, second = (group.device for group in setting.cluster.groups)
    seconds: dict[str, list[float]] = {}
    for operator in step_operators(job, runtime, grid):
        times = seconds.setdefault(str(operator.kind), [0.0, 0.0])
        for at, device in enumerate((first, second)):
            times[at] += float(execution_s(operator, device, job, runtime, grid)[0])
    return [
        {"kinds": " + ".join(case.kinds), "assumption": case.assumption, "model": model, "operators": kind, "r": b / a}
        for kind, (a, b) in seconds.items()
    ]


def doubled(model: str, devices: int, low: int, high: int) -> list[dict[str, Any]]:
    """Compute the best step with either tp at every bandwidth; hosts do not limit tp here."""
    best: dict[float, dict[int, tuple[float, ParallelConfig]]] = {}
    settings = {share: setting_of(model, v100s(devices, share), "fp16") for share in SHARES}
    for share, setting in settings.items():
        for tp in (low, high):
            grid, _ = enumerate_space(setting, SpaceOptions(without=("tp_divides_host",), allowed=(("tp", (tp,)),)))
            found = fastest(setting, grid)
            if len(found):
                best.setdefault(share, {})[tp] = quickest(setting, found)
    if any(len(of_share) < 2 for of_share in best.values()) or not best:
        return []
    # The nominal plan is the best one at the catalog's bandwidth; planning anew is judged against keeping it.
    _, nominal = min(best[1.0].values(), key=lambda timed: timed[0])
    rows = []
    for share, of_share in best.items():
        (low_s, of_low), (high_s, of_high) = of_share[low], of_share[high]
        rows.append(
            {
                "model": model,
                "devices": devices,
                "tp": f"{low} to {high}",
                "bandwidth": share,
                "low [s]": low_s,
                "high [s]": high_s,
                "cost": high_s / low_s - 1,
                "anew": simulated_s(settings[share], nominal) / min(low_s, high_s) - 1,
                "low config": _short(of_low),
                "high config": _short(of_high),
            }
        )
    return rows


def v100s(devices: int, share: float) -> Cluster:
    """Build a cluster of V100 with PCIe, with a share of their bandwidth inside hosts and between them."""
    return slowed(find_cluster("v100-pcie", hosts=devices // 8), share)


def slowed(cluster: Cluster, share: float) -> Cluster:
    """Return the cluster with a share of its bandwidth inside hosts and between them."""

    def scaled(group: HostGroup) -> HostGroup:
        # Links inside hosts and network adapters change by the same factor.
        intra, nics = (
            tuple(replace(link, bandwidth_bytes_per_s=share * link.bandwidth_bytes_per_s) for link in links)
            for links in (group.intra_links, group.nic_links)
        )
        return replace(group, intra_links=intra, nic_links=nics)

    return replace(cluster, groups=tuple(map(scaled, cluster.groups)))


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
            "least cost": min(row["cost"] for row in own),
            "most cost": max(row["cost"] for row in own),
            "planning anew gains, at most": max(row["anew"] for row in own),
        }


def _short(config: ParallelConfig) -> str:
    return f"pp={config.pp},tp={config.tp},dp={config.dp},vpp={config.vpp},mbs={config.mbs}"


if __name__ == "__main__":
    raise SystemExit(main())
