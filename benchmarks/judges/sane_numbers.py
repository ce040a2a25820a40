"""Check that every prediction is a plausible number, for all models on all clusters and devices of the catalog.

    python -m benchmarks.judges.sane_numbers [--json] [--variants N] [--deep N] [--workers N]

A pair is a model and a cluster. The clusters are those of the catalog, one of each device of the catalog, clusters of
unlike hosts, and a network that a trace has slowed down. For each pair several variants are drawn with a seed: number
of hosts, runtime, precision, optimizer, sequence length, batch, and further dimensions of the space. The candidates are
all configurations that the rules allow, before memory removes any. If they are more than MOST, MOST of them at equal
distances are used.

For all candidates the program checks step times and their parts, memory and its parts, and the share of the peak. MFU
counts attention as PaLM does, masked half included, and may therefore exceed 1 on very long sequences. The share of the
peak counts only the half of attention that is computed and must not exceed 1. For some candidates it checks the
predicted errors, error terms and their shares, features, block costs, uneven stages and the stage tables from which
these are planned. For one or two it checks the event simulator under every possible schedule, and the proxy job. Every
numpy warning and every exception counts as a violation.

The exit status is 1 if there is a violation. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.random import Generator, default_rng

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, tell
from benchmarks.support.workers import mapper
from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.parallel_config import ENUMERATED_DIMENSIONS, ConfigGrid
from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.job.setting import Setting
from costmodels.job.training_job import PRECISIONS, RECOMPUTE_MODULES, TrainingJob
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.operators.layer_operators import unique_shapes
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.simulator.simulated_step import simulate_step
from costmodels.simulator.stage_rows import stage_rows
from costmodels.simulator.trace import operator_events
from costmodels.step.block_costs import block_costs
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.pipeline.passes import SCHEDULES
from costmodels.step.pipeline.stage_tables import stage_tables
from costmodels.step.step_time import estimate_step, model_flops_utilisation
from costmodels.surrogates.error_terms import step_terms
from costmodels.surrogates.predicted import predict
from costmodels.surrogates.uncertainty import step_uncertainty
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping, cluster_names, find_cluster
from hardware.device import device_names
from hardware.dynamics import INTER, HostEvent, LinkEvent, Trace, cluster_at
from hardware.io.errors import ConfigError, did_you_mean
from trials.trial_keys import ProxyOptions
from tuner.planners.pipeline.uneven import plan_uneven_work
from tuner.search.proxy.proxy_trials import proxy_of
from tuner.space.enumeration import SpaceOptions, enumerate_space

PROGRAM = "judges.sane_numbers"
VIOLATED = 1
MOST = 1500
"""Maximum number of candidates predicted for one variant."""
SOME = 24
"""Number of candidates of one variant whose errors, error terms and stages are checked."""
HOSTS = (1, 2, 3, 4, 16)
SEQUENCE_LENGTHS = (512, 2048, 4096, 8192, 32768, 131072)
PER_DEVICE = (1, 2, 6, 16)
"""Global batch sizes over the number of devices."""
HEADROOM = 0.08
PROXY = ProxyOptions(hosts=1, layers="auto", full_trials=1)
SAME = 1e-9
"""Largest relative difference between a sum and its parts."""
MIXED: dict[str, dict[str, Any]] = {
    "A100 beside H100": {"groups": [{"name": "dgx-a100", "hosts": 1}, {"name": "dgx-h100", "hosts": 1}]},
    "three generations": {
        "groups": [
            {"device": "V100-PCIe-32", "hosts": 1},
            {"name": "dgx-a100", "hosts": 2},
            {"name": "dgx-h200", "hosts": 1},
        ]
    },
    "under switches": {"name": "dgx-h100", "hosts": 4, "switch": {"hosts": 2, "uplink_gb_per_s": 100}},
}
TRACED = "slow network"
TRACE = Trace(
    events=(
        LinkEvent(time_s=1.0, link=INTER, share=0.01),
        LinkEvent(time_s=2.0, link=(0, 1), share=1e-6),
        LinkEvent(time_s=3.0, link=(2,), share=0.3),
        HostEvent(time_s=4.0, host=3, is_lost=True),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One setting and search space of a pair.

    Attributes:
        model: Name of the model in the catalog.
        cluster: Label of the cluster, one of `cluster_labels`.
        hosts: Number of hosts; unused where the label determines it.
        runtime: Name of the runtime profile.
        job: Fields of the job other than the model.
        opened: Further dimensions that the space searches.
    """

    model: str
    cluster: str
    hosts: int
    runtime: str
    job: tuple[tuple[str, Any], ...]
    opened: tuple[str, ...]

    @property
    def setting(self) -> Setting:
        """Setting that the rules and the cost model receive."""
        return Setting(
            job=TrainingJob(model=find_model(self.model), **dict(self.job)),
            cluster=cluster_named(self.cluster, self.hosts),
            runtime=find_runtime(self.runtime),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Result of checking one variant.

    Attributes:
        variant: The checked variant.
        candidates: Number of configurations that obey the rules.
        predicted: Number of candidates that were predicted.
        numbers: Number of values that were checked.
        simulated: Number of steps run in the event simulator.
        violations: Distinct descriptions of implausible values.
    """

    variant: Variant
    candidates: int
    predicted: int
    numbers: int
    simulated: int
    violations: tuple[str, ...]


class Figures:
    """Counter of checked numbers that records the implausible ones."""

    def __init__(self) -> None:
        self.count = 0
        self.wrong: list[str] = []

    def look(
        self, what: str, values: Any, grid: ConfigGrid | None = None, *, above: float = -np.inf, **limits: float
    ) -> None:
        """Check that all values are finite, greater than `above`, at least `least` and at most `most`."""
        found = np.asarray(values, dtype=np.float64)
        self.count += found.size
        least, most = limits.get("least", -np.inf), limits.get("most", np.inf)
        # NaN fails every comparison, so that finiteness need not be checked first.
        bad = ~(np.isfinite(found) & (found > above) & (found >= least) & (found <= most))
        if bad.any():
            row = int(np.argwhere(bad)[0][0]) if found.ndim else 0
            where = "" if grid is None or found.shape[:1] != (len(grid),) else f" of {grid.config(row)}"
            self.wrong.append(f"{what}{where}: {found[bad][0]:.6g} ({int(bad.sum())} of {found.size})")

    def agree(self, what: str, one: FloatArray, other: FloatArray, grid: ConfigGrid | None = None) -> None:
        """Check that two arrays are equal except for rounding."""
        self.look(what, np.abs(one / other - 1.0), grid, most=SAME)


def cluster_labels() -> tuple[str, ...]:
    """Return the labels of all clusters: catalog clusters, one of each device, unlike hosts and a slow network."""
    return (*cluster_names(), *(f"device {name}" for name in device_names()), *MIXED, TRACED)


@cache
def cluster_named(label: str, hosts: int) -> Cluster:
    """Return the cluster with that label."""
    if label == TRACED:
        return cluster_at(find_cluster("dgx-h100", hosts=4), TRACE, 5.0)
    if label in MIXED:
        return cluster_from_mapping(MIXED[label], Path())
    if label.startswith("device "):
        return cluster_from_mapping({"device": label.removeprefix("device "), "hosts": hosts}, Path())
    return find_cluster(label, hosts=hosts)


def precisions_of(cluster: Cluster) -> tuple[str, ...]:
    """Return the precisions that all devices of the cluster support."""

    def has(precision: str) -> bool:
        try:
            return all(device.peak_flop_per_s(precision) > 0 for device in cluster.devices)
        except ConfigError:
            return False

    return tuple(filter(has, PRECISIONS))


def drawn(model: str, label: str, rng: Generator) -> Variant:
    """Draw a variant of a pair."""
    hosts = int(rng.choice(HOSTS))
    if label.startswith(("gb200", "gb300", "vr200")):
        hosts = min(hosts, 3)
    cluster = cluster_named(label, hosts)
    runtime = find_runtime(str(rng.choice(runtime_names())))
    job = {
        "sequence_length": int(rng.choice(SEQUENCE_LENGTHS)),
        "global_batch_size": cluster.num_devices * int(rng.choice(PER_DEVICE)),
        "precision": str(rng.choice(precisions_of(cluster))),
        "optimizer": str(rng.choice(tuple(OPTIMIZERS))),
        "recompute": str(rng.choice(runtime.recompute_modes)),
        "zero_stage": int(rng.choice(runtime.zero_stages)),
        "recompute_modules": tuple(
            str(module) for module in rng.choice(RECOMPUTE_MODULES, size=int(rng.integers(1, 4)), replace=False)
        ),
    }
    opened = tuple(name for name in ENUMERATED_DIMENSIONS if rng.random() < 0.5)
    return Variant(model=model, cluster=label, hosts=hosts, runtime=runtime.name, job=tuple(job.items()), opened=opened)


def checked(variant: Variant, is_deep: bool = True, *, most: int = MOST, some: int = SOME) -> Checked:
    """Predict the candidates of one variant and check every number.

    Args:
        variant: The variant to check.
        is_deep: Whether to check errors, error terms and simulated steps too, which take most of the time.
        most: Maximum number of candidates to predict.
        some: Number of candidates to check more closely.
    """
    figures, sizes = Figures(), [0, 0, 0]
    try:
        with warnings.catch_warnings(), np.errstate(divide="raise", over="raise", invalid="raise"):
            warnings.simplefilter("error")
            _look_at(variant, figures, sizes, is_deep, most, some)
    except Exception as error:  # noqa: BLE001 # whatever is raised is what this program looks for
        last = traceback.extract_tb(error.__traceback__)[-1]
        figures.wrong.append(f"{type(error).__name__}: {error} at {Path(last.filename).name}:{last.lineno}")
    return Checked(
        variant=variant,
        candidates=sizes[0],
        predicted=sizes[1],
        numbers=figures.count,
        simulated=sizes[2],
        violations=tuple(dict.fromkeys(figures.wrong)),
    )


def _look_at(variant: Variant, figures: Figures, sizes: list[int], is_deep: bool, most: int, some: int) -> None:
    setting = variant.setting
    options = SpaceOptions(opened=variant.opened)
    grid, _ = enumerate_space(setting, options)
    sizes[0] = len(grid)
    if not len(grid):
        return
    # Neighbouring candidates are much alike; equal distances reach all parts of the space.
    grid = _spread(grid, most)
    sizes[1] = len(grid)
    look_at_predictions(setting, grid, figures)
    few = _spread(grid, some)
    if setting.runtime.uneven:
        # uneven stages have code paths of their own, with and without unlike hosts
        plans = plan_uneven_work(setting, few, setting.runtime.uneven, memory_headroom=HEADROOM)
        look_at_predictions(setting, plans, figures)
    look_at_stages(setting, few, figures)
    look_at_proxies(setting, _spread(grid, 3), figures)
    if not is_deep:
        return
    look_at_errors(setting, few, figures)
    sizes[2] = look_at_simulations(setting, _spread(grid, 2), figures)


def _spread(grid: ConfigGrid, most: int) -> ConfigGrid:
    """Return at most `most` candidates at equal distances."""
    return grid.take(np.unique(np.linspace(0, len(grid) - 1, min(most, len(grid))).astype(np.int64)))


def share_of_peak(setting: Setting, step_time_s: FloatArray) -> FloatArray:
    """Compute the MFU without the half of attention that causal kernels skip [n]."""
    model, length = setting.job.model, setting.job.sequence_length
    # The operations that depend on the sequence length are those of attention; causal kernels skip half of them.
    attention = model.model_flops_per_token(length) - model.model_flops_per_token(0)
    needed = 1.0 - attention / 2 / model.model_flops_per_token(length)
    return needed * model_flops_utilisation(setting.job, setting.cluster, step_time_s)


def look_at_predictions(setting: Setting, grid: ConfigGrid, figures: Figures) -> None:
    """Check step time, memory and MFU of every configuration [n]."""
    memory = estimate_memory(setting, grid)
    figures.look("peak memory", memory.peak_bytes, grid, above=0)
    figures.look("needed memory", memory.needed_bytes, grid, above=0)
    figures.look("capacity", memory.capacity_bytes, grid, above=0)
    for part, part_bytes in memory.parts_bytes.items():
        figures.look(f"memory of {part}", part_bytes, grid, least=0)
    figures.agree("memory's parts", np.sum(list(memory.parts_bytes.values()), axis=0), memory.peak_bytes, grid)
    chance = memory.probability_of_fit(HEADROOM, memory_error_of(setting.runtime))
    figures.look("probability of fit", chance, grid, least=0, most=1)
    # With the memory given, the cost model slows down configurations that barely fit.
    for told in (memory, None):
        estimate = estimate_step(setting, grid, memory=told)
        figures.look("step time", estimate.step_time_s, grid, above=0)
        for part, seconds in estimate.breakdown_s.items():
            figures.look(f"time of {part}", seconds, grid, least=0)
        figures.agree("step time's parts", np.sum(list(estimate.breakdown_s.values()), axis=0), estimate.step_time_s)
        figures.look("share of the peak", share_of_peak(setting, estimate.step_time_s), grid, above=0, most=1)
        mfu = model_flops_utilisation(setting.job, setting.cluster, estimate.step_time_s)
        figures.look("MFU", mfu, grid, above=0, most=2)


def look_at_errors(setting: Setting, grid: ConfigGrid, figures: Figures) -> None:
    """Check all inputs of the surrogates for configurations [n]: errors, features, shares and error terms."""
    memory = estimate_memory(setting, grid)
    told = predict(MeasuredSetting(setting=setting, memory="device", stage="fullest"), grid, memory=memory)
    figures.look("constants' effects", told.constant_effects, grid)
    figures.look("features", told.features, grid)
    figures.look("memory's shares", told.memory_shares, grid, least=0)
    figures.look("measured peak", told.peak_bytes, grid, above=0)
    uncertainty = step_uncertainty(setting, grid, memory=memory)
    figures.look("log error", uncertainty.log_error, grid, above=0, most=10)
    terms = step_terms(setting, grid, memory=memory)
    figures.look("elasticities", terms.elasticities.data, least=0, most=1 + SAME)
    # above 1 where a collective is partly hidden behind what is no term: what shows of it grows faster than it does
    figures.look("covered share", terms.covered, grid, least=0, most=1.1)
    figures.look("shares of terms", terms.shares.data, least=0, most=1 + SAME)
    for term in terms.terms:
        figures.look(f"time of {term.name}", term.time_s, least=0)


def look_at_stages(setting: Setting, grid: ConfigGrid, figures: Figures) -> None:
    """Check the costs of blocks, and of stages by their number of layers, as planners receive them."""
    shapes, _ = unique_shapes(grid)
    costs = block_costs(setting, shapes, kernel_s, collective_s)
    for name in ("compute", "exposed", "host", "once_s"):
        figures.look(f"blocks' {name}", getattr(costs, name), least=0)
    for pp, vpp in sorted({(int(pp), int(vpp)) for pp, vpp in zip(grid.pp, grid.vpp, strict=True)})[:3]:
        # Stage tables need equal numbers of stages in all configurations.
        rows = grid.take((grid.pp == pp) & (grid.vpp == vpp))
        tables = stage_tables(setting, rows)
        figures.look("stages' times", tables.time_s, least=0)
        figures.look("recomputed stages' times", tables.again_s, least=0)
        figures.look("stages' memory", tables.needed_bytes, above=0)
        figures.look("recomputed stages' memory", tables.again_bytes, above=0)
        # Differences along the number of layers, relative to the longest time; rounding may make them slightly
        # negative.
        figures.look("more layers take longer", np.diff(tables.time_s, axis=1) / tables.time_s.max(), least=-SAME)


def look_at_proxies(setting: Setting, grid: ConfigGrid, figures: Figures) -> None:
    """Check the predictions of the proxy jobs that run in place of configurations [n]."""
    if len(setting.cluster.groups) > 1:
        return
    for config in (grid.config(position) for position in range(len(grid))):
        found = proxy_of(config, setting, PROXY)
        if found is not None:
            look_at_predictions(found.setting(setting), ConfigGrid.from_configs([found.config]), figures)


def look_at_simulations(setting: Setting, grid: ConfigGrid, figures: Figures) -> int:
    """Check each configuration in the event simulator under all schedules; return the number of simulated steps."""
    done = 0
    for config in (grid.config(position) for position in range(len(grid))):
        if config.pp * config.vpp * (setting.job.global_batch_size // (config.dp * config.mbs)) > 4096:
            continue  # seconds each
        alone = ConfigGrid.from_configs([config])
        for schedule in SCHEDULES:
            memory = estimate_memory(setting, alone)
            try:
                found = simulate_step(setting, config, schedule=schedule, memory=memory)
            except ValueError:
                continue  # the schedule can't be had with these degrees
            done += 1
            what = f"simulated {schedule}"
            figures.look(f"{what}: step time", found.step_time_s, alone, above=0)
            # Rounding can leave tiny negative parts.
            parts = np.array(list(found.breakdown_s.values()))
            figures.look(f"{what}: parts", parts, least=-SAME * found.step_time_s)
            figures.agree(f"{what}: sum of parts", np.array([parts.sum()]), np.array([found.step_time_s]), alone)
            share = share_of_peak(setting, np.array([found.step_time_s]))
            figures.look(f"{what}: share of the peak", share, alone, above=0, most=1)
            figures.look(f"{what}: idle shares", [row.idle_share for row in stage_rows(found)], least=0, most=1)
            events = operator_events(found)
            figures.look(f"{what}: begin of events", events.start_s, least=0)
            figures.look(f"{what}: length of events", events.end_s - events.start_s, least=-SAME * found.step_time_s)
            figures.look(f"{what}: begin of tasks", found.timeline.start_s, least=0)
            figures.look(f"{what}: end of tasks", found.timeline.end_s, least=0)
    return done


def variants_of(models: Sequence[str], labels: Sequence[str], count: int) -> list[Variant]:
    """Draw `count` variants of every pair, reproducibly."""
    return [
        drawn(model, label, default_rng([crc32(model.encode()), crc32(label.encode()), number]))
        for label in labels
        for model in models
        for number in range(count)
    ]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Check every pair."""
    models = tuple(model for model in model_names() if given.only in (None, model))
    if not models:
        raise ConfigError("is no model of the catalog", key="--only", value=given.only)
    labels = given.clusters or cluster_labels()
    for label in labels:
        if label not in cluster_labels():
            raise ConfigError(
                "is no cluster", key="--clusters", value=label, nearest=did_you_mean(label, cluster_labels())
            )
    started_s = time.monotonic()
    variants = variants_of(models, labels, given.variants)
    found: list[Checked] = []
    with mapper(given.workers) as mapped:
        for one in mapped(checked, variants, [number % given.deep == 0 for number in range(len(variants))]):
            found.append(one)
            for violation in one.violations:
                tell(f"{PROGRAM}: {one.variant}: {violation}")
            if len(found) % 100 == 0:
                done = sum(each.predicted for each in found)
                tell(f"{PROGRAM}: {len(found)} of {len(variants)} variants, {done:,} candidates predicted")
    return {
        "pairs": len({(one.variant.model, one.variant.cluster) for one in found}),
        "variants": len(found),
        "empty_variants": sum(not one.candidates for one in found),
        "candidates": sum(one.candidates for one in found),
        "predicted": sum(one.predicted for one in found),
        "simulated_steps": sum(one.simulated for one in found),
        "numbers": sum(one.numbers for one in found),
        "seconds": round(time.monotonic() - started_s),
        "violations": [
            {"variant": asdict(one.variant), "what": violation} for one in found for violation in one.violations
        ],
    }


def show(figures: dict[str, Any]) -> None:
    """Print the counts; violations were printed to stderr when they were found."""
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):16} {len(value) if isinstance(value, list) else value:,}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all predictions and return the exit status."""
    parser = benchmark_parser(PROGRAM, __doc__)
    parser.add_argument("--variants", type=count_at_least(1), default=3, help="variants of each pair (3)")
    parser.add_argument("--deep", type=count_at_least(1), default=1, help="check every N-th variant closely (1)")
    parser.add_argument("--only", metavar="MODEL", help="check only this model of the catalog")
    parser.add_argument(
        "--clusters", nargs="+", metavar="LABEL", help="check only these clusters, such as 'dgx-h100' or 'device B200'"
    )
    parser.add_argument("--workers", type=count_at_least(1), default=2, help="processes (2)")
    violated: list[bool] = []

    def measured(given: argparse.Namespace) -> dict[str, Any]:
        figures = measure(given)
        violated.extend(True for _ in figures["violations"])
        return figures

    return answer(PROGRAM, parser.parse_args(arguments), measured, show) or (VIOLATED if violated else 0)


if __name__ == "__main__":
    sys.exit(main())
