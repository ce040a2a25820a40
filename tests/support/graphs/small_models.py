"""Models of a few hundred parameters that together have all features of a transformer graph."""

from costmodels.job.model_spec import plain_model
from costmodels.job.training_job import TrainingJob

_GROUPED = {
    "name": "grouped",
    "source": "made up",
    "num_layers": 2,
    "hidden_size": 8,
    "vocab_size": 12,
    "tied_embeddings": False,
    "norm": "rms",
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_size": 6,
    "gated_ffn": True,
}
_GPT = {
    **_GROUPED,
    "name": "gpt",
    "tied_embeddings": True,
    "norm": "layer",
    "num_kv_heads": 4,
    "head_dim": 2,
    "gated_ffn": False,
    "learned_positions": 8,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
_EXPERTS = {**_GROUPED, "name": "experts", "num_experts": 4, "top_k": 2, "expert_ffn_size": 4}
_LATENT = {
    **_EXPERTS,
    "name": "latent",
    "num_kv_heads": 4,
    "head_dim": 6,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "shared_expert_ffn_size": 4,
    "router_bias": True,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
}
SMALL = {
    model.name: model
    for model in (
        plain_model(**_GROUPED),
        plain_model(**{**_GROUPED, "name": "one key", "num_kv_heads": 1, "qkv_bias": True, "causal": False}),
        plain_model(**_GPT),
        plain_model(**{**_GPT, "name": "gpt with positions to spare", "learned_positions": 10, "num_layers": 1}),
        plain_model(**{**_EXPERTS, "moe_layer_period": 2}),
        plain_model(
            **{
                **_EXPERTS,
                "name": "experts with biases",
                "num_layers": 1,
                "num_shared_experts": 1,
                "shared_expert_ffn_size": 4,
                "shared_expert_gate": True,
                "mlp_bias": True,
                "qk_norm": True,
                "norms_per_layer": 4,
            }
        ),
        plain_model(**_LATENT),
        plain_model(
            **{**_LATENT, "name": "latent with biases", "q_lora_rank": 4, "qkv_bias": True, "norms_per_layer": 1}
        ),
    )
}


def small_job(name):
    """Build a job with two sequences of eight tokens in single precision."""
    return TrainingJob(model=SMALL[name], sequence_length=8, global_batch_size=2, precision="fp32")
