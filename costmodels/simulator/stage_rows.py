"""A simulated step as people look at it: what every stage of every kind of replicas ran, and where it was idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from costmodels.simulator.simulated_step import ALL, Label, Role, Simulation


class Span(NamedTuple):
    """One thing that a stage did, from its begin to its end.

    Attributes:
        role: What it is.
        kind: Of a pass a `passes.Kind`; of a hop that of the pass that sent; -1 of all else.
        micro_batch: Of a pass or hop, from 0; -1 of all else.
        chunk: Of the stage, from 0; -1 where it concerns all of them.
        start_s: After the step's begin.
        end_s: After the step's begin.
    """

    role: Role
    kind: int
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageRow:
    """One stage of one kind of replicas.

    Attributes:
        replica: Number of the first of these replicas.
        count: How many they are.
        stage: Number of the stage.
        device: Name of the device that sets its pace.
        computing: Its passes and the optimizer's step, one after the other.
        hops: What it hands on to other stages.
        weights: Collectives over its weights and gradients.
        idle_share: The part of the step, overheads left out, in which it computes nothing.
    """

    replica: int
    count: int
    stage: int
    device: str
    computing: tuple[Span, ...]
    hops: tuple[Span, ...]
    weights: tuple[Span, ...]
    idle_share: float


def stage_rows(simulation: Simulation) -> tuple[StageRow, ...]:
    """The stages of the first kind of replicas, then those of the next.

    A pass is one span, or several where its pieces wait for weights between them.
    """
    pp, timeline = len(simulation.stages[0]), simulation.timeline
    spans: dict[tuple[int, int], list[Span]] = {}
    passes: dict[Label, list[tuple[float, float]]] = {}
    busy_s = np.zeros((len(simulation.replicas), pp))
    starts, ends = timeline.start_s.tolist(), timeline.end_s.tolist()
    for label, start_s, end_s in zip(simulation.labels, starts, ends, strict=True):
        if label.role == Role.BARRIER or end_s <= start_s:
            continue
        if label.role in (Role.PASS, Role.OPTIMIZER):
            busy_s[label.replicas, label.stage] += end_s - start_s
        if label.role == Role.PASS:
            pieces = passes.setdefault(label._replace(piece=-1), [])
            begin_s = pieces.pop()[0] if pieces and pieces[-1][1] >= start_s else start_s
            pieces.append((begin_s, end_s))
            continue
        for replicas in range(len(simulation.replicas)) if label.replicas == ALL else (label.replicas,):
            spans.setdefault((replicas, label.stage), []).append(_span(label, pp, start_s, end_s))
    for label, pieces in passes.items():
        own = spans.setdefault((label.replicas, label.stage), [])
        own += [_span(label, pp, start_s, end_s) for start_s, end_s in pieces]
    idle = 1.0 - busy_s / timeline.makespan_s
    found = []
    for replicas, kind in enumerate(simulation.replicas):
        for stage, work in enumerate(simulation.stages[replicas]):
            own = sorted(spans.get((replicas, stage), []), key=lambda span: span.start_s)
            found.append(
                StageRow(
                    replica=kind.first,
                    count=kind.count,
                    stage=stage,
                    device=work.device,
                    computing=tuple(span for span in own if span.role in (Role.PASS, Role.OPTIMIZER)),
                    hops=tuple(span for span in own if span.role == Role.HOP),
                    weights=tuple(span for span in own if span.role in (Role.GATHER, Role.REDUCE, Role.TIED)),
                    idle_share=float(idle[replicas, stage]),
                )
            )
    return tuple(found)


def idle_gaps(row: StageRow, until_s: float) -> tuple[tuple[float, float], ...]:
    """When a stage computes nothing before `until_s`: pairs of begin and end."""
    free_s, gaps = 0.0, []
    for span in row.computing:
        if span.start_s > free_s:
            gaps.append((free_s, span.start_s))
        free_s = max(free_s, span.end_s)
    return (*gaps, (free_s, until_s)) if until_s > free_s else tuple(gaps)


def _span(label: Label, pp: int, start_s: float, end_s: float) -> Span:
    chunk = label.virtual // pp if label.virtual >= 0 else -1
    return Span(label.role, label.kind, label.micro_batch, chunk, start_s, end_s)
