"""Modules with operators that are seldom met are planned, or refused by name with a way out."""

import pytest
import torch
from torch import nn

from costmodels.sharding.frontends.torch.calls import Operand
from hardware.io.errors import ConfigError
from tests.support.graphs.torch_graphs import graph_of_torch
from tests.support.graphs.torch_halves import Case, are_close, halved


class OfWeight(nn.Module):
    """A function of a weight and inputs, whose squares are the loss."""

    def __init__(self, function, *shape, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta", dtype=dtype))
        self.function = function

    def forward(self, *inputs):
        """The sum of squares."""
        return self.function(self.weight, *inputs).float().square().sum()


def op_of(graph, primitive):
    """The first operator of a primitive."""
    return next(op for op in graph.ops if op.primitive == primitive)


def test_a_product_of_groups_is_cut_by_rows_groups_and_columns():
    """Forward and both gradients of `_grouped_mm` have a rule, and each row is multiplied with one matrix."""
    ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32)
    module = OfWeight(
        lambda weight, x: torch._grouped_mm(x @ x.t() @ x, weight, offs=ends), 4, 64, 128, dtype=torch.bfloat16
    )
    graph = graph_of_torch(module, (torch.empty(256, 64, device="meta", dtype=torch.bfloat16),))
    products = [op for op in graph.ops if op.primitive == "_grouped_mm"]

    assert graph.unknown == ()
    assert len(products) == 2  # the loss does not depend on the input's gradient
    assert {op.flop for op in products} == {2 * 256 * 64 * 128}
    assert sorted(products[0].rule.factors[factor].size for factor in products[0].rule.cuttable) == [4, 64, 128, 256]


def test_an_lstm_is_planned_step_by_step():
    """`nn.LSTM` has no kernel of its own in the graph, and every operator has a rule."""
    with torch.device("meta"):
        module, x = nn.LSTM(32, 64, batch_first=True), torch.empty(16, 5, 32)

    graph = graph_of_torch(module, (x,), lambda module, x: module(x)[0].sum())

    assert graph.unknown == ()
    assert sum(op.primitive in ("mm", "addmm") for op in graph.ops) >= 10


def test_empty_results_are_left_out():
    """An operator with an empty result keeps its other results, and its rule keeps their places."""
    graph = graph_of_torch(OfWeight(lambda weight: torch.split(weight * 2, [0, 8])[1], 8, 4), ())
    split = op_of(graph, "split_with_sizes")

    assert len(split.results) == len(split.rule.results) == 1
    assert graph.tensors[split.results[0]].shape == (8, 4)


def test_factorizations_have_flops_and_map_over_their_batch():
    """A batch of matrices is cut, and a Cholesky factorization takes a third of n cubed for each."""
    graph = graph_of_torch(OfWeight(lambda weight: torch.linalg.cholesky(weight @ weight.mT), 16, 8, 8), ())
    op = op_of(graph, "linalg_cholesky_ex")

    assert [op.rule.factors[factor].size for factor in op.rule.cuttable] == [16]
    assert op.flop == pytest.approx(16 * 8**3 / 3)


def test_shapes_that_depend_on_values_are_refused():
    """`nonzero` and `item` are refused by name with their line and a way out, and no exception of torch escapes."""
    picked = OfWeight(lambda weight: weight[weight > 0], 8, 4)
    scaled = OfWeight(lambda weight: weight * weight.sum().item(), 8, 4)

    with pytest.raises(ConfigError, match=r"nonzero.*depend on values.*torch\.where"):
        graph_of_torch(picked, ())
    # a parameter has no value that stays
    with pytest.raises(ConfigError, match=r"_dense.* \(line \d+ of test_strange_modules\.py\).*depend on values"):
        graph_of_torch(scaled, ())


def test_values_of_inputs_are_taken_from_the_sample():
    """A branch on a mask, a size from the largest index and the lengths of a CTC loss are those of the sample, and told
    with the user's line; without values they are refused.
    """

    def branched(weight, x, mask, index, lengths):
        if not mask.any():
            x = -x
        summed = torch.zeros(int(index.max()) + 1, 8).index_add(0, index, x @ weight)
        aligned = nn.functional.ctc_loss(
            (x @ weight).log_softmax(-1)[:, None].expand(6, 2, 8), torch.ones(2, 3, dtype=torch.long), lengths, (3, 2)
        )
        return summed.sum() + aligned

    inputs = torch.rand(6, 4), torch.tensor([False, True]), torch.tensor([0, 1, 2, 2, 4, 1]), torch.tensor([6, 5])
    graph = graph_of_torch(OfWeight(branched, 4, 8), inputs)

    assert [words.partition(" of ")[2] for words in graph.sampled] == [
        f"test_strange_modules.py reads {value}" for value in (True, 4, 6, 5)
    ]
    assert (5, 8) in {tensor.shape for tensor in graph.tensors}
    with pytest.raises(ConfigError, match="give inputs with values"):
        graph_of_torch(OfWeight(branched, 4, 8), [each.to("meta") for each in inputs])


def test_checks_of_constants_are_no_branches():
    """What a module asks of a constant that it made of numbers is known, as libraries check their arguments."""

    def checked(weight):
        sizes = torch.tensor([(1.5, 2.0)], dtype=weight.dtype)
        assert (sizes > 0).all()
        return weight * sizes

    graph = graph_of_torch(OfWeight(checked, 4, 2), ())

    assert graph.unknown == ()
    assert op_of(graph, "mul").results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_groups_of_other_types_are_traced(dtype):
    """`_grouped_mm` of types that its kernels take is planned, although torch's fake tensors refuse them."""
    ends = torch.tensor([4, 16], dtype=torch.int32)
    module = OfWeight(lambda weight, x: torch._grouped_mm(x, weight, offs=ends), 2, 8, 24, dtype=dtype)

    graph = graph_of_torch(module, (torch.empty(16, 8, device="meta", dtype=dtype),))

    assert [op.flop for op in graph.ops if op.primitive == "_grouped_mm"] == [2 * 16 * 8 * 24] * 2
    with pytest.raises(RuntimeError, match="can't be multiplied"):
        graph_of_torch(module, (torch.empty(16, 16, device="meta", dtype=dtype),))


@pytest.mark.parametrize("shapes", [((16, 32), (4, 32, 24)), ((16, 32), (32, 24))])
def test_halves_of_a_product_of_groups_make_up_the_whole(shapes):
    """Run on halves along each factor that can be cut, `_grouped_mm` gives the results of one run."""
    left, right = (torch.rand(shape) for shape in shapes)
    ends = torch.tensor([3, 8, 8, 16] if len(shapes[1]) == 3 else [4, 12, 20, 32], dtype=torch.int32)
    op = torch.ops.aten._grouped_mm.default
    params = {"self": Operand(0), "mat2": Operand(1), "offs": Operand(2), "bias": None, "out_dtype": None}
    case = Case(op=op, params=params, operands=(left, right, ends), results=(op(left, right, ends),))

    assert len(case.rule.cuttable) == 4
    assert all(are_close(halved(case, case.rule, factor), case.results) for factor in case.rule.cuttable)


EXPERTS = {
    "MixtralConfig": {"num_local_experts": 4, "intermediate_size": 32},
    "Qwen3MoeConfig": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "DeepseekV3Config": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@pytest.mark.parametrize("config", EXPERTS)
def test_experts_of_transformers_are_planned(config):
    """Models with experts have a rule for every operator as they come, and are refused with eager experts."""
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "num_experts_per_tok": 2,
    }

    def graph_with(**options):
        own = getattr(transformers, config)(**small, **EXPERTS[config], num_key_value_heads=4)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, **options)
            tokens = torch.zeros(4, 16, dtype=torch.long)
        return graph_of_torch(model, (tokens,), lambda model, x: model(input_ids=x, labels=x, use_cache=False).loss)

    graph = graph_with()

    assert graph.unknown == ()
    assert sum(op.primitive == "_grouped_mm" for op in graph.ops) == 6
    with pytest.raises(ConfigError, match="nonzero"):
        graph_with(experts_implementation="eager")
