"""Commands that run no trial: space, predict, simulate and rank. All but space answer by what trials taught."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hardware.io.errors import ConfigError
from hardware.rounding import by_source, predicted
from tuner.cli.costs import load_with_prices, parse_share, rank_costs
from tuner.cli.options import (
    CURRENT,
    FOUND_NOTHING,
    AsJson,
    At,
    ConfigOrCurrent,
    Network,
    Overrides,
    Storage,
    StudyFile,
    at_time,
    check_out,
    launchable_config,
    load,
    taught_study,
    tell_basis,
    whole_number,
    with_plans,
)
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import (
    LAYOUT,
    NOTHING_WORKS,
    config_in_words,
    hosts_in_words,
    in_words,
    layout_columns,
    print_json,
    print_knobs,
    print_reasons,
    print_simulation,
    printable,
    speed_in_words,
    tell_columns,
    warn,
)
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # these load numpy
    from tuner.answers.basis import Basis
    from tuner.forecast.prepared import Prepared
    from tuner.forecast.ranked import Ranked
    from tuner.forecast.sizes import Size
    from tuner.study_file.request import StudyRequest
    from tuner.subject.problem import Problem

LEARNED = "learned"
"""Source of a step time that trials of other candidates taught."""


def space(
    study: StudyFile,
    list_configs: Annotated[bool, Option("--list", help="Print every candidate.")] = False,
    why: Annotated[
        str | None, Option(metavar="pp=8,tp=3,...", help="Explain every rule that excludes this configuration.")
    ] = None,
    knobs: Annotated[
        bool, Option("--knobs", help="List the knobs of the study and of its framework, and which may pay.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Count the configurations that can work, and explain why the others cannot."""
    from costmodels.job.parallel_config import parse_config
    from tuner.forecast.prepared import Prepared
    from tuner.forecast.stored_subject import restore_subject

    request = load(study, overrides)
    chosen = None if why is None else parse_config(why, request.problem.subject.defaults, option="--why")
    restore_subject(request, lambda: StoredStudies(request.storage).look(request.name))
    found = Prepared(request=request, problem=request.problem).space
    if chosen is None:
        warn(found.warnings)
    payload: dict[str, Any] = {"grid": found.num_before_memory, "feasible": len(found.grid), "removed": found.removed}
    if knobs:
        from tuner.answers.knob_list import knob_rows

        payload["knobs"] = knob_rows(request)
    configs = [found.grid.values(position) for position in range(len(found.grid))] if list_configs else []
    reasons = (
        request.problem.subject.reasons_against(request.problem.options, chosen, found) if chosen is not None else {}
    )
    if as_json:
        listed = {"configs": configs} if list_configs else {}
        told = {"config": chosen.values(request.problem.dimensions), "reasons": reasons} if chosen is not None else {}
        print_json(payload | listed | told)
    else:
        for values in configs:
            typer.echo(in_words(values))
        if chosen is not None:
            print_reasons(request.problem, chosen, reasons)
        elif knobs:
            print_knobs(payload["knobs"])
        elif not list_configs:
            for line in request.problem.subject.space_lines(request.problem.options, found):
                typer.echo(line)
    if chosen is None and not len(found.grid):
        raise typer.Exit(FOUND_NOTHING)


def predict(
    study: StudyFile,
    chosen: ConfigOrCurrent = CURRENT,
    at: At = None,
    network: Network = None,
    plan: Annotated[bool, Option("--plan", help="Show how the layers are sharded, and their communication.")] = False,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Tell step time and memory of one configuration, inside the search space or outside it.

    They are what the study's trials measured or taught, and predicted by the cost model without trials.
    """
    from tuner.answers.predictions import predict_taught
    from tuner.search.step_draws import SLOWER, slower_in_words

    own = load(study, overrides, storage)
    request, missing = at_time(own, at, network)
    wanted, broken = launchable_config(request, chosen, missing)
    warn(broken)
    prepared = with_plans(request, StoredStudies(request.storage), wanted)
    _, basis = taught_study(own)
    payload = predict_taught(prepared.problem, wanted, basis, is_elsewhere=at is not None)
    if plan:
        from tuner.forecast.planned_candidates import by_hand

        payload["plan"] = payload.get("plan") or by_hand(prepared.problem, wanted)
    if as_json:
        from tuner.forecast.stages import stages_json

        print_json(payload | stages_json(prepared.problem, wanted))
        return
    of_cost_model = payload["predicted"]
    typer.echo(f"{'Predicted' if of_cost_model is None else 'Step'} for {config_in_words(prepared.problem, wanted)}")
    typer.echo(speed_in_words(payload) + ("" if of_cost_model is None else f" ({_source_in_words(payload)})"))
    if of_cost_model is not None:
        low_s, high_s = payload["step_time_range_s"]
        slower = slower_in_words(payload[SLOWER])
        typer.echo(f"  {predicted(low_s)} to {predicted(high_s)} s with probability 95%{slower}")
        typer.echo(f"  the cost model alone predicts {predicted(of_cost_model['step_time_s'])} s, of which:")
    elif "step_time_range_s" in payload:
        _print_step_range(payload)
    predicted_s = (of_cost_model or payload)["step_time_s"]
    for line in prepared.problem.subject.part_lines(payload["breakdown_s"], predicted_s):
        typer.echo(line)
    _print_peak(prepared.problem, payload)
    if payload.get("peak_memory_log_error"):
        low_gib, high_gib = (size / 2**30 for size in payload["peak_memory_range_bytes"])
        typer.echo(
            f"  {low_gib:.1f} to {high_gib:.1f} GiB with probability 95%; "
            f"probability of fit {payload['fit_probability']:.2f}"
        )
    if of_cost_model is not None:
        typer.echo(f"  the cost model alone predicts {of_cost_model['peak_memory_bytes'] / 2**30:.1f} GiB, of which:")
    _print_memory_parts(payload)
    if plan:
        from tuner.plans.layer_plans import plan_lines

        for line in plan_lines(payload["plan"]):
            typer.echo(printable(line))
    untaught = basis.taught is not None and of_cost_model is None
    tell_basis(basis, "they say nothing of this setting, which is predicted" if untaught else "")


def _source_in_words(payload: dict[str, Any]) -> str:
    """Return where a step time comes from that trials have taught."""
    return (
        payload["outcome"]
        if payload["source"] != LEARNED
        else "learned from other trials" + (f"; it {payload['outcome']}" if payload["outcome"] else "")
    )


def _print_step_range(payload: dict[str, Any]) -> None:
    """Print the range of a predicted step time, and what makes it wide."""
    low_s, high_s = payload["step_time_range_s"]
    widening = {f"the constant {name}": effect for name, effect in payload["step_time_from_constants"].items()}
    if payload["step_time_from_cluster"]:
        widening["a cluster that no fit has seen"] = payload["step_time_from_cluster"]
    most = sorted(widening.items(), key=lambda each: -each[1])[:2]
    leading = " and ".join(f"{name} ({effect:.1%})" for name, effect in most)
    reasons = f", mostly for {leading}" if leading else ""
    typer.echo(f"  {predicted(low_s)} to {predicted(high_s)} s with probability 95%{reasons}")
    typer.echo(f"  {predicted(payload['unnamed_step_time_s'])} s under `runtime: unknown`, of which nothing is fitted")


def _print_peak(problem: Problem, payload: dict[str, Any]) -> None:
    spare = payload.get("outcome") or f"{problem.options.memory_headroom:.0%} must stay free"
    fits = f"fits ({spare})" if payload["fits"] else f"DOES NOT FIT ({spare})"
    capacity = payload["memory_capacity_bytes"]
    typer.echo(f"{payload['peak_memory_bytes'] / 2**30:.1f} GiB of {capacity / 2**30:.1f} GiB per device: {fits}")


def _print_memory_parts(payload: dict[str, Any]) -> None:
    for part, size in payload["memory_bytes"].items():
        if size:
            typer.echo(f"  {part:<13} {size / 2**30:10.2f} GiB")


def simulate(
    study: StudyFile,
    chosen: ConfigOrCurrent = CURRENT,
    schedule: Annotated[str, Option(metavar="NAME", help="Pipeline schedule: 1f1b, gpipe, zero-bubble.")] = "1f1b",
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Perfetto trace to write; compressed if the name ends in .gz.")
    ] = None,
    at: At = None,
    network: Network = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one step of one configuration, pass by pass, and show the timeline of every pipeline stage.

    The simulation is the cost model's; beside it stands what the study's trials measured or taught of the step. The
    trace can be opened in ui.perfetto.dev.
    """
    from tuner.answers.predictions import predict_taught
    from tuner.forecast.simulation import simulate_candidate, simulation_json, write_trace

    if trace is not None:
        check_out(trace, "--trace")
    own = load(study, overrides, storage)
    request, missing = at_time(own, at, network)
    wanted, broken = launchable_config(request, chosen, missing)
    prepared = with_plans(request, StoredStudies(request.storage), wanted)
    _, basis = taught_study(own)
    told = predict_taught(prepared.problem, wanted, basis, is_elsewhere=at is not None)
    simulation = simulate_candidate(prepared.problem, wanted, schedule)
    payload = simulation_json(prepared.problem, wanted, schedule, simulation)
    is_taught = told["predicted"] is not None
    payload |= basis.as_json() | {"taught": {key: told[key] for key in _TOLD} if is_taught else None}
    if trace is not None:
        write_trace(simulation, trace)
        payload["trace"] = str(trace)
    warn(broken)
    if as_json:
        print_json(payload)
        return
    typer.echo(f"Simulated for {config_in_words(prepared.problem, wanted)}, {schedule}")
    print_simulation(simulation, payload)
    _print_peak(prepared.problem, told if is_taught else payload)
    _print_memory_parts(payload)
    if is_taught:
        ratio = told["step_time_s"] / payload["step_time_s"]
        typer.echo(f"{speed_in_words(told)} ({_source_in_words(told)}): {ratio:.3g} times the simulated step")
    untaught = basis.taught is not None and not is_taught
    tell_basis(basis, "they say nothing of this setting, which is simulated" if untaught else "")
    if trace is not None:
        typer.echo(f"wrote {printable(str(trace))}; ui.perfetto.dev opens it", err=True)


_TOLD = ("step_time_s", "step_time_range_s", "slower_probability", "source", "outcome", "peak_memory_bytes", "fits")
"""Keys of what trials taught of a simulated step."""


def rank(
    study: StudyFile,
    top: Annotated[str | None, Option(metavar="K", help="Number of configurations to print; 10 by default.")] = None,
    hosts: Annotated[
        str | None,
        Option(
            metavar="2,4,8,...",
            help="Print the best configuration for each of these numbers of hosts instead; 4..64 stands for both ends "
            "and the powers of two between.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        Option(
            metavar="N",
            help="Compare days, cost and energy of a whole training on so many tokens (1e12, 300B, 15T) for each size "
            "of each cluster instead.",
        ),
    ] = None,
    clusters: Annotated[
        str | None,
        Option(
            metavar="NAME,...",
            help="Clusters of the catalog, or devices, to compare with --tokens; by default the study's own.",
        ),
    ] = None,
    prices: Annotated[
        Path | None, Option(metavar="FILE", help="Prices of device-hours (YAML); replaces the study's cost.prices.")
    ] = None,
    max_days: Annotated[str | None, Option(metavar="DAYS", help="Longest training; replaces limits.max_days.")] = None,
    max_cost: Annotated[
        str | None, Option(metavar="AMOUNT", help="Highest cost of the training; replaces limits.max_cost.")
    ] = None,
    free_memory: Annotated[
        str | None,
        Option(metavar="SHARE", help="Share of memory that must stay free, as 8%; replaces limits.free_memory."),
    ] = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="HTML page to draw the comparison of clusters on.")] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the fastest configurations by what the study's trials measured and taught; no trial is run.

    Beside each step time stand the range that holds it with a probability of 95%, the speed-up over the current
    configuration (without one, over the baseline or else the first), MFU, memory and the probability to fit, and what
    takes most of the step: compute, memory traffic, network, host, bubble or overhead. Once trials have ended, the
    range is that of a configuration that behaves like those measured, and `beyond` the chance that it is slower.

    With --tokens, print which clusters and sizes train the model when and for how much, and which of them no other
    beats in both.
    """
    num_rows = 10 if top is None else whole_number("--top", top, 1)
    if hosts is not None and top is not None:
        raise ConfigError(
            "cannot be combined with --hosts, which prints one configuration per size", key="--top", value=top
        )
    changes = list(overrides or [])
    if free_memory is not None:
        changes.append(f"limits.free_memory={parse_share('--free-memory', free_memory)}")
    config = load_with_prices(study, changes, storage, prices)
    if any(value is not None for value in (tokens, clusters, prices, max_days, max_cost, out)):
        if top is not None:
            rule = "cannot be combined with a comparison of clusters, which prints one configuration per size"
            raise ConfigError(rule, key="--top", value=top)
        rank_costs(
            config,
            clusters=clusters,
            hosts=hosts,
            tokens=tokens,
            max_days=max_days,
            max_cost=max_cost,
            out=out,
            as_json=as_json,
        )
        return
    if hosts is not None:
        _rank_sizes(config, hosts, as_json)
        return
    _rank_configs(config, num_rows, as_json)


def _rank_configs(request: StudyRequest, num_rows: int, as_json: bool) -> None:
    from tuner.answers.basis import basis_of
    from tuner.answers.predictions import rank_candidates
    from tuner.answers.rank_rows import compared_with, rank_rows
    from tuner.forecast.idle_hosts import idle_hosts_of_first
    from tuner.forecast.ranked import place_of_current

    stored = StoredStudies(request.storage)
    prepared = with_plans(request, stored)
    candidates = prepared.candidates
    warn(candidates.space.warnings)
    num_rows = min(num_rows, len(candidates.space.grid))
    basis = basis_of(request, stored, prepared, on_progress=lambda note: warn([note]))
    ranked = rank_candidates(prepared, basis, on_progress=lambda note: warn([note]))
    current = place_of_current(prepared.problem, candidates, ranked) if num_rows else None
    is_beyond = current is not None and current >= num_rows
    places = [*range(num_rows), *([current] if is_beyond and current is not None else [])]
    shown = {place + 1: row for place, row in zip(places, rank_rows(prepared, basis, ranked, places), strict=True)}
    rows = list(shown.values())[:num_rows]
    compared = compared_with(prepared, ranked)[0] if rows else None
    idle = idle_hosts_of_first(prepared.problem, candidates, ranked) if rows else None
    if as_json:
        print_json(
            {
                "configs": rows,
                "current": None if current is None else {"rank": current + 1, **shown[current + 1]},
                "compared_with": compared,
                **basis.as_json(),
                "idle_hosts": idle and idle.as_json(),
            }
        )
    elif rows:
        from tuner.terminal.rank_table import print_ranking

        tell_basis(basis)
        print_ranking(prepared, ranked, shown, compared=compared, current=None if current is None else current + 1)
        if any(row["source"] == "simulated" for row in shown.values()):
            typer.echo("Step times are simulated pass by pass; `meshtune simulate` shows one such step.", err=True)
        if idle is not None:
            typer.echo(f"The first {idle.in_words}")
        if not all(row["fits"] for row in shown.values()):
            _tell_misfits(request, prepared, ranked)
    if not rows:
        if not as_json:
            typer.echo(NOTHING_WORKS, err=True)
        raise typer.Exit(FOUND_NOTHING)


def _tell_misfits(request: StudyRequest, prepared: Prepared, ranked: Ranked) -> None:
    """Print what the mark of a candidate that does not fit means."""
    from tuner.answers.rehearsals import told_rehearsals

    has_refused = any(one.in_words for one in told_rehearsals(request))
    capacity = int(prepared.candidates.space.memory.capacity_bytes.min()) / 2**30
    headroom = prepared.problem.options.memory_headroom
    typer.echo(
        f"! does not fit: {capacity:.1f} GiB per device, of which {headroom:.0%} must stay free"
        + ("; or crashed" if ranked.num_trials else "")
        + "; or refused in rehearsal, which `meshtune status` lists" * has_refused,
        err=True,
    )


def _mark_of(size: Size, basis: Basis) -> str:
    """Return the mark of a measured step time where trials have taught; a blank keeps the digits aligned."""
    return "" if basis.taught is None else "*" if size.is_measured else " "


def _rank_sizes(request: StudyRequest, text: str, as_json: bool) -> None:
    from costmodels.job.parallel_config import HAND
    from tuner.answers.predictions import judge_of
    from tuner.forecast.sizes import best_by_size, parse_sizes

    hosts = parse_sizes(request, text)
    prepared, basis = taught_study(request)
    sizes = list(best_by_size(prepared.problem, hosts, file=request.file, judge=judge_of(prepared, basis)))
    dimensions = request.problem.dimensions
    if any(size.config is not None and size.config.plan != HAND for size in sizes):
        dimensions += ("plan",)
    smallest = next((size for size in sorted(sizes, key=lambda size: size.hosts) if size.config is not None), None)
    if as_json:
        print_json(
            {
                "sizes": [size.as_json(dimensions) for size in sizes],
                "smallest_that_fits": smallest.hosts if smallest else None,
                **basis.as_json(),
            }
        )
    else:
        places = {"hosts": [str(size.hosts) for size in sizes], "devices": [f"{size.devices:,}" for size in sizes]}
        figures = {
            "step [s]": [
                by_source(size.step_time_s, size.source) + _mark_of(size, basis) if size.config else "-"
                for size in sizes
            ],
            "GiB": [f"{size.peak_memory_bytes / 2**30:.1f}" if size.config else "-" for size in sizes],
            "tokens/s/device": [
                by_source(size.tokens_per_s_per_device, size.source) if size.config else "-" for size in sizes
            ],
        }
        layouts = [size.config.values(dimensions) if size.config else {} for size in sizes]
        columns = places | layout_columns(layouts, places | figures) | figures
        words = [at for at, head in enumerate(columns) if head == LAYOUT]
        print_table(list(columns), list(zip(*columns.values(), strict=True)), left=words)
        tell_columns(layouts, columns)
        for size in sizes:
            if size.reason:
                typer.echo(f"{hosts_in_words(size.hosts)}: {size.reason}")
        if smallest is not None:
            typer.echo(f"Smallest that fits: {hosts_in_words(smallest.hosts)} ({smallest.devices:,} devices)")
        tell_basis(basis)
        if any(size.is_measured for size in sizes):
            typer.echo("* the step time of its own trials", err=True)
    if smallest is None:
        raise typer.Exit(FOUND_NOTHING)
