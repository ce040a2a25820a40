"""Readers of Kimi Linear and of small Gemma 4 models: which layers are what, and their sizes."""

import pytest

from costmodels.job.hugging_face.reader import model_from_hugging_face
from hardware.io.errors import ConfigError

FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
KIMI = {
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL_LAYERS,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL_LAYERS],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""Kimi-Linear-48B-A3B, whose file numbers its layers from 1 (arXiv 2510.26692)."""
GEMMA = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "hidden_size": 512,
    "hidden_size_per_layer_input": 64,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
    "vocab_size": 4096,
    "vocab_size_per_layer_input": 4096,
}


def read(mapping):
    """The model of a config.json."""
    return model_from_hugging_face(mapping, name="some-model", file="some-model.json")


def test_kimi_linear_has_latent_attention_in_every_fourth_layer():
    """48 and 3 billion parameters, as its name says; layers that the file numbers from 1 stand where they belong."""
    model = read(KIMI)
    full = [layer + 1 for layer, blocks in enumerate(model.layers) if blocks[0].kind == "latent_attention"]

    assert full == FULL_LAYERS
    assert [blocks[1].kind for blocks in model.layers] == ["dense_mlp"] + ["experts"] * 26
    assert model.num_parameters / 1e9 == pytest.approx(48, abs=1.2)
    assert model.num_active_parameters / 1e9 == pytest.approx(3, abs=0.6)


def test_layers_that_are_in_neither_list_are_refused():
    """A layer that the file calls neither is named with the key."""
    own = KIMI["linear_attn_config"] | {"full_attn_layers": FULL_LAYERS[:-1]}

    with pytest.raises(ConfigError, match="must share the layers 1 to 27 with kda_layers"):
        read(KIMI | {"linear_attn_config": own})


def test_the_last_layers_of_small_gemma_4_models_have_no_keys_of_their_own():
    """Six of twelve layers have queries alone, and MLPs of twice the width; all have a small MLP for their inputs."""
    layers = read(GEMMA).layers

    assert [mixer.kv_projections for mixer, *_ in layers] == [2] * 6 + [0] * 6
    assert [ffn.ffn_size for _, ffn, _ in layers] == [1024] * 6 + [2048] * 6
    assert {own.ffn_size for *_, own in layers} == {64}


def test_inputs_of_layers_are_a_table_and_a_product_of_the_embedding():
    """All layers together: 12 * 64 values of every token, from a table of their own and from the token's values."""
    model, without = read(GEMMA), read(GEMMA | {"hidden_size_per_layer_input": 0})

    more = 12 * 64 * (4096 + 512) + 64
    assert model.embedding.parameters - without.embedding.parameters == more
    assert model.num_parameters - without.num_parameters == more + 12 * (2 * 512 * 64 + 512)
