"""Kernels and collectives of a simulated step with their times, and a trace of them for Perfetto and Chrome.

Inside a pass, the program of the pass sets the order of kernels and collectives. A pass that waited for its host or
shared its links is stretched as a whole.

Letters: e events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from costmodels.simulator.pass_program import Segment
from costmodels.simulator.simulated_step import Simulation
from costmodels.simulator.stage_work import StageWork
from costmodels.simulator.step_tasks import Role
from costmodels.step.pipeline.passes import Kind
from hardware.arrays import FloatArray, IntArray

PASSES, COMPUTE, COMMUNICATION, WEIGHTS, TRANSFERS = range(5)
STREAMS = ("passes", "compute", "communication", "weights", "transfers")
"""Rows of one device: its passes, its two streams, its collectives over weights, and its messages to other stages."""

_ACCUMULATION = "gradients.accumulate"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorEvents:
    """All kernels and collectives of a step, on one device of each stage and kind of replicas.

    Attributes:
        names: Names of operators and sites of collectives, each once.
        name: Position of each event's name in `names` [e].
        device: Number of each event's device: kind of replicas times stages, plus stage [e].
        stream: Stream of each event: COMPUTE, COMMUNICATION, WEIGHTS or TRANSFERS [e].
        start_s: Begin of each event [s], [e].
        end_s: End of each event [s], [e].
    """

    names: tuple[str, ...]
    name: IntArray
    device: IntArray
    stream: IntArray
    start_s: FloatArray
    end_s: FloatArray

    def __len__(self) -> int:
        return len(self.name)


class _Template(NamedTuple):
    """Events of a stretch of one pass, from its begin on."""

    seconds: float
    name: IntArray
    stream: IntArray
    start_s: FloatArray
    end_s: FloatArray


class _PieceEvents(NamedTuple):
    """Events of one piece in a pass; layers that are alike share them."""

    name: IntArray
    stream: IntArray
    start_s: FloatArray
    lasts_s: FloatArray


def operator_events(simulation: Simulation) -> OperatorEvents:
    """Return the kernels and collectives of a simulated step."""
    return _Collector(simulation).collect()


class _Collector:
    """Collector of a step's events; equal stretches are written once and repeated."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.pp = len(simulation.stages[0])
        self.names: dict[str, int] = {}
        self.pieces: dict[tuple[int, int, bool, Kind, float], _PieceEvents] = {}

    def collect(self) -> OperatorEvents:
        """Collect the events of all tasks."""
        timeline = self.simulation.timeline
        members: dict[tuple[int, int, int, int, int], list[int]] = {}
        others: list[int] = []
        for task, label in enumerate(self.simulation.labels):
            if label.role == Role.PASS:
                key = (label.replicas, label.stage, label.virtual // self.pp, label.kind, label.piece)
                members.setdefault(key, []).append(task)
            elif label.role != Role.BARRIER:
                others.append(task)
        # Tasks that are no passes come first, one event each.
        columns = [self._single_events(others)]
        for (replicas, stage, chunk, kind, piece), tasks in members.items():
            # All passes of one stretch have the same events. They are shifted to each pass's begin and stretched to its
            # duration.
            template = self._template(self.simulation.stages[replicas][stage], chunk, Kind(kind), piece)
            start_s, end_s = timeline.start_s[tasks], timeline.end_s[tasks]
            scale = (end_s - start_s) / template.seconds if template.seconds > 0 else np.ones(len(tasks))
            shape = (len(tasks), len(template.name))
            columns.append(
                (
                    np.tile(template.name, len(tasks)),
                    np.full(shape, replicas * self.pp + stage).ravel(),
                    np.tile(template.stream, len(tasks)),
                    (start_s[:, None] + scale[:, None] * template.start_s).ravel(),
                    (start_s[:, None] + scale[:, None] * template.end_s).ravel(),
                )
            )
        name, device, stream, start_s, end_s = (np.concatenate(column) for column in zip(*columns, strict=True))
        return OperatorEvents(
            names=tuple(self.names), name=name, device=device, stream=stream, start_s=start_s, end_s=end_s
        )

    def _number(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _single_events(self, tasks: list[int]) -> tuple[Any, ...]:
        """Return the columns of messages, collectives over weights and the optimizer's steps, each one event.

        A task of all replicas together is shown on the first kind's device.
        """
        streams = {Role.HOP: TRANSFERS, Role.OPTIMIZER: COMPUTE}
        names = {
            Role.HOP: "pp.send_recv",
            Role.OPTIMIZER: "optimizer",
            Role.GATHER: "weights.gather",
            Role.TIED: "tied.all_reduce",
        }
        labels = [self.simulation.labels[task] for task in tasks]
        timeline = self.simulation.timeline
        return (
            np.array([self._number(names.get(label.role, "gradients.reduce")) for label in labels], dtype=np.int64),
            np.array([max(label.replicas, 0) * self.pp + label.stage for label in labels], dtype=np.int64),
            np.array([streams.get(label.role, WEIGHTS) for label in labels], dtype=np.int64),
            timeline.start_s[tasks],
            timeline.end_s[tasks],
        )

    def _template(self, work: StageWork, chunk: int, kind: Kind, piece: int) -> _Template:
        """Return the events of a stretch of one pass, piece by piece; a negative piece stands for the whole chunk."""
        now_s = work.begins_s
        columns = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
        for at in work.order(chunk, kind) if piece < 0 else (piece,):
            events = self._piece(work, chunk, at, kind)
            start_s = now_s + events.start_s
            columns.append((events.name, events.stream, start_s, start_s + events.lasts_s))
            now_s += work.piece_s(chunk, at, kind)
        return _Template(now_s, *(np.concatenate(column) for column in zip(*columns, strict=True)))

    def _piece(self, work: StageWork, chunk: int, at: int, kind: Kind) -> _PieceEvents:
        """Return the events of one piece of a chunk; the results are remembered."""
        held, again = work.chunks[chunk][at]
        accumulation_s = work.accumulation_s[chunk][at] if kind == work.gradients_kind else 0.0
        key = (id(work), held, again, kind, accumulation_s)
        if key not in self.pieces:
            rows: list[tuple[int, int, float, float]] = []
            device_s = 0.0
            for segment in work.programs[held, again, kind]:
                rows += self._segment(segment, work, device_s)
                device_s += segment.duration_s(work.overlap_efficiency)
            # Gradients are added up once the piece's own kernels are through.
            if accumulation_s > 0:
                rows.append((self._number(_ACCUMULATION), COMPUTE, work.stretch * device_s, accumulation_s))
            name, stream, start_s, lasts_s = zip(*rows, strict=True) if rows else ((), (), (), ())
            self.pieces[key] = _PieceEvents(
                name=np.array(name, dtype=np.int64),
                stream=np.array(stream, dtype=np.int64),
                start_s=np.array(start_s, dtype=np.float64),
                lasts_s=np.array(lasts_s, dtype=np.float64),
            )
        return self.pieces[key]

    def _segment(self, segment: Segment, work: StageWork, device_s: float) -> Iterator[tuple[int, int, float, float]]:
        """Yield the events of a segment that begins `device_s` after the piece, on the device's own clock.

        While both streams are at work, each of them is slower.
        """
        # Both streams run slower until the shorter one is through; the rest of the longer one runs at full rate.
        slowed_s = min(segment.kernels_s, segment.traffic_s)
        slower = 2.0 - work.overlap_efficiency

        def at(done_s: float) -> float:
            """Return the time at which `done_s` of one stream's work is done."""
            return device_s + slower * min(done_s, slowed_s) + max(done_s - slowed_s, 0.0)

        for stream, works in ((COMPUTE, segment.kernels), (COMMUNICATION, segment.traffic)):
            done_s = 0.0
            for one in works:
                start_s, end_s = at(done_s), at(done_s + one.seconds)
                done_s += one.seconds
                yield self._number(one.name), stream, work.stretch * start_s, end_s - start_s


def chrome_trace(simulation: Simulation) -> str:
    """Write the step in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    A process is one device of a stage, a thread one of STREAMS.

    Source: Google, Trace Event Format, complete events ("ph": "X") and metadata events ("ph": "M").
    """
    events = operator_events(simulation)
    rows: list[dict[str, Any]] = []
    pp = len(simulation.stages[0])
    for number, kind in enumerate(simulation.replicas):
        for stage, work in enumerate(simulation.stages[number]):
            device = number * pp + stage
            name = f"stage {stage}: {work.device}"
            if len(simulation.replicas) > 1 or kind.count > 1:
                name += f", replica {kind.first}" + (f" of {kind.count} alike" if kind.count > 1 else "")
            rows.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": name}})
            rows.append({"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}})
            for stream, title in enumerate(STREAMS):
                rows.append({"ph": "M", "name": "thread_name", "pid": device, "tid": stream, "args": {"name": title}})
    rows += _passes(simulation, pp)
    columns = (events.name, events.device, events.stream, events.start_s * 1e6, (events.end_s - events.start_s) * 1e6)
    for name, device, stream, start_us, seconds_us in zip(*(column.tolist() for column in columns), strict=True):
        title = events.names[name]
        rows.append(_complete(title, title.split(".")[0], device, stream, start_us, seconds_us))
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def _passes(simulation: Simulation, pp: int) -> Iterator[dict[str, Any]]:
    """Yield one complete event for each pass, with its micro-batch and virtual stage."""
    timeline = simulation.timeline
    for task, label in enumerate(simulation.labels):
        if label.role == Role.PASS:
            kind = Kind(label.kind).name.lower()
            chunk = f" chunk {label.virtual // pp}" if label.virtual >= pp else ""
            start_s, end_s = timeline.start_s[task], timeline.end_s[task]
            name, device = f"{kind} {label.micro_batch}{chunk}", label.replicas * pp + label.stage
            row = _complete(name, kind, device, PASSES, start_s * 1e6, (end_s - start_s) * 1e6)
            yield row | {"args": {"micro_batch": label.micro_batch, "virtual_stage": label.virtual}}


def _complete(name: str, category: str, pid: int, tid: int, start_us: float, seconds_us: float) -> dict[str, Any]:
    """Return a complete event of the Trace Event Format; its times are in microseconds."""
    rounded = {"ts": round(float(start_us), 3), "dur": round(float(seconds_us), 3)}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **rounded}
