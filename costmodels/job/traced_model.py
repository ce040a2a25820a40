"""Make a model of what a trace of transformers' own says: every kind of layer as the parts that were counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.head import Head
from costmodels.blocks.mask import Mask
from costmodels.blocks.traced_part import Heads, Product, TracedExperts, TracedMixer, TracedMlp
from costmodels.job.model_spec import Layer, ModelSpec
from costmodels.traced.amounts import Amount
from costmodels.traced.model import TracedAttention, TracedBlock, TracedEnd, TracedModel, TracedProduct, TracedRow
from hardware.io.errors import ConfigError

_SHAPE = (1.0, 1024.0)
"""Sequences and tokens at which amounts that grow with tokens alone are taken."""


def model_of_trace(traced: TracedModel, *, name: str) -> ModelSpec:
    """Return the model of a trace; what it could only bound, and further rows of layers, are named in its remarks.

    Raises:
        ConfigError: the model has no table of tokens, or its layers no products.
    """
    tables = [
        one for end in traced.ends if end.kind == "embedding" for one in end.block.parameters if len(one.shape) > 1
    ]
    if not traced.rows or not tables:
        raise ConfigError("has no row of layers behind a table of tokens", key="model_type", value=traced.model_type)
    vocab_size, width = max((one.shape for one in tables), key=lambda shape: shape[0])
    main, *further = traced.rows
    layers = _layers(traced, main, width)
    bounds = [bound for at in sorted(set(main.kinds)) for bound in traced.kinds[at].bounds]
    left_out = [row.name for row in further]
    left_out += ["multi-token prediction"] * any(end.kind == "mtp" for end in traced.ends)
    own = [end for end in traced.ends if end.kind != "mtp" and _is_beside(end, main, further)]
    norm_size = sum(end.block.num_parameters for end in own if end.kind == "norm")
    heads = [end.block for end in own if end.kind == "head"]
    head = Head(
        hidden_size=width,
        vocab_size=vocab_size,
        has_table=not traced.tied_embeddings,
        norm_size=norm_size,
        bias=any(one.shape == (vocab_size,) for block in heads for one in block.parameters),
    )
    known = vocab_size * width + (head.parameters if heads else norm_size)
    beside = sum(end.block.num_parameters for end in own) - known
    return ModelSpec(
        name=name,
        source=f"transformers {traced.version}, {traced.class_name}",
        hidden_size=width,
        tied_embeddings=traced.tied_embeddings,
        norm="rms",
        layers=layers,
        embedding=Embedding(hidden_size=width, vocab_size=vocab_size, further=beside),
        head=head,
        left_out=tuple(left_out),
        remarks=tuple(
            f"the model is traced: {text}"
            for text in (
                *traced.notes,
                *([] if heads else [f"{traced.class_name} has no output head; one over the vocabulary is added"]),
                *([f"{beside:,} parameters beside its layers count in memory alone"] if beside else []),
                *_of_layers(traced, main, layers),
                *dict.fromkeys(bounds),
            )
        ),
    )


def _of_layers(traced: TracedModel, main: TracedRow, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield sentences about parameters that layers share, and about those of idle experts."""
    shared = sum(one.size for one in traced.shared)
    if shared:
        yield f"{shared:,} parameters that layers share are held where they stand first"
    every = sum(one.size for at in main.kinds for one in traced.kinds[at].parameters if not one.is_shared) + shared
    if idle := every - sum(block.parameters for layer in layers for block in layer):
        yield f"{idle:,} parameters of experts that compute nothing are left out"


def _is_beside(end: TracedEnd, main: TracedRow, further: Sequence[TracedRow]) -> bool:
    """Return whether an end belongs to the main row: it stands in the same module, in no part that has another row."""
    owner, path = main.name.split(".")[:-1], end.block.name.split(".")
    depth = len(owner) + 1
    apart = any(path[:depth] == row.name.split(".")[:depth] for row in further)
    return end.kind == "head" or not further or (path[: depth - 1] == owner and not apart)


def _layers(traced: TracedModel, main: TracedRow, width: int) -> tuple[Layer, ...]:
    """Return the layers of a row; what several of them share belongs to the first ones."""
    left, found, known = sum(one.size for one in traced.shared), list[Layer](), dict[tuple[int, bool], Layer]()
    for at in main.kinds:
        shared = sum(one.size for one in traced.kinds[at].parameters if one.is_shared)
        owns = shared <= left
        left -= shared * owns
        if (at, owns) not in known:
            known[at, owns] = _layer(traced.kinds[at], width, owns=owns)
        found.append(known[at, owns])
    return tuple(found)


def _layer(block: TracedBlock, width: int, *, owns: bool) -> Layer:
    """Return the two parts of a layer, or the one that it has."""
    channel = [one for one in block.products if one.part == "channel mixer"]
    mixer = [one for one in block.products if one.part != "channel mixer"]
    if not channel and not mixer and not block.attentions:
        raise ConfigError("is a layer without products", key="model_type", value=block.class_name)
    # a layer of one part holds all there is, whatever its names say
    sides = [side for side, has in ((False, bool(mixer or block.attentions)), (True, bool(channel))) if has]
    whole = len(sides) == 1
    return tuple(
        _part(block, channel if side else mixer, width, is_channel=side, is_whole=whole, owns=owns) for side in sides
    )


def _part(
    block: TracedBlock, products: Iterable[TracedProduct], width: int, *, is_channel: bool, is_whole: bool, owns: bool
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
    parameters = [one for one in block.parameters if is_whole or (one.part == "channel mixer") == is_channel]
    passes = [one for one in block.passes if is_whole or (one.part == "channel mixer") == is_channel]
    own = {
        "hidden_size": width,
        "products": tuple(dense),
        "heads": () if is_channel else tuple(_heads(one) for one in block.attentions),
        "scan_flops": scan,
        "square_flops": square,
        "moved_bytes": sum(_per_token(one.read_bytes) + _per_token(one.written_bytes) for one in passes),
        "dense_parameters": sum(
            one.size for one in parameters if not (one.is_expert and routed) and (owns or not one.is_shared)
        ),
        "lent_parameters": sum(one.size for one in parameters if one.is_shared and not owns),
    }
    if routed:
        # experts beyond those that have all their weights compute nothing (LongCat-Flash)
        held = sum(
            one.size // one.shape[0] * min(groups, one.shape[0]) if len(one.shape) == 3 else one.size
            for one in parameters
            if one.is_expert
        )
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
