"""Blocks of a config.json, for model types whose layers differ or are no plain decoder's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.experts import Experts
from costmodels.blocks.head import Head
from costmodels.blocks.mask import Mask
from costmodels.job.hugging_face.config import Config
from costmodels.job.hugging_face.decoders import even_head_dim
from costmodels.job.model_spec import Layer, ModelSpec
from hardware.io.errors import ConfigError


def attention(
    config: Config,
    *,
    heads: str = "num_attention_heads",
    kv_heads: str = "num_key_value_heads",
    head_dim: int | None = None,
    norm: str = "",
    bias: bool = False,
    output_bias: bool = False,
    gated: bool = False,
    norms: float = 1.0,
    **own: Any,
) -> Attention:
    """Return the attention that a config.json describes.

    Args:
        config: Keys of the config.json.
        heads: Key of the query heads.
        kv_heads: Key of the key and value heads; as many as query heads where it is missing.
        head_dim: Default of the model type; None stands for hidden_size / heads.
        norm: Norms of queries and keys: `head` for one weight per element of a head, `wide` for one per element of all.
        bias: Whether queries, keys and values have biases.
        output_bias: Whether the output has a bias.
        gated: Whether a gate scales each element of the heads' results.
        norms: Norms over the hidden size that belong to attention.
        own: Further fields of `Attention`.
    """
    hidden_size, num_heads = config.count("hidden_size"), config.count(heads)
    num_kv_heads = config.count(kv_heads, default=num_heads)
    if head_dim is None and not config.has("head_dim"):
        head_dim = even_head_dim(hidden_size, num_heads)
    size = config.count("head_dim", default=head_dim)
    norm_sizes = {"": 0, "head": 2 * size, "wide": (num_heads + num_kv_heads) * size}
    return Attention(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        qkv_bias=bias,
        output_bias=output_bias,
        qk_norm_size=norm_sizes[norm],
        gate_size=num_heads * size if gated else 0,
        norms=norms,
        norm_size=hidden_size,
        **own,
    )


def mlp(config: Config, *, size: int, gated: bool = True, bias: bool = False, norms: float = 1.0) -> DenseMlp:
    """Return an MLP of that inner size."""
    hidden_size = config.count("hidden_size")
    return DenseMlp(hidden_size=hidden_size, ffn_size=size, gated=gated, bias=bias, norms=norms, norm_size=hidden_size)


def experts(
    config: Config,
    *,
    number: int,
    top_k: int,
    size: int,
    shared: int = 0,
    shared_size: int = 0,
    gated: bool = True,
    norms: float = 1.0,
    **own: Any,
) -> Experts:
    """Return a mixture of so many experts of that inner size, with shared ones of `shared_size` together."""
    hidden_size = config.count("hidden_size")
    if top_k > number:
        raise ConfigError(f"must not exceed the {number} experts", key="num_experts_per_tok", value=top_k)
    return Experts(
        hidden_size=hidden_size,
        num_experts=number,
        top_k=top_k,
        ffn_size=size,
        gated=gated,
        num_shared=shared if shared_size else 0,
        shared_ffn_size=shared_size,
        norms=norms,
        norm_size=hidden_size,
        **own,
    )


def windows(config: Config, kinds: Sequence[str], *, key: str = "sliding_window") -> list[Mask]:
    """Return the mask of every layer of `layer_types`: `sliding_attention`, or full attention."""
    window = config.count(key, default=0, minimum=0) if "sliding_attention" in kinds else 0
    return [Mask(window=window if kind == "sliding_attention" else 0) for kind in kinds]


SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(config: Config, otherwise: Sequence[str], known: Sequence[str] = (SLIDING, FULL)) -> list[str]:
    """Return the kind of every layer: those of `layer_types`, or the class's own."""
    found = config.words("layer_types", known)
    return check_length(config, "layer_types", list(otherwise) if found is None else found)


def check_length(config: Config, key: str, kinds: list[str]) -> list[str]:
    """Return the kinds if there is one for every layer.

    Raises:
        ConfigError: there are fewer or more.
    """
    layers = config.count("num_hidden_layers", default=len(kinds))
    if len(kinds) != layers:
        raise ConfigError(f"must name one kind for each of the {layers} layers", key=key, value=len(kinds))
    return kinds


def model(
    config: Config,
    layers: Sequence[Sequence[AbstractBlock]],
    *,
    name: str,
    tied: bool,
    mtp: int = 0,
    mtp_layer: Sequence[AbstractBlock] = (),
    head_bias: bool = False,
    left_out: Sequence[str] = (),
) -> ModelSpec:
    """Return the model of these layers, between the tables of the config.json.

    Args:
        config: Keys of the config.json.
        layers: Blocks of every layer.
        name: Name of the model.
        tied: Default of `tie_word_embeddings`.
        mtp: Multi-token prediction modules.
        mtp_layer: Blocks of their layer, if it is not like the last one.
        head_bias: Whether the logits have a bias.
        left_out: Parts that are not read.
    """
    hidden_size, vocab_size = config.count("hidden_size"), config.count("vocab_size")
    is_tied = config.flag("tie_word_embeddings", default=tied)
    rows: tuple[Layer, ...] = tuple(tuple(layer) for layer in layers)
    return ModelSpec(
        name=name,
        source=f"config.json of {name}",
        hidden_size=hidden_size,
        tied_embeddings=is_tied,
        norm="rms",
        layers=rows,
        embedding=Embedding(hidden_size=hidden_size, vocab_size=vocab_size),
        head=Head(
            hidden_size=hidden_size, vocab_size=vocab_size, has_table=not is_tied, norm_size=hidden_size, bias=head_bias
        ),
        num_mtp_layers=mtp,
        mtp_layer=tuple(mtp_layer),
        left_out=tuple(left_out),
    )
