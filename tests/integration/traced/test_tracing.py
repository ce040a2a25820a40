"""What traces say of models whose answers are known: sizes, kinds of layers, masks, ends, and what is refused."""

import json

import pytest

pytest.importorskip("torch", reason="traces need torch: pip install 'meshtune[torch]'")
pytest.importorskip("transformers", reason="traces need transformers")

from costmodels.traced.model import Reach
from costmodels.traced.with_torch.tracing import trace_transformers
from hardware.io.errors import ConfigError

pytestmark = pytest.mark.slow

KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "n_group": 1,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "topk_group": 1,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "num_nextn_predict_layers": 0,
}
SMALL = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def test_an_unknown_type_is_built_by_its_architecture():
    """Kimi-K2's file names its own type and DeepSeek-V3's architecture: 1,026,408,209,408 parameters, 1 dense layer."""
    traced = trace_transformers(KIMI_K2, with_operators=False)

    assert traced.class_name == "DeepseekV3ForCausalLM"
    assert traced.rows[0].kinds == (0,) + (1,) * 60
    assert traced.num_parameters == 1_026_408_209_408


def test_a_head_size_that_a_class_needs_is_filled_in_and_told():
    """Ministral's class fails without `head_dim`; the hidden size is divided among the heads, and the trace says so."""
    traced = trace_transformers({"model_type": "ministral"}, with_operators=False)

    assert traced.num_parameters == 7_241_732_096
    assert traced.notes == ("head_dim is missing and taken as hidden_size / num_attention_heads, 128",)


def test_key_heads_that_a_class_needs_are_filled_in_and_told():
    """Nemotron's class fails without `num_key_value_heads`; one for each query head is taken, and the trace says so."""
    traced = trace_transformers({"model_type": "nemotron", **SMALL, "num_hidden_layers": 2}, with_operators=False)

    assert "num_key_value_heads is missing and taken as num_attention_heads, 4" in traced.notes
    assert [one.shape for one in traced.kinds[0].parameters if one.name == "self_attn.k_proj.weight"] == [(64, 64)]


def test_the_decoder_of_a_composite_configuration_is_traced():
    """Of MusicGen's three configurations the decoder's is traced, and the trace says so."""
    traced = trace_transformers({"model_type": "musicgen"}, with_operators=False)

    assert traced.notes == ("decoder alone is traced, by transformers' MusicgenForCausalLM",)
    assert [row.name for row in traced.rows] == ["model.decoder.layers"]


@pytest.mark.parametrize(("model_type", "mixer"), [("qwen3_moe", "self_attn"), ("granitemoehybrid", "mamba")])
def test_the_name_of_a_model_does_not_say_what_a_part_is(model_type, mixer):
    """Qwen3MoeAttention and GraniteMoeHybridMambaLayer mix tokens, though their names have the word for experts."""
    traced = trace_transformers({"model_type": model_type}, with_operators=False)

    parts = {one.part for one in traced.kinds[0].parameters if one.name.startswith(mixer)}
    assert parts == {"token mixer"}


def test_experts_run_with_balanced_routing():
    """The products of DeepSeek's experts have 8 rows for each token, divided among 384 experts."""
    traced = trace_transformers(KIMI_K2)

    experts = [one for one in traced.kinds[1].products if one.kind == "experts"]
    assert [one.weight for one in experts] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert [int(one.shape[1].at(2, 4096)) for one in experts] == [8 * 2 * 4096] * 2
    assert {one.groups for one in experts} == {384}


@pytest.mark.parametrize(
    ("change", "reaches"),
    [
        (
            {"model_type": "gemma3_text", "sliding_window": 1024, "num_hidden_layers": 6},
            {Reach(causal=True, window=1024), Reach(causal=True)},
        ),
        (
            {"model_type": "gpt_oss", "sliding_window": 128, "num_hidden_layers": 2},
            {Reach(causal=True, window=128), Reach(causal=True)},
        ),
        (
            {
                "model_type": "llama4_text",
                "attention_chunk_size": 3000,
                "num_hidden_layers": 4,
                "intermediate_size_mlp": 96,
            },
            {Reach(causal=True, chunk=3000), Reach(causal=True)},
        ),
        ({"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 1}, {Reach(causal=True, window=4096)}),
        ({"model_type": "bert", "num_hidden_layers": 1}, {Reach(causal=False)}),
    ],
)
def test_masks_are_read_by_what_they_hide(change, reaches):
    """Windows, chunks and both directions are found in the masks that transformers makes, whatever keys are called."""
    traced = trace_transformers({**SMALL, **change})

    assert {one.reach for kind in traced.kinds for one in kind.attentions} == reaches


def test_an_indexer_limits_the_keys_and_its_scores_are_counted():
    """DeepSeek-V3.2's attention sees 2,048 keys that its indexer picks, after scores of 64 heads over all of them."""
    traced = trace_transformers({"model_type": "deepseek_v32", "num_hidden_layers": 4})

    attention = traced.kinds[0].attentions[0]
    scores = [one for one in traced.kinds[0].products if one.module == "self_attn.indexer"]
    assert attention.reach == Reach(causal=True, selected=2048)
    assert sum(one.flops.at(1, 4096) for one in scores) == 2 * 4096**2 * 64 * (128 + 1)


def test_linear_attention_and_full_attention_are_two_kinds():
    """Three of four layers of Qwen3-Next are gated delta nets; the trace says that a fallback in torch stood in."""
    traced = trace_transformers({"model_type": "qwen3_next", "num_hidden_layers": 8})

    assert traced.rows[0].kinds == (0, 0, 0, 1) * 2
    assert not traced.kinds[0].attentions
    assert {one.part for one in traced.kinds[0].products} == {"token mixer", "channel mixer"}
    assert any("torch_chunk_gated_delta_rule is traced in torch" in line for line in traced.kinds[0].bounds)


def test_ends_and_prediction_modules_stand_apart():
    """DeepSeek-V3's module of multi-token prediction is an end, which the model's 671 billion leave out."""
    traced = trace_transformers({"model_type": "deepseek_v3"}, with_operators=False)

    sizes = {(end.kind, end.block.num_parameters) for end in traced.ends if end.block.parameters}
    assert traced.num_parameters == 671_026_404_352
    assert sizes == {("embedding", 926_679_040), ("norm", 7168), ("head", 926_679_040), ("mtp", 11_610_067_968)}


def test_a_vision_tower_is_a_row_of_its_own():
    """The tower of Qwen3-VL runs on its own tokens, in both directions, beside the language model's layers."""
    traced = trace_transformers({"model_type": "qwen3_vl"})

    tower = next(row for row in traced.rows if row.name == "model.visual.blocks")
    block = traced.kinds[tower.kinds[0]]
    assert (len(tower.kinds), block.attentions[0].reach, block.bounds) == (27, Reach(causal=False), ())
    assert sum(one.flops.at(1, 1000) for one in block.products) == 2 * 1000 * (4 * 1152**2 + 2 * 1152 * 4304)


def test_shared_layers_count_once():
    """Zamba2's shared transformer stands in nine layers and counts once."""
    traced = trace_transformers({"model_type": "zamba2"}, with_operators=False)

    assert traced.num_parameters == 2_481_848_336
    assert any(one.name == "shared_transformer.self_attn.q_proj.weight" for one in traced.shared)


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        ({"model_type": "no_such", "auto_map": {"AutoModel": "modeling.Model"}}, "auto_map.*code of a repository"),
        ({"model_type": "lama"}, "model_type.*unknown to transformers.*llama"),
        ({"model_type": "llama", "num_attention_heads": "many"}, "refused by transformers' LlamaConfig"),
        ({"model_type": "llama", "hidden_size": -4}, "refused by transformers' LlamaConfig.*attention heads"),
        ({"model_type": "dots1"}, "cannot be built by transformers' Dots1ForCausalLM"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(mapping, sentence):
    """Code of a repository, unknown types and impossible values each give one sentence."""
    with pytest.raises(ConfigError, match=sentence):
        trace_transformers(mapping)


def test_a_trace_is_plain_data():
    """Nothing of torch is left in a trace: it can be compared, hashed and written."""
    one, two = (trace_transformers({"model_type": "llama", **SMALL, "num_hidden_layers": 2}) for _ in range(2))

    assert one == two
    assert hash(one) == hash(two)
    assert "torch" not in json.dumps(repr(one))
