"""Output of `meshtune place` for a file of operators."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardware.rounding import predicted
from tuner.cli.options import FOUND_NOTHING
from tuner.terminal.console import print_json, printable
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # this loads numpy
    from collections.abc import Mapping

    from tuner.place.operators.answer import OperatorAnswer


def place_graphs(
    mapping: Mapping[str, Any],
    file: Path | None,
    *,
    time_s: float,
    gap: float,
    workers: int,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Place the operators of a file, and print the answer.

    Args:
        mapping: Contents of the file.
        file: Its path; None if it was written by the command's own options.
        time_s: Longest time of the search [s].
        gap: Gap to the lower bound at which the search ends.
        workers: Number of processes that search together.
        trace: File for the timeline; None to write none.
        as_json: Whether to print one JSON object.
    """
    from hardware.io.output_file import write_output
    from tuner.place.operators.answer import answer_json, check_answer, place_operators
    from tuner.place.operators.graph_file import read_operator_placement
    from tuner.place.operators.timeline import chrome_trace
    from tuner.planners.engine.workers import ProcessWorkers

    placement = read_operator_placement(mapping, file)
    with nullcontext() if workers == 1 else ProcessWorkers(workers) as together:
        answer = place_operators(
            placement, time_s=time_s, gap=gap, workers=together, on_progress=lambda line: typer.echo(line, err=True)
        )
    check_answer(answer)
    if trace is not None and answer.schedule is not None:
        write_output(trace, chrome_trace(placement, answer.schedule) + "\n")
    if as_json:
        print_json(answer_json(answer))
    elif answer.schedule is not None:
        _print_answer(answer)
    else:
        typer.echo(f"No schedule fits: {answer.outcome.known.value}.", err=True)
    if answer.schedule is None:
        raise typer.Exit(FOUND_NOTHING)


def _print_answer(answer: OperatorAnswer) -> None:
    from hardware.device import GIB
    from tuner.place.operators.answer import operators_json, used_bytes
    from tuner.place.operators.timeline import events_of, letters_of, text_timeline

    placement, schedule, outcome = answer.placement, answer.schedule, answer.outcome
    assert schedule is not None, "there is an answer to print"
    assert outcome.best is not None, "a schedule has a cost"
    letters, workload = letters_of(placement), placement.workload
    rows = []
    for one in operators_json(placement, schedule):
        way = f"fused with {', '.join(one['fused_with'])}" if one["fused_with"] else "whole"
        if len(one["devices"]) > 1:
            way = f"split in {len(one['devices'])}"
        devices = ",".join(map(str, one["devices"]))
        name = printable(f"{one['graph']}: {one['operator']}")
        letter = letters[one["graph"], one["operator"]]
        rows.append([f"{one['start_s']:.4g}", f"{one['end_s']:.4g}", devices, way, letter, name])
    print_table(["from [s]", "to [s]", "devices", "runs", "letter", "operator"], rows)
    sends = [event for event in events_of(placement, schedule) if event.kind == "send"]
    for event in sends:
        source, target = event.devices
        links = " and ".join(event.links)
        line = f"{event.name}: device {source} to {target} over {links}, {event.start_s:.4g} to {event.end_s:.4g} s"
        typer.echo(printable(line))
    for line in text_timeline(placement, schedule):
        typer.echo(printable(line))
    used = used_bytes(workload, schedule) / 2**30
    for step in placement.captured:
        typer.echo(
            printable(
                f"Captured {step.graph} ({step.factory}): {step.captured:,} operators, coarsened to {step.operators}; "
                f"{step.flop / 1e12:.4g} TFLOP, {step.state_bytes / GIB:.3g} GiB of parameters, moments and inputs, "
                f"{step.cut_bytes / GIB:.3g} GiB between operators, at most {step.working_bytes / GIB:.3g} GiB "
                "inside of one while it runs."
            )
        )
    typer.echo("Memory [GiB]: " + ", ".join(f"device {device} {size:.3g}" for device, size in enumerate(used)))
    ends_s = schedule.completion_s(workload).tolist()
    if len(placement.graphs) > 1:
        told = (f"{name} {predicted(end_s)} s" for name, end_s in zip(placement.graphs, ends_s, strict=True))
        typer.echo(printable(f"Ends: {', '.join(told)}."))
    proof = "no schedule costs less" if answer.is_proven else f"gap {outcome.gap:.1%}"
    makespan, ends = predicted(answer.makespan_s), predicted(outcome.best.cost)
    typer.echo(
        f"Makespan: {makespan} s predicted; weighted sum of the ends {ends} s, "
        f"lower bound {predicted(outcome.bound)} s ({proof})."
    )
    for baseline in answer.baselines:
        told_of = f"  {baseline.name} ({baseline.meaning}): "
        if baseline.cost_s is None:
            typer.echo(told_of + "nothing was found")
        else:
            gain = baseline.cost_s / outcome.best.cost - 1
            beside = f"the answer is {gain:.1%} faster" if gain >= 0.0005 else "as fast as the answer"
            typer.echo(told_of + f"{predicted(baseline.cost_s)} s, {beside}")
    typer.echo(
        f"Searched {outcome.nodes:,} partial schedules in {answer.before_s + outcome.seconds:.1f} s; "
        f"{outcome.stop.value}."
    )
