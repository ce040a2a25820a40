"""Encoders: BERT and its kin with the head that fills in masked words, ViT with the head that says a class, and T5.

Every query of an encoder sees all keys. The original layers have their norms behind attention and MLP, as many as
others have before them.
"""

from __future__ import annotations

from dataclasses import replace

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.cross_attention import CrossAttention
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.head import Head
from costmodels.blocks.mask import Mask
from costmodels.blocks.projection import Projection
from costmodels.job.hugging_face import rows
from costmodels.job.hugging_face.config import Config
from costmodels.job.hugging_face.decoders import even_head_dim
from costmodels.job.hugging_face.towers import square_patches, square_side
from costmodels.job.model_spec import ModelSpec
from hardware.io.errors import ConfigError

FULL = Mask(causal=False)


def _layer(config: Config, width: int, *, qkv_bias: bool) -> tuple[Attention, DenseMlp]:
    """Read a layer of BERT or ViT: attention to all tokens and an MLP, each with a norm of two vectors."""
    heads, norm_size = config.count("num_attention_heads", default=12), 2 * width
    attention = Attention(
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=even_head_dim(width, heads),
        qkv_bias=qkv_bias,
        output_bias=True,
        rotary=False,
        mask=FULL,
        norm_size=norm_size,
    )
    inner = config.count("intermediate_size", default=3072)
    return attention, DenseMlp(hidden_size=width, ffn_size=inner, gated=False, bias=True, norm_size=norm_size)


def bert(config: Config, name: str) -> ModelSpec:
    """Read BERT or RoBERTa, as it is trained to fill in masked words."""
    _check_head(config, "ForMaskedLM")
    for key in ("is_decoder", "add_cross_attention"):
        if config.flag(key, default=False):
            raise ConfigError("must be false: encoders alone are read", key=key, value=True)
    _check_positions(config)
    width, vocab_size = config.count("hidden_size", default=768), config.count("vocab_size")
    if not config.flag("tie_word_embeddings", default=True):
        rule = "must be true, as in every published model: without it transformers keeps two biases of the logits"
        raise ConfigError(rule, key="tie_word_embeddings", value=False)
    norm_size = 2 * width
    layer = _layer(config, width, qkv_bias=True)
    return ModelSpec(
        name=name,
        source=f"config.json of {name}",
        hidden_size=width,
        tied_embeddings=True,
        norm="layer",
        layers=(layer,) * config.count("num_hidden_layers", default=12),
        embedding=Embedding(
            hidden_size=width,
            vocab_size=vocab_size,
            learned_positions=config.count("max_position_embeddings", default=512),
            token_types=config.count("type_vocab_size", default=2),
            norm_size=norm_size,
        ),
        head=Head(
            hidden_size=width,
            vocab_size=vocab_size,
            has_table=False,
            norm_size=norm_size,
            bias=True,
            transform_size=width * width + width,
        ),
    )


def modernbert(config: Config, name: str) -> ModelSpec:
    """Read ModernBERT: gated MLPs, rotary positions, and windows in two of three layers."""
    _check_head(config, "ForMaskedLM")
    width, vocab_size = config.count("hidden_size", default=768), config.count("vocab_size", default=50_368)
    heads, layers = config.count("num_attention_heads", default=12), config.count("num_hidden_layers", default=22)
    norm_size = width * (1 + config.flag("norm_bias", default=False))
    bias, is_tied = config.flag("attention_bias", default=False), config.flag("tie_word_embeddings", default=True)
    period = config.count("global_attn_every_n_layers", default=3)
    otherwise = [rows.SLIDING if layer % period else rows.FULL for layer in range(layers)]
    kinds = rows.layer_types(config, otherwise)
    window = config.count("local_attention", default=128) // 2  # on either side
    if config.flag("sparse_prediction", default=False):
        raise ConfigError("must be false: the logits of all tokens are priced", key="sparse_prediction", value=True)
    _ignore_classifier(config)
    mlp = DenseMlp(
        hidden_size=width,
        ffn_size=config.count("intermediate_size", default=1152),
        gated=True,
        bias=config.flag("mlp_bias", default=False),
        norm_size=norm_size,
    )

    def attention(layer: int) -> Attention:
        return Attention(
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=even_head_dim(width, heads),
            qkv_bias=bias,
            output_bias=bias,
            mask=Mask(causal=False, window=window) if kinds[layer] == rows.SLIDING else FULL,
            norms=0.0 if layer == 0 else 1.0,  # the embedding's norm stands for that of the first layer
            norm_size=norm_size,
        )

    return ModelSpec(
        name=name,
        source=f"config.json of {name}",
        hidden_size=width,
        tied_embeddings=is_tied,
        norm="layer",
        layers=tuple((attention(layer), mlp) for layer in range(layers)),
        embedding=Embedding(hidden_size=width, vocab_size=vocab_size, norm_size=norm_size),
        head=Head(
            hidden_size=width,
            vocab_size=vocab_size,
            has_table=not is_tied,
            norm_size=norm_size,
            bias=config.flag("decoder_bias", default=True),
            norms=2.0,
            transform_size=width * width + width * config.flag("classifier_bias", default=False),
        ),
    )


def vit(config: Config, name: str) -> ModelSpec:
    """Read ViT, as it is trained to say the class of an image; a sequence is an image with its token of the whole."""
    _check_head(config, "ForImageClassification")
    width = config.count("hidden_size", default=768)
    tokens, norm_size = square_patches(config, side=224, patch=16) + 1, 2 * width
    values = config.count("num_channels", default=3) * square_side(config, "patch_size", 16) ** 2
    labels = config.value("id2label", default={"0": "", "1": ""})
    if not isinstance(labels, dict) or not labels:
        raise ConfigError("must map the numbers of classes to their names", key="id2label", value=labels)
    config.read.update(("label2id", "encoder_stride", "pooler_output_size"))  # of other heads
    bias = config.flag("qkv_bias", default=True)
    layer = _layer(config, width, qkv_bias=bias)
    patches: AbstractBlock = Projection(inputs=values, outputs=width, bias=True)
    number = config.count("num_hidden_layers", default=12)
    return ModelSpec(
        name=name,
        source=f"config.json of {name}",
        hidden_size=width,
        tied_embeddings=False,
        norm="layer",
        layers=((patches, *layer), *(layer,) * (number - 1)),
        # a row for each position, and the token of the whole image
        embedding=Embedding(hidden_size=width, vocab_size=0, learned_positions=tokens + 1),
        head=Head(
            hidden_size=width, vocab_size=len(labels), has_table=True, norm_size=norm_size, bias=True, is_pooled=True
        ),
        remarks=(f"a sequence of {name} is an image: job.sequence_length is {tokens}, its patches and one token more",),
    )


def t5(config: Config, name: str) -> ModelSpec:
    """Read T5: the layers of its encoder, and behind them those of its decoder, which attend to the encoder too.

    Both have `sequence_length` tokens. Tables of distances stand in the first layer of each.
    """
    _check_head(config, "ForConditionalGeneration")
    width, heads, size = config.count("d_model"), config.count("num_heads"), config.count("d_kv", default=64)
    kind = config.value("feed_forward_proj", default="relu")
    if not isinstance(kind, str):
        raise ConfigError("must be text", key="feed_forward_proj", value=kind)
    config.read.update(("relative_attention_max_distance", "num_hidden_layers", "num_attention_heads", "hidden_size"))
    config.read.update(("head_dim", "is_encoder_decoder", "is_gated_act", "tie_word_embeddings", "n_positions"))
    config.read.update(("scale_decoder_outputs", "output_past"))
    number = config.first_count("num_layers", "num_hidden_layers")
    number_behind = config.count("num_decoder_layers", default=number)
    table = config.count("relative_attention_num_buckets", default=32) * heads
    inner = config.count("d_ff")
    mlp = DenseMlp(hidden_size=width, ffn_size=inner, gated=kind.startswith("gated-"), norm_size=width)
    causal = Attention(
        hidden_size=width, num_heads=heads, num_kv_heads=heads, head_dim=size, norm_size=width, rotary=False
    )
    both = replace(causal, mask=FULL)
    cross = CrossAttention(hidden_size=width, num_heads=heads, num_kv_heads=heads, head_dim=size, norm_size=width)

    def of_layer(attention: Attention, layer: int) -> Attention:
        return attention if layer else replace(attention, distance_table=table)

    encoder = [
        (of_layer(both, layer), replace(mlp, norms=2.0) if layer == number - 1 else mlp) for layer in range(number)
    ]
    decoder = [(of_layer(causal, layer), cross, mlp) for layer in range(number_behind)]
    vocab_size = config.count("vocab_size", default=32_128)
    return ModelSpec(
        name=name,
        source=f"config.json of {name}",
        hidden_size=width,
        tied_embeddings=True,  # transformers 5 ties them whatever the file says
        norm="rms",
        layers=(*encoder, *decoder),
        embedding=Embedding(hidden_size=width, vocab_size=vocab_size),
        head=Head(hidden_size=width, vocab_size=vocab_size, has_table=False, norm_size=width),
        remarks=(
            f"encoder and decoder of {name} are both priced with job.sequence_length tokens; what pipeline stages hand"
            " on of the encoder's results is not counted",
        ),
    )


def _check_head(config: Config, ending: str) -> None:
    """Refuse a model with another head than the one that is read."""
    named = config.value("architectures", default=[])
    if isinstance(named, list) and named and not str(named[0]).endswith(ending):
        raise ConfigError(f"is read with the head {ending} alone", key="architectures", value=str(named[0]))


def _check_positions(config: Config) -> None:
    kind = config.value("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise ConfigError("must be absolute", key="position_embedding_type", value=kind)


def _ignore_classifier(config: Config) -> None:
    """Mark the keys of heads that say classes as read."""
    config.read.update(("classifier_dropout", "classifier_pooling", "classifier_activation", "repad_logits_with_grad"))
    config.read.update(("sparse_pred_ignore_index", "reference_compile", "deterministic_flash_attn"))
    config.read.update(("global_rope_theta", "local_rope_theta", "rope_parameters", "initializer_cutoff_factor"))
