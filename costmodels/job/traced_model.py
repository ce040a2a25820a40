"""Make a model of what a trace of transformers' own says: every kind of layer as the parts that were counted."""

from __future__ import annotations

from collections.abc import Iterable

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.head import Head
from costmodels.blocks.mask import Mask
from costmodels.blocks.traced_part import Heads, Product, TracedExperts, TracedMixer, TracedMlp
from costmodels.job.model_spec import Layer, ModelSpec
from costmodels.traced.amounts import Amount
from costmodels.traced.model import TracedAttention, TracedBlock, TracedModel, TracedProduct
from hardware.io.errors import ConfigError

_SHAPE = (1.0, 1024.0)
"""Sequences and tokens at which amounts that grow with tokens alone are taken."""


def model_of_trace(traced: TracedModel, *, name: str) -> ModelSpec:
    """Return the model of a trace; what it could only bound, and further rows of layers, are named in its remarks.

    Raises:
        ConfigError: the model has no table of tokens, or its layers no products.
    """
    tables = [end.block for end in traced.ends if end.kind == "embedding" and end.block.parameters]
    if not traced.rows or not tables:
        raise ConfigError("has no row of layers behind a table of tokens", key="model_type", value=traced.model_type)
    vocab_size, width = max((one.shape for block in tables for one in block.parameters), key=lambda shape: shape[0])
    main, *further = traced.rows
    kinds = {at: _layer(traced.kinds[at], width) for at in sorted(set(main.kinds))}
    norm_size = sum(end.block.num_parameters for end in traced.ends if end.kind == "norm")
    bounds = [bound for at in sorted(set(main.kinds)) for bound in traced.kinds[at].bounds]
    left_out = [row.name for row in further]
    left_out += ["multi-token prediction"] * any(end.kind == "mtp" for end in traced.ends)
    return ModelSpec(
        name=name,
        source=f"transformers {traced.version}, {traced.class_name}",
        hidden_size=width,
        tied_embeddings=traced.tied_embeddings,
        norm="rms",
        layers=tuple(kinds[at] for at in main.kinds),
        embedding=Embedding(hidden_size=width, vocab_size=vocab_size),
        head=Head(hidden_size=width, vocab_size=vocab_size, has_table=not traced.tied_embeddings, norm_size=norm_size),
        left_out=tuple(left_out),
        remarks=tuple(f"the model is traced: {text}" for text in (*traced.notes, *dict.fromkeys(bounds))),
    )


def _layer(block: TracedBlock, width: int) -> Layer:
    """Return the two parts of a layer, or the one that it has."""
    channel = [one for one in block.products if one.part == "channel mixer"]
    mixer = [one for one in block.products if one.part != "channel mixer"]
    found: list[AbstractBlock] = []
    if mixer or block.attentions:
        found.append(_part(block, mixer, block.attentions, width, is_channel=False))
    if channel:
        found.append(_part(block, channel, (), width, is_channel=True))
    if not found:
        raise ConfigError("is a layer without products", key="model_type", value=block.class_name)
    return tuple(found)


def _part(
    block: TracedBlock,
    products: Iterable[TracedProduct],
    attentions: Iterable[TracedAttention],
    width: int,
    *,
    is_channel: bool,
) -> AbstractBlock:
    dense, routed, scan, square, groups = list[Product](), list[Product](), 0.0, 0.0, 1
    for one in products:
        if one.kind in ("matrix", "experts") and one.shape is not None:
            found = _product(one)
            (routed if one.kind == "experts" else dense).append(found)
            groups = max(groups, one.groups)
        elif one.kind != "convolution":  # few FLOPs, and its reads are among the passes
            scan += one.flops.coefficients[3]
            square += one.flops.coefficients[5]
    parameters = [one for one in block.parameters if (one.part == "channel mixer") == is_channel]
    passes = [one for one in block.passes if (one.part == "channel mixer") == is_channel]
    own = {
        "hidden_size": width,
        "products": tuple(dense),
        "heads": tuple(_heads(one) for one in attentions),
        "scan_flops": scan,
        "square_flops": square,
        "moved_bytes": sum(_per_token(one.read_bytes) + _per_token(one.written_bytes) for one in passes),
        "dense_parameters": sum(one.size for one in parameters if not one.is_expert),
    }
    if routed:
        held = sum(one.size for one in parameters if one.is_expert)
        return TracedExperts(**own, routed=tuple(routed), num_experts=groups, expert_parameters=held)  # type: ignore[arg-type]
    is_mixer = bool(own["heads"]) or scan > 0 or square > 0
    return TracedMixer(**own) if is_mixer else TracedMlp(**own)  # type: ignore[arg-type]


def _product(one: TracedProduct) -> Product:
    assert one.shape is not None, "checked by the caller"
    batch, rows, inputs, outputs = (float(amount.at(*_SHAPE)) for amount in one.shape)
    tokens = _SHAPE[0] * _SHAPE[1]
    count = float(one.count.at(*_SHAPE))
    return Product(rows=batch * rows * count / tokens, inputs=round(inputs), outputs=round(outputs))


def _heads(one: TracedAttention) -> Heads:
    reach = one.reach
    mask = Mask(causal=reach.causal, window=reach.window or reach.selected, chunk=reach.chunk)
    return Heads(one.num_heads, one.num_kv_heads, one.head_dim, one.value_head_dim, mask)


def _per_token(amount: Amount) -> float:
    """Return what each token adds to an amount."""
    return amount.coefficients[3]
