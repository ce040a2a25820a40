"""Models of a few hundred parameters that together have all features of a transformer graph."""

from dataclasses import replace

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.experts import Experts
from costmodels.blocks.gated_delta_net import GatedDeltaNet
from costmodels.blocks.head import Head
from costmodels.blocks.lightning_attention import LightningAttention
from costmodels.blocks.mamba1 import Mamba1
from costmodels.blocks.mamba2 import Mamba2
from costmodels.blocks.mask import Mask
from costmodels.blocks.short_convolution import ShortConvolution
from costmodels.blocks.sparse_latent_attention import SparseLatentAttention
from costmodels.job.model_spec import ModelSpec, plain_model
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
_OWN = {"hidden_size": 8, "norm_size": 8}
_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
_FEW = {"num_experts": 4, "top_k": 2, "ffn_size": 4, "gated": True}


def _of_blocks(name: str, *layers: tuple[AbstractBlock, ...]) -> ModelSpec:
    return ModelSpec(
        name=name,
        source="made up",
        hidden_size=8,
        tied_embeddings=False,
        norm="rms",
        layers=layers,
        embedding=Embedding(hidden_size=8, vocab_size=12),
        head=Head(hidden_size=8, vocab_size=12, has_table=True, norm_size=8, bias=True),
    )


_KINDS = (
    _of_blocks(
        "masks, sinks and gates",
        (
            Attention(**_OWN, **_HEADS, mask=Mask(window=3), sinks=True, qkv_bias=True, output_bias=True),
            Experts(**_OWN, **_FEW, idle_experts=4, router_bias=True, bias=True),
        ),
        (
            Attention(**_OWN, **_HEADS, mask=Mask(chunk=4), rotary=False, gate_size=16, qk_norm_size=8),
            Experts(**_OWN, **_FEW, latent_size=6, num_shared=1, shared_ffn_size=4, norms=0.0),
        ),
        (Attention(**_OWN, **_HEADS, gate_size=4, kv_projections=1, qk_norm_size=24, norms=3.0),),
    ),
    _of_blocks(
        "states",
        (
            GatedDeltaNet(
                **_OWN, num_key_heads=2, num_value_heads=4, key_head_dim=2, value_head_dim=2, conv_size=2, norms=2.0
            ),
            Mamba2(
                **_OWN,
                num_heads=4,
                head_dim=2,
                num_groups=2,
                state_size=2,
                conv_size=3,
                proj_bias=True,
                output_bias=True,
                chunk=4,
            ),
        ),
        (
            LightningAttention(**_OWN, num_heads=2, head_dim=4, chunk=4),
            ShortConvolution(**_OWN, conv_size=3, bias=True),
        ),
        (Mamba1(**_OWN, inner_size=4, state_size=2, step_rank=2, conv_size=3, has_norms=True),) * 2,
    ),
    replace(
        _of_blocks("prediction", (Attention(**_OWN, **_HEADS), DenseMlp(**_OWN, ffn_size=6, gated=False))),
        num_mtp_layers=2,
    ),
    _of_blocks(
        "indexer",
        (
            SparseLatentAttention(
                **_OWN,
                num_heads=4,
                q_lora_rank=4,
                kv_lora_rank=6,
                qk_nope_head_dim=4,
                qk_rope_head_dim=2,
                v_head_dim=2,
                index_heads=2,
                index_head_dim=2,
                mask=Mask(window=4),
            ),
            DenseMlp(**_OWN, ffn_size=6, gated=True),
        ),
    ),
)
"""Models of the other kinds of blocks; the meanings of their operators know the sizes of a head."""
SMALL = {
    model.name: model
    for model in (
        *_KINDS,
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
