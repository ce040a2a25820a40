"""A small model of many kinds of blocks, which no plain decoder is."""

from costmodels.blocks.attention import Attention
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.experts import Experts
from costmodels.blocks.head import Head
from costmodels.blocks.mamba2 import Mamba2
from costmodels.blocks.mask import Mask
from costmodels.job.model_spec import ModelSpec

_OWN = {"hidden_size": 512, "norm_size": 512}
_HEADS = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
WHOLE, WINDOW = Attention(**_OWN, **_HEADS), Attention(**_OWN, **_HEADS, mask=Mask(window=256))
STATES = Mamba2(**_OWN, num_heads=16, head_dim=64, num_groups=8, state_size=32)
DENSE = DenseMlp(**_OWN, ffn_size=1536, gated=True)
EXPERTS = Experts(**_OWN, num_experts=16, top_k=4, ffn_size=256, gated=True)

MIXED = ModelSpec(
    name="mixed",
    source="made up",
    hidden_size=512,
    tied_embeddings=False,
    norm="rms",
    layers=((WINDOW, DENSE), (STATES, EXPERTS), (STATES,), (WHOLE, EXPERTS), (WINDOW, DENSE), (STATES, EXPERTS)),
    embedding=Embedding(hidden_size=512, vocab_size=8192),
    head=Head(hidden_size=512, vocab_size=8192, has_table=True, norm_size=512),
    num_mtp_layers=1,
)
