"""Timeline of operators as events, as text for terminals, and as a file for Perfetto."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from hardware.rounding import predicted
from tuner.place.operators.graph_file import OperatorPlacement
from tuner.place.trace_rows import process_rows
from tuner.planners.scheduling.problem import Run, Schedule

WIDTH = 60
"""Characters of the makespan in a terminal's timeline."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@#"
"""Letters of operators in a terminal's timeline, as many as a file may list; those of captured ones may repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Run of an operator on one device, or transfer between two.

    Attributes:
        kind: `run` or `send`.
        graph: Model that the operator belongs to.
        name: Name of the operator, of fused ones with + between them, or of the sender and the receiver.
        devices: Device of a run; source and target of a transfer.
        links: Kinds of the links of a transfer; empty for a run.
        start_s: Start [s].
        end_s: End [s].
    """

    kind: str
    graph: str
    name: str
    devices: tuple[int, ...]
    links: tuple[str, ...]
    start_s: float
    end_s: float

    def as_json(self) -> dict[str, Any]:
        """Return the event as an object."""
        return {
            "kind": self.kind,
            "graph": self.graph,
            "name": self.name,
            "devices": list(self.devices),
            "links": list(self.links),
            "start_s": self.start_s,
            "end_s": self.end_s,
        }


def events_of(placement: OperatorPlacement, schedule: Schedule) -> tuple[Event, ...]:
    """Return the events of a schedule, in the order of their starts; a split is an event on each device."""
    workload, found = placement.workload, []
    names = placement.operators
    for run in schedule.runs:
        for device, end_s in zip(run.devices, _ends_s(placement, run), strict=True):
            found.append(
                Event(
                    kind="run",
                    graph=placement.graphs[workload.model_of[run.ops[0]]],
                    name="+".join(names[op] for op in run.ops),
                    devices=(device,),
                    links=(),
                    start_s=run.start_s,
                    end_s=end_s,
                )
            )
    for transfer in schedule.transfers:
        source, target = workload.edges[transfer.edge].tolist()
        links = [workload.links[link] for link in transfer.links]
        found.append(
            Event(
                kind="send",
                graph=placement.graphs[workload.model_of[source]],
                name=f"{names[source]} to {names[target]}",
                devices=(links[0].source, links[0].target),
                links=tuple(one.link.kind for one in links),
                start_s=transfer.start_s,
                end_s=transfer.end_s,
            )
        )
    return tuple(sorted(found, key=lambda event: (event.start_s, event.kind != "run", event.devices, event.end_s)))


def _ends_s(placement: OperatorPlacement, run: Run) -> tuple[float, ...]:
    """Return the end of a run on each of its devices [s]: parts of a split end before what gathers them."""
    if len(run.devices) == 1:
        return (run.end_s,)
    of_run = (split for split in placement.workload.splits if (split.op, split.parts) == (run.ops[0], len(run.devices)))
    part_s = next(of_run).part_s
    return (run.end_s, *(run.start_s + part_s[device] for device in run.devices[1:]))


def device_in_words(placement: OperatorPlacement, device: int) -> str:
    """Return a device in words: its number, its host and its kind."""
    return f"{device}: host {placement.host_of[device]} {placement.kind_of[device]}"


def letters_of(placement: OperatorPlacement) -> dict[tuple[str, str], str]:
    """Return the letter of each operator, by graph and name."""
    graphs = [placement.graphs[model] for model in placement.workload.model_of.tolist()]
    return dict(zip(zip(graphs, placement.operators, strict=True), itertools.cycle(LETTERS), strict=False))


def text_timeline(placement: OperatorPlacement, schedule: Schedule) -> list[str]:
    """Return a schedule as lines of text: a row for each device, a letter for each operator, . where it waits."""
    letters = list(letters_of(placement).values())
    held = [
        (device, letters[run.ops[0]], run.start_s, end_s)
        for run in schedule.runs
        for device, end_s in zip(run.devices, _ends_s(placement, run), strict=True)
    ]
    makespan_s = max(run.end_s for run in schedule.runs)
    names = [device_in_words(placement, device) for device in range(placement.workload.num_devices)]
    width = max(map(len, names))
    lines = []
    for device, name in enumerate(names):
        own = [(letter, start_s, end_s) for of, letter, start_s, end_s in held if of == device]
        row = []
        for column in range(WIDTH):
            at_s = makespan_s * (column + 0.5) / WIDTH
            row.append(next((letter for letter, start_s, end_s in own if start_s <= at_s < end_s), "."))
        lines.append(f"{name:<{width}} |{''.join(row)}|")
    lines.append(f"{'':<{width}}  0{f'{predicted(makespan_s)} s':>{WIDTH - 1}}")
    return lines


def chrome_trace(placement: OperatorPlacement, schedule: Schedule) -> str:
    """Write a schedule in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    A process is a host, a thread one of its devices; links have a process of their own, with a thread for each that
    carries something.

    Source: Google, Trace Event Format, complete events ("ph": "X") and metadata events ("ph": "M").
    """
    rows = process_rows(placement.host_of, "links")
    network = max(placement.host_of) + 1
    for device, (host, kind) in enumerate(zip(placement.host_of, placement.kind_of, strict=True)):
        title = f"device {device} ({kind})"
        rows.append({"ph": "M", "name": "thread_name", "pid": host, "tid": device, "args": {"name": title}})
    threads: dict[tuple[int, ...], int] = {}
    for event in events_of(placement, schedule):
        times = {"ts": round(event.start_s * 1e6, 3), "dur": round((event.end_s - event.start_s) * 1e6, 3)}
        title, category = event.name, event.graph
        if event.kind == "run":
            (device,) = event.devices
            pid, tid = placement.host_of[device], device
        else:
            pid = network
            tid = threads.setdefault(event.devices, len(threads))
            title = f"{event.name} over {' and '.join(event.links)}"
        rows.append({"ph": "X", "name": title, "cat": category, "pid": pid, "tid": tid, **times})
    for (source, target), tid in threads.items():
        title = f"device {source} to {target}"
        rows.append({"ph": "M", "name": "thread_name", "pid": network, "tid": tid, "args": {"name": title}})
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)
