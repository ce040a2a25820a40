"""The virtual clock by hand-computed answers, and what must hold for any step."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.blocks.operator import OpKind
from hardware.cluster import Cluster
from hardware.collectives import all_gather_s, all_reduce_s, send_recv_s
from hardware.device import find_device
from hardware.host_group import HostGroup
from hardware.link import Link
from trials.torch_training.profiling.rank_recording import Computed, Issued, RankGroup, RankRecording, Waited
from trials.torch_training.profiling.virtual_clock import virtual_step

GIGABYTE = 10**9


def _cluster(hosts=1, devices_per_host=8, sharers=1, switches=(), uplink=None):
    return Cluster(
        name="test",
        groups=(
            HostGroup(
                name="test",
                device=find_device("V100"),
                hosts=hosts,
                devices_per_host=devices_per_host,
                intra_links=(Link(kind="test", bandwidth_bytes_per_s=1e11, latency_s=1e-6),),
                nic_links=(Link(kind="test", bandwidth_bytes_per_s=1e9, latency_s=1e-6, sharers=sharers),),
            ),
        ),
        switches=switches,
        uplink_bytes_per_s=uplink,
    )


def _nothing(collective):
    return np.zeros(np.shape(collective.wire_bytes))


def _second(collective):
    """Every call takes a second, all of it at work."""
    return np.sign(collective.wire_bytes).astype(float)


def _latency(collective):
    """Every call takes a second before its first byte."""
    return np.ones(np.shape(collective.wire_bytes))


class _Rank:
    """Writes a recording: `_Rank(0).computes(1.0).issues("a", OpKind.ALL_REDUCE, group).waits("a")`."""

    def __init__(self, rank):
        self.rank, self.events, self.numbers = rank, [], {}

    def computes(self, cpu_s):
        self.events.append(Computed(cpu_s=cpu_s))
        return self

    def issues(self, name, kind, group, message_bytes=GIGABYTE, ends=None):
        self.numbers[name] = len(self.numbers)
        self.events.append(
            Issued(call=self.numbers[name], kind=kind, message_bytes=message_bytes, group=group, ends=ends)
        )
        return self

    def waits(self, name):
        self.events.append(Waited(call=self.numbers[name]))
        return self

    def calls(self, kind, group, message_bytes=GIGABYTE, ends=None):
        name = f"blocking {len(self.numbers)}"
        return self.issues(name, kind, group, message_bytes, ends).waits(name)

    def sends(self, group, to, message_bytes=GIGABYTE):
        return self.issues(f"sent {len(self.numbers)}", OpKind.SEND_RECV, group, message_bytes, (self.rank, to))

    def receives(self, group, source, message_bytes=GIGABYTE):
        return self.calls(OpKind.SEND_RECV, group, message_bytes, (source, self.rank))

    def recording(self):
        return RankRecording(rank=self.rank, events=tuple(self.events))


def _step(*ranks, cluster=None, **further):
    return virtual_step([rank.recording() for rank in ranks], cluster or _cluster(), **further)


def _group(*ranks, name="group"):
    return RankGroup(name=name, ranks=ranks)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 1), (2, 5), (4, 3)])
def test_a_pipeline_has_its_bubble(num_stages, num_micro_batches):
    """Stages that hand on m micro-batches take (m + p - 1) times as long as one micro-batch, links aside."""
    group = _group(*range(num_stages))
    stages = [_Rank(stage) for stage in range(num_stages)]
    for stage, rank in enumerate(stages):
        for _ in range(num_micro_batches):
            rank = rank.receives(group, stage - 1) if stage else rank  # noqa: PLW2901 # the same rank
            rank.computes(2.0)
            if stage < num_stages - 1:
                rank.sends(group, stage + 1)

    step = _step(*stages, collective_time=_nothing)

    assert step.step_time_s == pytest.approx((num_micro_batches + num_stages - 1) * 2.0)
    assert step.waiting_s == pytest.approx([(num_stages - 1) * 2.0] * num_stages)


def test_a_straggler_delays_a_collective():
    """A collective begins when the last member has issued it; the others wait, and what it takes is exposed to all."""
    group = _group(0, 1, 2)
    ranks = [
        _Rank(rank).computes(1.0 + 4.0 * (rank == 1)).calls(OpKind.ALL_REDUCE, group).computes(1.0) for rank in range(3)
    ]

    step = _step(*ranks, collective_time=_second)

    assert step.step_time_s == pytest.approx(5 + 1 + 1)
    assert step.busy_s == pytest.approx((2, 6, 2))
    assert step.waiting_s == pytest.approx((4, 0, 4))
    assert step.exposed_s == pytest.approx((1, 1, 1))


@pytest.mark.parametrize(("between_s", "exposed_s"), [(3.0, 0.0), (1.0, 0.0), (0.25, 0.75)])
def test_an_overlapped_call_costs_what_compute_does_not_hide(between_s, exposed_s):
    """A gather that is issued early and waited for late is exposed by what is left of it."""
    group = _group(0, 1)
    ranks = [
        _Rank(rank)
        .computes(1.0)
        .issues("gather", OpKind.ALL_GATHER, group)
        .computes(between_s)
        .waits("gather")
        .computes(2.0)
        for rank in range(2)
    ]

    step = _step(*ranks, collective_time=_second)

    assert step.step_time_s == pytest.approx(1 + between_s + exposed_s + 2)
    assert step.exposed_s == pytest.approx((exposed_s,) * 2)
    assert step.communicating_s == pytest.approx((1.0, 1.0))


def test_calls_take_what_the_links_take():
    """Alone on its links a call takes the time of hardware/collectives.py for its bytes and its ranks' places."""
    cluster = _cluster(hosts=2, devices_per_host=2)
    for kind, seconds, ranks in [
        (OpKind.ALL_REDUCE, all_reduce_s, (0, 1)),
        (OpKind.ALL_REDUCE, all_reduce_s, (0, 1, 2, 3)),
        (OpKind.ALL_GATHER, all_gather_s, (1, 3)),
        (OpKind.SEND_RECV, send_recv_s, (1, 2)),
    ]:
        members = np.array(ranks)
        ends = ranks if kind == OpKind.SEND_RECV else None
        step = _step(
            *[_Rank(rank).computes(0.0).calls(kind, _group(*ranks), ends=ends) for rank in ranks], cluster=cluster
        )

        expected = float(seconds(GIGABYTE, cluster.links_among([members[np.newaxis]], members))[0])
        assert step.step_time_s == pytest.approx(expected)
        assert step.exposed_s == pytest.approx([expected] * len(ranks))


@pytest.mark.parametrize(
    ("names", "collective_time", "expected_s"), [("aa", _latency, 2.0), ("ab", _latency, 1.0), ("ab", _second, 2.0)]
)
def test_calls_on_one_group_run_one_after_the_other(names, collective_time, expected_s):
    """Two calls in flight on one group take twice the time of one; on two groups they share the links, no more."""
    ranks = [
        _Rank(rank)
        .issues("first", OpKind.ALL_REDUCE, _group(0, 1, name=names[0]))
        .issues("second", OpKind.ALL_REDUCE, _group(0, 1, name=names[1]))
        .waits("first")
        .waits("second")
        for rank in range(2)
    ]

    assert _step(*ranks, collective_time=collective_time).step_time_s == pytest.approx(expected_s)


def test_messages_of_one_sender_arrive_in_order():
    """The k-th receive gets the k-th message, whatever their sizes, and both directions go at once."""
    group = _group(0, 1)
    first = _Rank(0).sends(group, 1, 1).computes(5.0).sends(group, 1, 2).receives(group, 1)
    second = _Rank(1).sends(group, 0).receives(group, 0, 1).computes(1.0).receives(group, 0, 2).computes(1.0)

    step = _step(first, second, collective_time=_second)

    assert step.step_time_s == pytest.approx(5 + 1 + 1)
    assert step.busy_s == pytest.approx((5, 2))
    assert step.exposed_s == pytest.approx((1, 2))  # rank 0 for what came back, which waited for its receive


def test_a_message_waits_for_its_receiver():
    """A message leaves when the receiver has asked for it; who waits for it to be gone waits for that."""
    group = _group(0, 1)
    sender = _Rank(0).computes(1.0).calls(OpKind.SEND_RECV, group, ends=(0, 1)).computes(1.0)
    receiver = _Rank(1).computes(4.0).receives(group, 0)

    assert _step(sender, receiver, collective_time=_second).step_time_s == pytest.approx(4 + 1 + 1)


@pytest.mark.parametrize(
    ("sharers", "pairs", "expected_s"),
    [
        (1, ((0, 2), (1, 3)), 1.0),
        (2, ((0, 2), (1, 3)), 2.0),  # one adapter for both
        (2, ((0, 2), (3, 1)), 1.0),  # in and out are two ways
        (1, ((0, 2), (0, 3)), 2.0),  # one sender for both
        (2, ((0, 1), (1, 3)), 1.0),  # one of them stays at home
    ],
)
def test_messages_share_adapters(sharers, pairs, expected_s):
    """Messages that leave a host at once share its adapter where its devices do, and a device its own links."""
    ranks = {rank: _Rank(rank) for rank in range(4)}
    for number, (sender, receiver) in enumerate(pairs):
        group = _group(sender, receiver, name=str(number))
        ranks[sender].issues(f"{number}", OpKind.SEND_RECV, group, ends=(sender, receiver))
        ranks[receiver].issues(f"{number}", OpKind.SEND_RECV, group, ends=(sender, receiver))

    step = _step(
        *ranks.values(), cluster=_cluster(hosts=2, devices_per_host=2, sharers=sharers), collective_time=_second
    )

    assert step.step_time_s == pytest.approx(expected_s)


def test_messages_share_uplinks():
    """Two messages below one switch that fill its uplink each take twice as long at once."""
    groups = [_group(0, 2, name="a"), _group(1, 3, name="b")]
    ranks = [
        _Rank(rank).issues("sent", OpKind.SEND_RECV, groups[rank % 2], ends=groups[rank % 2].ranks) for rank in range(4)
    ]

    wide = _step(*ranks, cluster=_cluster(4, 1, switches=(0, 0, 1, 1), uplink=2e9), collective_time=_second)
    narrow = _step(*ranks, cluster=_cluster(4, 1, switches=(0, 0, 1, 1), uplink=1e9), collective_time=_second)

    assert wide.step_time_s == pytest.approx(1.0)
    assert narrow.step_time_s == pytest.approx(2.0)


def test_a_call_without_a_partner_is_told():
    """Recordings that do not belong together raise and name the ranks and the call."""
    group = _group(0, 1)
    more = _Rank(0).calls(OpKind.ALL_REDUCE, group).calls(OpKind.ALL_GATHER, group)
    fewer = _Rank(1).calls(OpKind.ALL_REDUCE, group)

    with pytest.raises(
        ValueError, match="rank 0 issued 2 calls with rank 1, which issued 1; call 1 of rank 0, a all_gather"
    ):
        _step(more, fewer)
    with pytest.raises(ValueError, match="call 0 of rank 1 is a all_to_all, but call 0 of rank 0"):
        _step(_Rank(0).calls(OpKind.ALL_REDUCE, group), _Rank(1).calls(OpKind.ALL_TO_ALL, group))
    with pytest.raises(ValueError, match="rank 0 issued 1 calls with rank 1, which issued 0"):
        _step(_Rank(0).sends(group, 1), _Rank(1))


def test_steps_that_never_end_are_told():
    """Two ranks that both send first and wait for it, or use two groups in two orders, never end."""
    group = _group(0, 1)
    ranks = [
        _Rank(rank).calls(OpKind.SEND_RECV, group, ends=(rank, 1 - rank)).receives(group, 1 - rank) for rank in range(2)
    ]

    with pytest.raises(ValueError, match="in a circle"):
        _step(*ranks)


def test_what_can_not_be_a_step_is_told():
    """Ranks without a device, ranks that come twice and waits for nothing raise."""
    with pytest.raises(ValueError, match="rank 8 has no device: test has 8"):
        _step(_Rank(8).computes(1.0))
    with pytest.raises(ValueError, match="one recording of every rank"):
        _step(_Rank(0), _Rank(0))
    with pytest.raises(ValueError, match="rank 0 waited for call 3, which it never issued"):
        virtual_step([RankRecording(rank=0, events=(Waited(call=3),))], _cluster())


def test_recordings_are_small():
    """A step of a thousand calls travels as less than 100 KB."""
    rank = _Rank(0)
    for call in range(1000):
        rank.computes(0.001 * call).calls(OpKind.ALL_REDUCE, _group(0, 1), 1000 * call)
    recording = rank.recording()

    sent = pickle.dumps(recording)

    assert pickle.loads(sent) == recording  # noqa: S301 # our own
    assert len(sent) < 100_000


@st.composite
def steps(draw):
    """The recordings of a program that can end: its calls are issued in one order by everybody."""
    num_ranks = draw(st.integers(1, 4))
    ranks = [_Rank(rank) for rank in range(num_ranks)]
    open_calls = [[] for _ in ranks]
    times = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    for number in range(draw(st.integers(0, 8))):
        members = tuple(sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))))
        is_message = len(members) == 2 and draw(st.booleans())
        kind = OpKind.SEND_RECV if is_message else draw(st.sampled_from([OpKind.ALL_REDUCE, OpKind.ALL_TO_ALL]))
        message_bytes = draw(st.sampled_from([0, 10**6, 10**9]))
        blocking = draw(st.booleans())
        for rank in members:
            ranks[rank].computes(draw(times))
            ends = members if is_message else None
            ranks[rank].issues(number, kind, _group(*members, name=str(members)), message_bytes, ends)
            if blocking:
                ranks[rank].waits(number)
            else:
                open_calls[rank].append(number)
        for rank in range(num_ranks):
            if open_calls[rank] and draw(st.booleans()):
                ranks[rank].waits(open_calls[rank].pop())
    for rank in ranks:
        rank.computes(draw(times))
    return [rank.recording() for rank in ranks]


clusters = st.sampled_from(
    [
        _cluster(),
        _cluster(2, 2),
        _cluster(2, 2, sharers=2),
        _cluster(4, 1),
        _cluster(4, 1, switches=(0, 0, 1, 1), uplink=1e9),
    ]
)


@given(steps(), clusters)
def test_a_step_lies_between_the_busiest_rank_and_one_thing_at_a_time(recordings, cluster):
    """No step is shorter than the busiest rank, or longer than all that is computed and sent, one after the other."""
    alone_s = []
    for recording in recordings:
        for event in recording.events:
            if isinstance(event, Issued) and recording.rank == event.group.ranks[0]:
                ranks = [
                    _Rank(rank).issues("call", event.kind, event.group, event.message_bytes, event.ends)
                    for rank in event.group.ranks
                ]
                alone_s.append(_step(*ranks, cluster=cluster).step_time_s)

    step = virtual_step(recordings, cluster)

    assert step.step_time_s >= max(step.busy_s) * (1 - 1e-9)
    assert step.step_time_s <= (sum(step.busy_s) + sum(alone_s)) * (1 + 1e-9)
    for parts in zip(step.busy_s, step.exposed_s, step.waiting_s, strict=True):
        assert sum(parts) == pytest.approx(step.step_time_s)
    for exposed_s, communicating_s in zip(step.exposed_s, step.communicating_s, strict=True):
        assert exposed_s <= communicating_s * (1 + 1e-9)


@given(steps(), st.sampled_from([0.25, 3.0]))
def test_faster_devices_scale_a_step_without_links(recordings, factor):
    """Where calls take no time, scaling all compute scales the step."""
    scaled = [
        RankRecording(
            rank=recording.rank,
            events=tuple(
                Computed(cpu_s=event.cpu_s * factor) if isinstance(event, Computed) else event
                for event in recording.events
            ),
        )
        for recording in recordings
    ]
    step_time_s = virtual_step(recordings, _cluster(), collective_time=_nothing).step_time_s

    assert virtual_step(scaled, _cluster(), collective_time=_nothing).step_time_s == pytest.approx(factor * step_time_s)
