"""State of a watch, in a JSON file: a watch that was killed goes on with it."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from costmodels.job.parallel_config import parse_config
from hardware.dynamics import Trace
from hardware.io.config_file import read_text
from hardware.io.errors import ConfigError
from hardware.io.output_file import write_output
from hardware.trace_file import LEAST_SHARE, format_trace, parse_trace
from tuner.replan.cluster_states import Figures, Setup
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem
from tuner.terminal.console import config_in_words
from tuner.watch.hosts import Seat
from tuner.watch.link_shares import Links, LinkShare, PairRates
from tuner.watch.policy import Standing

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """All that a watch keeps.

    Attributes:
        source: Source of the cluster's states, as `--hosts-from` names it.
        began_s: Wall clock at the beginning of the watch.
        standing: What runs; None before the first answer.
        ran_on: Identities of the hosts when the running setup began.
        told: Last answer in short, so that it is not given twice.
        seats: Nodes of the hosts; empty for a file.
        trace: Events that were seen; empty for a file, which has them itself.
        links: What a probe has measured of links; empty without one.
    """

    source: str
    began_s: float
    standing: Standing | None = None
    ran_on: tuple[str, ...] = ()
    told: str = ""
    seats: tuple[Seat, ...] = ()
    trace: Trace = field(default_factory=lambda: Trace(events=()))
    links: Links = field(default_factory=Links)


def write_state(file: Path, request: StudyRequest, kept: Kept) -> None:
    """Write the state whole, in the place of the one before.

    Raises:
        ConfigError: The file cannot be written.
    """
    standing = kept.standing
    told = {
        "version": VERSION,
        "study_name": request.name,
        "hosts": request.problem.cluster.num_hosts,
        "source": kept.source,
        "began_s": kept.began_s,
        "running": None if standing is None else _standing_json(request.problem, standing),
        "ran_on": list(kept.ran_on),
        "told": kept.told,
        "seats": [asdict(seat) for seat in kept.seats],
        "trace": format_trace(kept.trace),
        "links": {
            "pairs": [asdict(one) for one in kept.links.pairs],
            "shares": [asdict(one) for one in kept.links.shares],
        },
    }
    text = json.dumps(told, indent=2, allow_nan=False) + "\n"
    _read(file, request, text)  # a state that could not be read would end the watch for good
    write_output(file, text, option="--state")


def read_state(file: Path, request: StudyRequest) -> Kept | None:
    """Read the state of an earlier watch; None if there is none.

    Raises:
        ConfigError: The file is no state, or that of another study.
    """
    return _read(file, request) if file.exists() else None


def _read(file: Path, request: StudyRequest, text: str | None = None) -> Kept:
    """Return the state in a file, or in a text that is to be written there."""
    nearest = "remove the file to begin anew, or name another with --state"
    try:
        told = json.loads(read_text(file) if text is None else text)
        if told["version"] != VERSION:
            raise ValueError(f"version {told['version']!r}")
        whose = (told["study_name"], told["hosts"])
        if whose == (request.name, request.problem.cluster.num_hosts):
            return _kept_of(file, request.problem, told)
    except (
        OSError,
        ValueError,
        ArithmeticError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        ConfigError,
    ) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"is no state of a watch ({reason})", key="--state", value=str(file), nearest=nearest
        ) from None
    name, hosts = whose
    raise ConfigError(
        f"is the state of the study {name!r} on {hosts} hosts, and this is {request.name!r} on "
        f"{request.problem.cluster.num_hosts}",
        key="--state",
        value=str(file),
        nearest=nearest,
    )


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the state for this process alone.

    Raises:
        ConfigError: Another process watches with it, or its folder cannot be written.
    """
    lock = file.with_name(f".{file.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", key="--state", value=str(file)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                "is in use by another `meshtune watch`", key="--state", value=str(file), nearest="one watch for a job"
            ) from None
        yield
    finally:
        os.close(descriptor)


def setup_json(problem: Problem, setup: Setup) -> dict[str, Any]:
    """Write a setup as JSON."""
    return {"hosts": list(setup.hosts), "config": config_in_words(problem, setup.config)}


def _setup_of(problem: Problem, told: Mapping[str, Any]) -> Setup:
    hosts = tuple(map(_whole, told["hosts"]))
    if list(hosts) != sorted({*hosts}) or not hosts or hosts[-1] >= problem.cluster.num_hosts:
        raise ValueError(f"hosts {hosts}")
    chosen = parse_config(str(told["config"]), problem.subject.defaults)
    devices = [group.devices_per_host for group in problem.cluster.groups for _ in range(group.hosts)]
    if chosen.num_devices > sum(devices[host] for host in hosts):  # uneven work may leave some idle
        raise ValueError(f"{chosen} needs more than the hosts {hosts}")
    return Setup(hosts=hosts, config=chosen)


def _standing_json(problem: Problem, standing: Standing) -> dict[str, Any]:
    return {
        "setup": None if standing.running is None else setup_json(problem, standing.running),
        "since_s": standing.since_s,
        "at_s": standing.at_s,
        "held_until_s": standing.held_until_s,
        "figures": None if standing.figures is None else asdict(standing.figures),
        "lost_steps": [{**setup_json(problem, setup), "steps": steps} for setup, steps in standing.lost_steps.items()],
    }


def _standing_of(problem: Problem, told: Mapping[str, Any]) -> Standing:
    figures = told["figures"]
    return Standing(
        running=None if told["setup"] is None else _setup_of(problem, told["setup"]),
        since_s=_finite(told["since_s"]),
        at_s=_finite(told["at_s"]),
        held_until_s=_finite(told["held_until_s"]),
        figures=None
        if figures is None
        else Figures(
            step_time_s=_positive(figures["step_time_s"]),
            state_bytes=_finite(figures["state_bytes"]),
            devices_per_host=_whole(figures["devices_per_host"]),
            nic_bytes_per_s=_positive(figures["nic_bytes_per_s"]),
        ),
        lost_steps={_setup_of(problem, one): _finite(one["steps"]) for one in told["lost_steps"]},
    )


def _kept_of(file: Path, problem: Problem, told: Mapping[str, Any]) -> Kept:
    if len(told["seats"]) not in (0, problem.cluster.num_hosts):
        raise ValueError(f"{len(told['seats'])} nodes")
    return Kept(
        source=str(told["source"]),
        began_s=_finite(told["began_s"]),
        standing=None if told["running"] is None else _standing_of(problem, told["running"]),
        ran_on=_texts(told["ran_on"]),
        told=str(told["told"]),
        seats=tuple(
            Seat(
                node=str(seat["node"]),
                identity=str(seat["identity"]),
                losses=_whole(seat["losses"]),
                is_lost=bool(seat["is_lost"]),
            )
            for seat in told["seats"]
        ),
        trace=parse_trace(str(told["trace"]), problem.cluster, place=str(file)),
        # states from before there was a probe have none
        links=_links_of(told["links"]) if "links" in told else Links(),
    )


def _links_of(told: Mapping[str, Any]) -> Links:
    return Links(
        pairs=tuple(
            PairRates(
                sender=str(one["sender"]),
                receiver=str(one["receiver"]),
                reference_bytes_per_s=_finite(one["reference_bytes_per_s"]),
                recent_bytes_per_s=tuple(map(_positive, one["recent_bytes_per_s"])),
            )
            for one in told["pairs"]
        ),
        shares=tuple(
            LinkShare(link=_link_of(one["link"]), share=_share(one["share"]), found=tuple(map(_share, one["found"])))
            for one in told["shares"]
        ),
    )


def _link_of(value: Any) -> tuple[str, ...]:
    link = _texts(value)
    if len(link) not in (1, 2) or list(link) != sorted({*link}):
        raise ValueError(f"{value!r} is no link")
    return link


def _share(value: Any) -> float:
    if not LEAST_SHARE <= _finite(value) <= 1:
        raise ValueError(f"{value!r} is no share")
    return float(value)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _positive(value: Any) -> float:
    if not _finite(value):
        raise ValueError("0 is not above 0")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))
