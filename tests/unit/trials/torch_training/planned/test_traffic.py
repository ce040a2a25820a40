"""What ranks send against the plan's list: agreement is silent, and any difference names axes, kind and bytes."""

from dataclasses import replace

import pytest

from costmodels.blocks.operator import OpKind
from tests.support.programs.sharded_steps import GPT, of_study
from trials.torch_training.planned.traffic import members, planned_traffic, recorded_traffic, traffic_mismatches
from trials.torch_training.profiling.rank_recording import Issued, RankGroup, RankRecording


@pytest.fixture(scope="module")
def plan():
    """A plan by hand on eight devices."""
    return of_study(GPT, 8, dp=2, tp=4)


def recording_of(plan, rank, surplus=0):
    """Return the recording of a rank that sends what the plan says in one call each, and in the last one a surplus."""
    calls = [
        Issued(call=number, kind=kind, message_bytes=int(num_bytes), group=RankGroup(name=str(ranks), ranks=ranks))
        for number, ((kind, ranks), num_bytes) in enumerate(planned_traffic(plan, rank).items())
    ]
    last = replace(calls[-1], message_bytes=calls[-1].message_bytes + surplus)
    return RankRecording(rank=rank, events=(*calls[:-1], last))


def test_groups_are_the_ranks_along_their_axes(plan):
    """The last axis of the mesh is the fastest, and several axes form one group."""
    assert members(plan.mesh, (1,), 5) == (4, 5, 6, 7)
    assert members(plan.mesh, (0,), 5) == (1, 5)
    assert members(plan.mesh, (0, 1), 5) == tuple(range(8))


def test_what_the_plan_says_is_no_difference(plan):
    """Ranks that send exactly the plan's bytes are not mentioned."""
    recordings = [recording_of(plan, rank) for rank in range(8)]

    assert traffic_mismatches(plan, recordings) == ()
    assert recorded_traffic(recordings[3]) == planned_traffic(plan, 3)


def test_one_byte_more_on_one_rank_is_told(plan):
    """A single surplus byte gives one sentence, with the axes of the group and both numbers."""
    recordings = [recording_of(plan, rank, surplus=int(rank == 6)) for rank in range(8)]
    (kind, _), num_bytes = list(planned_traffic(plan, 6).items())[-1]

    (sentence,) = traffic_mismatches(plan, recordings)

    assert f".{kind}: the plan has {num_bytes:,.0f} bytes, sent {num_bytes + 1:,.0f} bytes" in sentence
    assert sentence.split(".")[0] in ("dp", "tp", "dp*tp")


def test_a_call_that_the_plan_lacks_is_told(plan):
    """An all-to-all that no plan by hand of these degrees has appears with zero planned bytes."""
    extra = Issued(call=99, kind=OpKind.ALL_TO_ALL, message_bytes=64, group=RankGroup(name="x", ranks=(0, 4)))
    one = recording_of(plan, 0)

    found = traffic_mismatches(plan, [replace(one, events=(*one.events, extra))])

    assert found == ("dp.all_to_all: the plan has 0 bytes, sent 64 bytes",)
