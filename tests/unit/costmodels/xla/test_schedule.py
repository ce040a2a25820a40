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


LOOP = """\
HloModule jit_scan, is_scheduled=true

%body (q: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
  %q = (s32[], f32[64,32]{1,0}) parameter(0)
  %x = f32[64,32]{1,0} get-tuple-element(%q), index=1
  %early = f32[64,32]{1,0} copy(%x)
  %start = f32[64,32]{1,0} all-reduce-start(%early), replica_groups={{0,1}}, to_apply=%add
  %beside = f32[64,32]{1,0} copy(%x)
  %done = f32[64,32]{1,0} all-reduce-done(%start)
  ROOT %out = (s32[], f32[64,32]{1,0}) tuple(%x, %done)
}

%cond (p: (s32[], f32[64,32])) -> pred[] {
  %p = (s32[], f32[64,32]{1,0}) parameter(0)
  ROOT %lt = pred[] custom-call(%p)
}

%short (s: f32[64,32]) -> f32[64,32] {
  %s = f32[64,32]{1,0} parameter(0)
  ROOT %one = f32[64,32]{1,0} copy(%s)
}

%long (l: f32[64,32]) -> f32[64,32] {
  %l = f32[64,32]{1,0} parameter(0)
  %two = f32[64,32]{1,0} copy(%l)
  ROOT %three = f32[64,32]{1,0} copy(%two)
}

ENTRY %main (a: f32[64,32]) -> f32[64,32] {
  %a = f32[64,32]{1,0} parameter(0)
  %w = (s32[], f32[64,32]{1,0}) while(%a), condition=%cond, body=%body, TIMES
  %b = f32[64,32]{1,0} get-tuple-element(%w), index=1
  ROOT %c = f32[64,32]{1,0} conditional(%b), branch_computations={%short, %long}
}
"""


@pytest.mark.parametrize("times", [0, 1, 2, 7])
def test_a_loop_runs_as_often_as_it_says(times):
    """An iteration takes a kernel, and an all-reduce of 5 s beside another; behind the loop runs the longer branch."""
    count = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    text = LOOP.replace("TIMES", count)
    found = replayed(text, {"data": 2}, kernel_s=lambda _: 1.0, collective_s=lambda *_: 5.0)

    assert found.step_time_s == times * (1.0 + 5.0) + 2.0
    assert (found.compute_s, found.comm_s, found.collectives) == (times * 2.0 + 2.0, times * 5.0, times)


@pytest.mark.parametrize(
    ("target", "result", "left", "right"),
    [
        ("convForward", "2,8,8,16", "2,8,8,4", "16,3,3,4"),
        ("convBackwardInput", "2,8,8,4", "2,8,8,16", "16,3,3,4"),
        ("convBackwardFilter", "16,3,3,4", "2,8,8,4", "2,8,8,16"),
    ],
)
def test_convolutions_have_the_operations_of_the_forward_pass(target, result, left, right):
    """Each of the passes multiplies as often as the forward pass: outputs times window times input features."""
    lines = (
        "ENTRY %main (x: bf16[1], y: bf16[1]) -> bf16[1] {",
        f"  %x = bf16[{left}] parameter(0)",
        f"  %y = bf16[{right}] parameter(1)",
        f"  %z = (bf16[{result}], u8[0]) custom-call(%x, %y), window={{size=3x3 pad=1_1x1_1}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn${target}"',
        "}",
    )
    (kernel,) = kernels_of("\n".join(lines))

    assert kernel.flop == 2 * (2 * 8 * 8 * 16) * (3 * 3 * 4)
    assert (kernel.is_product, kernel.precision) == (True, "bf16")


VIEWED = """\
%fused (w: f32[8,64,32], u: f32[64,32], i: s32[]) -> f32[8,32,64] {
  %whole = f32[8,64,32]{2,1,0} parameter(0)
  %view = f32[8,32,64]{2,1,0} bitcast(%whole)
  %u = f32[64,32]{1,0} parameter(1)
  %row = f32[1,32,64]{2,1,0} bitcast(%u)
  %i = s32[] parameter(2)
  %set = f32[8,32,64]{2,1,0} dynamic-update-slice(%view, %row, %i, %i, %i)
  ROOT %back = f32[8,64,32]{2,1,0} bitcast(%set)
}

ENTRY %main (w: f32[8,64,32], u: f32[64,32], i: s32[]) -> f32[8,64,32] {
  %w = f32[8,64,32]{2,1,0} parameter(0)
  %u.1 = f32[64,32]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %f = f32[8,64,32]{2,1,0} fusion(%w, %u.1, %i.1), kind=kLoop, calls=%fused
}
"""


def test_views_of_an_array_move_nothing():
    """A row that is written in place through a view moves the row, not the array of all rows."""
    (kernel,) = kernels_of(VIEWED)

    assert kernel.num_bytes == 2 * WHOLE + 4
