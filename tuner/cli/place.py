"""Command `meshtune place`: place several models on one cluster, as whole modules or as operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from hardware.io.errors import ConfigError
from hardware.io.output_file import check_place, write_output
from hardware.rounding import predicted
from tuner.cli import completion as cli_completion
from tuner.cli.options import FOUND_NOTHING, AsJson, check_out, number, whole_number
from tuner.cli.place_operators import place_graphs
from tuner.terminal.console import print_json, printable
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # this loads numpy
    from tuner.place.answer import Answer
    from tuner.place.exports.roles import Export


NO_PLACEMENT = "No placement was found in which all modules fit together; allow more time, more hosts, or fewer rules."


def place(
    file: Annotated[
        Path | None,
        Argument(metavar="FILE", help="Placement file (YAML): a cluster, and modules with their flow or graphs."),
    ] = None,
    jax: Annotated[
        str | None,
        Option(metavar="MODULE:FACTORY", help="In place of a file: factory of a JAX step, as for `plan --jax`."),
    ] = None,
    torch: Annotated[
        str | None, Option(metavar="MODULE:FACTORY", help="In place of a file: factory of a torch module's step.")
    ] = None,
    cluster: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Cluster for --jax or --torch, from the catalog, or a YAML file that describes one. "
            "Default: dgx-a100.",
            autocompletion=cli_completion.clusters,
        ),
    ] = None,
    hosts: Annotated[str | None, Option(metavar="N", help="Number of hosts of that cluster. Default: 1.")] = None,
    most_operators: Annotated[
        str | None,
        Option(
            "--most-operators",
            metavar="N",
            help="Most operators to which the step of --jax or --torch is coarsened. Default: 32.",
        ),
    ] = None,
    time_limit: Annotated[
        str,
        Option("--time-limit", metavar="SECONDS", help="Longest time of the search; the best so far is the answer."),
    ] = "30",
    gap: Annotated[
        str, Option(metavar="SHARE", help="Gap between step time and lower bound at which the search ends.")
    ] = "0.01",
    trace: Annotated[
        Path | None, Option(metavar="OUT", help="Write the step's timeline as a trace for Perfetto.")
    ] = None,
    export: Annotated[
        str | None,
        Option(
            "--export",
            metavar="verl|openrlhf",
            help="Search only placements that this RL framework can launch, and print its arguments.",
        ),
    ] = None,
    workers: Annotated[
        str, Option("--workers", metavar="N", help="Processes that search the schedule of operators together.")
    ] = "1",
    as_json: AsJson = False,
) -> None:
    """Place several models on one cluster: the devices of each, its layout, and when it runs.

    For RL post-training (actor, rollout, critic, reward, reference) and multimodal training (encoders and a language
    model). Step times are predicted; the answer stands beside those of usual placements. A file with `graphs` describes
    models as operators instead: the device of each, and the links over which data travel. So do --jax and --torch with
    the step of a program.
    """
    limit_s, share = number("--time-limit", time_limit, above_zero=True), number("--gap", gap)
    num_workers = whole_number("--workers", workers, 1)
    if trace is not None:
        check_out(trace, "--trace")
        check_place(trace, "--trace")

    from hardware.io.config_file import read_mapping

    own = {"--cluster": cluster, "--hosts": hosts, "--most-operators": most_operators}
    _check_source(file, jax, torch, own)
    mapping = _captured_mapping(jax, torch, own) if file is None else read_mapping(file)
    if file is None or _holds_operators(mapping, file):
        if export is not None:
            raise ConfigError("is for files of modules; no framework runs operators so", key="--export", value=export)
        with _named_options(file):
            place_graphs(mapping, file, time_s=limit_s, gap=share, workers=num_workers, trace=trace, as_json=as_json)
        return
    if num_workers > 1:
        raise ConfigError("is for files of operators; modules are placed by one", key="--workers", value=workers)

    from tuner.place.placing import place_file, placed_json
    from tuner.place.timeline import chrome_trace

    answer, exported = place_file(
        file,
        time_s=limit_s,
        gap=share,
        framework=export,
        option="--export",
        on_progress=lambda line: typer.echo(line, err=True),
    )
    if trace is not None and answer.state is not None:
        write_output(trace, chrome_trace(answer.problem, answer.state) + "\n", option="--trace")
    if as_json:
        print_json(placed_json(answer, exported))
    else:
        _print_placed(answer, exported)
    if answer.state is None:
        raise typer.Exit(FOUND_NOTHING)


def _print_placed(answer: Answer, exported: Export | None) -> None:
    """Print the arguments of a framework, or else the answer for people."""
    if exported is not None:
        for line in (*exported.lines, *(f"# {note}" for note in exported.notes)):
            typer.echo(printable(line))
    elif answer.state is not None:
        _print_answer(answer)
    else:
        typer.echo(NO_PLACEMENT, err=True)


def _check_source(file: Path | None, jax: str | None, torch: str | None, own: Mapping[str, str | None]) -> None:
    """Check that there is a file or one of `--jax` and `--torch`, and `own` options of these two only beside them."""
    given = {"FILE": file, "--jax": jax, "--torch": torch}
    if sum(value is not None for value in given.values()) != 1:
        said = " and ".join(name for name, value in given.items() if value is not None) or "none"
        nearest = f"this one has {said}"
        raise ConfigError("needs a placement file, --jax or --torch alone", key="place", nearest=nearest)
    for option, value in own.items():
        if file is not None and value is not None:
            raise ConfigError("is for --jax or --torch; a file says it itself", key=option, value=value)


def _captured_mapping(jax: str | None, torch: str | None, own: Mapping[str, str | None]) -> Mapping[str, Any]:
    """Return what a placement file would say for the step of a factory.

    Args:
        jax: Value of `--jax`.
        torch: Value of `--torch`.
        own: Values of the options that belong to these two.
    """
    key = "jax" if jax is not None else "torch"
    graph: dict[str, Any] = {key: jax or torch}
    if own["--most-operators"] is not None:
        graph["most_operators"] = whole_number("--most-operators", own["--most-operators"], 2)
    named = own["--cluster"] or "dgx-a100"
    is_file = named.endswith((".yaml", ".yml"))
    if is_file and own["--hosts"] is not None:
        raise ConfigError("is not for a cluster's file, which says it itself", key="--hosts", value=own["--hosts"])
    count = 1 if own["--hosts"] is None else whole_number("--hosts", own["--hosts"], 1)
    cluster = {"file": named} if is_file else {"name": named, "hosts": count}
    return {"name": jax or torch, "cluster": cluster, "graphs": {"step": graph}}


@contextmanager
def _named_options(file: Path | None) -> Iterator[None]:
    """Name the command's options in messages, in place of the keys of a file that nobody wrote."""
    options = {
        "graphs.step.jax": "--jax",
        "graphs.step.torch": "--torch",
        "graphs.step.most_operators": "--most-operators",
        "cluster.hosts": "--hosts",
        "cluster.name": "--cluster",
        "cluster": "--cluster",
    }
    try:
        yield
    except ConfigError as error:
        if file is not None:
            raise
        key = options.get(error.key or "", error.key)
        raise ConfigError(error.rule, key=key, value=error.value, nearest=error.nearest, file=error.file) from None


def _holds_operators(mapping: Mapping[str, Any], file: Path) -> bool:
    """Return whether a file describes operators rather than modules."""
    if ("graphs" in mapping) == ("modules" in mapping):
        rule = "has either `modules`, which are jobs of whole models, or `graphs`, which are operators"
        raise ConfigError(rule, nearest="this one has " + ("both" if "graphs" in mapping else "none"), file=str(file))
    return "graphs" in mapping


def _print_answer(answer: Answer) -> None:
    from tuner.place.answer import is_proven, module_json
    from tuner.place.timeline import at_work_s, makes_tokens, text_timeline

    problem, state = answer.problem, answer.state
    assert state is not None, "there is an answer to print"
    rows = []
    modules = [module_json(problem, state, at) for at in range(len(problem.unit_of))]
    for one in sorted(modules, key=lambda one: (one["start_s"], one["end_s"])):
        layout = one["layout"]
        degrees = ",".join(f"{key}={value}" for key, value in layout.items() if key != "recompute" and value != 1)
        recompute = f",recompute={layout['recompute']}" if layout["recompute"] != "none" else ""
        rows.append(
            [
                f"{one['start_s']:.4g}",
                f"{one['end_s']:.4g}",
                str(one["devices"]),
                one["where"],
                f"{one['busy_bytes'] / 2**30:.0f}",
                "leave" if one["states_leave"] else "stay",
                (degrees or "1 device") + recompute,
                printable(f"{one['name']} ({one['job']} {one['model']})"),
            ]
        )
    heads = ["from [s]", "to [s]", "devices", "where", "peak [GiB]", "states", "layout", "module"]
    print_table(heads, rows)
    for line in text_timeline(problem, state, answer.step_time_s):
        typer.echo(printable(line))
    outcome = answer.outcome
    proof = "the best of the family" if is_proven(answer) else f"gap {outcome.gap:.1%}"
    typer.echo(
        f"Step: {predicted(answer.step_time_s)} s predicted, lower bound {predicted(outcome.bound)} s ({proof}), "
        f"{predicted(makes_tokens(problem) / answer.step_time_s)} tokens/s, "
        f"devices held {at_work_s(problem, state, answer.step_time_s):.0%} of the step."
    )
    for baseline in answer.baselines:
        told = f"  {baseline.name} ({printable(baseline.meaning)}): "
        if baseline.step_time_s is None:
            typer.echo(told + ("nothing was found in its time" if baseline.fits else "does not fit"))
        else:
            gain = baseline.step_time_s / answer.step_time_s - 1
            beside = f"the answer is {gain:.1%} faster" if gain >= 0.0005 else "as fast as the answer"
            typer.echo(told + f"{predicted(baseline.step_time_s)} s, {beside}")
    typer.echo(f"Searched {outcome.nodes:,} partial placements in {answer.search_s:.1f} s; {outcome.stop.value}.")
