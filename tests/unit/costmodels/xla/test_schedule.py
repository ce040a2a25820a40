"""The reader of XLA's programs for GPUs: traffic and operations of kernels, and the replay of both streams."""

import pytest

from costmodels.blocks.operator import OpKind
from costmodels.xla.schedule import kernels_of, replayed, without_comments

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused_add (p.1: f32[64,32], p.2: f32[64,32]) -> f32[64,32] {
  %p.1 = f32[64,32]{1,0} parameter(0)
  %p.2 = f32[64,32]{1,0} parameter(1)
  ROOT %add.1 = f32[64,32]{1,0} add(%p.1, %p.2)
}

%fused_slice (p.3: f32[64,32], p.4: s32[]) -> f32[4,32] {
  %p.3 = f32[64,32]{1,0} parameter(0)
  %p.4 = s32[] parameter(1)
  ROOT %slice.1 = f32[4,32]{1,0} dynamic-slice(%p.3, %p.4, %p.4), dynamic_slice_sizes={4,32}
}

ENTRY %main (a: f32[64,32], b: f32[32,16], i: s32[]) -> (f32[64,16], f32[4,32]) {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %all-gather-start = (f32[32,16]{1,0}, f32[64,16]{1,0}) all-gather-start(%b), replica_groups={{0,1}}, dimensions={0}
  %sum = f32[64,32]{1,0} fusion(%a, /*index=5*/%a), kind=kLoop, calls=%fused_add
  %part = f32[4,32]{1,0} fusion(%sum, %i), kind=kLoop, calls=%fused_slice
  %all-gather-done = f32[64,16]{1,0} all-gather-done(%all-gather-start)
  %product = (f32[64,16]{1,0}, s8[4194304]{0}) custom-call(%sum, %b), custom_call_target="__cublas$gemm"
  %all-reduce = f32[4,32]{1,0} all-reduce(%part), replica_groups={{0,1}}, to_apply=%fused_add
  ROOT %tuple = (f32[64,16]{1,0}, f32[4,32]{1,0}) tuple(%product, %all-reduce)
}
"""
WHOLE, WEIGHT, RESULT, PART = 4 * 64 * 32, 4 * 32 * 16, 4 * 64 * 16, 4 * 4 * 32


def test_kernels_have_their_traffic():
    """A fusion moves its operands and results, a slice its part, and a product its arrays without working memory."""
    kernels = {each.name: each for each in kernels_of(without_comments(PROGRAM))}

    assert set(kernels) == {"sum", "part", "product"}
    assert kernels["sum"].num_bytes == 3 * WHOLE
    assert kernels["part"].num_bytes == PART + 4 + PART
    assert kernels["product"].num_bytes == WHOLE + WEIGHT + RESULT
    assert kernels["product"].flop == pytest.approx(2 * 64 * 32 * 16)


def test_a_step_waits_where_a_collective_is_done():
    """The gather runs beside two kernels, and the all-reduce, which has no start, beside none."""
    found = replayed(
        without_comments(PROGRAM),
        {"data": 2},
        kernel_s=lambda _: 1.0,
        collective_s=lambda kind, num_bytes, axes: {
            (OpKind.ALL_GATHER, 2 * WEIGHT, (0,)): 5.0,
            (OpKind.ALL_REDUCE, PART, (0,)): 2.0,
        }[kind, num_bytes, axes],
    )

    assert (found.compute_s, found.comm_s, found.step_time_s) == (3.0, 7.0, 5.0 + 1.0 + 2.0)
    assert (found.collectives, found.synchronous) == (2, 1)
