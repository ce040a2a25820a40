"""The FLOPs of a trace beside those that torch counts while the same model runs on real numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_routed_experts": 4}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}

MODELS = {
    "llama": SMALL | HEADS,
    "gemma3_text": SMALL | HEADS | {"sliding_window": 100},
    "gpt_oss": SMALL | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 100},
    "deepseek_v3": SMALL | LATENT | EXPERTS | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm4_moe": SMALL | HEADS | EXPERTS,
    "qwen3_moe": SMALL | HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_next": SMALL
    | HEADS
    | LINEAR
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "bamba": SMALL | HEADS | MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": SMALL | HEADS | MAMBA | {"mamba_d_ssm": 128},
    "minimax": SMALL | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": SMALL | HEADS | {"layer_types": ["conv", "full_attention", "conv"]},
    "gpt2": {"vocab_size": 384, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048},
    "bert": SMALL | {"max_position_embeddings": 2048},
    "t5": {"vocab_size": 384, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
}
"""A small config.json of each kind: shared heads, windows, latent and linear attention, scans, experts, encoders."""


@pytest.mark.parametrize("model_type", MODELS)
def test_a_trace_counts_the_flops_that_torch_counts(model_type):
    """Products and attention of a forward pass are exactly those of FlopCounterMode over the real model."""
    from costmodels.traced.with_torch.tracing import trace_transformers

    mapping = {"model_type": model_type, **MODELS[model_type]}
    traced = trace_transformers(mapping)

    assert traced.notes == ()
    assert traced.forward_flops.at(2, 1024) == _counted(mapping, 2, 1024)
    assert traced.num_parameters == sum(one.numel() for one in _real(mapping).parameters())


def _real(mapping):
    from costmodels.traced.with_torch.building import class_of, config_of

    config = config_of(mapping)
    model_class = class_of(config, None)
    chosen = {"experts_implementation": "eager"} if model_class._can_set_experts_implementation() else {}
    return model_class._from_config(config, attn_implementation="eager", dtype=torch.float32, **chosen).eval()


def _counted(mapping, batch, length):
    from torch.utils.flop_counter import FlopCounterMode

    model = _real(mapping)
    tokens = torch.randint(0, 384, (batch, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False) if hasattr(model.config, "use_cache") else model(**inputs)
    return counter.get_total_flops()
