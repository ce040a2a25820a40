"""Configurations of multimodal models: the published ones, and small ones that run anywhere."""

from __future__ import annotations

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "head_dim": 16,
}
_LATENT = {
    **TEXT,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_QWEN = {"hidden_size": 64, "intermediate_size": 100, "depth": 4, "num_heads": 4, "out_hidden_size": 64}
_SQUARE = {
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
}

SMALL = {
    "gemma3": {"text_config": TEXT, "mm_tokens_per_image": 16, "vision_config": {**_SQUARE, "vision_use_head": False}},
    "glm4v_moe": {
        "text_config": {
            **TEXT,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": {**_QWEN, "image_size": 112},
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**_SQUARE, "image_size": [112, 112]},
    },
    "kimi_k25": {
        "text_config": _LATENT,
        "projection_hidden_size": 64,
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 100,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
    },
    "llama4": {
        "text_config": {**TEXT, "intermediate_size_mlp": 96, "num_local_experts": 2},
        "vision_config": {
            **_SQUARE,
            "intermediate_size": 256,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        },
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_SQUARE},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **_SQUARE, "image_size": 224},
    },
    "qwen2_5_vl": {"text_config": TEXT, "vision_config": {**_QWEN, "fullatt_block_indexes": [1, 3]}},
    "qwen3_vl": {
        "text_config": TEXT,
        "vision_config": {**_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2]},
    },
}
"""Changes of the defaults of transformers' classes that make small models, by model type."""

ANY_SIZE = ("glm4v_moe", "kimi_k25", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose images have any size."""

QWEN3_VL_8B = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "attention_bias": False,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
    },
}
"""Qwen/Qwen3-VL-8B-Instruct on Hugging Face, config.json, but for keys that change no size."""

QWEN2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
"""Qwen/Qwen2.5-VL-7B-Instruct on Hugging Face, config.json, whose language model has no keys of its own."""
