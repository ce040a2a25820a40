"""What a watch sees of a cluster: the events until now, from a file that grows, or from the nodes of a batch system.

Time is counted in seconds, as in a trace. For a file it is the time of its last row and what has passed since the file
was last written. For nodes it is the time since the watch began.
"""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hardware.cluster import Cluster
from hardware.dynamics import HostEvent, LinkEvent, Trace, lost_hosts
from hardware.io.config_file import read_text
from hardware.io.errors import ConfigError
from hardware.trace_file import parse_trace

TICK_S = 1e-3
"""Least time between two events [s]."""

MOST_EVENTS, KEPT_EVENTS = 1000, 500
"""Largest number of events of nodes that are kept, and number of the latest that stay when there are more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """State of the cluster as it was seen at one time.

    Attributes:
        trace: Events until now.
        now_s: Time of the look [s].
        identities: Text for each host that changes when the host was lost and has come back or was replaced.
        names: Names of the hosts, for users; those of a trace where there are no others.
    """

    trace: Trace
    now_s: float
    identities: tuple[str, ...]
    names: tuple[str, ...]


class AbstractHosts(ABC):
    """Source of the states of a cluster."""

    @abstractmethod
    def look(self) -> Look:
        """Look at the cluster.

        Raises:
            ConfigError: The cluster cannot be seen.
        """


def read_growing(file: Path, cluster: Cluster) -> Trace:
    """Read a trace to which rows are appended; a last line without its line break is still being written.

    Raises:
        ConfigError: The file cannot be read, or a row cannot happen to this cluster.
    """
    text = read_text(file)
    return parse_trace(text[: text.rfind("\n") + 1] or text, cluster, place=str(file))


class FileHosts(AbstractHosts):
    """Trace file that grows while it is watched.

    Args:
        file: File in the form of `hardware.trace_file`.
        cluster: Nominal cluster.
        clock: Seconds since the epoch, as the file system counts them.
    """

    def __init__(self, file: Path, cluster: Cluster, *, clock: Callable[[], float] = time.time) -> None:
        self._file, self._cluster, self._clock = file, cluster, clock
        self._latest_s = 0.0

    def look(self) -> Look:
        """Read the file."""
        trace = read_growing(self._file, self._cluster)
        last_s = trace.events[-1].time_s if trace.events else 0.0
        # an event in the file has happened, whatever its time says: the clock of the file is that of its rows
        age_s = max(self._clock() - self._file.stat().st_mtime, 0.0)
        self._latest_s = max(self._latest_s, last_s + age_s)
        losses = [0] * self._cluster.num_hosts
        for event in trace.events:
            if isinstance(event, HostEvent) and event.is_lost:
                losses[event.host] += 1
        return Look(
            trace=trace,
            now_s=self._latest_s,
            identities=tuple(f"{count}" for count in losses),
            names=tuple(f"h{host}" for host in range(self._cluster.num_hosts)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Node of a cluster that is up.

    Attributes:
        name: Name or address of the node.
        identity: Text that changes when the node was down in between.
        devices: Number of its devices; None if the cluster does not tell.
    """

    name: str
    identity: str
    devices: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Host of the study, and the node that takes its place.

    Attributes:
        node: Name of the node that has or had the place; empty before the first one.
        identity: Identity of that node.
        losses: Number of times that the place has lost its node.
        is_lost: Whether the node is gone.
    """

    node: str = ""
    identity: str = ""
    losses: int = 0
    is_lost: bool = True


Shares = Mapping[str | tuple[int, ...], float]
"""Shares of links, named as in `LinkEvent`."""

Probe = Callable[[Sequence[Seat], bool], Shares]
"""Function that measures how fast the links of hosts are, as `NodeHosts` calls it."""


class NodeHosts(AbstractHosts):
    """Hosts that are the nodes of a batch system.

    Hosts take the nodes with enough devices in the order of their names. A node that goes leaves its place empty until
    it comes back, or until there is another node without a place.

    Args:
        nodes: Function that returns the nodes that are up; it raises ConfigError if they cannot be seen.
        cluster: Nominal cluster.
        began_s: Wall clock at the beginning of the watch.
        source: Name of the batch system, for messages.
        seats: Places as an earlier process has left them.
        events: Events that an earlier process has seen.
        network: Function that returns a trace whose last shares are those of the links now; it raises ConfigError if
            it cannot be read. Its times and its hosts do not count.
        probe: Function that is given the places, and whether it may measure now, which takes seconds. It returns the
            shares of links that it has measured.
        clock: Seconds since the epoch.

    Attributes:
        seats: Places after the last look.
        events: All events so far.
    """

    def __init__(
        self,
        nodes: Callable[[], Sequence[Node]],
        cluster: Cluster,
        *,
        began_s: float,
        source: str,
        seats: Sequence[Seat] = (),
        events: Sequence[HostEvent | LinkEvent] = (),
        network: Callable[[], Trace] = lambda: Trace(events=()),
        probe: Probe | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._nodes, self._cluster, self._began_s, self._clock = nodes, cluster, began_s, clock
        self._source, self._network, self._probe = source, network, probe
        self._needs = tuple(group.devices_per_host for group in cluster.groups for _ in range(group.hosts))
        self.seats = tuple(seats) or tuple(Seat() for _ in self._needs)
        self.events = list(events)

    def look(self) -> Look:
        """Ask for the nodes, give each host its node, and note what has changed."""
        nodes, network = self._nodes(), self._network()
        self.seats = take_seats(self.seats, self._needs, nodes)
        lost = {host for host, seat in enumerate(self.seats) if seat.is_lost}
        if len(lost) == len(self.seats):
            raise ConfigError(
                f"has no node that is up and has {min(self._needs)} devices, of {len(nodes)} that are up",
                key="--hosts-from",
                value=self._source,
                nearest="the cluster of the study says how many devices a host has",
            )
        before = {*lost_hosts(Trace(events=tuple(self.events)), math.inf)}
        shares, known = _shares(network.events), _shares(self.events)
        if self._probe is not None:  # the loss of a host should be answered first
            shares = {**shares, **self._probe(self.seats, lost == before)}
        now_s = self._clock() - self._began_s
        # a clock that was set back must not let a host change twice at once
        now_s = max(now_s, self.events[-1].time_s + TICK_S if self.events else 0.0)
        self.events += [HostEvent(time_s=now_s, host=host, is_lost=host in lost) for host in sorted(lost ^ before)]
        self.events += [
            LinkEvent(time_s=now_s, link=link, share=shares.get(link, 1.0))
            for link in {**known, **shares}
            if shares.get(link, 1.0) != known.get(link, 1.0)
        ]
        self.events = shorten(self.events)
        return Look(
            trace=Trace(events=tuple(self.events)),
            now_s=now_s,
            identities=tuple(f"{seat.node} {seat.identity} {seat.losses}" for seat in self.seats),
            names=tuple(seat.node or f"h{host}" for host, seat in enumerate(self.seats)),
        )


def _shares(events: Sequence[HostEvent | LinkEvent]) -> dict[str | tuple[int, ...], float]:
    """Return the last share of each link that the events name."""
    return {event.link: event.share for event in events if isinstance(event, LinkEvent)}


def shorten(events: list[HostEvent | LinkEvent]) -> list[HostEvent | LinkEvent]:
    """Leave out old events if there are many; what they have changed is changed by the first ones kept."""
    if len(events) <= MOST_EVENTS:
        return events
    from_s = events[-KEPT_EVENTS].time_s
    old = [event for event in events if event.time_s <= from_s]
    return [
        *(HostEvent(time_s=from_s, host=host, is_lost=True) for host in lost_hosts(Trace(events=tuple(old)), from_s)),
        *(LinkEvent(time_s=from_s, link=link, share=share) for link, share in _shares(old).items() if share < 1),
        *(event for event in events if event.time_s > from_s),
    ]


def take_seats(seats: Sequence[Seat], needs: Sequence[int], nodes: Sequence[Node]) -> tuple[Seat, ...]:
    """Give each host of a study its node.

    Args:
        seats: Places before.
        needs: Number of devices that each host has.
        nodes: Nodes that are up.
    """
    known = {node.name: node for node in nodes}
    left = sorted(known.keys() - {seat.node for seat in seats}, key=_in_order)
    found = []
    for seat, need in zip(seats, needs, strict=True):
        losses = seat.losses + (not seat.is_lost and seat.node not in known)
        name = seat.node if seat.node in known else next((one for one in left if _suits(known[one], need)), None)
        if name is None:
            found.append(replace(seat, losses=losses, is_lost=True))
            continue
        if name != seat.node:
            left.remove(name)
        found.append(Seat(node=name, identity=known[name].identity, losses=losses, is_lost=False))
    return tuple(found)


def _suits(node: Node, need: int) -> bool:
    return node.devices is None or node.devices >= need


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts node9 before node10."""
    parts = re.split(r"0*([0-9]+)", name)  # every second one is a number, which may have more digits than `int` reads
    return [(len(part), part) if at % 2 else (-1, part) for at, part in enumerate(parts)]
