"""Compare the event simulator with the closed form, and measure the simulator's speed.

    python -m benchmarks.judges.simulator [--json]

Agreement: both models predict the same feasible configurations. These are drawn with a seed from the spaces of the
studies, about equally many from each study. The difference of a configuration is the simulator's step time over the
closed form's, less 1. Where the difference exceeds 2%, both models predict the configuration again, each time without
one effect that they count differently, and once without all of them. The cause of the difference is the effect whose
removal leaves the smallest difference.

Speed: `simulate_step` and `operator_events` together, as the median of several repetitions in one process on one
thread. Progress goes to stderr. Exit status 2 reports a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, median_s, publish, tell
from benchmarks.support.workers import mapper
from costmodels.job.parallel_config import DEGREES, ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import Collective
from costmodels.simulator.simulated_step import simulate_step
from costmodels.simulator.trace import operator_events
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tuner.study_file.config import load_study

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "studies"
STUDIES = (*sorted(FOLDER.glob("*.yaml")), *sorted((FOLDER / "flexparallel").glob("*.yaml")))
LARGE_STUDY = FOLDER / "flexparallel" / "pangu-135b-8192.yaml"

NEAR = 0.02
"""Largest absolute difference for which no cause is sought."""
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
NUM_LARGEST = 20
AT_ONCE = 8
"""Number of configurations in one task of a worker."""

LITTLE_VOCABULARY = 64
"""Vocabulary size at which the head costs nearly nothing compared with a layer."""

GATHERS = ("weights.all_gather", "expert_weights.all_gather")
WEIGHTS = ("weights.", "expert_weights.", "copies.", "expert_copies.", "tied.")
MESSAGES = ("pp.",)
CAUSES = ("unequal stages", "messages", "gathers", "gradients")
"""Effects that the two models count differently.

- unequal stages: the head, and layers that virtual stages cannot share equally. The closed form charges the whole
  imbalance once, as for a slowest stage at the end. A slowest stage in front runs forward passes meanwhile.
- messages between stages: they slow down the layers' collectives on the same links. The closed form adds up what is not
  hidden in each direction, although both directions are used at the same time.
- gathers: the weights are gathered beside the first passes.
- gradients: the last backward pass of every stage is slower while gradients are reduced, but the closed form charges
  only one stage for it. Chunks that end early start their reduction sooner, whereas the closed form hides it behind one
  backward pass only.
"""

CLASSES: Mapping[str, Callable[[ParallelConfig], bool]] = {
    "pp = 1": lambda config: config.pp == 1,
    "pp > 1, vpp = 1": lambda config: config.pp > 1 and config.vpp == 1,
    "vpp > 1": lambda config: config.vpp > 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One configuration as both models predict it.

    Attributes:
        study: Name of the study from which the configuration was drawn.
        config: The compared configuration.
        step_time_s: Step time by the simulator [s].
        difference: Simulated step time over the closed form's, less 1; None if the schedule cannot be simulated.
        parts: Difference of each part of BREAKDOWN, over the closed form's step time.
        left: Remaining difference without each of CAUSES, and without all of them ("all"); empty if the difference is
            small.
    """

    study: str
    config: ParallelConfig
    step_time_s: float = 0.0
    difference: float | None = None
    parts: Mapping[str, float]
    left: Mapping[str, float]

    @property
    def cause(self) -> str:
        """Effect whose removal leaves the smallest difference."""
        return min(CAUSES, key=lambda cause: abs(self.left[cause]))

    @property
    def part(self) -> str:
        """Part of the breakdown with the largest difference."""
        return max(BREAKDOWN, key=lambda part: abs(self.parts[part]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    study: Path
    positions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Feasible:
    name: str
    setting: Setting
    grid: ConfigGrid
    memory: MemoryEstimate


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    parser = benchmark_parser("judges.simulator", __doc__)
    parser.add_argument("--configs", type=count_at_least(1), default=1000, help="configurations to compare (1000)")
    parser.add_argument("--seed", type=count_at_least(0), default=0, help="seed of the draw (0)")
    parser.add_argument(
        "--studies",
        nargs="+",
        type=Path,
        default=list(STUDIES),
        metavar="YAML",
        help="study files to draw from (all that are shipped)",
    )
    parser.add_argument("--repeats", type=count_at_least(1), default=5, help="repetitions of each timing (5)")
    parser.add_argument("--workers", type=count_at_least(1), default=2, help="worker processes (2)")
    return answer("simulator", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure agreement and speed."""
    tasks = list(_draw_tasks(given.studies, given.configs, given.seed))
    with threadpool_limits(1):
        # Speed is measured before the workers start and compete for the cores.
        speed = [_speed_row(*case, given.repeats) for case in _speed_cases()]
    total = sum(len(task.positions) for task in tasks)
    begin_s = time.perf_counter()
    found: list[Compared] = []
    with mapper(given.workers) as each:
        for number, compared in enumerate(each(_compare, tasks)):
            found += compared
            if number % 10 == 9:
                tell(f"{len(found)} of {total}: {time.perf_counter() - begin_s:.0f} s")
    return {"seed": given.seed, "seconds": time.perf_counter() - begin_s, **agreement(found), "speed": speed}


def agreement(found: Sequence[Compared]) -> dict[str, Any]:
    """Compute the statistics of the configurations that both models predicted."""
    # Some configurations have no schedule in the simulator; they are counted but say nothing about agreement.
    known = [one for one in found if one.difference is not None]
    if not known:
        raise ConfigError("hold no configuration that can be simulated", key="--studies")
    differences = _differences(known)
    largest = sorted(known, key=lambda one: -abs(one.difference or 0.0))[:NUM_LARGEST]
    return {
        "configurations": len(known),
        "without_schedule": len(found) - len(known),
        "studies": dict(Counter(one.study for one in known)),
        "quantiles": {f"{share:g}": float(np.quantile(differences, share)) for share in QUANTILES},
        "within_2pct": float(np.mean(np.abs(differences) <= NEAR)),
        "classes": [
            _class_row(name, [one for one in known if belongs(one.config)])
            for name, belongs in {**CLASSES, "all": lambda _: True}.items()
        ],
        "largest": [_largest_row(one) for one in largest],
    }


def _differences(found: Sequence[Compared]) -> FloatArray:
    return np.array([one.difference for one in found], dtype=np.float64)


def _class_row(name: str, found: Sequence[Compared]) -> dict[str, Any]:
    """Summarise one class: the differences, and the number of those beyond NEAR by cause."""
    apart = np.abs(_differences(found))
    far = [one for one in found if one.left]
    causes = Counter(one.cause for one in far)
    return {
        "class": name,
        "configurations": len(found),
        "median": float(np.median(apart)) if len(apart) else None,
        "p95": float(np.quantile(apart, 0.95)) if len(apart) else None,
        "largest": float(apart.max()) if len(apart) else None,
        "within_2pct": float(np.mean(apart <= NEAR)) if len(apart) else None,
        "beyond": len(far),
        **{cause: causes[cause] for cause in CAUSES},
        "largest_without_all": max((abs(one.left["all"]) for one in far), default=None),
    }


def _largest_row(one: Compared) -> dict[str, Any]:
    assert one.difference is not None, "what cannot be simulated does not differ"
    return {
        "study": one.study,
        "config": one.config.values(DEGREES),
        "difference": one.difference,
        "part": one.part,
        "of_part": one.parts[one.part],
        "cause": one.cause if one.left else None,
        "without": dict(one.left),
    }


def _draw_tasks(studies: Sequence[Path], count: int, seed: int) -> Iterator[_Task]:
    """Draw feasible configurations, about equally many of each study; small studies give all that they have."""
    sizes = []
    for path in studies:
        sizes.append(len(_feasible(path).grid))
        tell(f"{_feasible(path).name}: {sizes[-1]:,} feasible configurations")
    # Share the count out in rounds: in each round all studies that still have configurations get the same number.
    left, numbers = min(count, sum(sizes)), [0] * len(sizes)
    while left:
        open_at = [at for at, size in enumerate(sizes) if numbers[at] < size]
        for at in open_at[:left]:
            more = min(max(left // len(open_at), 1), sizes[at] - numbers[at])
            numbers[at] += more
            left -= more
    for number, (path, size) in enumerate(zip(studies, sizes, strict=True)):
        # A generator of its own for each study keeps the draws independent.
        chosen = np.random.default_rng([seed, number]).choice(size, numbers[number], replace=False)
        for start in range(0, len(chosen), AT_ONCE):
            yield _Task(study=path, positions=tuple(chosen[start : start + AT_ONCE].tolist()))


@lru_cache(maxsize=32)
def _feasible(path: Path) -> _Feasible:
    """Return the candidates of a study that are predicted to fit into memory."""
    study = load_study(path)
    space = study.problem.space()
    fits = np.flatnonzero(space.memory.fits(study.problem.options.memory_headroom))
    return _Feasible(
        name=path.stem, setting=study.problem.setting, grid=space.grid.take(fits), memory=space.memory.take(fits)
    )


def _compare(task: _Task) -> list[Compared]:
    known = _feasible(task.study)
    return [
        compared(known.name, known.setting, known.grid.config(at), known.memory.take(np.array([at])))
        for at in task.positions
    ]


def compared(study: str, setting: Setting, config: ParallelConfig, memory: MemoryEstimate) -> Compared:
    """Predict one configuration with both models, and find the causes of a difference beyond NEAR."""
    job, runtime = setting.job, setting.runtime

    def both(
        job: TrainingJob = job,
        runtime: RuntimeProfile = runtime,
        config: ParallelConfig = config,
        time: CollectiveTime = collective_s,
    ) -> tuple[float, float, dict[str, float]]:
        return _both(Setting(job=job, cluster=setting.cluster, runtime=runtime), config, memory, time)

    try:
        step_time_s, difference, parts = both()
    except ValueError:
        return Compared(study=study, config=config, parts={}, left={})
    left = {}
    if abs(difference) > NEAR:
        equal = _equalize_stages(job, runtime, config)
        left = {
            "unequal stages": both(*equal)[1],
            "messages": both(time=_skip_collectives(MESSAGES))[1],
            "gathers": both(time=_skip_collectives(GATHERS))[1],
            "gradients": both(time=_skip_collectives(WEIGHTS, but=GATHERS))[1],
            "all": both(*equal, time=_skip_collectives(MESSAGES + WEIGHTS))[1],
        }
    return Compared(study=study, config=config, step_time_s=step_time_s, difference=difference, parts=parts, left=left)


def _both(
    setting: Setting, config: ParallelConfig, memory: MemoryEstimate, collective_time: CollectiveTime
) -> tuple[float, float, dict[str, float]]:
    """Return the simulated step time [s], its relative difference, and the difference by part."""
    grid = ConfigGrid.from_configs([config])
    # Both models get the same memory estimate, since a configuration that barely fits runs slowly.
    simulated = simulate_step(setting, config, collective_time=collective_time, memory=memory)
    estimate = estimate_step(setting, grid, collective_time=collective_time, memory=memory)
    estimated_s = float(estimate.step_time_s[0])
    parts = {
        part: (simulated.breakdown_s[part] - float(seconds[0])) / estimated_s
        for part, seconds in estimate.breakdown_s.items()
    }
    return simulated.step_time_s, simulated.step_time_s / estimated_s - 1, parts


def _equalize_stages(
    job: TrainingJob, runtime: RuntimeProfile, config: ParallelConfig
) -> tuple[TrainingJob, RuntimeProfile, ParallelConfig]:
    """Return a job, runtime and configuration with equally many layers in every virtual stage and almost no head."""
    num_virtual = config.pp * config.vpp
    layers = -(-job.model.num_layers // num_virtual) * num_virtual
    model = job.model.changed(num_layers=layers, vocab_size=LITTLE_VOCABULARY)
    even = replace(config, assignment=replace(config.assignment, layers=(), recomputed=()))
    return replace(job, model=model), replace(runtime, layer_padding=1, layer_split="even"), even


def _skip_collectives(names: tuple[str, ...], but: tuple[str, ...] = ()) -> CollectiveTime:
    """Return a time function that charges nothing for some collectives.

    Args:
        names: Prefixes of the names of collectives that take no time.
        but: Prefixes of names to charge nevertheless.
    """

    def seconds(collective: Collective) -> FloatArray:
        own_s = collective_s(collective)
        is_none = collective.name.startswith(names) and not collective.name.startswith(but or "\0")
        return np.zeros_like(own_s) if is_none else own_s

    return seconds


def _speed_cases() -> Iterator[tuple[str, Setting, ParallelConfig]]:
    """Yield configurations without contention, then the current one of the largest study and others of its size."""
    study = load_study(LARGE_STUDY)
    assert study.problem.current is not None, "the study names it"
    setting, current = study.problem.setting, study.problem.current
    for pp, vpp in ((8, 1), (16, 1)):
        # one replica, stages on hosts of their own: only tp inside the hosts, and messages one at a time
        alone = replace(setting, cluster=find_cluster("ascend-910b", hosts=pp))
        alone = replace(alone, job=replace(setting.job, global_batch_size=8 * pp))
        yield "nothing contends", alone, replace(current, pp=pp, vpp=vpp, dp=1, zero_stage=0)
    yield "8,192 devices, the current one", setting, current
    for pp, tp, vpp in ((8, 8, 1), (8, 4, 2), (16, 8, 1), (16, 8, 6), (32, 4, 3), (1, 8, 1)):
        dp = setting.cluster.num_devices // (pp * tp)
        yield "8,192 devices", setting, replace(current, pp=pp, tp=tp, dp=dp, vpp=vpp)


def _speed_row(name: str, setting: Setting, config: ParallelConfig, repeats: int) -> dict[str, Any]:
    simulation = simulate_step(setting, config)
    events = len(operator_events(simulation))
    simulate_s = median_s(lambda: simulate_step(setting, config), repeats)
    events_s = median_s(lambda: operator_events(simulation), repeats)
    seconds = simulate_s + events_s
    return {
        "case": name,
        "config": config.values(DEGREES),
        "tasks": len(simulation.labels),
        "events": events,
        "simulate_s": simulate_s,
        "events_s": events_s,
        "seconds": seconds,
        "events_per_s": events / seconds,
    }


def show(figures: dict[str, Any]) -> None:
    """Print the tables, each below its title."""
    print(
        f"{figures['configurations']:,} configurations (seed {figures['seed']}): simulator over closed form, less 1\n"
    )
    print("  ".join(f"{float(share):.0%}: {_percent(value)}" for share, value in figures["quantiles"].items()))
    print(f"within 2%: {figures['within_2pct']:.1%}; without a schedule: {figures['without_schedule']}\n")
    print("By class: differences beyond 2% counted by cause, and the largest difference left without all causes\n")
    publish(
        [
            row
            | {name: _percent(row[name]) for name in ("median", "p95", "largest", "within_2pct")}
            | {"largest_without_all": _percent(row["largest_without_all"])}
            for row in figures["classes"]
        ],
        as_json=False,
    )
    print("\nLargest differences: the part of the breakdown that differs most, and what is left without each cause\n")
    publish([_format_row(row) for row in figures["largest"]], as_json=False)
    print("\nSpeed on one thread, medians\n")
    publish(
        [
            row | {"config": _degrees(row["config"]), "events_per_s": f"{row['events_per_s']:,.0f}"}
            for row in figures["speed"]
        ],
        as_json=False,
    )


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "study": row["study"],
        "config": _degrees(row["config"]),
        "difference": _percent(row["difference"]),
        "part": f"{row['part']} {_percent(row['of_part'])}",
        "cause": row["cause"] or "-",
        **{f"no {cause}": _percent(row["without"].get(cause)) for cause in (*CAUSES, "all")},
    }


def _degrees(config: Mapping[str, Any]) -> str:
    """Format the degrees that are larger than 1."""
    return " ".join(f"{name}{value}" for name, value in config.items() if value != 1) or "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
