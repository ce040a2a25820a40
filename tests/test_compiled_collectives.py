"""Reading XLA's partitioned programs: every form of a group, and nothing that is passed over in silence."""

import pytest

from benchmarks.compiled_collectives import bytes_of, group_size

LINE = "%all-reduce.1 = bf16[8,128]{1,0} all-reduce(%dot.2), channel_id=1, "


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,2},{1,3}}", 2),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,4]T(1,0)) {'axis_0','axis_1'}", 8),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
    ],
)
def test_groups_are_read_in_every_form(groups, size):
    """Listed, as an iota, by a mesh's axes, and by parts of these."""
    assert group_size(LINE + groups) == size
    assert bytes_of(LINE + groups) == {"reduced": 2 * 8 * 128 * 2 * (size - 1) / size}


def test_sums_of_sums_are_one_reduction():
    """An all-reduce of an all-reduce counts as one along both axes; a reduce-scatter takes its operand's bytes."""
    text = "\n".join(
        [
            "%a = f32[64]{0} all-reduce(%dot), replica_groups=[2,4]<=[8]",
            "%b = f32[64]{0} all-reduce(%a), replica_groups=[4,2]<=[8]",
            "%c = f32[16]{0} all-gather(%b), replica_groups=[2,4]<=[8]",
            "%d = pred[16]{0} collective-permute(%c), source_target_pairs={{0,1}}",
        ]
    )

    assert bytes_of(text) == {"reduced": 2 * 256 * 7 / 8, "gathered": 64 * 3 / 4, "exchanged": 16}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (LINE + "replica_groups={}", "can't read the groups"),
        (LINE + "replica_groups=mesh['a'=2] {'b'}", "can't read the groups"),
        ("%w = (f32[]) while(%tuple), condition=%c, body=%b", "a program with a loop"),
        ("%s = f32[8] all-reduce-start(%x), replica_groups={{0,1}}", "an asynchronous collective"),
        ("%s = token[8] all-gather(%x), replica_groups={{0,1}}", "can't tell the size of token"),
    ],
)
def test_what_can_not_be_read_is_refused(line, told):
    """A group, a type or a loop that would be counted as nothing is an error."""
    with pytest.raises(ValueError, match=told):
        bytes_of(line)
