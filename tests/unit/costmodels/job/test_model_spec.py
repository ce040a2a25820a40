import dataclasses

import pytest
import yaml

from costmodels.job.model_catalog import find_model, load_model, model_names
from costmodels.job.model_spec import plain_model
from hardware.io.errors import ConfigError
from tests.support.settings.mixed_models import MIXED
from tests.support.settings.model_parts import has_experts, num_moe_layers, parameters_of

NAMES = [
    "deepseek-v3",
    "gpt-13b",
    "gpt-175b",
    "gpt-22b",
    "gpt-38b",
    "llama-13b",
    "llama-7b",
    "llama2-13b",
    "llama2-34b",
    "llama3-405b",
    "llama3-70b",
    "llama3-8b",
    "mixtral-8x7b",
    "pangu-135b",
    "qwen2.5-72b",
    "qwen2.5-7b",
]

# Parameters of the published checkpoints; of DeepSeek-V3 without the bias that balances the experts of 58 layers, 256
# numbers each, which no gradient trains (a buffer in transformers' modeling_deepseek_v3.py).
EXACT_PARAMETERS = {
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "llama-13b": 13_015_864_320,
    "llama-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-34b": 33_743_970_304,
    "llama3-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
}

# No checkpoint is public; the name is all there is. The tolerance is the rounding that the name shows; gpt-38b's name
# counts no embeddings (12 * 48 * 8192^2 = 38.65e9), and Pangu Ultra's 135 is rounded up from 133.9.
NAMED_PARAMETERS = {
    "gpt-13b": (13e9, 0.04),
    "gpt-175b": (175e9, 0.003),
    "gpt-22b": (22e9, 0.01),
    "gpt-38b": (38e9, 0.03),
    "pangu-135b": (135e9, 0.01),
}

# What the papers quote, in billions, to the digits they print.
ACTIVE_PARAMETERS = {"mixtral-8x7b": (12.9, 0.05), "deepseek-v3": (37, 0.6), "llama3-8b": (8.0, 0.05)}

YAML = """
source: made up
num_layers: 4
hidden_size: 64
vocab_size: 128
tied_embeddings: false
norm: rms
num_heads: 8
num_kv_heads: 2
head_dim: 8
ffn_size: 96
gated_ffn: true
"""
TINY = plain_model(name="tiny", **yaml.safe_load(YAML))
TINY_MOE = TINY.changed(num_layers=7, num_experts=4, top_k=2, expert_ffn_size=32)
TINY_MLA = TINY.changed(num_kv_heads=8, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=4)


def test_the_catalog_holds_the_names_that_studies_rely_on():
    """Every promised catalog name is there, and no other."""
    assert list(model_names()) == NAMES


@pytest.mark.parametrize(
    ("name", "parameters", "tolerance"),
    [*((name, count, 0) for name, count in EXACT_PARAMETERS.items()), *((n, *p) for n, p in NAMED_PARAMETERS.items())],
)
def test_catalog_models_have_the_published_parameters(name, parameters, tolerance):
    """A catalog model has as many parameters as its checkpoint, or, where none is public, as its name says."""
    assert find_model(name).num_parameters == pytest.approx(parameters, rel=tolerance)


@pytest.mark.parametrize(("name", "billions", "tolerance"), [(n, *p) for n, p in ACTIVE_PARAMETERS.items()])
def test_active_parameters_are_those_of_the_papers(name, billions, tolerance):
    """A token of a MoE model uses the published share of the parameters; of a dense model, all of them."""
    assert find_model(name).num_active_parameters / 1e9 == pytest.approx(billions, abs=tolerance)


def test_every_catalog_model_names_its_source():
    """A catalog model takes its name from its file and says where its sizes come from, and which are assumed."""
    for name in NAMES:
        assert find_model(name).name == name
        assert "arXiv" in find_model(name).source or "FlexParallel" in find_model(name).source
    assert "vocab_size" in find_model("gpt-38b").assumed
    assert find_model("llama3-8b").assumed == ()


def test_gpt_parameters_follow_narayanan_equation_2():
    """A GPT has 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) parameters (arXiv 2104.04473), and a final norm."""
    model = find_model("gpt-175b")
    layers, h, vocab, positions = 96, 12288, 51200, 2048

    assert model.num_parameters == 12 * layers * h**2 + 13 * layers * h + (vocab + positions) * h + 2 * h


def test_dense_flops_are_6n_plus_12lhs():
    """Per token: 6 N without the embedding table, and 12 L h s of attention (PaLM, appendix B)."""
    model = find_model("llama-7b")
    matrices = model.num_parameters - model.embedding.table

    assert model.model_flops_per_token(2048) == 6 * matrices + 12 * 32 * 4096 * 2048


def test_flops_of_a_tied_head_count():
    """Tying the head to the embedding saves parameters, not FLOPs."""
    tied = TINY.changed(tied_embeddings=True)

    assert tied.num_parameters == TINY.num_parameters - TINY.embedding.table
    assert tied.model_flops_per_token(256) == TINY.model_flops_per_token(256)


def test_moe_flops_count_the_experts_a_token_visits():
    """Adding experts that a token does not visit adds FLOPs of their router rows only."""
    wider = TINY_MOE.changed(num_experts=8)

    added = wider.model_flops_per_token(256) - TINY_MOE.model_flops_per_token(256)
    assert added == 6 * num_moe_layers(TINY_MOE) * 4 * TINY_MOE.hidden_size


def test_latent_attention_flops_use_both_head_sizes():
    """With MLA, scores cost the width of the queries and the context the width of the values."""
    growth = TINY_MLA.model_flops_per_token(257) - TINY_MLA.model_flops_per_token(256)

    assert growth == 6 * TINY_MLA.num_layers * TINY_MLA.plain.num_heads * (8 + 4)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_layers_with_experts_are_those_of_is_moe_layer(period):
    """The layers with experts agree with asking every layer, and layers add up to the model."""
    dense_only = TINY.changed(num_layers=7)
    for dense in (0, 1, 3, 5):
        model = TINY_MOE.changed(moe_layer_period=period, num_dense_layers=dense)
        is_moe = [model.plain.is_moe_layer(layer) for layer in range(7)]

        assert [has_experts(layer) for layer in model.layers] == is_moe
        assert [layer == dense_only.layers[0] for layer in model.layers] == [not moe for moe in is_moe]
        layers = sum(map(parameters_of, model.layers))
        assert model.num_parameters == layers + 2 * model.embedding.table + model.head.norm_size


@pytest.mark.parametrize(
    ("base", "changes", "key", "rule"),
    [
        (TINY, {"num_layers": 0}, "num_layers", "whole number from 1"),
        (TINY, {"hidden_size": True}, "hidden_size", "whole number from 1"),
        (TINY, {"vocab_size": 1e5}, "vocab_size", "whole number from 1"),
        (TINY, {"ffn_size": 2**31}, "ffn_size", "2147483647"),
        (TINY, {"learned_positions": -1}, "learned_positions", "whole number from 0"),
        (TINY, {"gated_ffn": "yes"}, "gated_ffn", "true or false"),
        (TINY, {"name": " "}, "name", "text"),
        (TINY, {"norm": "rmsnorm"}, "norm", "did you mean 'rms'?"),
        (TINY, {"num_kv_heads": 3}, "num_kv_heads", "nearest: 2"),
        (TINY, {"assumed": ("vocab",)}, "assumed", "did you mean 'vocab_size'?"),
        (TINY, {"top_k": 2}, "top_k", "only where num_experts is above 0"),
        (TINY, {"v_head_dim": 8}, "v_head_dim", "only where kv_lora_rank is above 0"),
        (TINY_MOE, {"top_k": 5}, "top_k", "at most 4"),
        (TINY_MOE, {"top_k": 0}, "top_k", "whole number from 1"),
        (TINY_MOE, {"expert_ffn_size": 0}, "expert_ffn_size", "whole number from 1"),
        (TINY_MOE, {"num_shared_experts": 1}, "shared_expert_ffn_size", "num_shared_experts (1)"),
        (TINY_MOE, {"num_dense_layers": 7}, "num_dense_layers", "at most 6"),
        (TINY_MOE, {"num_dense_layers": 6, "moe_layer_period": 3}, "num_dense_layers", "at most 5"),
        (TINY_MOE, {"moe_layer_period": 8}, "moe_layer_period", "at most 7"),
        (TINY_MLA, {"head_dim": 64}, "head_dim", "valid: 8"),
        (TINY_MLA, {"num_kv_heads": 4}, "num_kv_heads", "valid: 8"),
        (TINY_MLA, {"v_head_dim": 0}, "v_head_dim", "whole number from 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(base, changes, key, rule):
    """A size out of range, or at odds with another, is a ConfigError with key, value and a way out."""
    with pytest.raises(ConfigError) as caught:
        base.changed(**changes)

    assert caught.value.key == key
    assert rule in str(caught.value)


def test_an_unknown_name_lists_the_catalog(tmp_path):
    """A mistyped catalog name is answered with the nearest one and all others."""
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-8b'\?.*mixtral-8x7b"):
        load_model("lama3-8b", tmp_path)
    with pytest.raises(ConfigError, match="no such model"):
        find_model("gpt-5")


@pytest.mark.parametrize(
    "reference", ["", "a/b/c", "x" * 5000, "x" * 5000 + ".yaml", "a\0b.yaml", "\n.json", "nope.json"]
)
def test_a_reference_to_nothing_is_a_mistake_of_the_user(tmp_path, reference):
    """No reference, however odd, ends in anything but a ConfigError."""
    with pytest.raises(ConfigError):
        load_model(reference, tmp_path)


def test_a_yaml_file_gives_the_model_it_describes(tmp_path):
    """A YAML file has the keys of a plain decoder, and names the model unless it says otherwise.

    A name of the catalog wins over a file of that name.
    """
    (tmp_path / "tiny.yaml").write_text(YAML)
    (tmp_path / "other.yaml").write_text(f"name: mine\nassumed: [vocab_size]{YAML}")
    (tmp_path / "llama3-8b").write_text(YAML)

    assert load_model("llama3-8b", tmp_path) == find_model("llama3-8b")
    assert load_model("tiny.yaml", tmp_path) == TINY
    assert load_model("other.yaml", tmp_path) == TINY.changed(name="mine", assumed=("vocab_size",))


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        (YAML + "num_expert: 4\n", "num_expert", "did you mean 'num_experts'?"),
        (YAML.replace("vocab_size: 128\n", ""), "vocab_size", "is required and missing"),
        (YAML.replace("kv_heads: 2", "kv_heads: 3"), "num_kv_heads", "must divide the model's 8 attention heads"),
    ],
)
def test_a_broken_yaml_file_is_named_with_its_key(tmp_path, text, key, rule):
    """A mistake in a model file is told with the file, the key and the rule."""
    (tmp_path / "tiny.yaml").write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_model("tiny.yaml", tmp_path)

    assert "tiny.yaml" in str(caught.value)
    assert key in str(caught.value)
    assert rule in str(caught.value)


# Rows of blocks


def test_blocks_of_a_row_are_each_there_once_and_named_apart():
    """Mixers, MLPs and experts, the ends last; of two with one label the second has a number."""
    assert MIXED.block_names == (
        *("window_attention", "mamba2", "attention", "dense_mlp", "prediction_join", "moe_mlp"),
        *("head_2", "embedding", "head"),
    )
    assert len(set(MIXED.blocks)) == len(MIXED.blocks) == len(MIXED.block_names)
    assert find_model("llama3-8b").block_names == ("attention", "dense_mlp", "embedding", "head")


def test_pieces_are_kinds_of_layers_and_ends():
    """Layers with the same blocks are one piece; prediction modules are one of their own, with their own head."""
    pieces = [[MIXED.block_names[at] for at in piece.blocks] for piece in MIXED.pieces]

    assert pieces == [
        *(["window_attention", "dense_mlp"], ["mamba2"]),
        *(["mamba2", "moe_mlp"], ["attention", "moe_mlp"]),
        ["prediction_join", "mamba2", "moe_mlp", "head_2"],
        *(["embedding"], ["head"]),
    ]
    assert len({piece.name for piece in MIXED.pieces}) == len(MIXED.pieces)
    assert MIXED.piece_of_layer.tolist() == [0, 2, 1, 3, 0, 2]
    assert MIXED.is_layer_piece.tolist() == 5 * [True] + 2 * [False]
    assert (MIXED.mean_layer * 6).tolist() == [2, 1, 2, 1, 0, 0, 0]
    assert MIXED.blocks_of_piece.sum(axis=1).tolist() == [2, 1, 2, 2, 4, 1, 1]


def test_experts_run_beside_the_mixers_of_their_layers():
    """Of four layers with experts, the prediction module counted, three have a state space and one attention."""
    beside = dict(zip(MIXED.block_names, MIXED.mixers_beside[MIXED.block_names.index("moe_mlp")], strict=True))

    assert {name: share for name, share in beside.items() if share} == {"mamba2": 3 / 4, "attention": 1 / 4}


def test_a_row_of_blocks_has_the_parameters_of_its_blocks():
    """Prediction modules have none of the main model's, but their FLOPs, with the head, count."""
    alone = dataclasses.replace(MIXED, num_mtp_layers=0)
    parameters = sum(map(parameters_of, MIXED.layers)) + 2 * 8192 * 512 + 512

    assert MIXED.num_parameters == alone.num_parameters == parameters
    added = MIXED.model_flops_per_token(1024) - alone.model_flops_per_token(1024)
    module = 2 * 512**2 + 2 * 512 + sum(block.active_parameters for block in MIXED.layers[-1]) + 8192 * 512 + 512
    assert added == 6 * module + 3 * MIXED.layers[-1][0].mixing_flops(1024)


def test_a_model_of_other_blocks_has_no_keys_of_a_decoder():
    """Who needs them is told which blocks the model has."""
    with pytest.raises(ConfigError, match="mixed has attention, dense_mlp, mamba2, moe_mlp, window_attention"):
        _ = MIXED.plain
