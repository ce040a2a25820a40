"""How long a recorded step takes where every rank has a device to itself and a cluster's links lie between them.

More ranks than cores take the time of all their work together: bubbles, stragglers and overlap do not show. So each
rank's own CPU time between its calls (rank_recording.py) is replayed on the event engine, with every call taking what
the link model says:

- All ranks begin together. What a rank computes, and what it issues, waits for what it did before.
- A collective begins when all its members have issued it and the one before it on that group has ended; a message
  begins when both ends have, as in NCCL and gloo, and the one before it from this sender to this receiver has ended.
- A wait holds up what its rank does next, nothing else. A blocking call is a call that is waited for at once.
- A call takes what hardware/collectives.py says of its kind, bytes and ranks, alone on its links. Calls at one time
  share, in each direction, a device's links to its host and to the network, the adapter that neighbours on a host have
  in common (`Link.sharers`) and a leaf switch's uplink, each of which a call takes whole (assumed). Different devices
  never disturb each other inside a host.
- Computing and communicating do not slow each other down (assumed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import Collective, OpKind
from costmodels.simulator.events import NOTHING, Route, TaskGraph, Timeline, run
from hardware.arrays import IntArray
from hardware.cluster import Cluster
from hardware.link import combined
from hardware.sharing import Uses
from trials.torch_training.profiling.rank_recording import (
    Computed,
    Issued,
    RankGroup,
    RankRecording,
    Waited,
)

OUT, IN = "out", "in"

_Channel = tuple[RankGroup, tuple[int, int] | None, int]
"""Calls of one channel run one after the other: a group, and of messages both ends and the tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualStep:
    """One step by the virtual clock; every tuple has one entry for each recording, in their order [n].

    Attributes:
        step_time_s: From the common begin to the last end.
        busy_s: What each rank computed.
        exposed_s: What each rank waited while a call that it needed was on its way.
        waiting_s: What each rank waited for calls that had not begun, because others had not issued them yet or an
            earlier one was in the way, and at the end for others; the three add up to the step.
        communicating_s: How long calls of each rank were on their way, hidden behind compute or not.
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    communicating_s: tuple[float, ...]


def virtual_step(
    recordings: Sequence[RankRecording], cluster: Cluster, *, collective_time: CollectiveTime = collective_s
) -> VirtualStep:
    """One step of all ranks.

    Args:
        recordings: One of every rank, all of the same step.
        cluster: Where the ranks stand, in its order of ranks; it may have more devices.
        collective_time: Time of a call alone on its links.

    Raises:
        ValueError: the recordings do not belong together: calls without a partner, or in an order that never ends.
    """
    _check_ranks(recordings, cluster)
    replay = _Replay(recordings, cluster, collective_time)
    try:
        timeline = run(replay.graph, [1.0] * len(replay.links.resources), 1.0)
    except ValueError:
        raise ValueError("ranks issue calls in orders in which they wait for each other in a circle") from None
    return _measured(replay, timeline)


def _check_ranks(recordings: Sequence[RankRecording], cluster: Cluster) -> None:
    ranks = [recording.rank for recording in recordings]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"a step has one recording of every rank, but got those of ranks {sorted(ranks)}")
    if max(ranks) >= cluster.num_devices:
        raise ValueError(f"rank {max(ranks)} has no device: {cluster.name} has {cluster.num_devices}")


class _Replay:
    """The step as tasks: the calls of all ranks first, then what each rank computed.

    Attributes:
        busy_s: What every recording computed.
        computed: Of every recording its tasks of compute, in order.
        needed: Of every recording the calls that each of these waited for; those at the end have no task.
        called: Of every recording all its calls.
    """

    def __init__(self, recordings: Sequence[RankRecording], cluster: Cluster, collective_time: CollectiveTime) -> None:
        self.graph = TaskGraph()
        self.links = _Links(cluster, collective_time)
        tasks = self._calls(recordings)
        self.busy_s = tuple(recording.busy_s for recording in recordings)
        self.computed: list[list[int]] = []
        self.needed: list[list[list[int]]] = []
        self.called = [[tasks[recording.rank, call.call] for call in _issued(recording)] for recording in recordings]
        for recording in recordings:
            self._compute(recording, tasks)

    def _calls(self, recordings: Sequence[RankRecording]) -> dict[tuple[int, int], int]:
        """Adds a task per call that its ranks have in common; by rank and number of the call there."""
        own: dict[_Channel, dict[int, list[Issued]]] = {}
        for recording in recordings:
            for call in _issued(recording):
                members = own.setdefault((call.group, call.ends, call.tag), {})
                members.setdefault(recording.rank, []).append(call)
        found: dict[tuple[int, int], int] = {}
        for (group, ends, _), calls in own.items():
            ranks = ends or group.ranks
            _check_partners(group, ranks, calls)
            before = NOTHING
            for together in zip(*(calls[rank] for rank in ranks), strict=True):
                message_bytes = max(call.message_bytes for call in together)
                latency_s, route = self.links.way(together[0].kind, message_bytes, ranks)
                before = self.graph.add(route, after=[before], latency_s=latency_s)
                found.update(((rank, call.call), before) for rank, call in zip(ranks, together, strict=True))
        return found

    def _compute(self, recording: RankRecording, tasks: dict[tuple[int, int], int]) -> None:
        """Adds what a rank computed, and makes its calls wait for what it did before them."""
        computed: list[int] = []
        needed: list[list[int]] = [[]]
        for event in recording.events:
            before = [*computed[-1:], *needed[-1]]
            match event:
                case Computed():
                    computed.append(self.graph.add(Route(event.cpu_s), after=before))
                    needed.append([])
                case Issued():
                    for task in before:
                        self.graph.wait(tasks[recording.rank, event.call], task)
                case Waited():
                    if (recording.rank, event.call) not in tasks:
                        raise ValueError(f"rank {recording.rank} waited for call {event.call}, which it never issued")
                    needed[-1].append(tasks[recording.rank, event.call])
        self.computed.append(computed)
        self.needed.append(needed)


class _Links:
    """What calls take of the cluster's links; the same object for equal calls.

    Attributes:
        resources: What has a capacity of its own, by its name, place and direction: its number.
    """

    def __init__(self, cluster: Cluster, collective_time: CollectiveTime) -> None:
        self.cluster, self.collective_time = cluster, collective_time
        self.resources: dict[tuple[str, int, int, str], int] = {}
        self.rank_host = cluster.rank_host()
        self.first_rank = np.searchsorted(self.rank_host, np.arange(cluster.num_hosts))
        self.sharers = np.repeat(
            [combined(group.nic_links).sharers for group in cluster.groups], [group.hosts for group in cluster.groups]
        )
        self.known: dict[tuple[OpKind, int, tuple[int, ...]], tuple[float, Route]] = {}

    def way(self, kind: OpKind, message_bytes: int, ranks: tuple[int, ...]) -> tuple[float, Route]:
        """A call's latency [s], and what it takes then."""
        key = (kind, message_bytes, ranks)
        if key not in self.known:
            members = np.array(ranks, dtype=np.int64)
            call = Collective(
                name=kind.value,
                kind=kind,
                wire_bytes=np.array([float(message_bytes)]),
                network_efficiency=1.0,
                group=self.cluster.links_among([members[np.newaxis]], members),
            )
            seconds = float(self.collective_time(call)[0])
            latency_s = min(float(self.collective_time(replace(call, wire_bytes=np.zeros(1)))[0]), seconds)
            if kind == OpKind.SEND_RECV:
                ends = [(ranks[0], OUT), (ranks[1], IN)]
            else:
                ends = [(rank, way) for rank in ranks for way in (OUT, IN)]
            self.known[key] = (latency_s, Route(seconds - latency_s, self._uses(ends, members)))
        return self.known[key]

    def _uses(self, ends: Sequence[tuple[int, str]], members: IntArray) -> Uses:
        """The resources of those ranks, each in its direction."""
        hosts = self.rank_host[members]
        if (hosts == hosts[0]).all():
            return (
                tuple((self._resource("inside", rank, 0, way), 1.0) for rank, way in ends) if len(members) > 1 else ()
            )
        found = {self._resource(*self._adapter(rank), way): 1.0 for rank, way in ends}
        switches = self.cluster.switches
        if switches and len({switches[host] for host in hosts}) > 1:
            for switch in {switches[host] for host in hosts}:
                below = np.array([rank for rank, host in zip(members, hosts, strict=True) if switches[host] == switch])
                share = self.cluster.uplink_share(below)
                ways = {way for rank, way in ends if switches[self.rank_host[rank]] == switch}
                found.update((self._resource("uplink", switch, 0, way), share) for way in ways)
        return tuple(found.items())

    def _adapter(self, rank: int) -> tuple[str, int, int]:
        """Neighbours share an adapter (assumed)."""
        host = int(self.rank_host[rank])
        slot = rank - int(self.first_rank[host])
        return ("adapter", host, slot // int(self.sharers[host]))

    def _resource(self, name: str, first: int, second: int, way: str) -> int:
        return self.resources.setdefault((name, first, second, way), len(self.resources))


def _issued(recording: RankRecording) -> list[Issued]:
    return [event for event in recording.events if isinstance(event, Issued)]


def _check_partners(group: RankGroup, ranks: Sequence[int], calls: dict[int, list[Issued]]) -> None:
    """Raises where the members' calls on one channel are not the same."""
    where = f"group {group.name} of ranks {list(group.ranks)}"
    own = [calls.get(rank, []) for rank in ranks]
    fewest, most = min(own, key=len), max(own, key=len)
    for rank, others in zip(ranks, own, strict=True):
        for call, partner in zip(others, own[0], strict=False):
            if call.kind != partner.kind:
                raise ValueError(
                    f"{where}: call {call.call} of rank {rank} is a {call.kind}, "
                    f"but call {partner.call} of rank {ranks[0]}, its partner, a {partner.kind}"
                )
    if len(fewest) < len(most):
        lacking, having = ranks[own.index(fewest)], ranks[own.index(most)]
        unmatched = most[len(fewest)]
        raise ValueError(
            f"{where}: rank {having} issued {len(most)} calls with rank {lacking}, which issued {len(fewest)}; "
            f"call {unmatched.call} of rank {having}, a {unmatched.kind}, has no partner"
        )


def _measured(replay: _Replay, timeline: Timeline) -> VirtualStep:
    """Where the time of every rank went."""
    step_time_s = timeline.makespan_s
    spans = np.stack([timeline.start_s, timeline.end_s], axis=1)
    exposed_s = []
    for computed, needed in zip(replay.computed, replay.needed, strict=True):
        begins = [*timeline.start_s[computed].tolist(), step_time_s]
        ends = [0.0, *timeline.end_s[computed].tolist()]
        exposed_s.append(
            sum(
                _covered_s(np.clip(spans[calls], end, begin))
                for begin, end, calls in zip(begins, ends, needed, strict=True)
            )
        )
    return VirtualStep(
        step_time_s=step_time_s,
        busy_s=replay.busy_s,
        exposed_s=tuple(exposed_s),
        waiting_s=tuple(
            max(step_time_s - own_s - shown_s, 0.0) for own_s, shown_s in zip(replay.busy_s, exposed_s, strict=True)
        ),
        communicating_s=tuple(_covered_s(spans[calls]) for calls in replay.called),
    )


def _covered_s(spans: np.ndarray) -> float:
    """The length of the union of spans [t, 2]."""
    covered_s, until_s = 0.0, 0.0
    for begin_s, end_s in sorted(spans.tolist()):
        covered_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return covered_s
