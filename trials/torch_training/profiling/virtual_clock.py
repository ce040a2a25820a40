"""Virtual clock: duration of a recorded step if every rank had its own device and a cluster's links connected them.

If there are more ranks than cores, the ranks share the cores, so bubbles, stragglers and overlap cannot be observed.
Instead, each rank's own CPU time between its calls (rank_recording.py) is replayed on the event engine, and every call
takes the time that the link model gives:

- All ranks begin together. A rank's compute and calls wait for its earlier ones.
- A collective begins when all its members have issued it and the previous one on that group has ended. A message begins
  when both ends have issued it, as in NCCL and gloo, and the previous one from this sender to this receiver has ended.
- A wait delays only the rank's later work. A blocking call is a call followed by a wait.
- A call takes the time that hardware/collectives.py gives for its kind, bytes and ranks, alone on its links.
  Simultaneous calls share, in each direction, a device's links to its host and to the network, the adapter that
  neighbours on a host have in common (`Link.sharers`), and a leaf switch's uplink. A single call takes each of these
  completely (assumed). Different devices never disturb each other inside a host.
- Compute and communication do not slow each other down (assumed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import Collective
from costmodels.simulator.events import NOTHING, Route, TaskGraph, Timeline, run
from hardware.arrays import IntArray
from hardware.cluster import Cluster
from hardware.link import combine_links
from hardware.sharing import Uses
from trials.torch_training.profiling.rank_recording import Computed, Issued, RankGroup, RankRecording, Waited

OUT, IN = "out", "in"

_Channel = tuple[RankGroup, tuple[int, int] | None, int]
"""A group, with both ends and the tag for messages; calls of one channel run one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualStep:
    """One step by the virtual clock; every tuple has one entry per recording, in their order [n].

    Attributes:
        step_time_s: Time from the common start to the last end [s].
        busy_s: Compute time of each rank [s].
        exposed_s: Time in which each rank waited for a call in transfer [s].
        waiting_s: Time in which each rank waited for calls that had not begun, or at the end for other ranks [s]. A
            call has not begun while other ranks have not issued it or an earlier call blocks it. `busy_s`, `exposed_s`
            and `waiting_s` add up to the step.
        communicating_s: Time in which calls of each rank were in transfer, hidden behind compute or not [s].
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    communicating_s: tuple[float, ...]


def virtual_step(
    recordings: Sequence[RankRecording], cluster: Cluster, *, collective_time: CollectiveTime = collective_s
) -> VirtualStep:
    """Replay one step of all ranks.

    Args:
        recordings: Recordings of all ranks for the same step.
        cluster: Cluster that the ranks run on, in its order of ranks; it may have more devices.
        collective_time: Function for the time of a call alone on its links.

    Raises:
        ValueError: The recordings do not fit together: calls without a partner, or in an order that never ends.
    """
    _check_ranks(recordings, cluster)
    replay = _Replay(recordings, cluster, collective_time)
    try:
        timeline = run(replay.graph, [1.0] * len(replay.links.resources), 1.0)
    except ValueError:
        raise ValueError(
            "deadlock: ranks issue calls in orders in which they wait for each other in a circle"
        ) from None
    return _measure(replay, timeline)


def _check_ranks(recordings: Sequence[RankRecording], cluster: Cluster) -> None:
    ranks = [recording.rank for recording in recordings]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"a step needs one recording of every rank, but got those of ranks {sorted(ranks)}")
    if max(ranks) >= cluster.num_devices:
        raise ValueError(f"rank {max(ranks)} has no device: {cluster.name} has {cluster.num_devices}")


class _Replay:
    """A step as a graph of tasks: first the calls of all ranks, then the compute of each rank.

    Attributes:
        busy_s: Compute time of every recording [s].
        computed: Compute tasks of every recording, in order.
        needed: Calls that each of these tasks waits for; the last entry holds waits after the last task.
        called: All calls of every recording.
    """

    def __init__(self, recordings: Sequence[RankRecording], cluster: Cluster, collective_time: CollectiveTime) -> None:
        self.graph = TaskGraph()
        self.links = _Links(cluster, collective_time)
        tasks = self._add_calls(recordings)
        self.busy_s = tuple(recording.busy_s for recording in recordings)
        self.computed: list[list[int]] = []
        self.needed: list[list[list[int]]] = []
        self.called = [
            [tasks[recording.rank, call.call] for call in _list_issued(recording)] for recording in recordings
        ]
        for recording in recordings:
            self._add_compute(recording, tasks)

    def _add_calls(self, recordings: Sequence[RankRecording]) -> dict[tuple[int, int], int]:
        """Add one task per call that its ranks share, and return the tasks by rank and number of the call there."""
        # Calls of each channel by rank, in the order in which the rank issued them.
        own: dict[_Channel, dict[int, list[Issued]]] = {}
        for recording in recordings:
            for call in _list_issued(recording):
                members = own.setdefault((call.group, call.ends, call.tag), {})
                members.setdefault(recording.rank, []).append(call)
        found: dict[tuple[int, int], int] = {}
        for (group, ends, _), calls in own.items():
            ranks = ends or group.ranks
            _check_partners(group, ranks, calls)
            # Calls of a channel run one after the other, so each waits for the one before it.
            before = NOTHING
            # The n-th calls of all members on a channel belong together.
            for together in zip(*(calls[rank] for rank in ranks), strict=True):
                # Members may state different sizes, for example in an uneven all-to-all; the largest one determines the
                # time.
                message_bytes = max(call.message_bytes for call in together)
                latency_s, route = self.links.way(together[0].kind, message_bytes, ranks)
                before = self.graph.add(route, after=[before], latency_s=latency_s)
                found.update(((rank, call.call), before) for rank, call in zip(ranks, together, strict=True))
        return found

    def _add_compute(self, recording: RankRecording, tasks: dict[tuple[int, int], int]) -> None:
        """Add a rank's compute tasks, and let its calls wait for the work before them."""
        computed: list[int] = []
        needed: list[list[int]] = [[]]
        for event in recording.events:
            before = [*computed[-1:], *needed[-1]]
            match event:
                case Computed():
                    computed.append(self.graph.add(Route(event.cpu_s), after=before))
                    needed.append([])
                case Issued():
                    # A call starts when all members have issued it, that is, when each has done its earlier work.
                    for task in before:
                        self.graph.wait(tasks[recording.rank, event.call], task)
                case Waited():
                    if (recording.rank, event.call) not in tasks:
                        raise ValueError(f"rank {recording.rank} waited for call {event.call}, which it never issued")
                    needed[-1].append(tasks[recording.rank, event.call])
        self.computed.append(computed)
        self.needed.append(needed)


class _Links:
    """Use of the cluster's links by calls; equal calls share one route.

    Attributes:
        resources: Number of each resource with a capacity of its own, by its name, place and direction.
    """

    def __init__(self, cluster: Cluster, collective_time: CollectiveTime) -> None:
        self.cluster, self.collective_time = cluster, collective_time
        self.resources: dict[tuple[str, int, int, str], int] = {}
        self.rank_host, self.rank_domain = cluster.rank_host(), cluster.rank_domain()
        # Rank of each host's first device, from the sorted hosts of all ranks.
        self.first_rank = np.searchsorted(self.rank_host, np.arange(cluster.num_hosts))
        self.sharers = np.repeat(
            [combine_links(group.nic_links).sharers for group in cluster.groups],
            [group.hosts for group in cluster.groups],
        )
        self.known: dict[tuple[OpKind, int, tuple[int, ...]], tuple[float, Route]] = {}

    def way(self, kind: OpKind, message_bytes: int, ranks: tuple[int, ...]) -> tuple[float, Route]:
        """Return a call's latency [s], and its route afterwards."""
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
            # The time without bytes is the latency; the rest is transfer, during which other calls may share the links.
            latency_s = min(float(self.collective_time(replace(call, wire_bytes=np.zeros(1)))[0]), seconds)
            if kind == OpKind.SEND_RECV:
                # A message leaves its sender and enters its receiver; a collective uses both directions of all members.
                ends = [(ranks[0], OUT), (ranks[1], IN)]
            else:
                ends = [(rank, way) for rank in ranks for way in (OUT, IN)]
            self.known[key] = (latency_s, Route(seconds - latency_s, self._find_uses(ends, members)))
        return self.known[key]

    def _find_uses(self, ends: Sequence[tuple[int, str]], members: IntArray) -> Uses:
        """Return the resources that these ranks use, each in its direction."""
        hosts, domains = self.rank_host[members], self.rank_domain[members]
        # Inside a domain, every device has links of its own.
        if (domains == domains[0]).all():
            return (
                tuple((self._resource("inside", rank, 0, way), 1.0) for rank, way in ends) if len(members) > 1 else ()
            )
        found = {self._resource(*self._adapter(rank), way): 1.0 for rank, way in ends}
        switches = self.cluster.switches
        if switches and len({switches[host] for host in hosts}) > 1:
            for switch in {switches[host] for host in hosts}:
                below = np.array([rank for rank, host in zip(members, hosts, strict=True) if switches[host] == switch])
                # A call across leaf switches also takes its part of each switch's uplink.
                share = self.cluster.uplink_share(below)
                ways = {way for rank, way in ends if switches[self.rank_host[rank]] == switch}
                found.update((self._resource("uplink", switch, 0, way), share) for way in ways)
        return tuple(found.items())

    def _adapter(self, rank: int) -> tuple[str, int, int]:
        """Return the network adapter of a rank; neighbours on a host share one (assumed)."""
        host = int(self.rank_host[rank])
        slot = rank - int(self.first_rank[host])
        return ("adapter", host, slot // int(self.sharers[host]))

    def _resource(self, name: str, first: int, second: int, way: str) -> int:
        return self.resources.setdefault((name, first, second, way), len(self.resources))


def _list_issued(recording: RankRecording) -> list[Issued]:
    return [event for event in recording.events if isinstance(event, Issued)]


def _check_partners(group: RankGroup, ranks: Sequence[int], calls: dict[int, list[Issued]]) -> None:
    """Raise ValueError if the members' calls on one channel are not the same."""
    where = f"group {group.name} of ranks {list(group.ranks)}"
    own = [calls.get(rank, []) for rank in ranks]
    # Compare call by call first, because a wrong kind explains more than a missing call.
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


def _measure(replay: _Replay, timeline: Timeline) -> VirtualStep:
    """Return the breakdown of every rank's time."""
    step_time_s = timeline.makespan_s
    spans = np.stack([timeline.start_s, timeline.end_s], axis=1)
    exposed_s = []
    for computed, needed in zip(replay.computed, replay.needed, strict=True):
        # Gaps between the compute tasks of a rank: from the end of one to the start of the next.
        begins = [*timeline.start_s[computed].tolist(), step_time_s]
        ends = [0.0, *timeline.end_s[computed].tolist()]
        # Between two compute tasks, the part covered by transfers of needed calls is exposed communication.
        exposed_s.append(
            sum(
                _union_s(np.clip(spans[calls], end, begin))
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
        communicating_s=tuple(_union_s(spans[calls]) for calls in replay.called),
    )


def _union_s(spans: np.ndarray) -> float:
    """Return the length of the union of spans [t, 2] [s]."""
    covered_s, until_s = 0.0, 0.0
    for begin_s, end_s in sorted(spans.tolist()):
        covered_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return covered_s
