"""Rows of a simulated step for display: the work of every stage of every kind of replicas, and its idle times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from costmodels.simulator.simulated_step import Simulation
from costmodels.simulator.step_tasks import ALL, Label, Role


class Span(NamedTuple):
    """One activity of a stage, from its begin to its end.

    Attributes:
        role: Role of the task.
        kind: Kind of pass as a `passes.Kind`; of a hop the kind of the sending pass; -1 of all other tasks.
        micro_batch: Micro-batch of a pass or hop, from 0; -1 of all other tasks.
        chunk: Chunk of the stage, from 0; -1 if the activity concerns all of them.
        start_s: Begin of the activity after the step's begin [s].
        end_s: End of the activity after the step's begin [s].
    """

    role: Role
    kind: int
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageRow:
    """Activities of one stage of one kind of replicas.

    Attributes:
        replica: Number of the first of these replicas.
        count: Number of these replicas.
        stage: Number of the stage.
        device: Name of the device that sets the stage's pace.
        computing: Passes and the optimizer's step, one after the other.
        hops: Messages to other stages.
        weights: Collectives over weights and gradients.
        idle_share: Share of the step, without overheads, in which the stage computes nothing.
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
    """Return the rows of all stages of the first kind of replicas, then those of the next.

    A pass is one span, or several if its pieces wait for weights between them.
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
            # Pieces of one pass that follow each other without a gap become one span.
            pieces = passes.setdefault(label._replace(piece=-1), [])
            begin_s = pieces.pop()[0] if pieces and pieces[-1][1] >= start_s else start_s
            pieces.append((begin_s, end_s))
            continue
        # A collective of all replicas is shown in the row of each.
        for replicas in range(len(simulation.replicas)) if label.replicas == ALL else (label.replicas,):
            spans.setdefault((replicas, label.stage), []).append(_span(label, pp, start_s, end_s))
    for label, pieces in passes.items():
        own = spans.setdefault((label.replicas, label.stage), [])
        own += [_span(label, pp, start_s, end_s) for start_s, end_s in pieces]
    # Only passes and the optimizer count as busy: messages and collectives over weights leave the device idle.
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
    """Return the times at which a stage computes nothing before `until_s`: pairs of begin and end."""
    free_s, gaps = 0.0, []
    for span in row.computing:
        if span.start_s > free_s:
            gaps.append((free_s, span.start_s))
        free_s = max(free_s, span.end_s)
    return (*gaps, (free_s, until_s)) if until_s > free_s else tuple(gaps)


def _span(label: Label, pp: int, start_s: float, end_s: float) -> Span:
    chunk = label.virtual // pp if label.virtual >= 0 else -1
    return Span(label.role, label.kind, label.micro_batch, chunk, start_s, end_s)
