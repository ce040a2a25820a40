"""Models of two layers of one kind of block, of every kind that has a graph."""

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.experts import Experts
from costmodels.blocks.gated_delta_net import GatedDeltaNet
from costmodels.blocks.head import Head
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.lightning_attention import LightningAttention
from costmodels.blocks.mamba1 import Mamba1
from costmodels.blocks.mamba2 import Mamba2
from costmodels.blocks.mask import Mask
from costmodels.blocks.short_convolution import ShortConvolution
from costmodels.blocks.sparse_latent_attention import SparseLatentAttention
from costmodels.job.model_spec import ModelSpec

H = 1024
_OWN = {"hidden_size": H, "norm_size": H}
_HEADS = {"num_heads": 32, "num_kv_heads": 16, "head_dim": 64}
_LATENT = {
    "num_heads": 32,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_FEW = {"num_experts": 16, "top_k": 4, "ffn_size": 512}

KINDS: dict[str, AbstractBlock] = {
    "attention": Attention(**_OWN, **_HEADS),
    "to all": Attention(**_OWN, **_HEADS, mask=Mask(causal=False)),
    "window": Attention(**_OWN, **_HEADS, mask=Mask(window=256)),
    "chunks": Attention(**_OWN, **_HEADS, mask=Mask(chunk=512), rotary=False),
    "sinks": Attention(**_OWN, **_HEADS, mask=Mask(window=128), sinks=True, qkv_bias=True, output_bias=True),
    "gated": Attention(**_OWN, **_HEADS, gate_size=32 * 64, qk_norm_size=2 * 64),
    "gated by head": Attention(**_OWN, **_HEADS, gate_size=32),
    "keys are values": Attention(**_OWN, **_HEADS, kv_projections=1),
    "wide norms": Attention(**_OWN, **_HEADS, qk_norm_size=(32 + 16) * 64, norms=2.0),
    "latent": LatentAttention(**_OWN, **_LATENT),
    "latent window": LatentAttention(**_OWN, **_LATENT, mask=Mask(window=256), rotary=False),
    "sparse latent": SparseLatentAttention(**_OWN, **_LATENT, index_heads=16, index_head_dim=32, mask=Mask(window=256)),
    "gated delta net": GatedDeltaNet(
        **_OWN, num_key_heads=16, num_value_heads=32, key_head_dim=32, value_head_dim=48, conv_size=4
    ),
    "mamba 2": Mamba2(**_OWN, num_heads=64, head_dim=32, num_groups=16, state_size=64),
    "mamba 2 with biases": Mamba2(
        **_OWN,
        num_heads=64,
        head_dim=32,
        num_groups=16,
        state_size=64,
        proj_bias=True,
        output_bias=True,
        has_norm=False,
    ),
    "mamba 1": Mamba1(**_OWN, inner_size=2048, state_size=16, step_rank=64, has_norms=True),
    "lightning": LightningAttention(**_OWN, num_heads=32, head_dim=64, norms=2.0),
    "short convolution": ShortConvolution(**_OWN, conv_size=3, bias=True),
    "dense": DenseMlp(**_OWN, ffn_size=4096, gated=True),
    "dense with biases": DenseMlp(**_OWN, ffn_size=4096, gated=False, bias=True, norms=2.0),
    "experts": Experts(**_OWN, **_FEW, gated=True, num_shared=1, shared_ffn_size=512, router_bias=True),
    "experts with biases": Experts(**_OWN, **_FEW, gated=True, bias=True),
    "latent experts": Experts(**_OWN, **_FEW, gated=False, latent_size=256, num_shared=1, shared_ffn_size=1024),
    "idle experts": Experts(**_OWN, **_FEW, gated=True, idle_experts=16, norms=0.0),
}
"""One block of every kind, and of every variant that has operators of its own, whose sizes divide by 16."""


def model_of(*blocks: AbstractBlock, layers: int = 2) -> ModelSpec:
    """Return a model of equal layers with these blocks."""
    return ModelSpec(
        name="of blocks",
        source="made up",
        hidden_size=H,
        tied_embeddings=False,
        norm="rms",
        layers=(blocks,) * layers,
        embedding=Embedding(hidden_size=H, vocab_size=8192),
        head=Head(hidden_size=H, vocab_size=8192, has_table=True, norm_size=H),
    )
