"""Products of groups on parts: together the parts of all ranks make up the product, however it is cut."""

import itertools

import pytest

pytest.importorskip("torch", reason="parts of torch modules need torch: pip install 'meshtune[torch]'")

import torch

from costmodels.sharding.dims import rule_of
from costmodels.sharding.exports.torch_calls import LocalCall, held_indices, in_part, local_shape, runs_of
from costmodels.sharding.exports.torch_groups import grouped
from costmodels.sharding.frontends.torch.calls import Operand
from costmodels.sharding.plan import wanted_layout, written_layout

pytestmark = pytest.mark.slow  # torch is optional

OP = torch.ops.aten._grouped_mm.default
SIZES = {"r": 4, "s": 4, "k": 8, "n": 8, "g": 2, "h": 2, "e": 4}
MESH = (2, 2)
KINDS = {
    "rows": "(r s) k, (g h) k n, e -> (r s) n",
    "columns": "(g h) n k, k (r s), e -> n (r s)",
    "contracted": "k (r s), (r s) n, e -> (g h) k n",
}


def part(tensor, runs):
    """What a rank has of a tensor."""
    for dim, own in enumerate(runs):
        tensor = tensor.index_select(dim, held_indices(own, tensor.device))
    return tensor


def local_call(rule, row, at, operands):
    """The call of one rank."""
    layouts, made = [wanted_layout(rule, slot, row) for slot in range(3)], written_layout(rule, 0, row)
    held = [runs_of(rule, place, row, MESH, at) for place in rule.operands]
    return LocalCall(
        op=OP,
        params={"self": Operand(0), "mat2": Operand(1), "offs": Operand(2), "bias": None, "out_dtype": None},
        operands=[part(one, own) for one, own in zip(operands, held, strict=True)],
        layouts=layouts,
        shapes=[tuple(one.shape) for one in operands],
        result_layouts=[made],
        result_shapes=[local_shape(rule.result_shape(0), made, MESH)],
        held=held,
        result_held=[runs_of(rule, rule.results[0], row, MESH, at)],
        sizes=MESH,
        place=at,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", [[3, 3, 10, 16], [0, 16, 16, 16]], ids=["unequal", "in one group"])
def test_parts_make_up_the_product(kind, ends):
    """Two axes cut any two loops, of rows and groups also those that hold no stretch of a dim, and groups are empty."""
    rule = rule_of(KINDS[kind], SIZES, blocked=("e",))
    rng = torch.Generator().manual_seed(0)
    operands = [torch.randn(rule.operand_shape(slot), generator=rng) for slot in range(2)]
    operands.append(torch.tensor(ends, dtype=torch.int32))
    whole = OP(*operands)
    loops = [number for number, factor in enumerate(rule.factors) if factor.name != "e"]
    rows = itertools.product((-1, *loops), repeat=2)
    for row in (row for row in rows if row[0] != row[1] or row[0] < 0 or rule.factors[row[0]].size % 4 == 0):
        found = torch.zeros_like(whole)
        # along an axis that serves nothing all ranks have the same
        for at in itertools.product(*(range(size if loop >= 0 else 1) for size, loop in zip(MESH, row, strict=True))):
            call = local_call(rule, row, at, operands)
            (made,) = grouped(call)
            assert tuple(made.shape) == call.result_shapes[0]
            indices = torch.meshgrid(*(held_indices(own, "cpu") for own in call.result_held[0]), indexing="ij")
            found.index_put_(indices, made, accumulate=True)
        assert torch.allclose(found, whole, atol=1e-5), row


@pytest.mark.parametrize("row", list(itertools.product((-1, 0, 1, 2), repeat=2)))
def test_every_index_falls_into_one_part(row):
    """The parts of a dim of three loops share its indices out, and each finds its own where it holds them."""
    rule = rule_of("(a b c) -> 1", {"a": 4, "b": 4, "c": 4})
    ranks = itertools.product(*(range(size if loop >= 0 else 1) for size, loop in zip(MESH, row, strict=True)))
    whole, seen = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    for at in ranks:
        ((own,),) = (runs_of(rule, rule.operands[0], row, MESH, at),)
        local, is_own = in_part(whole, own)
        assert held_indices(own, "cpu")[local[is_own]].tolist() == whole[is_own].tolist()
        assert in_part(whole - 64, own)[0].tolist() == local.tolist()
        seen += is_own

    assert seen.tolist() == [1] * 64
