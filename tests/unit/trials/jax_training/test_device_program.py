"""A device's program without its collectives, and their time: every kind, and nothing passed over in silence."""

import numpy as np
import pytest

from costmodels.blocks.operator import OpKind
from costmodels.operators.kernels import collective_alone_s
from tests.support.programs.small_backends import cluster_of
from trials.jax_training.device_program import DeviceProgram

PAIRS = "replica_groups={{0,1},{2,3}}"


def program(*lines, before=""):
    """Read a text that XLA could have written for four devices."""
    text = ["HloModule m, is_scheduled=true, num_partitions=4", before, "ENTRY %main (x: f32[8]) -> f32[8] {", *lines]
    return DeviceProgram.of("\n".join([*text, "}"]))


@pytest.mark.parametrize(
    ("line", "kind", "message_bytes", "stand_ins"),
    [
        (
            f"f32[8,2]{{1,0}} all-reduce(%x), {PAIRS}, to_apply=%add",
            OpKind.ALL_REDUCE,
            64,
            ["f32[8,2]{1,0} opt-barrier(%x)"],
        ),
        (
            f"bf16[8,2]{{1,0}} all-gather(%x), {PAIRS}, dimensions={{1}}",
            OpKind.ALL_GATHER,
            32,
            ["bf16[8,2]{1,0} concatenate(%x, %x), dimensions={1}", "bf16[8,2]{1,0} opt-barrier(%y.alone)"],
        ),
        (
            f"f32[4,2]{{1,0}} reduce-scatter(%x), {PAIRS}, dimensions={{0}}, to_apply=%add",
            OpKind.REDUCE_SCATTER,
            64,
            ["f32[4,2]{1,0} slice(%x), slice={[0:4], [0:2]}", "f32[4,2]{1,0} opt-barrier(%y.alone)"],
        ),
        (
            f"(f32[4]{{0}}, f32[4]{{0}}) all-to-all(%x, %z), {PAIRS}",
            OpKind.ALL_TO_ALL,
            32,
            ["(f32[4]{0}, f32[4]{0}) tuple(%x, %z)", "(f32[4]{0}, f32[4]{0}) opt-barrier(%y.alone)"],
        ),
        (
            "s32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,2},{2,1}}",
            OpKind.SEND_RECV,
            32,
            ["s32[8]{0} opt-barrier(%x)"],
        ),
    ],
)
def test_a_collective_leaves_something_of_its_shape(line, kind, message_bytes, stand_ins):
    """Each kind is told with its message and groups, and its place is taken by work of one device alone."""
    found = program(f"  ROOT %y = {line}")

    (one,) = found.collectives
    assert (one.kind, one.message_bytes) == (kind, message_bytes)
    assert one.groups == (((1, 2), (2, 1)) if kind == OpKind.SEND_RECV else ((0, 1), (2, 3)))
    assert [text.split(" = ")[1] for text in found.alone.splitlines()[3:-1]] == stand_ins
    assert found.alone.splitlines()[-2].startswith("  ROOT %y = ")


def test_the_device_takes_the_first_place_and_keeps_all_other_work():
    """The program is one of a single partition, whose number is 0, and other lines are as they were."""
    found = program("  %id = u32[] partition-id()", "  ROOT %y = f32[8]{0} add(%x, %x)")

    assert found.alone.splitlines()[0] == "HloModule m, is_scheduled=true"
    assert found.alone.splitlines()[3:5] == ["  %id = u32[] constant(0)", "  ROOT %y = f32[8]{0} add(%x, %x)"]
    assert found.collectives == ()


@pytest.mark.parametrize(
    ("line", "before"),
    [
        (f"  ROOT %y = f32[8]{{0}} all-gather-start(%x), {PAIRS}", ""),
        (
            "  ROOT %y = f32[8]{0} add(%x, %x)",
            f"%body (x: f32[8]) -> f32[8] {{\n  %y = f32[8]{{0}} all-reduce(%x), {PAIRS}\n}}",
        ),
        (f"  ROOT %y = c64[8]{{0}} all-reduce(%x), {PAIRS}", ""),
    ],
    ids=["asynchronous", "in_a_loop", "of_unknown_size"],
)
def test_a_collective_that_nobody_can_price_is_an_error(line, before):
    """Time that the clock would leave out fails the trial."""
    with pytest.raises(ValueError, match="can't tell"):
        program(line, before=before)


def test_collectives_run_one_after_the_other_on_the_links_of_the_cluster():
    """Equal collectives count each time, and groups within hosts take another time than groups across them."""
    cluster = cluster_of(2, 2)
    line = "f32[262144]{0} all-reduce(%x), to_apply=%add, "
    inside = program(f"  %y = {line}{PAIRS}").collectives_s(cluster)
    across = program(f"  %y = {line}replica_groups={{{{0,2}},{{1,3}}}}").collectives_s(cluster)
    both = program(f"  %y = {line}{PAIRS}", f"  %z = {line}replica_groups=[2,2]<=[2,2]T(1,0)", f"  %w = {line}{PAIRS}")

    links = cluster.links_among([np.array([[0, 2], [1, 3]])], np.arange(4))
    assert across == pytest.approx(float(collective_alone_s(OpKind.ALL_REDUCE, np.array([2.0**20]), links)[0]))
    assert inside != pytest.approx(across, rel=0.1)
    assert both.collectives_s(cluster) == pytest.approx(2 * inside + across)


LOOP = """%body (p: f32[8]) -> f32[8] {{
  ROOT %y = f32[8]{{0}} all-reduce(%p), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add
}}
%cond (q: s32[]) -> pred[] {{
  %limit = s32[] constant(6)
  ROOT %lt = pred[] compare(%q, %limit), direction={direction}
}}"""
WHILE = "  %w = f32[8]{0} while(%x), condition=%cond, body=%body"


def test_collectives_of_a_loop_count_as_often_as_it_turns():
    """A loop that counts to a constant runs its collective that many times, in time too; its body has stand-ins."""
    once, looped = (
        program(f"  ROOT %y = f32[8]{{0}} all-reduce(%x), {PAIRS}"),
        program(WHILE, before=LOOP.format(direction="LT")),
    )
    cluster = cluster_of(4)

    assert [each.times for each in looped.collectives] == [6]
    assert looped.collectives_s(cluster) == pytest.approx(6 * once.collectives_s(cluster))
    assert "f32[8]{0} opt-barrier(%p)" in looped.alone


def test_a_loop_of_unknown_length_is_refused():
    """A collective in a loop that does not count to a constant has no known time."""
    with pytest.raises(ValueError, match="can't tell the time of"):
        program(WHILE, before=LOOP.format(direction="NE"))


CALLED = """%called (p: f32[8]) -> f32[8] {
  ROOT %y = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
}"""
CALL = "f32[8]{0} call(%x), to_apply=%called"


def test_collectives_of_a_called_computation_count_for_each_call():
    """The body of a `jax.shard_map` is a computation: each of its calls sends, as often as its caller runs."""
    loop = LOOP.format(direction="LT").replace("all-reduce(%p), " + PAIRS, "call(%p)")
    twice = program(f"  %a = {CALL}", f"  ROOT %b = {CALL}", before=CALLED)
    in_loop = program(WHILE, f"  ROOT %b = {CALL}", before=f"{loop.replace('%add', '%called')}\n{CALLED}")

    assert [each.times for each in twice.collectives] == [2]
    assert [each.times for each in in_loop.collectives] == [7]


@pytest.mark.parametrize(
    "caller",
    [
        "f32[8]{0} conditional(%i, %x, %x), branch_computations={%called, %other}",
        "f32[8]{0} conditional(%p, %x, %x), true_computation=%other, false_computation=%called",
    ],
)
def test_a_called_computation_whose_callers_cannot_be_counted_is_refused(caller):
    """A branch may run or not, and a collective in it has no known time, although it is called elsewhere too."""
    with pytest.raises(ValueError, match="can't tell the time of"):
        program(f"  %a = {caller}", f"  ROOT %b = {CALL}", before=CALLED)
