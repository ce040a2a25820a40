import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.programs.attention_ranks import Case, attend_to_local_positions, count_bytes_on_ring, whole_tensors
from trials.torch_training.model.attention import attend, local_positions
from trials.torch_training.model.attention_kernels import block_backward, block_forward

NAMES = ("result", "gradient of q", "gradient of k", "gradient of v")

HEADS = [(8, 8), (8, 2), (12, 3)]

SPLITS = [(2, 1, 8, 2), (4, 1, 12, 3), (1, 2, 12, 3), (1, 4, 8, 2), (1, 4, 8, 8), (2, 2, 8, 2), (2, 2, 12, 3)]
"""cp, up, heads, and heads of keys and values, of which Ulysses may have to repeat some."""


def _by_softmax(case):
    """Result and gradients of plain attention in float64, over the whole sequence in this process."""
    *inputs, grad = (x.double() for x in whole_tensors(case))
    q, k, v = (x.requires_grad_() for x in inputs)
    k_h, v_h = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k_h) / case.head_dim**0.5
    unseen = torch.ones(case.sequence_length, case.sequence_length, dtype=torch.bool).triu(1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v_h)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def _put_together(told):
    """What all ranks told, each row at its position."""
    positions, *parts = ([torch.from_numpy(x) for x in column] for column in zip(*told, strict=True))
    order = torch.cat(positions).argsort()
    return [torch.cat(part, dim=1)[:, order] for part in parts]


def _errors(found, expected):
    return {name: (x - y).abs().max().item() for name, x, y in zip(NAMES, found, expected, strict=True)}


def _errors_on_ranks(on_ranks, case):
    told = [values for (values,) in on_ranks(case.cp * case.up, attend_to_local_positions, case)]
    return _errors(_put_together(told), _by_softmax(case))


def _errors_of_one_rank(case):
    *inputs, grad = whole_tensors(case)
    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves, ring=None, ulysses=None)
    return _errors((out.detach(), *torch.autograd.grad(out, leaves, grad)), _by_softmax(case))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attention_of_one_rank_is_plain_attention(heads, kv_heads):
    """Without any split, result and gradients are those of the textbook's softmax."""
    errors = _errors_of_one_rank(Case(heads=heads, kv_heads=kv_heads))

    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("cp", "up", "heads", "kv_heads"), SPLITS)
def test_split_attention_is_plain_attention(on_ranks, cp, up, heads, kv_heads):
    """Results and gradients of all ranks, put together by position, are those of one process to 1e-5."""
    errors = _errors_on_ranks(on_ranks, Case(cp=cp, up=up, heads=heads, kv_heads=kv_heads))

    assert max(errors.values()) < 1e-5, errors


def test_split_attention_can_be_recomputed(on_ranks):
    """Under activation checkpointing, where the backward pass runs the forward pass again, nothing changes."""
    errors = _errors_on_ranks(on_ranks, Case(cp=2, up=2, kv_heads=2, checkpointed=True))

    assert max(errors.values()) < 1e-5, errors


def test_a_ring_of_bfloat16_is_as_exact_as_one_rank(on_ranks):
    """Results of narrow inputs are merged in float32: four blocks err at most twice as much as one kernel does."""
    case = Case(cp=4, kv_heads=2, dtype="bfloat16")
    alone = _errors_of_one_rank(case)

    errors = _errors_on_ranks(on_ranks, case)

    assert all(errors[name] <= 2 * alone[name] for name in NAMES), (errors, alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_heads_of_keys_and_values_travel(on_ranks, dtype):
    """A rank sends cp - 1 blocks forward, as many backward, and as often the gradients of a block in float32."""
    case = Case(cp=4, kv_heads=2, dtype=dtype)
    width = {"float32": 4, "bfloat16": 2}[dtype]

    told = on_ranks(case.cp, count_bytes_on_ring, case)

    numbers = 2 * case.batch * case.sequence_length // case.cp * case.kv_heads * case.head_dim
    assert {num_bytes for _, num_bytes in told} == {numbers * (case.cp - 1) * (2 * width + 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("s_q", "s_k"), [(64, 64), (64, 32), (32, 64)])
def test_kernels_for_gpus_are_called_as_torch_declares_them(dtype, s_q, s_k):
    """Without a GPU, the shapes at least come out as promised, for whole blocks and for halves."""
    with FakeTensorMode():
        q = torch.empty(2, s_q, 8, 16, dtype=dtype, device="cuda")
        k, v = torch.empty(2, 2, s_k, 2, 16, dtype=dtype, device="cuda")
        out, lse = block_forward(q, k, v, causal=s_q == s_k)
        grads = block_backward(torch.empty_like(out), q, k, v, out, lse, causal=s_q == s_k)

    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@given(cp=st.integers(1, 6), up=st.integers(1, 6), chunk=st.integers(1, 5))
def test_ranks_share_out_the_sequence(cp, up, chunk):
    """Every position is held by exactly one rank, and all ranks hold equally many."""
    length = 2 * cp * up * chunk
    ranks = [(cp_rank, up_rank) for cp_rank in range(cp) for up_rank in range(up)]
    held = [local_positions(length, cp=cp, up=up, cp_rank=i, up_rank=j) for i, j in ranks]

    assert {len(positions) for positions in held} == {2 * chunk}
    assert torch.cat(held).sort().values.tolist() == list(range(length))


@given(cp=st.integers(2, 6), up=st.integers(1, 4), chunk=st.integers(1, 5))
def test_places_of_the_ring_share_out_the_work(cp, up, chunk):
    """Every place of the ring has equally many pairs of a query and a key that the causal mask lets it see."""
    length = 2 * cp * up * chunk
    pairs = [
        sum(
            int((local_positions(length, cp=cp, up=up, cp_rank=cp_rank, up_rank=up_rank) + 1).sum())
            for up_rank in range(up)
        )
        for cp_rank in range(cp)
    ]

    assert set(pairs) == {length * (length + 1) // 2 // cp}


def test_without_a_ring_the_order_is_plain():
    """Ulysses alone gives its ranks contiguous slices."""
    assert local_positions(9, cp=1, up=3, cp_rank=0, up_rank=1).tolist() == [3, 4, 5]
