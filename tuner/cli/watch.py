"""Command `meshtune watch`: follow the cluster of a running job, and say when to change its layout."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from hardware.io.errors import ConfigError, did_you_mean
from tuner.cli.options import Overrides, Storage, StudyFile, load, number, with_plans
from tuner.cli.replan import CheckpointEvery, Restart, StorageBandwidth, costs_of_change
from tuner.run.endings import ending_signals
from tuner.storage.stored_studies import StoredStudies
from tuner.subject.ability import Ability
from tuner.terminal.console import printable, say

if TYPE_CHECKING:  # these load numpy and Optuna
    from costmodels.job.parallel_config import ParallelConfig
    from trials.link_probe.contract import AbstractProber
    from tuner.subject.problem import Problem
    from tuner.watch.answer import Answer
    from tuner.watch.hosts import AbstractHosts
    from tuner.watch.probing import Probing
    from tuner.watch.state import Kept

SYSTEMS = ("ray", "slurm")


def watch(
    study: StudyFile,
    hosts_from: Annotated[
        str,
        Option(
            metavar="ray|slurm|FILE",
            help="What knows the hosts: a running Ray cluster, Slurm, or a CSV trace that is followed as it grows.",
        ),
    ],
    hook: Annotated[
        str | None,
        Option(metavar="COMMAND", help="Command that gets each answer as JSON on its standard input; see the guide."),
    ] = None,
    running: Annotated[
        str | None,
        Option(
            "--config",
            metavar="pp=4,...",
            help="Configuration that runs now; by default what this watch named last, or else the study's best.",
        ),
    ] = None,
    once: Annotated[bool, Option("--once", help="Print one answer and end.")] = False,
    settle: Annotated[
        str, Option(metavar="SECONDS", help="Time for which the cluster has to stand before a change that can wait.")
    ] = "60",
    horizon: Annotated[
        str, Option(metavar="SECONDS", help="Time within which a change has to repay its cost.")
    ] = "3600",
    restart: Restart = "120",
    bandwidth: StorageBandwidth = "5",
    checkpoint: CheckpointEvery = "1800",
    every: Annotated[str, Option(metavar="SECONDS", help="Time between two looks at the cluster.")] = "5",
    state: Annotated[
        Path | None, Option(metavar="FILE", help="File that keeps what runs; by default NAME.watch.json.")
    ] = None,
    ray_address: Annotated[
        str | None, Option(metavar="ADDRESS", help="Address of the Ray cluster; takes precedence over RAY_ADDRESS.")
    ] = None,
    nodes: Annotated[
        str | None,
        Option(metavar="LIST", help="Slurm's nodes of the job, such as node[01-08]; by default those of this job."),
    ] = None,
    network: Annotated[
        Path | None,
        Option(metavar="TRACE", help="With ray or slurm: CSV trace that tells how fast links are, and may grow."),
    ] = None,
    probe: Annotated[
        str | None,
        Option(
            metavar="SECONDS",
            help="With ray or slurm: time between two measurements of the links by TCP; by default none.",
        ),
    ] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object per answer, each on a line, and nothing else, on stdout.")
    ] = False,
) -> None:
    """Watch the cluster of a running job: name the best layout whenever hosts go, come or slow down.

    Each answer says whether a change to that layout repays a restart from the last checkpoint, and gives its flags. A
    change that can wait is made when the cluster has stood for a while, or when staying has cost as much. Running the
    same command again continues the watch.
    """
    from tuner.watch.hook import check_hook

    if hook is not None:
        check_hook(hook)
    costs = costs_of_change(restart, bandwidth, checkpoint)
    settle_s, horizon_s = number("--settle", settle), number("--horizon", horizon, above_zero=True)
    every_s = number("--every", every, above_zero=True)
    if network is not None and hosts_from not in SYSTEMS:
        raise ConfigError("is for ray and slurm: a trace tells of hosts and links", key="--network", value=str(network))
    probe_s = None if probe is None else _probe_s(probe, hosts_from, network)
    request = load(study, overrides, storage)
    if rule := request.problem.subject.refusal(Ability.WATCH):
        raise ConfigError(rule, file=request.file, key="model")
    prepared = with_plans(request, StoredStudies(request.storage))

    from tuner.replan.present import Watched
    from tuner.replan.replanning import Assumptions
    from tuner.run.driver import interrupts_held
    from tuner.watch.policy import Rules
    from tuner.watch.state import Kept, locked, read_state
    from tuner.watch.watching import Doing, watch_cluster

    file = state or Path(f"{request.name}.watch.json")
    rules = Rules(settle_s=settle_s, horizon_s=horizon_s, costs=Assumptions(**costs))
    chosen = _parse(prepared.problem, running)
    with locked(file), ending_signals(lambda: None) as interrupted:
        kept = read_state(file, request)
        if kept is None or kept.source != hosts_from:
            kept = Kept(source=hosts_from, began_s=time.time())
        doing = Doing(
            on_answer=lambda answer: _tell(answer, hook, as_json=as_json),
            on_trouble=lambda trouble: say(f"meshtune: {printable(trouble)}", err=True),
            every_s=every_s,
            once=once,
            state=file,
        )
        try:
            with interrupts_held():  # joining Ray replaces the handler of SIGTERM
                hosts, probing = _hosts(
                    prepared.problem, hosts_from, kept, ray_address, nodes, network, probe_s, doing.on_trouble
                )
            with closing(probing) if probing is not None else nullcontext():
                watch_cluster(Watched(prepared), hosts, kept, rules, doing, running=chosen, probing=probing)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None


def _probe_s(probe: str, hosts_from: str, network: Path | None) -> float:
    """Return the time between two probes [s].

    Raises:
        ConfigError: The text is no time, or there is nothing to probe.
    """
    if hosts_from not in SYSTEMS:
        raise ConfigError(
            "is for ray and slurm: a trace has no hosts that can be reached",
            key="--probe",
            value=probe,
            nearest="add rows to the trace when links slow down",
        )
    if network is not None:
        raise ConfigError(
            "and --network both tell how fast links are", key="--probe", value=probe, nearest="leave one of them out"
        )
    return number("--probe", probe, above_zero=True)


def _parse(problem: Problem, text: str | None) -> ParallelConfig | None:
    """Parse the configuration that runs now."""
    from costmodels.job.parallel_config import parse_config

    return None if text is None else parse_config(text, problem.subject.defaults)


def _hosts(
    problem: Problem,
    hosts_from: str,
    kept: Kept,
    ray_address: str | None,
    nodes: str | None,
    network: Path | None,
    probe_s: float | None,
    on_trouble: Callable[[str], None],
) -> tuple[AbstractHosts, Probing | None]:
    """Return the source of the cluster's states, and the probe of its links if one is asked for."""
    from hardware.dynamics import Trace
    from tuner.watch.hosts import FileHosts, NodeHosts, read_growing
    from tuner.watch.probing import Probing

    cluster = problem.cluster
    if hosts_from not in SYSTEMS:
        file = Path(hosts_from)
        if not file.exists() and file.suffix == "":
            raise ConfigError(
                "is neither ray nor slurm, nor a file",
                key="--hosts-from",
                value=hosts_from,
                nearest=did_you_mean(hosts_from, SYSTEMS),
            )
        return FileHosts(file, cluster), None
    if network is not None:
        read_growing(network, cluster)  # a mistake should be told at once
    from tuner.watch.systems import job_to_probe, nodes_of_ray, nodes_of_slurm

    prober: AbstractProber | None = None
    if hosts_from == "ray":
        from trials.on_ray.members import RayMembers

        members = RayMembers(ray_address or os.environ.get("RAY_ADDRESS") or "auto")
        look = partial(nodes_of_ray, members, cluster)
        if probe_s is not None:
            from trials.on_ray.probe import RayProber

            prober = RayProber(members.ray)
    else:
        look = partial(nodes_of_slurm, nodes, cluster)
        if probe_s is not None:
            from trials.command.slurm.prober import SlurmProber

            prober = SlurmProber(job_to_probe(os.environ))
    probing = (
        None
        if prober is None or probe_s is None
        else Probing(prober, every_s=probe_s, links=kept.links, on_trouble=on_trouble)
    )
    hosts = NodeHosts(
        look,
        cluster,
        began_s=kept.began_s,
        source=hosts_from,
        seats=kept.seats,
        events=kept.trace.events,
        network=(lambda: Trace(events=())) if network is None else partial(read_growing, network, cluster),
        probe=None if probing is None else probing.look,
    )
    return hosts, probing


def _tell(answer: Answer, hook: str | None, *, as_json: bool) -> str:
    """Print an answer and call the hook with it; return why the hook failed, or nothing."""
    from tuner.watch.hook import call_hook

    if as_json:
        typer.echo(json.dumps(answer.payload, allow_nan=False))
    else:
        for line in answer.lines:
            typer.echo(printable(line))
    return "" if hook is None else call_hook(hook, answer.payload)
