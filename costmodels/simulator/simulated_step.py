"""Event simulation of one optimizer step: every pass, transfer and collective of one configuration on one cluster.

This is the finer of the two fidelities. It shares the kernels, the collectives and the waits of unequal micro-batches
with `step_time.py`, and nothing else. The terms that the closed form adds up run here on the compute and communication
streams of devices (see events.py), so that unlike stages, unlike devices among the replicas and transfers that share
links have their real cost. Replicas that are alike are simulated once.

Sequences of varying length make micro-batches unequal. Here all of them have mean work, and the wait for the longest
ones is that of the closed form (costmodels/step/pipeline/unequal_micro_batches.py).

A step: sharded weights are gathered, piece by piece, before the first micro-batch needs them. The passes run in the
order of their schedule and hand on their results. Gradients leave piece by piece while the last micro-batch runs
backward, those of all replicas of a stage together. Then the gradients of a tied table go between the first and the
last stage. When the last gradient has arrived, the optimizer steps everywhere.

Letters: p stages, v virtual stages, k kinds of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_s, kernel_s
from costmodels.simulator.events import Timeline, run
from costmodels.simulator.operator_prices import OperatorPrices
from costmodels.simulator.stage_prices import price_operators, stage_works
from costmodels.simulator.stage_work import StageWork
from costmodels.simulator.step_tasks import Label, Role, StepTasks
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.layer_residuals import layer_residual
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.overheads import overhead_s
from costmodels.step.pipeline.passes import SPLIT_BACKWARD, PassOrder, pass_order
from costmodels.step.pipeline.schedules import of_round
from costmodels.step.replicas import ReplicaKind, replica_kinds
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Simulation:
    """Result of one simulated step.

    Attributes:
        step_time_s: Wall clock of the step [s].
        breakdown_s: Parts of the step time by BREAKDOWN, on the critical path [s]; they sum to it.
        replicas: Kinds of replicas; the timeline has one replica of each.
        stages: Work of each stage of each kind [k][p].
        labels: Description of each task.
        timeline: Times at which the tasks ran, before overheads.
    """

    step_time_s: float
    breakdown_s: dict[str, float]
    replicas: tuple[ReplicaKind, ...]
    stages: tuple[tuple[StageWork, ...], ...]
    labels: tuple[Label, ...]
    timeline: Timeline


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedStep:
    """A configuration with the work of its stages, which steps of any number of micro-batches have in common.

    Attributes:
        setting: Job, cluster and runtime; the hosts are in the configuration's order.
        config: Configuration to simulate.
        schedule: One of `passes.SCHEDULES`.
        replicas: Kinds of replicas, with their numbers of micro-batches.
        stages: Work of each stage of each kind [k][p].
    """

    setting: Setting
    config: ParallelConfig
    schedule: str
    replicas: tuple[ReplicaKind, ...]
    stages: tuple[tuple[StageWork, ...], ...]

    def orders(self, micro_batches: Sequence[int]) -> tuple[PassOrder, ...]:
        """Return the order of passes of each kind of replicas, which run so many micro-batches of their step."""
        pp, vpp = self.config.pp, self.config.vpp
        sizes = of_round(np.array([kind.micro_batches for kind in self.replicas]), pp).tolist()
        return tuple(
            pass_order(self.schedule, pp, vpp, number, size) for number, size in zip(micro_batches, sizes, strict=True)
        )

    def run(self, orders: Sequence[PassOrder]) -> tuple[StepTasks, Timeline]:
        """Run the tasks of one step."""
        tasks = StepTasks(self.setting.runtime, self.config, self.stages, orders)
        return tasks, run(tasks.graph, [1.0] * len(tasks.resources), self.setting.runtime.overlap_efficiency)

    def overhead_s(self, makespan_s: float, memory: MemoryEstimate | None) -> float:
        """Return the overheads of a step whose tasks take so long [s]."""
        # A pipeline spans several hosts if any of its ranks changes hosts from stage to stage.
        hosts = self.setting.cluster.rank_host().reshape(self.config.pp, -1)
        spans = np.array([1 + int((hosts != hosts[0]).any())])
        grid = ConfigGrid.from_configs([self.config])
        return float(overhead_s(self.setting, grid, spans, memory, np.array([makespan_s]))[0])

    @property
    def unexplained(self) -> float:
        """Factor on all times that the runtime's calibration left unexplained."""
        setting, residuals = self.setting, self.setting.runtime.residuals
        if not residuals:
            return 1.0
        grid = ConfigGrid.from_configs([self.config])
        return float(np.exp(layer_residual(residuals, setting.cluster.device_names, setting.job, grid))[0])


def imbalance_s(
    setting: Setting,
    grid: ConfigGrid,
    *,
    kernel_time: KernelTime = kernel_s,
    collective_time: CollectiveTime = collective_s,
) -> FloatArray:
    """Return the time that steps wait because their micro-batches are unequal [s], [n]."""
    if setting.job.sequences is None:
        return np.zeros(len(grid))
    found = estimate_step(setting, grid, kernel_time=kernel_time, collective_time=collective_time)
    return found.breakdown_s["imbalance"]


def price_step(
    setting: Setting,
    config: ParallelConfig,
    *,
    prices: OperatorPrices,
    schedule: str = "1f1b",
    collective_time: CollectiveTime = collective_s,
) -> PricedStep:
    """Compute the work of all stages of a configuration.

    Args:
        setting: Job, cluster and runtime. The configuration's dp*mbs divides the job's global batch.
        config: Configuration to simulate; it occupies all devices of the cluster.
        prices: Prices of its operators, as `price_operators` returns them.
        schedule: One of `passes.SCHEDULES`.
        collective_time: Model of a collective's time.
    """
    setting = replace(setting, cluster=setting.cluster.reordered(config.assignment.hosts))
    # Replicas may get unequal numbers of micro-batches; each kind has an order of its own.
    even = setting.job.global_batch_size // (config.dp * config.mbs)
    micro_batches = np.array(config.assignment.micro_batches or (even,) * config.dp, dtype=np.int64)
    kinds = replica_kinds(setting.cluster, config, micro_batches)
    stages = stage_works(
        setting,
        config,
        kinds,
        splits_backward=schedule in SPLIT_BACKWARD,
        prices=prices,
        collective_time=collective_time,
    )
    return PricedStep(setting=setting, config=config, schedule=schedule, replicas=kinds, stages=stages)


def simulate_step(
    setting: Setting,
    config: ParallelConfig,
    *,
    schedule: str = "1f1b",
    kernel_time: KernelTime = kernel_s,
    collective_time: CollectiveTime = collective_s,
    memory: MemoryEstimate | None = None,
) -> Simulation:
    """Simulate one step.

    Args:
        setting: Job, cluster and runtime. The configuration's dp*mbs divides the job's global batch.
        config: Configuration to simulate; it occupies all devices of the cluster.
        schedule: One of `passes.SCHEDULES`.
        kernel_time: Model of a kernel's time.
        collective_time: Model of a collective's time.
        memory: Memory of the configuration, if it is known: a configuration that does not quite fit runs slowly.

    Raises:
        ValueError: the schedule does not support these degrees.
    """
    prices = price_operators(setting, [config], kernel_time)
    step = price_step(setting, config, prices=prices, schedule=schedule, collective_time=collective_time)
    orders = step.orders([kind.micro_batches for kind in step.replicas])
    tasks, timeline = step.run(orders)
    breakdown = _breakdown(timeline, tasks, step.stages, orders)
    breakdown["overhead"] = step.overhead_s(timeline.makespan_s, memory)
    breakdown = {part: seconds * step.unexplained for part, seconds in breakdown.items()}
    grid = ConfigGrid.from_configs([config])
    waits_s = imbalance_s(setting, grid, kernel_time=kernel_time, collective_time=collective_time)
    breakdown["imbalance"] = float(waits_s[0])
    return Simulation(
        step_time_s=sum(breakdown.values()),
        breakdown_s=breakdown,
        replicas=step.replicas,
        stages=step.stages,
        labels=tuple(tasks.label(task) for task in range(len(tasks.graph))),
        timeline=timeline,
    )


def _breakdown(
    timeline: Timeline, tasks: StepTasks, stages: tuple[tuple[StageWork, ...], ...], orders: Sequence[PassOrder]
) -> dict[str, float]:
    """Break the critical path down by BREAKDOWN.

    Passes on it beyond those of the busiest stage count as bubble. The time by which passes are slowed down counts as
    traffic of the weights beside them.
    """
    seconds = dict.fromkeys(BREAKDOWN, 0.0)
    on_path = dict.fromkeys(Role, 0.0)
    slowed_s = previous_s = 0.0
    for task in timeline.critical_path():
        role, end_s = tasks.like[task].role, float(timeline.end_s[task])
        # Tasks of the critical path follow each other without a gap, so each counts from the end of the one before.
        on_path[role] += end_s - previous_s
        if role == Role.PASS:
            # A pass takes longer than its own work if it shares links with the traffic of weights.
            slowed_s += end_s - previous_s - tasks.graph.demands[task].routes[0].work_s
        previous_s = end_s
    on_path[Role.PASS] -= slowed_s
    seconds["pp"] = on_path[Role.HOP] + on_path[Role.TIED]
    seconds["dp"] = on_path[Role.GATHER] + on_path[Role.REDUCE] + slowed_s
    seconds["optimizer"] = on_path[Role.OPTIMIZER]
    # The passes on the path are divided into the parts of the busiest stage's work; the rest is bubble.
    busiest, busiest_s = {"compute": 0.0}, 0.0
    for works, order in zip(stages, orders, strict=True):
        for work in works:
            parts = {part: order.num_micro_batches * own for part, own in work.parts_s().items()}
            if sum(parts.values()) > busiest_s:
                busiest, busiest_s = parts, sum(parts.values())
    # The path may hold less than the busiest stage's passes, when other tasks took their place on it.
    passes_s = on_path[Role.PASS]
    share = min(passes_s / busiest_s, 1.0) if busiest_s > 0 else 0.0
    for part, own in busiest.items():
        seconds[part] += share * own
    seconds["bubble"] = max(passes_s - busiest_s, 0.0)
    return seconds
