"""Configurations of transformers' model types: the default of each, and changes that move keys which set sizes."""

from __future__ import annotations

import json
from typing import Any

_VOCABULARY = {"vocabulary_map": {"<image>": 1, "<|extra_200|>": 2}}
_INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
_TURNING = {
    "rope_parameters": {
        kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in ("full_attention", "sliding_attention")
    }
}
FILLED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "chameleon": _VOCABULARY,
    "cohere_compass": {"text_config": _TURNING},
    "cohere_compass_text": _TURNING,
    "dbrx": {"attn_config": {"rope_theta": 500_000.0, "clip_qkv": 8}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 31, "num_experts_per_tok": 6}},
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_group": 3, "n_group": 8, "topk_method": "group_limited_greedy"},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 512}},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": _VOCABULARY,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "granite4_vision": {"deepstack_layer_map": [[1, 0], [2, 1]], "downsample_rate": "1/2"},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"is_decoder": True},
}
"""Keys without which the default configuration of a type cannot be built."""

_HYBRID = {"num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention"] * 2}
CHANGED: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8, "tie_word_embeddings": True},),
    "mistral": ({"head_dim": 96, "num_hidden_layers": 5},),
    "qwen2": ({"num_key_value_heads": 4, "tie_word_embeddings": True},),
    "qwen3": ({"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8},),
    "qwen2_moe": ({"mlp_only_layers": [0, 1], "decoder_sparse_step": 2, "num_key_value_heads": 4},),
    "qwen3_moe": ({"mlp_only_layers": [0], "moe_intermediate_size": 512, "attention_bias": True},),
    "mixtral": ({"num_local_experts": 4, "tie_word_embeddings": True},),
    "gpt2": ({"n_inner": 1000, "n_layer": 3},),
    "gpt_neox": ({"attention_bias": False, "tie_word_embeddings": True, "num_hidden_layers": 3},),
    "deepseek_v3": (
        {"num_hidden_layers": 5, "q_lora_rank": None, "n_shared_experts": 2, "attention_bias": True},
        {"tie_word_embeddings": True, "first_k_dense_replace": 1},
    ),
    "deepseek_v32": (
        {"first_k_dense_replace": 2, "index_n_heads": 32, "n_shared_experts": 2, "mlp_layer_types": None},
    ),
    "glm_moe_dsa": ({"num_hidden_layers": 20, "index_topk_freq": 4, "indexer_types": None, "mlp_layer_types": None},),
    "mistral4": ({"first_k_dense_replace": 2, "q_lora_rank": 512},),
    "glm4_moe": ({"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 128},),
    "gpt_oss": ({"attention_bias": False, "num_hidden_layers": 5, "layer_types": None, "head_dim": 32},),
    "llama4_text": ({"interleave_moe_layer_step": 2, "moe_layers": None, "attention_bias": True},),
    "qwen3_next": (
        {
            "mlp_only_layers": [0, 1],
            "decoder_sparse_step": 2,
            "full_attention_interval": 3,
            "layer_types": None,
            "linear_num_value_heads": 16,
            "attention_bias": True,
        },
    ),
    "qwen3_5_text": ({"linear_num_value_heads": 64, "attention_bias": True, "tie_word_embeddings": True},),
    "qwen3_5_moe_text": ({"shared_expert_intermediate_size": 256, "linear_conv_kernel_dim": 3},),
    "minimax_m2": ({"head_dim": 64, "num_local_experts": 32},),
    "minimax": ({"head_dim": 96, "num_hidden_layers": 5, "layer_types": None},),
    "nemotron_h": (
        {"layers_block_type": ["linear_attention", "moe"] * 3, "use_bias": True, "n_shared_experts": 2},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2, "mlp_bias": True},
        {"moe_latent_size": 512, "use_conv_bias": False, "n_groups": 4, "mamba_num_heads": 64},
    ),
    "olmo3": ({"num_key_value_heads": 8, "attention_bias": True},),
    "seed_oss": ({"attention_out_bias": True, "mlp_bias": True, "attention_bias": False},),
    "hunyuan_v1_moe": ({"head_dim": 96, "num_experts": 8, "attention_bias": True, "num_key_value_heads": 8},),
    "ernie4_5_moe": (
        {"moe_layer_interval": 2, "moe_layer_start_index": 3, "moe_num_shared_experts": 0, "use_bias": True},
    ),
    "granitemoehybrid": (
        {**_HYBRID, "num_local_experts": 0, "mamba_proj_bias": True},
        {**_HYBRID, "attention_bias": True},
    ),
    "falcon_h1": (
        {"mamba_d_ssm": None, "mamba_d_head": 64, "mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True},
        {"projectors_bias": True},
        {"mamba_proj_bias": True},
    ),
    "jamba": (
        {"num_experts": 1},
        {"expert_layer_period": 3, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_conv_bias": False},
    ),
    "bert": (
        {"num_hidden_layers": 3, "type_vocab_size": 1, "max_position_embeddings": 1024, "num_attention_heads": 8},
    ),
    "modernbert": (
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
        {"tie_word_embeddings": False, "decoder_bias": False, "num_hidden_layers": 5, "layer_types": None},
    ),
    "roberta": ({"intermediate_size": 1024},),
    "t5": (
        {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 4, "d_kv": 32, "relative_attention_num_buckets": 16},
    ),
    "kimi_linear": ({"linear_num_heads": 16, "q_lora_rank": 512, "n_shared_experts": 2, "num_hidden_layers": 6},),
    "gemma4_text": (
        {"num_kv_shared_layers": 10, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 128},
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
        {"num_kv_shared_layers": 18, "attention_bias": True, "vocab_size_per_layer_input": 1000},
    ),
    "vit": ({"qkv_bias": False, "image_size": 384, "num_labels": 1000}, {"patch_size": 14, "num_channels": 1}),
    "bamba": ({"attn_layer_indices": [3, 9], "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True},),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "conv_bias": True},
        {"block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "conv_bias": True,
            "num_dense_layers": 1,
        },
    ),
    "gemma3_text": ({"attention_bias": True, "tie_word_embeddings": False},),
    "gemma3n_text": (
        {
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
            "intermediate_size": 8192,
            "num_hidden_layers": 7,
            "layer_types": None,
            "activation_sparsity_pattern": None,
        },
    ),
    "dots1": ({"n_shared_experts": 2, "first_k_dense_replace": 3, "attention_bias": True, "head_dim": 64},),
    "smollm3": ({"attention_bias": True, "mlp_bias": True},),
    "zamba2": ({"use_shared_attention_adapter": True, "num_mem_blocks": 2, "add_bias_linear": True},),
    "mamba2": ({"use_bias": True, "use_conv_bias": False},),
}
"""Changes of the default, each with values for keys that set sizes, kinds of layers, gates, norms or biases."""


def configurations(model_type: str) -> list[dict[str, Any]]:
    """Return the config.json of a type's default and of each change; null lets the class fill a key in again."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = []
    for change in ({}, *CHANGED.get(model_type, ())):
        config = CONFIG_MAPPING[model_type](**FILLED.get(model_type, {}) | change)
        made.append(json.loads(config.to_json_string(use_diff=False)))
    return made
