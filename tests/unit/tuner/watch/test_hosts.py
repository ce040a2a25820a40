"""Hosts that a watch sees: nodes that come and go, and the file of a trace."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.cluster_file import read_described_cluster
from hardware.dynamics import HostEvent, LinkEvent, Trace, lost_hosts
from hardware.io.errors import ConfigError
from hardware.trace_file import format_trace, parse_trace
from tuner.watch.hosts import (
    KEPT_EVENTS,
    MOST_EVENTS,
    FileHosts,
    Node,
    NodeHosts,
    Seat,
    read_growing,
    shorten,
    take_seats,
)

CLUSTER = read_described_cluster({"name": "dgx-h100", "hosts": 3}, Path()).cluster
NAMES = tuple(f"node{number}" for number in range(5))
NEEDS = (8, 8, 8)
SIGHTS = st.lists(st.lists(st.sampled_from(NAMES), unique=True), min_size=1, max_size=8)


def nodes(names, devices=8):
    """Nodes with these names."""
    return [Node(name=name, identity="", devices=devices) for name in names]


@given(sights=SIGHTS)
def test_a_node_keeps_its_place(sights):
    """Each node has one place at most, one that stays up keeps its own, and no place is empty while a node is left."""
    seats = (Seat(),) * len(NEEDS)
    for names in sights:
        before, seats = seats, take_seats(seats, NEEDS, nodes(names))
        taken = [seat.node for seat in seats if not seat.is_lost]
        for old, new in zip(before, seats, strict=True):
            assert old.node not in names or new.node == old.node
            assert new.losses == old.losses + (not old.is_lost and old.node not in names)
        assert len(taken) == len({*taken}) == min(len(NEEDS), len(names))


@given(sights=SIGHTS)
def test_the_events_are_those_of_the_places(sights):
    """After each look the trace's lost hosts are the empty places, and it reads back as it was written."""
    seen = iter(sights)
    clock = iter(range(1000, 2000))
    hosts = NodeHosts(lambda: nodes(next(seen)), CLUSTER, began_s=1000.0, source="slurm", clock=lambda: next(clock))
    for names in sights:
        if not names:
            with pytest.raises(ConfigError, match="no node that is up"):
                hosts.look()
            continue
        look = hosts.look()
        lost = tuple(host for host, seat in enumerate(hosts.seats) if seat.is_lost)
        assert lost_hosts(look.trace, look.now_s) == lost
        assert parse_trace(format_trace(look.trace), CLUSTER, place="state") == look.trace


def test_nodes_take_their_places_in_the_order_of_numbers():
    """Of equal nodes the second comes before the tenth, and one with too few devices takes no place."""
    up = [*nodes(["n10", "n9", "n2"]), Node(name="n1", identity="", devices=4)]

    assert [seat.node for seat in take_seats((Seat(),) * 3, NEEDS, up)] == ["n2", "n9", "n10"]
    assert [seat.node for seat in take_seats((Seat(),) * 3, NEEDS, nodes(["a"], None))] == ["a", "", ""]


def test_a_node_that_was_down_between_two_looks_is_another(tmp_path):
    """The identity of a host changes with that of its node, and with a loss that a file tells of."""
    sights = iter([[Node(name="a", identity="1", devices=8)], [Node(name="a", identity="2", devices=8)]])
    hosts = NodeHosts(lambda: next(sights), CLUSTER, began_s=0.0, source="ray", clock=lambda: 1.0)
    first, second = hosts.look(), hosts.look()
    file = tmp_path / "trace.csv"
    file.write_text("time_s,link,share\n1,h1,lost\n2,h1,back\n", encoding="utf-8")
    of_file = FileHosts(file, CLUSTER).look()

    assert first.trace == second.trace
    assert first.identities[0] != second.identities[0]
    assert first.identities[1:] == second.identities[1:]
    assert of_file.identities[1] != of_file.identities[0]


def test_the_clock_of_a_file_is_that_of_its_rows(tmp_path):
    """The time is that of the last row and what has passed since it was written, and never goes back."""
    file = tmp_path / "trace.csv"
    file.write_text("time_s,link,share\n100,h1,lost\n", encoding="utf-8")
    os.utime(file, (5000.0, 5000.0))
    now_s = 5030.0
    hosts = FileHosts(file, CLUSTER, clock=lambda: now_s)
    first = hosts.look()
    os.utime(file, (5029.0, 5029.0))
    second = hosts.look()
    now_s = 5010.0
    file.write_text("time_s,link,share\n100,h1,lost\n120,h1,ba", encoding="utf-8")
    third = hosts.look()

    assert [first.now_s, second.now_s, third.now_s] == [130.0, 130.0, 130.0]
    assert third.trace == first.trace


@given(
    events=st.lists(
        st.tuples(st.sampled_from([0.0, 1.5, 1 / 3]), st.sampled_from(["inter", (1,), (0, 2)]), st.floats(1e-6, 1.0)),
        unique_by=lambda event: event[:2],
    )
)
def test_a_trace_is_written_as_it_is_read(events):
    """Every trace reads back as it was written, to the last digit."""
    links = [LinkEvent(time_s=time_s, link=link, share=share) for time_s, link, share in sorted(events, key=str)]
    links.sort(key=lambda event: event.time_s)
    trace = Trace(events=(*links, HostEvent(time_s=9.0, host=2, is_lost=True)))

    assert parse_trace(format_trace(trace), CLUSTER, place="trace.csv") == trace


@pytest.mark.slow
@given(toggles=st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_old_events_are_left_out(toggles):
    """Without the old events the hosts that are lost are the same at every later time."""
    lost: set[int] = set()
    events = []
    for number, host in enumerate(toggles * 40):
        lost ^= {host}
        events.append(HostEvent(time_s=float(number), host=host, is_lost=host in lost))
    events.insert(0, LinkEvent(time_s=0.0, link=(1,), share=0.5))
    short = shorten(events)

    assert len(short) <= max(MOST_EVENTS, KEPT_EVENTS + 4)
    assert any(isinstance(event, LinkEvent) for event in short)
    assert len(events) <= MOST_EVENTS or len(short) < len(events)
    for event in short:
        now = lost_hosts(Trace(events=tuple(short)), event.time_s)
        assert now == lost_hosts(Trace(events=tuple(events)), event.time_s)


def test_a_monitor_tells_how_fast_links_are(tmp_path):
    """With nodes of a batch system, the last shares of a trace count from when they are seen; its hosts do not."""
    file = tmp_path / "network.csv"
    file.write_text("time_s,link,share\n7,h1,0.5\n8,h2,lost\n", encoding="utf-8")
    clock = iter((100.0, 110.0, 120.0))
    hosts = NodeHosts(
        lambda: nodes(NAMES[:3]),
        CLUSTER,
        began_s=0.0,
        source="slurm",
        network=lambda: read_growing(file, CLUSTER),
        clock=lambda: next(clock),
    )
    first = hosts.look()
    file.write_text("time_s,link,share\n7,h1,0.5\n8,h2,lost\n9,inter,0.25\n", encoding="utf-8")
    second = hosts.look()
    file.write_text("time_s,link,share\n9,inter,0.25\n", encoding="utf-8")
    third = hosts.look()
    slow = [LinkEvent(time_s=100.0, link=(1,), share=0.5), LinkEvent(time_s=110.0, link="inter", share=0.25)]

    assert list(first.trace.events) == slow[:1]
    assert list(second.trace.events) == slow
    assert list(third.trace.events) == [*slow, LinkEvent(time_s=120.0, link=(1,), share=1.0)]


def test_a_probe_tells_how_fast_links_are():
    """The shares of a probe are events from when it finds them; a lost host is answered before it measures again."""
    sights, clock = iter([NAMES[:3], NAMES[:3], NAMES[:2], NAMES[:2]]), iter((100.0, 110.0, 120.0, 130.0))
    shares, asked = iter([{}, {(1,): 0.5}, {(1,): 0.5}, {}]), []

    def probe(seats, may_measure):
        asked.append(([seat.node for seat in seats], may_measure))
        return next(shares)

    hosts = NodeHosts(
        lambda: nodes(next(sights)), CLUSTER, began_s=0.0, source="ray", probe=probe, clock=lambda: next(clock)
    )
    looks = [hosts.look() for _ in range(4)]
    slow, lost = LinkEvent(time_s=110.0, link=(1,), share=0.5), HostEvent(time_s=120.0, host=2, is_lost=True)

    assert [len(look.trace.events) for look in looks] == [0, 1, 2, 3]
    assert looks[3].trace.events == (slow, lost, LinkEvent(time_s=130.0, link=(1,), share=1.0))
    assert asked == [([*NAMES[:3]], may_measure) for may_measure in (True, True, False, True)]


@pytest.mark.parametrize(
    "name",
    ["n" + "9" * 5_000, "n\u00b2", "\u0663", "-oProxyCommand=x", "$(touch x)", "a,b", "\x1b[31m", "[::1]", "0" * 50],
)
def test_a_node_may_have_any_name(name):
    """Whatever the batch system calls a node, it takes its place; numbers in names count by their value."""
    nodes = [Node(name=one, identity="", devices=8) for one in (name, "node10", "node9", "node09")]

    seats = take_seats([Seat()] * 4, [8] * 4, nodes)

    assert {seat.node for seat in seats} == {one.name for one in nodes}
    assert [seat.node for seat in seats].index("node10") > [seat.node for seat in seats].index("node9")
