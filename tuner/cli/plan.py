"""Command `meshtune plan`: shard one training step over a device mesh and show its communication."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from hardware.io.errors import ConfigError, did_you_mean
from tuner.cli import completion as cli_completion
from tuner.cli.options import AsJson, Overrides, launchable_config, load, number, whole_number, write_file
from tuner.terminal.console import config_in_words, print_json, printable, warn

if TYPE_CHECKING:  # these load numpy
    from costmodels.sharding.device_mesh import DeviceMesh
    from costmodels.sharding.frontends.factories import JaxStep
    from costmodels.sharding.graph import Graph
    from tuner.planners.engine.workers import AbstractWorkers
    from tuner.planners.judged import Verdict
    from tuner.planners.planning import Planned, PlannerOptions
    from tuner.planners.sharding.pins import Pin
    from tuner.plans.plan_export import PlanExport, PlanSource

MOST_WORKERS = 5
"""Largest number of processes that plan one step: one for each of TOAST's search trees."""


def plan(
    study: Annotated[Path | None, Argument(metavar="STUDY", help="Study file (YAML); requires --config.")] = None,
    chosen: Annotated[
        str | None, Option("--config", metavar="dp=4,tp=2,...", help="Configuration whose degrees define the mesh.")
    ] = None,
    jax: Annotated[
        str | None,
        Option(
            metavar="MODULE:FACTORY", help="Factory of a JAX step; it returns function, abstract arguments[, donated]."
        ),
    ] = None,
    torch: Annotated[
        str | None,
        Option(metavar="MODULE:FACTORY", help="Factory of a torch module's step; it returns module, inputs[, loss]."),
    ] = None,
    stablehlo: Annotated[
        Path | None,
        Option(metavar="FILE", help="StableHLO module of a step: text, bytecode or a file of jax.export. Needs JAX."),
    ] = None,
    mesh: Annotated[
        str | None, Option(metavar="data=2,model=4", help="Mesh for --jax, --torch or --stablehlo, slowest axis first.")
    ] = None,
    cluster: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Cluster of that mesh, from the catalog. Default: hosts of the device of --judge, or dgx-a100.",
            autocompletion=cli_completion.clusters,
        ),
    ] = None,
    hosts: Annotated[str, Option(metavar="N", help="Number of hosts of that cluster.")] = "1",
    layers: Annotated[
        str | None,
        Option(metavar="N", help="Number of layers to plan; by default the fewest that include every kind of layer."),
    ] = None,
    prediction: Annotated[
        bool, Option("--prediction", help="Also plan the model's modules of multi-token prediction.")
    ] = False,
    planner: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Planner: recursive (D-Rec), descent (improves that plan) or toast (searches over colours of dims).",
            autocompletion=cli_completion.planners,
        ),
    ] = "descent",
    order: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Order in which operators are visited: price, weight, topological, reverse; best tries all.",
        ),
    ] = "best",
    whole_axes: Annotated[
        bool,
        Option("--whole-axes", help="Let each axis cut only one dim of an operator; never split an axis between dims."),
    ] = False,
    pin: Annotated[
        list[str] | None,
        Option(
            metavar="op=*.up,dim=ffn,axis=tp",
            help="Pin a dim of operators to an axis, or to a number of parts with `ways=`; `weight_s=` makes it soft. "
            "An unnamed dim is addressed as `operand1.0` or `result.0`.",
        ),
    ] = None,
    memory_gib: Annotated[
        str | None,
        Option(
            "--memory-gib",
            metavar="N|device",
            help="Memory limit per device for the planned arrays; `device` is its whole memory. No limit by default.",
        ),
    ] = None,
    diagnose: Annotated[bool, Option("--diagnose", help="Also compute the cost of slightly different pins.")] = False,
    overlap: Annotated[
        bool | None,
        Option(
            "--overlap/--no-overlap",
            help="Whether collectives run beside the compute; the default is what XLA does with JAX functions.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        str | None,
        Option(
            metavar="DEVICE",
            help="With --jax or --stablehlo: let XLA's compiler for this device, which needs none, decide between the "
            "last candidates by its schedule and memory.",
        ),
    ] = None,
    prove: Annotated[
        str | None,
        Option(metavar="SECONDS", help="Let HiGHS search this long for a proven lower bound on the step time."),
    ] = None,
    export: Annotated[
        str | None,
        Option(
            metavar="TARGET",
            help="Also export the plan to jax, shardy, torch or megatron; see --out.",
            autocompletion=cli_completion.plan_forms,
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="File for --export; without it, the terminal shows an excerpt.")] = None,
    explain: Annotated[
        str | None, Option(metavar="colours", help="Also show the dims that must be cut together, and their conflicts.")
    ] = None,
    drawing: Annotated[
        Path | None, Option(metavar="FILE", help="With --explain: Graphviz file to write, with the dims in conflict.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Shard one training step over a device mesh: choose the dims that every axis cuts, and show the communication."""
    from tuner.planners.judged import leaves_layouts
    from tuner.plans.plan_export import PlanSource, named_lines
    from tuner.plans.sharding_plans import in_lines, judged_json, judged_lines, of_candidate, plan_json, shardings_table

    options = replace(_parse_options(planner, order, whole_axes, pin or [], diagnose=diagnose), overlap=overlap)
    _check_export(export, out)
    _check_explain(explain, drawing)
    source = _Source(jax=jax, torch=torch, stablehlo=stablehlo)
    _check_judge(judge, source, export)
    candidate = None
    _check_steps({"a study file": study, "--jax": jax, "--torch": torch, "--stablehlo": stablehlo})
    if study is None:
        named = cluster or judge or "dgx-a100"
        graph, found_mesh = _read_function(source, mesh, named, whole_number("--hosts", hosts, 1))
        title = f"{graph.name} on {found_mesh.in_words} of {found_mesh.cluster.name}"
    else:
        if chosen is None:
            raise ConfigError("is missing", key="--config", nearest="for example --config dp=4,tp=2")
        request = load(study, overrides)
        wanted, _ = launchable_config(request, chosen)
        candidate = (request.problem.setting, wanted)
        num_layers = None if layers is None else whole_number("--layers", layers, 1)
        graph, found_mesh = of_candidate(request.problem.setting, wanted, num_layers, has_prediction=prediction)
        title = f"{config_in_words(request.problem, wanted)}: {graph.name}, one micro-batch on {found_mesh.in_words}"
    prove_s = None if prove is None else number("--prove", prove, above_zero=True)
    options = replace(options, memory_bytes=_parse_memory_bytes(memory_gib, found_mesh), prove_s=prove_s)
    found, verdicts = _search(graph, found_mesh, options, source, judge)
    payload, lines = plan_json(found), [title, *in_lines(found)]
    if verdicts:
        payload["judged"] = judged_json(verdicts)
        lines += judged_lines(verdicts, found_mesh.cluster.devices[0].name)
    lines.append("Shardings of the step's inputs:")
    lines += named_lines([*shardings_table(found).items()])
    explained = _explain_dims(graph, drawing) if explain is not None else None
    planned = PlanSource(plan=found.plan, candidate=candidate, is_propagated=leaves_layouts(verdicts))
    exported = _export(export, out, planned, source)
    if exported is not None:
        payload["export"] = exported.content
    if explained is not None:
        payload["explained"] = explained[0]
        lines += explained[1]
    lines += exported.lines if exported is not None else ()
    if as_json:
        print_json(payload)
    else:
        for line in lines:
            typer.echo(printable(line))
    warn(exported.notes if exported is not None else ())


def _check_steps(steps: Mapping[str, object]) -> None:
    """Refuse a command with no step, or with several."""
    given = [name for name, value in steps.items() if value is not None]
    if len(given) == 1:
        return
    names = list(steps)
    several = f"{', '.join(names[:-1])} or {names[-1]}"
    rule = f"needs {several}" + (" alone" if given else "")
    if len(given) == 2:
        rule = f"needs {' or '.join(given)}, not both"
    raise ConfigError(rule, key="plan", nearest="meshtune plan STUDY --config")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Step that is no study's candidate: a factory of JAX or of torch, or a file with a StableHLO module."""

    jax: str | None
    torch: str | None
    stablehlo: Path | None

    @property
    def is_jax(self) -> bool:
        """Whether the step is a function that JAX can trace and XLA can compile."""
        return self.jax is not None or self.stablehlo is not None

    @contextmanager
    def open_step(self) -> Iterator[JaxStep]:
        """Give the step's function, which may be traced, compiled and lowered in this context.

        Raises:
            ConfigError: It cannot be loaded, or JAX is missing.
        """
        from costmodels.sharding.frontends.factories import check_installed, step_of_factory
        from costmodels.sharding.frontends.users_code import users_code

        if self.jax is not None:
            with users_code(self.jax, option="--jax"):
                yield step_of_factory(self.jax)
            return
        assert self.stablehlo is not None, "the step is a function"
        check_installed("jax", option="--stablehlo", value=str(self.stablehlo))
        from costmodels.sharding.frontends.jax.stablehlo.reading import read_stablehlo

        step = read_stablehlo(self.stablehlo)
        with step.types():
            yield step.function, step.arguments, step.donated


@contextmanager
def _start_workers(graph: Graph, options: PlannerOptions) -> Iterator[AbstractWorkers | None]:
    """Start processes for TOAST's search trees if the graph is large and the machine has several cores."""
    from tuner.planners.engine.workers import ProcessWorkers
    from tuner.planners.planning import MANY_OPS

    cores = os.cpu_count() or 1
    if options.planner != "toast" or len(graph.ops) <= MANY_OPS or cores == 1:
        yield None
        return
    with ProcessWorkers(min(cores, MOST_WORKERS)) as workers:
        yield workers


def _name_options(error: ConfigError) -> ConfigError:
    """Translate a planner's error: name the command's options instead of the planner's own keys."""
    from tuner.planners.judged import KEY as JUDGE_KEY
    from tuner.planners.sharding.manumatic import MEMORY_KEY
    from tuner.planners.sharding.pins import KEY

    where = (error.key or "").replace(KEY, "--pin").replace(MEMORY_KEY, "--memory-gib")
    if where == JUDGE_KEY:
        where = f"--{JUDGE_KEY}"
    rule = error.rule.replace(f"{KEY}[", "--pin[")
    return ConfigError(rule, key=where, value=error.value, nearest=error.nearest)


def _parse_memory_bytes(text: str | None, mesh: DeviceMesh) -> float | None:
    """Parse the memory limit of `--memory-gib` [bytes]."""
    from hardware.device import GIB

    if text is None:
        return None
    if text == "device":
        return float(min(device.memory_bytes for device in mesh.cluster.devices))
    try:
        return number("--memory-gib", text, above_zero=True) * GIB
    except ConfigError as error:
        raise ConfigError(f"{error.rule}, or device", key=error.key, value=error.value) from None


def _parse_options(planner: str, order: str, whole_axes: bool, pins: list[str], *, diagnose: bool) -> PlannerOptions:
    from tuner.planners.planning import ORDER_CHOICES, PLANNERS, PlannerOptions

    planners = [choice for choice in PLANNERS if choice == planner]
    if not planners:
        raise ConfigError("is no planner", key="--planner", value=planner, nearest=did_you_mean(planner, PLANNERS))
    orders = [choice for choice in ORDER_CHOICES if choice == order]
    if not orders:
        raise ConfigError("is no order", key="--order", value=order, nearest=did_you_mean(order, ORDER_CHOICES))
    if diagnose and not pins:
        raise ConfigError("needs --pin", key="--diagnose", nearest="for example --pin op=*.up,dim=ffn,axis=tp")
    return PlannerOptions(
        planner=planners[0],
        order=orders[0],
        whole_axes=whole_axes,
        pins=tuple(_parse_pin(text) for text in pins),
        diagnose=diagnose,
    )


def _parse_pin(text: str) -> Pin:
    """Parse a pin such as `op=*.up,dim=ffn,axis=tp`."""
    from tuner.planners.sharding.pins import Pin

    keys = ("op", "dim", "axis", "ways", "weight_s")
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in keys or not equals or not value:
            raise ConfigError(
                f"must be {', '.join(keys)} with values",
                key="--pin",
                value=text,
                nearest="for example op=*.dense_mlp.up,dim=ffn,axis=tp",
            )
        values[name] = value
    if "op" not in values or "dim" not in values:
        raise ConfigError("lacks op or dim", key="--pin", value=text, nearest="for example op=*.up,dim=ffn,axis=tp")
    if "ways" in values:
        values["ways"] = whole_number("--pin ways", values["ways"], 1)
    if "weight_s" in values:
        values["weight_s"] = number("--pin weight_s", values["weight_s"])
    return Pin(**values)


def _read_function(source: _Source, mesh: str | None, cluster: str, hosts: int) -> tuple[Graph, DeviceMesh]:
    from costmodels.sharding.device_mesh import mesh_of
    from costmodels.sharding.frontends.factories import graph_of_torch_factory
    from hardware.cluster_file import find_cluster

    if mesh is None:
        raise ConfigError("is missing", key="--mesh", nearest="for example --mesh data=2,model=4")
    found_mesh = mesh_of(mesh, find_cluster(cluster, hosts))
    if source.torch is not None:
        return graph_of_torch_factory(source.torch), found_mesh
    with source.open_step() as (function, arguments, donated):
        from costmodels.sharding.frontends.jax.graph import graph_of_jax

        return graph_of_jax(function, *arguments, donated=donated), found_mesh


def _check_judge(judge: str | None, source: _Source, export: str | None) -> None:
    """Refuse a judge of what XLA does not compile, and let JAX load its compiler where there is no GPU."""
    from tuner.planners.judged import find_judge

    if judge is None:
        return
    try:
        find_judge(judge)
    except ConfigError as error:
        raise _name_options(error) from None
    if not source.is_jax:
        nearest = "XLA compiles no other programs"
        raise ConfigError("needs --jax or --stablehlo", key="--judge", value=judge, nearest=nearest)
    if export not in (None, "jax", "shardy"):
        nearest = "--export jax or shardy"
        raise ConfigError(f"chooses plans for XLA, not for {export}", key="--judge", value=judge, nearest=nearest)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _search(
    graph: Graph, mesh: DeviceMesh, options: PlannerOptions, source: _Source, judge: str | None
) -> tuple[Planned, tuple[Verdict, ...]]:
    """Plan a graph, or else a JAX function, for which XLA's compiler decides between the last candidates."""
    from tuner.planners.planning import plan_graph

    try:
        if judge is None:
            with _start_workers(graph, options) as workers:
                return plan_graph(graph, mesh, options, workers=workers), ()
        from tuner.planners import plan_jax

        with source.open_step() as (function, arguments, donated):
            plan = plan_jax(function, *arguments, mesh=mesh, donated=donated, options=options, judge=judge)
        return plan.planned, plan.judged
    except ConfigError as error:
        raise _name_options(error) from None


def _check_explain(explain: str | None, drawing: Path | None) -> None:
    if explain not in (None, "colours"):
        raise ConfigError("is no known explanation", key="--explain", value=explain, nearest="colours")
    if drawing is not None and explain is None:
        raise ConfigError("needs --explain", key="--drawing", value=str(drawing), nearest="--explain colours")


def _explain_dims(graph: Graph, out: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return the colours of a graph's dims for JSON and as lines, and draw their conflicts to the file `out`."""
    from tuner.planners.toast.colour_report import drawing, report_json, report_lines
    from tuner.planners.toast.compatibility import compatibility
    from tuner.planners.toast.named_dims import named_dims

    found = compatibility(named_dims(graph))
    lines = report_lines(found)
    if out is not None:
        write_file(out, drawing(found))
        lines.append(f"wrote {out}")
    return report_json(found), lines


def _check_export(export: str | None, out: Path | None) -> None:
    """Refuse an invalid `--export` before any planning."""
    from tuner.plans.plan_export import find_plan_exporter

    if export is not None:
        find_plan_exporter(export)
    elif out is not None:
        raise ConfigError("needs --export", key="--out", value=str(out), nearest="for example --export jax")


def _export(export: str | None, out: Path | None, planned: PlanSource, source: _Source) -> PlanExport | None:
    from tuner.plans.plan_export import export_plan

    if export is None:
        return None
    if export in ("jax", "shardy") and source.is_jax:
        from costmodels.sharding.exports.jax_apply import outputs_of
        from costmodels.sharding.exports.jax_shardy import annotate_stablehlo
        from costmodels.sharding.frontends.jax.program import trace_function

        with source.open_step() as (function, arguments, donated):
            program = trace_function(function, *arguments, donated=donated)
            text = None
            if export == "shardy":
                text = annotate_stablehlo(function, program, planned.plan, is_propagated=planned.is_propagated)
        planned = replace(planned, outputs=outputs_of(program), stablehlo=text)
    exported = export_plan(export, planned)
    if out is None:
        return exported
    write_file(out, exported.text)
    return replace(exported, lines=(f"wrote {out}",))
