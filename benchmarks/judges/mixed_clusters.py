"""Measure what idle hosts and tensor degrees of stages gain on ten mixed clusters, in the event simulator.

    python -m benchmarks.judges.mixed_clusters [--cases N] [--json]

Each cluster has two kinds of hosts with eight devices each. Three searches look for the fastest layout: with uneven
layers and any order of all hosts, with hosts that may be idle as well, and with a tensor degree for each kind of hosts.
Gains are over the first search, in simulated steps. `answer` compares the fastest candidates by the closed form, which
is what `meshtune best` prints before any trial. `best of 6` lets the simulator choose among the six fastest candidates
of the first search, and for a gain among six more of the other one. Batches are four sequences of 2,048 tokens per
device, in fp16, and the runtime is Megatron-LM's (with FlagScale's meshes for the degrees of stages).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping
from tuner.space.enumeration import SpaceOptions, build_space, setting_for

SEQUENCE_LENGTH, BATCH_PER_DEVICE = 2048, 4
SIMULATED = 6
PARTS = {
    "all hosts": ("layers", "hosts"),
    "idle hosts": ("layers", "hosts", "idle_hosts"),
    "degrees": ("layers", "hosts", "stage_tp"),
}
"""Parts of the work that each search may make uneven."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Mixed cluster and the model trained on it.

    Attributes:
        groups: Name and number of hosts of each kind, and the bandwidth of a device's adapter if it is not the
            catalog's [GB/s].
        model: Name of the model.
    """

    groups: tuple[tuple[str, int, float | None], ...]
    model: str

    @property
    def name(self) -> str:
        """Hosts and model in words."""
        kinds = (f"{hosts} {name}{f' at {nic:g} GB/s' if nic else ''}" for name, hosts, nic in self.groups)
        return f"{' + '.join(kinds)}, {self.model}"

    def setting(self) -> Setting:
        """Build the setting of the job."""
        groups = [
            {"name": name, "hosts": hosts}
            | ({"nic_links": [{"kind": "ethernet", "bandwidth_gb_per_s": nic, "latency_us": 10}]} if nic else {})
            for name, hosts, nic in self.groups
        ]
        cluster = cluster_from_mapping({"groups": groups}, Path())
        job = TrainingJob(
            model=find_model(self.model),
            sequence_length=SEQUENCE_LENGTH,
            global_batch_size=BATCH_PER_DEVICE * cluster.num_devices,
            precision="fp16",
        )
        return setting_for(job, cluster, replace(find_runtime("megatron-core"), residuals=()), SpaceOptions())


def _case(model: str, *groups: tuple[str, int] | tuple[str, int, float]) -> Case:
    return Case(model=model, groups=tuple((*group, None)[:3] for group in groups))


CASES = (
    _case("llama-7b", ("dgx-a100", 2), ("v100-pcie", 4)),
    _case("llama-7b", ("dgx-h100", 1), ("v100-pcie", 2)),
    _case("llama-7b", ("rtx4090d", 4), ("v100-pcie", 4)),
    _case("llama-7b", ("rtx4090d", 4), ("l20", 4)),
    _case("gpt-13b", ("dgx-h100", 4), ("dgx-a100", 4)),
    _case("gpt-13b", ("dgx-h100", 6), ("dgx-a100", 1)),
    _case("gpt-13b", ("dgx-a100", 4), ("rtx4090d", 4)),
    _case("llama2-34b", ("dgx-h100", 4), ("l20", 4)),
    _case("llama-13b", ("dgx-h100", 3), ("dgx-h100", 1, 0.5)),
    _case("gpt-22b", ("dgx-a100", 8), ("v100-pcie", 2)),
)
"""Clusters in three kinds: devices of unlike speed, numbers of hosts that few layouts divide, and a slow network."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the gains and return the exit status."""
    parser = benchmark_parser("judges.mixed_clusters", __doc__)
    parser.add_argument("--cases", type=count_at_least(1), default=len(CASES), help="number of clusters (all)")
    return answer("mixed_clusters", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each cluster."""
    rows = []
    for case in CASES[: given.cases]:
        tell(case.name)
        rows.append(row_of(case))
    return {"clusters": rows}


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    publish(figures["clusters"], as_json=False)


def row_of(case: Case) -> dict[str, Any]:
    """Compute the gains of one cluster."""
    setting = case.setting()
    timed = {name: simulated(setting, fastest(setting, parts)) for name, parts in PARTS.items()}
    base = timed["all hosts"]
    row: dict[str, Any] = {"cluster": case.name, "all hosts [s]": base[0][0]}
    for name in ("idle hosts", "degrees"):
        best_s, chosen = min((*timed[name], *base))
        row[f"{name}: answer"] = base[0][0] / timed[name][0][0]
        row[f"{name}: best of {SIMULATED}"] = min(base)[0] / best_s
        row[f"{name}: best"] = chosen
    return row


def fastest(setting: Setting, parts: Sequence[str]) -> list[ParallelConfig]:
    """Return the fastest candidates of a search that fit, by the closed form; there are some in every case."""
    options = SpaceOptions(opened=("assignment",), uneven=tuple(parts))
    space = build_space(setting, options, current=None)
    at = np.flatnonzero(space.memory.fits(options.memory_headroom))
    seconds = estimate_step(setting, space.grid.take(at), memory=space.memory.take(at)).step_time_s
    return [space.grid.config(position) for position in at[np.argsort(seconds, kind="stable")[:SIMULATED]].tolist()]


def simulated(setting: Setting, configs: Sequence[ParallelConfig]) -> list[tuple[float, str]]:
    """Return the simulated step time of each configuration [s], and the configuration in short."""
    return [(simulate_step(setting, config).step_time_s, _short(config)) for config in configs]


def _short(config: ParallelConfig) -> str:
    degrees = [f"{name}={value}" for name, value in config.values().items() if value != 1]
    return ",".join([*degrees, str(config.assignment)]).rstrip(",")


if __name__ == "__main__":
    raise SystemExit(main())
