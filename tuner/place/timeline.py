"""Timeline of a step as events, as text for terminals, and as a file for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from hardware.rounding import predicted
from tuner.place.search.problem import PlacementProblem
from tuner.place.search.state import State, options_chosen
from tuner.place.trace_rows import process_rows
from tuner.place.workload import EMBEDDINGS, GENERATE, WEIGHTS

WIDTH = 60
"""Characters of the step in a terminal's timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that takes time in a step.

    Attributes:
        kind: `run` of a module, `phase` of its run, or `send`.
        module: Module that runs, or that sends.
        target: Module that receives; empty for runs.
        name: Name of the event.
        start_s: Start [s].
        end_s: End [s].
        cells: Cells that it holds, as bits; 0 for what is sent.
    """

    kind: str
    module: str
    target: str
    name: str
    start_s: float
    end_s: float
    cells: int


def events_of(problem: PlacementProblem, state: State) -> tuple[Event, ...]:
    """Return the events of a placement's step, in the order of their starts."""
    found = [*_runs(problem, state), *_sends(problem, state)]
    return tuple(sorted(found, key=lambda event: (event.start_s, event.kind != "run", event.end_s)))


def _runs(problem: PlacementProblem, state: State) -> Iterator[Event]:
    chosen = options_chosen(problem, state)
    for task, members in enumerate(problem.tasks):
        for module in members:
            unit = problem.unit_of[module]
            option = chosen[unit]
            name, cells = problem.workload.modules[module].name, state.where[unit]
            start_s, end_s = state.start_s[task], state.end_s[task]
            yield Event(kind="run", module=name, target="", name=name, start_s=start_s, end_s=end_s, cells=cells)
            if len(members) > 1:
                continue
            moved_s = option.moves_s[problem.place_in_unit[module]]
            trains = problem.workload.modules[module].job == "train"
            phases = [("load states", moved_s / 2 if trains else moved_s), *option.layout.phases]
            if not option.layout.phases:
                phases.append(("compute", option.times_s[problem.place_in_unit[module]] - moved_s))
            phases.append(("store states", moved_s / 2 if trains else 0.0))
            at_s = start_s
            for phase, seconds in phases:
                if seconds > 0:
                    yield Event(
                        kind="phase",
                        module=name,
                        target="",
                        name=phase,
                        start_s=at_s,
                        end_s=at_s + seconds,
                        cells=cells,
                    )
                    at_s += seconds


def _sends(problem: PlacementProblem, state: State) -> Iterator[Event]:
    chosen = options_chosen(problem, state)
    modules = problem.workload.modules
    for edge in problem.workload.edges:
        source, target = problem.unit_of[edge.source], problem.unit_of[edge.target]
        ends = chosen[source], state.where[source], chosen[target], state.where[target]
        start_s = state.end_s[problem.task_of[edge.source]]
        if edge.sends == WEIGHTS:
            start_s = max(start_s, state.end_s[problem.task_of[edge.target]])
            seconds = problem.weights_s(edge, *ends)
        elif edge.sends == EMBEDDINGS and problem.task_of[edge.source] == problem.task_of[edge.target]:
            continue  # they pass micro-batch after micro-batch
        else:
            seconds = problem.edge_s(edge, *ends)
        if seconds > 0:
            yield Event(
                kind="send",
                module=modules[edge.source].name,
                target=modules[edge.target].name,
                name=edge.sends,
                start_s=start_s,
                end_s=start_s + seconds,
                cells=0,
            )


def devices_in_words(problem: PlacementProblem, cells: int) -> str:
    """Return the devices of some cells in words: `hosts 0-3`, or `host 0 devices 0-3`."""
    parts = []
    whole: list[int] = []
    for host in dict.fromkeys(problem.host_of_cell):
        own = [cell for cell, of in enumerate(problem.host_of_cell) if of == host]
        taken = [at for at, cell in enumerate(own) if cells >> cell & 1]
        if len(taken) == len(own):
            whole.append(host)
        elif taken:
            size = problem.pools[problem.pool_of_cell[own[0]]].devices
            devices = [at * size + one for at in taken for one in range(size)]
            parts.append(f"host {host} devices {_ranges(devices)}")
    named = [f"host{'s' if len(whole) > 1 else ''} {_ranges(whole)}"] if whole else []
    return ", ".join(named + parts)


def _ranges(numbers: list[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def text_timeline(problem: PlacementProblem, state: State, step_time_s: float) -> list[str]:
    """Return the step as lines of text: a row for each set of devices, a letter for each module."""
    modules = [module.name for module in problem.workload.modules]
    letters = {name: chr(ord("A") + at) for at, name in enumerate(modules)}
    runs = [event for event in events_of(problem, state) if event.kind == "run"]
    rows: dict[tuple[str, ...], list[int]] = {}
    for cell in range(problem.num_cells):
        line = tuple(_letter(runs, letters, cell, step_time_s * (column + 0.5) / WIDTH) for column in range(WIDTH))
        rows.setdefault(line, []).append(cell)
    names = [devices_in_words(problem, sum(1 << cell for cell in cells)) for cells in rows.values()]
    width = max(map(len, names))
    lines = [f"{name:<{width}} |{''.join(line)}|" for name, line in zip(names, rows, strict=True)]
    lines.append(f"{'':<{width}}  0{f'{predicted(step_time_s)} s':>{WIDTH - 1}}")
    return [*lines, "  ".join(f"{letter} {name}" for name, letter in letters.items())]


def _letter(runs: list[Event], letters: dict[str, str], cell: int, at_s: float) -> str:
    here = [run for run in runs if run.cells >> cell & 1 and run.start_s <= at_s < run.end_s]
    # modules of a gang on the same cells take turns
    return letters[here[int(at_s * 7919) % len(here)].module] if here else "."


def chrome_trace(problem: PlacementProblem, state: State) -> str:
    """Write the step in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    A process is a host, a thread one part of it; what is sent has a process of its own, with a thread per receiver.

    Source: Google, Trace Event Format, complete events ("ph": "X") and metadata events ("ph": "M").
    """
    rows = process_rows(problem.host_of_cell, "between modules")
    network = max(problem.host_of_cell) + 1
    first = {host: problem.host_of_cell.index(host) for host in problem.host_of_cell}
    for cell, host in enumerate(problem.host_of_cell):
        size = problem.pools[problem.pool_of_cell[cell]].devices
        at = (cell - first[host]) * size
        title = f"device {at}" if size == 1 else f"devices {at}-{at + size - 1}"
        rows.append({"ph": "M", "name": "thread_name", "pid": host, "tid": cell, "args": {"name": title}})
    receivers = {module.name: at for at, module in enumerate(problem.workload.modules)}
    for name, at in receivers.items():
        rows.append({"ph": "M", "name": "thread_name", "pid": network, "tid": at, "args": {"name": f"to {name}"}})
    jobs = {module.name: module.job for module in problem.workload.modules}
    for event in events_of(problem, state):
        if event.kind == "send":
            places = [(network, receivers[event.target])]
            title = f"{event.name} from {event.module}"
        else:
            places = [(host, cell) for cell, host in enumerate(problem.host_of_cell) if event.cells >> cell & 1]
            title = event.name
        category = "send" if event.kind == "send" else jobs[event.module]
        times = {"ts": round(event.start_s * 1e6, 3), "dur": round((event.end_s - event.start_s) * 1e6, 3)}
        rows += [{"ph": "X", "name": title, "cat": category, "pid": pid, "tid": tid, **times} for pid, tid in places]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def at_work_s(problem: PlacementProblem, state: State, step_time_s: float) -> float:
    """Return the share of the devices' time in which some module holds them."""
    runs = [event for event in events_of(problem, state) if event.kind == "run"]
    total = held = 0.0
    for cell, pool in enumerate(problem.pool_of_cell):
        size = problem.pools[pool].devices
        total += size * step_time_s
        spans = {(run.start_s, run.end_s) for run in runs if run.cells >> cell & 1}
        held += size * sum(end_s - start_s for start_s, end_s in spans)
    return held / total if total else 0.0


def makes_tokens(problem: PlacementProblem) -> int:
    """Return the tokens of a step: those that are generated, or else those of the largest module."""
    modules = problem.workload.modules
    made = [
        one.generation.prompts
        * one.generation.responses_per_prompt
        * (one.generation.prompt_tokens + one.generation.response_tokens)
        for one in modules
        if one.job == GENERATE and one.generation
    ]
    return max(made or [one.sequences_per_step * one.training.sequence_length for one in modules])
