"""Real ranks under the recorded backend: right results, the calls that were made, and recordings that fit together."""

import dataclasses

import pytest

from costmodels.blocks.operator import OpKind
from costmodels.job.runtime import find_runtime
from hardware.cluster_file import find_cluster
from tests.support.programs import recorded_ranks, training_ranks
from tests.support.programs.small_backends import PP
from trials.torch_training.profiling.rank_recording import Computed, Issued, RankRecording, Waited
from trials.torch_training.profiling.virtual_clock import virtual_step

CLUSTER = find_cluster("dgx-h100")


def _calls(recording):
    """Kind and bytes of every call."""
    return [(event.kind, event.message_bytes) for event in recording.events if isinstance(event, Issued)]


def _order(recording):
    """The calls by their numbers, and waits by those below zero: `~call`."""
    return [
        event.call if isinstance(event, Issued) else ~event.call
        for event in recording.events
        if not isinstance(event, Computed)
    ]


def _told(ranks):
    """What each of them told last, in columns."""
    return tuple(zip(*(values[-1] for values in ranks), strict=True))


def test_reductions(on_ranks):
    """All that adds up gives the results of plain gloo; its message is the whole tensor, and waits count once."""
    recordings, are_equal = _told(on_ranks(2, recorded_ranks.reductions))

    assert all(map(all, are_equal))
    for recording in recordings:
        assert _calls(recording) == [
            (OpKind.ALL_REDUCE, 32),
            (OpKind.ALL_REDUCE, 32),
            (OpKind.ALL_REDUCE, 48),
            (OpKind.REDUCE_SCATTER, 32),
            (OpKind.REDUCE_SCATTER, 32),
            (OpKind.REDUCE_SCATTER, 32),
        ]
        assert _order(recording) == [0, ~0, 1, 2, ~2, ~1, 3, ~3, 4, ~4, 5, ~5]
    assert virtual_step(recordings, CLUSTER).step_time_s >= max(recording.busy_s for recording in recordings)


def test_exchanges(on_ranks):
    """All that moves data gives the results of plain gloo; the message is what was gathered, or one member's buffer."""
    recordings, are_equal = _told(on_ranks(2, recorded_ranks.exchanges))

    assert all(map(all, are_equal))
    for recording in recordings:
        assert _calls(recording) == [
            (OpKind.ALL_GATHER, 32),
            (OpKind.ALL_GATHER, 32),
            (OpKind.ALL_TO_ALL, 32),
            (OpKind.ALL_TO_ALL, 12),
            (OpKind.ALL_GATHER, 32),
            (OpKind.ALL_GATHER, 32),
            (OpKind.REDUCE_SCATTER, 32),
            (OpKind.ALL_REDUCE, 0),
        ]
    assert virtual_step(recordings, CLUSTER).step_time_s >= max(recording.busy_s for recording in recordings)


def test_messages(on_ranks):
    """Batched and single messages arrive, and are recorded with both ends and their tag."""
    recordings, are_equal = _told(on_ranks(3, recorded_ranks.ring))

    assert all(map(all, are_equal))
    messages = [
        [(event.ends, event.tag, event.message_bytes) for event in recording.events if isinstance(event, Issued)]
        for recording in recordings
    ]
    assert messages == [
        [((0, 1), 0, 32), ((2, 0), 0, 32), ((0, 1), 3, 32)],
        [((1, 2), 0, 32), ((0, 1), 0, 32), ((0, 1), 3, 32)],
        [((2, 0), 0, 32), ((1, 2), 0, 32)],
    ]
    assert virtual_step(recordings, CLUSTER).step_time_s > 0


def test_functional_collectives(on_ranks):
    """Functional collectives and their gradients are those of plain gloo, and are waited for where they are used."""
    recordings, are_equal = _told(on_ranks(2, recorded_ranks.functional))

    assert all(map(all, are_equal))
    for recording in recordings:
        assert _calls(recording) == [
            (OpKind.ALL_GATHER, 64),
            (OpKind.REDUCE_SCATTER, 64),
            (OpKind.ALL_TO_ALL, 32),
            (OpKind.ALL_REDUCE, 32),
            (OpKind.ALL_TO_ALL, 32),
            (OpKind.ALL_GATHER, 64),
            (OpKind.REDUCE_SCATTER, 64),
        ]
        assert _order(recording)[-1] == ~3
    assert virtual_step(recordings, CLUSTER).step_time_s >= max(recording.busy_s for recording in recordings)


def test_dtensors(on_ranks):
    """Redistribution on a sub-mesh gives the right tensors, by calls on the groups of the mesh."""
    recordings, are_equal = _told(on_ranks(4, recorded_ranks.redistribute))

    assert all(map(all, are_equal))
    for recording in recordings:
        assert _calls(recording) == [
            (OpKind.ALL_GATHER, 128),
            (OpKind.ALL_GATHER, 256),
            (OpKind.ALL_REDUCE, 256),
            (OpKind.REDUCE_SCATTER, 256),
        ]
        groups = [event.group.ranks for event in recording.events if isinstance(event, Issued)]
        inner, outer = recording.rank // 2 * 2, recording.rank % 2
        assert groups == [(inner, inner + 1)] + [(outer, outer + 2)] * 3
    assert virtual_step(recordings, CLUSTER).step_time_s >= max(recording.busy_s for recording in recordings)


def test_sharded_layers(on_ranks):
    """FSDP2 has the gradients of plain gloo; it gathers twice and reduces once per layer, and waits for each."""
    _, expected = _told(on_ranks(2, recorded_ranks.sharded, "gloo"))
    steps, gradients = _told(on_ranks(2, recorded_ranks.sharded, "recorded"))

    assert gradients == expected
    for step in zip(*steps, strict=True):
        for recording in step:
            assert _calls(recording) == [(OpKind.ALL_GATHER, 512)] * 4 + [(OpKind.REDUCE_SCATTER, 512)] * 2
            assert _order(recording) == [0, ~0, 1, ~1, 2, ~2, 3, ~3, 4, ~4, 5, ~5]
        assert virtual_step(step, CLUSTER).step_time_s >= max(recording.busy_s for recording in step)


def test_pipelines(on_ranks):
    """A stage under 1F1B has the gradient of plain gloo; it hands on every micro-batch, and what comes back."""
    _, expected = _told(on_ranks(2, recorded_ranks.pipelined, "gloo"))
    steps, gradients = _told(on_ranks(2, recorded_ranks.pipelined, "recorded"))

    assert gradients == expected
    for step in zip(*steps, strict=True):
        for recording in step:
            ends = sorted(event.ends for event in recording.events if isinstance(event, Issued))
            assert ends == [(0, 1)] * 4 + [(1, 0)] * 4
            assert _calls(recording) == [(OpKind.SEND_RECV, 64)] * 8
        assert virtual_step(step, CLUSTER).step_time_s > 0


def test_a_trained_pipeline_shows_its_bubble(on_ranks):
    """Two stages work side by side on eight micro-batches; with one of them they take turns."""
    shares = {}
    job, runtime = training_ranks.job_of(training_ranks.LLAMA), find_runtime("torch-reference")
    for num_micro_batches in (1, 8):
        config = dataclasses.replace(PP, mbs=job.global_batch_size // num_micro_batches)
        told = on_ranks(2, training_ranks.train_recorded, job, runtime, config)
        recordings = [_undisturbed(steps) for steps in told]
        busy_s = sum(recording.busy_s for recording in recordings)
        shares[num_micro_batches] = virtual_step(recordings, CLUSTER).step_time_s / busy_s

    # one micro-batch: all the work, one after the other; eight: half of it, and the bubble
    assert shares[8] < 0.8 < shares[1]


def _undisturbed(recordings):
    """One step of a rank with the least time that each piece of its compute took in equal steps."""
    return RankRecording(
        rank=recordings[0].rank,
        events=tuple(
            min(events, key=lambda event: event.cpu_s) if isinstance(events[0], Computed) else events[0]
            for events in zip(*(recording.events for recording in recordings), strict=True)
        ),
    )


def test_subgroups(on_ranks):
    """Members of a group are recorded by their numbers in the trial, and groups of the same ranks keep apart."""
    recordings = [values[-1] for values in on_ranks(3, recorded_ranks.subgroups)]

    idle, *members = recordings
    assert _calls(idle) == []
    for recording in members:
        first, second, message = [event for event in recording.events if isinstance(event, Issued)]
        assert first.group.ranks == second.group.ranks == (1, 2)
        assert first.group != second.group
        assert message.ends == (2, 1)
    assert virtual_step(recordings, CLUSTER).step_time_s > 0


def test_ways_to_wait(on_ranks):
    """A blocking call is needed at once, a future's where it is taken; a call may be never needed."""
    for recording, results in zip(*_told(on_ranks(2, recorded_ranks.ways_to_wait)), strict=True):
        assert results == [[2.0, 2.0]] * 4
        assert _order(recording) == [0, ~0, 1, ~1, 2, ~2, 3, ~3, 4]


def test_what_can_not_be_recorded(on_ranks):
    """While a step is recorded, receives from anybody and calls of other threads raise."""
    for [(first, second)] in on_ranks(2, recorded_ranks.what_can_not_be_recorded):
        assert "name the source" in first
        assert "another thread communicates" in second


def test_waiting_is_not_computing(on_ranks):
    """What calls cost their thread, and waiting for a rank that sleeps, is no compute; products are."""
    recordings, used_s = _told(on_ranks(2, recorded_ranks.times))

    for recording, own_s in zip(recordings, used_s, strict=True):
        first = recording.events[0]
        assert isinstance(first, Computed)
        assert first.cpu_s == pytest.approx(own_s, rel=0.2, abs=0.002)
        assert recording.busy_s - first.cpu_s < 0.02
        assert sum(isinstance(event, Waited) for event in recording.events) == 4
