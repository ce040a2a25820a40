"""Reading of programs that XLA compiled: collectives with bytes, ranks and counts."""

from tuner.rehearsal.jax_room.hlo import num_bytes, read_program

PROGRAM = """\
HloModule jit_step, num_partitions=4

%body.1 (arg.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %value.1 = f32[8,4]{1,0} get-tuple-element(%arg.1), index=1
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%value.1), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%add.1
  %fusion.1 = f32[8,4]{1,0} fusion(%all-reduce.1), kind=kLoop, calls=%fused.1
  ROOT %tuple.1 = (s32[], f32[8,4]{1,0}) tuple(%count.1, %fusion.1)
}

%condition.1 (arg.2: (s32[], f32[8,4])) -> pred[] {
  %arg.2 = (s32[], f32[8,4]{1,0}) parameter(0)
  %limit.1 = s32[] constant(6)
  ROOT %less.1 = pred[] compare(%count.2, %limit.1), direction=LT
}

ENTRY %main.1 (one.1: bf16[16]) -> bf16[64] {
  %one.1 = bf16[16]{0} parameter(0)
  %while.1 = (s32[], /*index=1*/f32[8,4]{1,0}) while(%start.1), condition=%condition.1, body=%body.1
  %gather.1 = (bf16[16]{0}, bf16[64]{0}) all-gather-start(%one.1), replica_groups={{0,1,2,3}}, dimensions={0}
  %scatter.1 = ((bf16[64]{0}), bf16[16]{0}) reduce-scatter-start(%two.1), replica_groups={}, to_apply=%add.1
  %send.1 = (bf16[16]{0}, bf16[16]{0}) collective-permute-start(%one.1), source_target_pairs={{0,1},{1,2},{2,3}}
  ROOT %done.1 = bf16[64]{0} all-gather-done(%gather.1)
}
"""


def collectives(rank, partitions=(0, 1, 2, 3)):
    """Name, bytes, ranks, peer and count of each collective of a rank."""
    found = read_program(PROGRAM).collectives_of(rank, partitions)
    return {(one.name, one.size, one.ranks, one.peer): count for one, count in found.items()}


def test_bodies_of_loops_count_as_often_as_they_turn():
    """The loop's condition says six: so many sums of 8 x 4 fp32, and so many fusions."""
    program = read_program(PROGRAM)

    assert collectives(0)["all-reduce", 128, (0, 1), -1] == 6
    assert program.operators["fusion"] == 6
    assert program.unknown_loops == 0


def test_starts_have_the_bytes_of_their_larger_side():
    """Of a gather's start, with operand and result, the result counts; a scatter's, which each rank keeps, times four.

    A permutation sends to its pair's second rank; the last rank sends nowhere.
    """
    everybody = (0, 1, 2, 3)

    assert collectives(0)["all-gather", 128, everybody, -1] == 1
    assert collectives(0)["reduce-scatter", 128, everybody, -1] == 1
    assert collectives(1)["collective-permute", 32, (1, 2), 2] == 1
    assert collectives(3)["collective-permute", 32, (3,), -1] == 1


def test_groups_are_of_ranks_and_not_of_partitions():
    """On a mesh that lists its devices backwards, rank 3 is the first partition."""
    assert collectives(3, partitions=(3, 2, 1, 0))["all-reduce", 128, (3, 2), -1] == 6
    assert collectives(7, partitions=(3, 2, 1, 0)) == {}


def test_a_loop_of_unknown_length_is_told():
    """Without the constant of its condition, a loop's body counts once, and the program says so."""
    program = read_program(PROGRAM.replace("constant(6)", "parameter(1)"))

    assert program.unknown_loops == 1
    assert program.operators["fusion"] == 1


def test_known_counts_come_first():
    """XLA's own figure of turns is taken."""
    config = 'body=%body.1, backend_config={"known_trip_count":{"n":"9"}}'

    assert read_program(PROGRAM.replace("body=%body.1", config)).operators["fusion"] == 9


def test_sizes_of_types():
    """Truth values have a byte, 4-bit numbers half of one, tokens none."""
    assert num_bytes("(pred[3]{0}, bf16[2,2]{1,0}, f8e4m3fn[5]{0}, s4[4]{0}, token[], f32[])") == 3 + 8 + 5 + 2 + 4
