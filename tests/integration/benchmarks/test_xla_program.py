"""Reading XLA's partitioned programs: every form of a group, loops, products, and nothing passed over in silence."""

import pytest

from benchmarks.support.xla_program import on_device
from costmodels.xla.groups import axes_of, groups_of

MESH = {"data": 4, "model": 2}
LINE = "  %all-reduce.1 = bf16[8,128]{1,0} all-reduce(%dot.2), channel_id=1, "
ALONG_DATA = ((0, 2, 4, 6), (1, 3, 5, 7))
ALONG_MODEL = ((0, 1), (2, 3), (4, 5), (6, 7))


def program(*lines, before=""):
    """A text that XLA could have written, and what a device does in it."""
    return on_device("\n".join([before, "ENTRY %main (x: f32[8]) -> f32[8] {", *lines, "}"]), MESH)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ALONG_MODEL),
        ("replica_groups=[4,2]<=[8], use_global_device_ids=true", ALONG_MODEL),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ALONG_DATA),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ALONG_DATA),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}", ALONG_DATA),
        ("replica_groups=mesh['a'=8] {'a':(1)4}", ALONG_DATA),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ALONG_MODEL),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", (tuple(range(8)),)),
    ],
)
def test_groups_are_read_in_every_form(groups, expected):
    """Listed, as an iota, by a mesh's axes, and by parts of these; their size decides what is sent."""
    assert groups_of(LINE + groups) == expected
    size = len(expected[0])
    (found,) = program(LINE + groups).sent.values()
    assert found == 2 * 8 * 128 * 2 * (size - 1) / size


@pytest.mark.parametrize(
    ("groups", "axes"), [(ALONG_DATA, ("data",)), (ALONG_MODEL, ("model",)), ((tuple(range(8)),), ("data", "model"))]
)
def test_groups_are_of_axes(groups, axes):
    """Groups are told by the axes along which their devices differ, and by none where these have more devices."""
    assert axes_of(groups, MESH) == axes
    assert axes_of(((0, 3), (1, 2)), MESH) == ("?",)


def test_sums_of_sums_are_one_reduction():
    """An all-reduce of an all-reduce counts as one along both axes, and so does a gather of a gather."""
    found = program(
        "  %a = f32[64]{0} all-reduce(%dot), replica_groups=[2,4]<=[4,2]T(1,0)",
        "  %b = f32[64]{0} all-reduce(%a), replica_groups=[4,2]<=[8]",
        "  %c = f32[16]{0} all-gather(%b), replica_groups=[2,4]<=[4,2]T(1,0)",
        "  %d = f32[32]{0} all-gather(%c), replica_groups=[4,2]<=[8]",
        "  ROOT %e = pred[16]{0} collective-permute(%d), source_target_pairs={{0,1}}",
    )

    both = ("data", "model")
    assert +found.sent == {("reduced", both): 2 * 256 * 7 / 8, ("gathered", both): 128 * 7 / 8, ("exchanged", ()): 16}


LOOP = """
%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%body (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[2,4]{1,0} parameter(0)
  %y = f32[4,3]{1,0} parameter(1)
  %dot = f32[2,3]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %s = f32[2,3]{1,0} all-reduce(%dot), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}"""
WHILE = "  %w = (s32[], f32[8]{0}) while(%tuple), condition=%cond, body=%body"


@pytest.mark.parametrize(
    ("loop", "times"), [(WHILE, 5), (WHILE + ', backend_config={"known_trip_count":{"n":"7"}}', 7)]
)
def test_loops_count_as_often_as_they_run(loop, times):
    """The limit of a scan's counter, or what XLA says, multiplies all that a loop's body does."""
    found = program(loop, before=LOOP)

    assert found.sent == {("reduced", ("model",)): times * 24}
    assert found.flop == times * 2 * 2 * 3 * 4


def test_products_are_counted():
    """A convolution counts its window and input features for each element, without the zeros of a dilated image."""
    found = program(
        "  %x = f32[2,8,8,4]{3,2,1,0} parameter(0)",
        "  %w = f32[3,3,4,6]{3,2,1,0} parameter(1)",
        "  %y = f32[2,16,16,6]{3,2,1,0} convolution(%x, %w), window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2}, "
        "dim_labels=b01f_01io->b01f",
    )

    assert found.flop == 2 * (2 * 16 * 16 * 6) * (3 * 3 * 4) / 4


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (LINE + "replica_groups={}", "can't read the groups"),
        (LINE + "replica_groups=mesh['a'=2] {'b'}", "can't read the groups"),
        (LINE + "replica_groups={{0,1,2},{3,4}}", "groups of unlike sizes"),
        (WHILE, "can't tell how often a loop runs"),
        ("  %s = f32[8] all-reduce-start(%x), replica_groups={{0,1}}", "an asynchronous collective"),
        ("  %s = token[8] all-gather(%x), replica_groups={{0,1}}", "can't tell the size of token"),
        ("  %c = f32[] conditional(%p, %x, %y), branch_computations={%body, %add}", "a branch that sends"),
    ],
)
def test_what_can_not_be_read_is_refused(line, told):
    """A group, a type, a loop or a branch that would be counted as nothing is an error."""
    with pytest.raises(ValueError, match=told):
        program(line, before=LOOP.replace("direction=LT", "direction=NE"))
