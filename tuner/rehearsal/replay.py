"""Replay of rehearsed ranks in the event simulator: the time of a step from what each rank ran, in its order.

Operators of a rank follow each other; a collective begins when its rank has reached it, runs on a stream of its group
beside what follows, and holds back what waits for it. A message begins when both of its ranks have reached it. The
other ranks of a group are taken to reach it at the same time, as they do the same work.

The host launches operators ahead of the device; where it needs longer than the device, all operators of the rank take
longer in proportion, by the norm that the closed form uses (costmodels/step/launches.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.simulator.events import NOTHING, Demand, Route, TaskGraph, run
from costmodels.step.launches import beyond_device_s
from costmodels.step.overheads import overhead_s
from costmodels.step.placement import place
from tuner.rehearsal.answer import RankAnswer, StepOrder
from tuner.rehearsal.recorded_prices import RecordedPrices, is_collective


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedStep:
    """Step of rehearsed ranks.

    Attributes:
        step_s: Time of the whole step, with the runtime's overheads [s].
        ranks_s: Time until each rank has done its last work, without these [s], by rank.
    """

    step_s: float
    ranks_s: dict[int, float]


def replayed_step(
    setting: Setting, config: ParallelConfig, answers: Sequence[RankAnswer], num_micro_batches: int
) -> ReplayedStep | None:
    """Replay the last steps of ranks, one of each stage; None if not all of them have an order.

    A step of fewer micro-batches than the job's is made longer by as many times the difference of the last two.
    """
    if any(not answer.orders for answer in answers) or len({answer.stage for answer in answers}) < config.pp:
        return None
    prices = RecordedPrices(setting, config)
    fewer, made = (answers[0].orders[at].micro_batches for at in (0, -1))
    last, more = _ends_s(prices, answers, -1), 0.0
    if made is not None and fewer is not None and made > fewer:
        before = _ends_s(prices, answers, 0)
        more = (num_micro_batches - made) * (max(last.values()) - max(before.values())) / (made - fewer)
    ranks_s = {rank: seconds + more for rank, seconds in last.items()}
    return ReplayedStep(step_s=_with_overheads(setting, config, max(ranks_s.values())), ranks_s=ranks_s)


def _with_overheads(setting: Setting, config: ParallelConfig, seconds: float) -> float:
    grid = ConfigGrid.from_configs([config])
    domains = place(setting.cluster, grid).pp.domains
    return seconds + float(overhead_s(setting, grid, domains, None, np.array([seconds]))[0])


def _ends_s(prices: RecordedPrices, answers: Sequence[RankAnswer], number: int) -> dict[int, float]:
    """Return the time at which each rank ends one of its recorded steps [s]."""
    graph, replay = TaskGraph(), _Replay(prices, {answer.rank for answer in answers})
    last = {answer.rank: replay.add(graph, at, answer, answer.orders[number]) for at, answer in enumerate(answers)}
    timeline = run(graph, (), prices.setting.runtime.overlap_efficiency)
    return {rank: float(timeline.end_s[tasks].max(initial=0.0)) for rank, tasks in last.items()}


class _Replay:
    """Tasks of all ranks; messages between them are shared."""

    def __init__(self, prices: RecordedPrices, ranks: set[int]) -> None:
        self.prices, self.ranks = prices, ranks
        self.messages: dict[tuple[int, int, int], int] = {}

    def add(self, graph: TaskGraph, device: int, answer: RankAnswer, order: StepOrder) -> list[int]:
        """Add what a rank ran, and return its tasks."""
        stretch = _stretch(self.prices, answer, order)
        kinds = [_hashable(kind) for kind in answer.kinds]
        streams: dict[tuple[int, ...], int] = defaultdict(lambda: NOTHING)
        counts: dict[tuple[int, int], int] = defaultdict(int)
        begun: list[int] = []
        own: list[int] = []
        last, waits, seconds = NOTHING, list[int](), 0.0

        def compute() -> None:
            """Add the operators since the last one as a task."""
            nonlocal last, waits, seconds
            if seconds or waits:
                last = graph.add(Route(stretch * seconds), after=(last, *waits), devices=(device,) if seconds else ())
                own.append(last)
                waits, seconds = [], 0.0

        for step in order.steps:
            if step < 0:
                compute()
                waits.append(begun[-1 - step])
                continue
            kind = kinds[step]
            if not is_collective(kind):
                seconds += self.prices.operator_s(*kind)
                continue
            compute()
            name, size, ranks, peer = kind
            whole_s, latency_s = self.prices.collective_s(name, size, ranks, peer)
            demand = Demand((Route(whole_s - latency_s),), latency_s, (device,))
            if peer in self.ranks and peer != answer.rank:
                is_sent = name.startswith("send")
                pair = (answer.rank, peer) if is_sent else (peer, answer.rank)
                key = (*pair, counts[pair])
                counts[pair] += 1
                if key not in self.messages:
                    self.messages[key] = graph.add_like(demand)
                task = self.messages[key]
                if last != NOTHING:
                    graph.wait(task, last)
            else:
                stream = ranks if peer < 0 else (*ranks, -1 if name.startswith("send") else -2)
                task = streams[stream] = graph.add_like(demand, (last, streams[stream]))
            begun.append(task)
            own.append(task)
        compute()
        return own


def _stretch(prices: RecordedPrices, answer: RankAnswer, order: StepOrder) -> float:
    """Return how much longer all operators of a rank take because the host launches them too slowly."""
    runtime = prices.setting.runtime
    device_s = host_s = 0.0
    for step in order.steps:
        if step < 0:
            continue
        kind = _hashable(answer.kinds[step])
        if is_collective(kind):
            device_s += prices.collective_s(*kind)[0]
            host_s += runtime.collective_launch_s
        elif seconds := prices.operator_s(*kind):
            device_s += seconds
            host_s += runtime.launch_s
    if not device_s or runtime.captured_graph:
        return 1.0
    beyond_s = float(beyond_device_s(np.array([[device_s]]), np.array([[host_s]]))[0, 0])
    return 1.0 + beyond_s / device_s


def _hashable(kind: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_hashable(one) if isinstance(one, list | tuple) else one for one in kind)
