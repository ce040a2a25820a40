"""Vision towers of multimodal models and the projections behind them, by the type of `vision_config`.

A tower is a row of layers of non-causal attention and MLPs behind a product that makes tokens of patches. Norms before
the first and behind the last layer count as further norms of these. Sizes are those of transformers' classes (5.24).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.mask import Mask
from costmodels.blocks.projection import Projection
from costmodels.blocks.tower_part import TowerPart
from costmodels.job.hugging_face.config import Config
from costmodels.job.hugging_face.decoders import even_head_dim
from costmodels.job.tower import Tower, TowerWork
from hardware.io.errors import ConfigError

FULL = Mask(causal=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Blocks that run one after the other over equally many tokens.

    Attributes:
        blocks: Blocks.
        width: Width of a token.
        tokens: Tokens of an image.
        is_projection: Whether they stand behind the tower's own, so that they are trained in any case.
    """

    blocks: Sequence[AbstractBlock]
    width: int
    tokens: int
    is_projection: bool = False


def vision_tower(config: Config, work: TowerWork, *, text_hidden: int) -> Tower:
    """Return the vision tower of a multimodal model, with its projection to the width of the language model.

    Args:
        config: Keys of the whole model.
        work: What a study says of it.
        text_hidden: Width of the language model.

    Raises:
        ConfigError: The type is not read, a key is missing or wrong, or the number of patches is not known.
    """
    model_type = config.value("model_type")
    assert isinstance(model_type, str), "the reader of this type was found"
    vision = config.under("vision_config")
    kind = vision.value("model_type", default=_DEFAULT_TOWER.get(model_type, ""))
    if model_type not in _ANY_TOWER:  # its class has one kind of tower, whatever the file calls it
        kind = _DEFAULT_TOWER.get(model_type, kind)
    reader = _TOWERS.get(str(kind))
    if reader is None or model_type not in _PROJECTIONS:
        rule = "is a tower that is not read"
        raise ConfigError(rule, key="vision_config.model_type", value=kind, nearest="leave `job.towers` out")
    try:
        steps = reader(vision, work)
        vision.check_rest()
    except ConfigError as error:
        raise error if (error.key or "").startswith("job.") else error.under("vision_config") from None
    steps = [*steps, *_PROJECTIONS[model_type](config, vision, steps[-1], text_hidden)]
    return Tower(
        name="vision",
        parts=tuple(
            TowerPart(
                tower="vision",
                part=block,
                hidden_size=step.width,
                images=work.images,
                tokens=step.tokens,
                trained=work.trained or step.is_projection,
            )
            for step in steps
            for block in step.blocks
        ),
    )


# Parts that several towers share.


def square_side(config: Config, key: str, default: int | None = None) -> int:
    """Return the side of a square that a key gives once or for both directions."""
    value = config.value(key, default) if default is not None else config.value(key)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError("must be one whole number: squares alone are read", key=key, value=value)


def _square_patches(config: Config, work: TowerWork, *, further: int = 0) -> int:
    """Return the patches of an image of the tower's one size; `further` tokens stand beside them.

    Raises:
        ConfigError: The study says another number.
    """
    patches = square_patches(config)
    if work.patches not in (None, patches):
        rule = "must be left out, or what image_size and patch_size give"
        raise ConfigError(rule, key="job.towers.vision.patches", value=work.patches, nearest=str(patches))
    return patches + further


def square_patches(config: Config, *, side: int | None = None, patch: int | None = None) -> int:
    """Return the patches of an image of the size that a config.json states, with the defaults of its class."""
    return (square_side(config, "image_size", side) // square_side(config, "patch_size", patch)) ** 2


def _any_patches(work: TowerWork, merged: int = 1) -> int:
    """Return the patches of an image, which the study has to say.

    Raises:
        ConfigError: It does not, or so many are not merged evenly.
    """
    if work.patches is None:
        rule = "is required: images of this tower have any size"
        raise ConfigError(rule, key="job.towers.vision.patches")
    if work.patches % merged:
        nearest = str(max(1, round(work.patches / merged)) * merged)
        raise ConfigError(
            f"must be a multiple of {merged}", key="job.towers.vision.patches", value=work.patches, nearest=nearest
        )
    return work.patches


def _layers(
    width: int,
    tokens: int,
    *,
    number: int,
    attention: Attention,
    mlp: DenseMlp,
    first_norm: bool = False,
    last_norm: bool = False,
    windowed: Sequence[int] = (),
    window: int = 0,
) -> _Step:
    """Return the layers of a tower, with a norm before the first and behind the last where it has them."""
    blocks: list[AbstractBlock] = []
    for layer in range(number):
        mask = replace(FULL, chunk=window) if layer in windowed else FULL
        blocks.append(replace(attention, mask=mask, norms=attention.norms + (first_norm and layer == 0)))
        blocks.append(replace(mlp, norms=mlp.norms + (last_norm and layer == number - 1)))
    return _Step(blocks=blocks, width=width, tokens=tokens)


def _attention(width: int, heads: int, norm_size: int, **own: object) -> Attention:
    head_dim = even_head_dim(width, heads)
    sizes = {"hidden_size": width, "num_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
    return Attention(**sizes, norm_size=norm_size, mask=FULL, **own)  # type: ignore[arg-type] # fields of Attention


def _check_words(config: Config, **known: object) -> None:
    """Refuse values of keys that change the blocks.

    Raises:
        ConfigError: A key has another value than the one that is read.
    """
    for key, value in known.items():
        if config.value(key, default=value) != value:
            raise ConfigError(
                "has another value than the one that is read", key=key, value=config.value(key), nearest=str(value)
            )


_Steps = list[_Step]


# Towers


def _qwen2_5(config: Config, work: TowerWork) -> _Steps:
    """Read the tower of Qwen2.5-VL: attention inside windows in most layers, gated MLPs, no table of positions."""
    width, side = config.count("hidden_size"), square_side(config, "patch_size")
    merged = config.count("spatial_merge_size", default=2) ** 2
    tokens, depth = _any_patches(work, merged), config.count("depth", default=32)
    values = config.count("in_channels", default=3) * config.count("temporal_patch_size", default=2) * side**2
    config.read.update(("out_hidden_size", "tokens_per_second", "in_chans", "spatial_patch_size"))
    full = config.numbers("fullatt_block_indexes", [7, 15, 23, 31])
    window = (config.count("window_size", default=112) // side) ** 2
    layers = _layers(
        width,
        tokens,
        number=depth,
        attention=_attention(width, config.count("num_heads", default=16), width, qkv_bias=True, output_bias=True),
        mlp=DenseMlp(
            hidden_size=width,
            ffn_size=config.count("intermediate_size", default=3420),
            gated=True,
            bias=True,
            norm_size=width,
        ),
        windowed=[layer for layer in range(depth) if layer not in full],
        window=window,
    )
    return [_Step(blocks=[Projection(inputs=values, outputs=width)], width=width, tokens=tokens), layers]


def _qwen3(config: Config, work: TowerWork) -> _Steps:
    """Read the tower of Qwen3-VL: a table of positions, and further mergers of earlier layers' values."""
    width, side = config.count("hidden_size", default=1152), square_side(config, "patch_size", 16)
    merged = config.count("spatial_merge_size", default=2) ** 2
    tokens = _any_patches(work, merged)
    values = config.count("in_channels", default=3) * config.count("temporal_patch_size", default=2) * side**2
    table = config.count("num_position_embeddings", default=2304) * width
    outputs = config.count("out_hidden_size", default=3584)
    deep = len(config.numbers("deepstack_visual_indexes", [8, 16, 24]))
    embedding = Projection(inputs=values, outputs=width, bias=True, table=table)
    layers = _layers(
        width,
        tokens,
        number=config.count("depth", default=27),
        attention=_attention(width, config.count("num_heads", default=16), 2 * width, qkv_bias=True, output_bias=True),
        mlp=DenseMlp(
            hidden_size=width,
            ffn_size=config.count("intermediate_size", default=4304),
            gated=False,
            bias=True,
            norm_size=2 * width,
        ),
    )
    inner = width * merged
    merger = _merger(inner, outputs, norm_width=inner, norm_size=2 * inner)
    mergers = _Step(blocks=merger * deep, width=inner, tokens=tokens // merged, is_projection=True)
    return [_Step(blocks=[embedding], width=width, tokens=tokens), layers, mergers]


def _merger(inner: int, outputs: int, *, norm_width: int, norm_size: int) -> list[AbstractBlock]:
    """Return the norm and the two products with biases that give merged tokens another width."""
    first = Projection(
        inputs=inner, outputs=inner, bias=True, activation=True, norm_width=norm_width, norm_size=norm_size
    )
    return [first, Projection(inputs=inner, outputs=outputs, bias=True)]


def _siglip(config: Config, work: TowerWork) -> _Steps:
    """Read SigLIP: a table of positions, a last norm, and perhaps a head that pools all tokens into one."""
    width, tokens = config.count("hidden_size"), _square_patches(config, work)
    heads, inner = config.count("num_attention_heads"), config.count("intermediate_size")
    values = config.count("num_channels", default=3) * square_side(config, "patch_size") ** 2
    mlp = DenseMlp(hidden_size=width, ffn_size=inner, gated=False, bias=True, norm_size=2 * width)
    steps = [
        _Step(
            blocks=[Projection(inputs=values, outputs=width, bias=True, table=tokens * width)],
            width=width,
            tokens=tokens,
        ),
        _layers(
            width,
            tokens,
            number=config.count("num_hidden_layers"),
            attention=_attention(width, heads, 2 * width, qkv_bias=True, output_bias=True, rotary=False),
            mlp=mlp,
            last_norm=True,
        ),
    ]
    if config.flag("vision_use_head", default=True):
        once = Projection(inputs=width, outputs=width, bias=True)
        keys = Projection(inputs=width, outputs=2 * width, bias=True)
        steps.append(_Step(blocks=[keys], width=width, tokens=tokens))
        steps.append(_Step(blocks=[replace(once, table=width), once, mlp], width=width, tokens=1))
    return steps


def _clip(config: Config, work: TowerWork) -> _Steps:
    """Read CLIP: a token of the whole image, a table of positions, norms before the first and behind the last layer."""
    width, tokens = config.count("hidden_size"), _square_patches(config, work, further=1)
    values = config.count("num_channels", default=3) * square_side(config, "patch_size") ** 2
    config.read.update(("projection_dim", "vocab_size"))  # of the part for texts
    return [
        _Step(
            blocks=[Projection(inputs=values, outputs=width, table=(tokens + 1) * width)],
            width=width,
            tokens=tokens - 1,
        ),
        _layers(
            width,
            tokens,
            number=config.count("num_hidden_layers"),
            attention=_attention(
                width, config.count("num_attention_heads"), 2 * width, qkv_bias=True, output_bias=True, rotary=False
            ),
            mlp=DenseMlp(
                hidden_size=width,
                ffn_size=config.count("intermediate_size"),
                gated=False,
                bias=True,
                norm_size=2 * width,
            ),
            first_norm=True,
            last_norm=True,
        ),
    ]


def _pixtral(config: Config, work: TowerWork) -> _Steps:
    """Read Pixtral's tower: a decoder's layers without a mask."""
    width, heads = config.count("hidden_size", default=1024), config.count("num_attention_heads", default=16)
    tokens = _any_patches(work)
    values = config.count("num_channels", default=3) * square_side(config, "patch_size", 16) ** 2
    config.read.update(("image_size", "head_dim", "vocab_size"))  # the largest image; computed; of nothing
    return [
        _Step(blocks=[Projection(inputs=values, outputs=width)], width=width, tokens=tokens),
        _layers(
            width,
            tokens,
            number=config.count("num_hidden_layers", default=24),
            attention=_attention(width, heads, width),
            mlp=DenseMlp(
                hidden_size=width, ffn_size=config.count("intermediate_size", default=4096), gated=True, norm_size=width
            ),
            first_norm=True,
        ),
    ]


def _llama4(config: Config, work: TowerWork) -> _Steps:
    """Read the tower of Llama 4, whose tokens are shuffled into fewer and pass an MLP of its own."""
    width, tokens = config.count("hidden_size", default=768), _square_patches(config, work, further=1)
    values = config.count("num_channels", default=3) * square_side(config, "patch_size", 14) ** 2
    merged = _inverse(config, "pixel_shuffle_ratio") ** 2
    inner, outputs = config.count("intermediate_size", default=5632), config.count("projector_output_dim", default=4096)
    if inner != width * merged or config.count("projector_input_dim", default=4096) != outputs:
        rule = f"must be {width * merged}, the shuffled width, with equal projector_input_dim and projector_output_dim"
        raise ConfigError(rule, key="intermediate_size", value=inner)
    config.read.update(("vision_output_dim", "vision_feature_select_strategy", "multi_modal_projector_bias"))
    return [
        _Step(
            blocks=[Projection(inputs=values, outputs=width, table=(tokens + 1) * width)],
            width=width,
            tokens=tokens - 1,
        ),
        _layers(
            width,
            tokens,
            number=config.count("num_hidden_layers", default=34),
            attention=_attention(
                width, config.count("num_attention_heads", default=16), 2 * width, qkv_bias=True, output_bias=True
            ),
            mlp=DenseMlp(hidden_size=width, ffn_size=inner, gated=False, bias=True, norm_size=2 * width),
            first_norm=True,
            last_norm=True,
        ),
        _Step(
            blocks=[
                Projection(inputs=inner, outputs=outputs, activation=True),
                Projection(inputs=outputs, outputs=outputs, activation=True),
            ],
            width=inner,
            tokens=(tokens - 1) // merged,
        ),
    ]


def _inverse(config: Config, key: str) -> int:
    """Return one over a ratio, which must be whole."""
    ratio = config.value(key, default=0.5)
    if isinstance(ratio, int | float) and 0 < ratio <= 1 and math.isclose(1 / ratio, round(1 / ratio)):
        return round(1 / ratio)
    raise ConfigError("must be one over a whole number", key=key, value=ratio)


def _internvl(config: Config, work: TowerWork) -> _Steps:
    """Read the tower of InternVL: scaled layers, a token of the whole image, and a table of positions."""
    width, heads = config.count("hidden_size", default=1024), config.count("num_attention_heads", default=16)
    tokens = _square_patches(config, work, further=1)
    values = config.count("num_channels", default=3) * square_side(config, "patch_size", 14) ** 2
    _check_words(config, use_mask_token=False)
    norm_size = width if config.value("norm_type", default="layer_norm") == "rms_norm" else 2 * width
    # each of the two scales of a layer is one more vector beside its norm
    scaled = norm_size + width
    rows = 1 + (tokens if config.flag("use_absolute_position_embeddings", default=True) else 0)
    has_norm = not config.flag("use_mean_pooling", default=True)
    config.read.add("layer_scale_init_value")
    layers = _layers(
        width,
        tokens,
        number=config.count("num_hidden_layers", default=24),
        attention=_attention(
            width,
            heads,
            scaled,
            qkv_bias=config.flag("attention_bias", default=False),
            output_bias=True,
            qk_norm_size=2 * width if config.flag("use_qk_norm", default=False) else 0,
            rotary=False,
        ),
        mlp=DenseMlp(
            hidden_size=width,
            ffn_size=config.count("intermediate_size", default=4096),
            gated=False,
            bias=True,
            norm_size=scaled,
        ),
    )
    embedding = Projection(inputs=values, outputs=width, bias=True, table=(rows + 2 * has_norm) * width)
    return [_Step(blocks=[embedding], width=width, tokens=tokens - 1), layers]


def _glm4v(config: Config, work: TowerWork) -> _Steps:
    """Read the tower of GLM-4.5V: gated MLPs, a table of positions, and tokens that a convolution merges."""
    width, side = config.count("hidden_size", default=1536), square_side(config, "patch_size", 14)
    merged = config.count("spatial_merge_size", default=2) ** 2
    tokens, inner = _any_patches(work, merged), config.count("intermediate_size", default=13_696)
    values = config.count("in_channels", default=3) * config.count("temporal_patch_size", default=2) * side**2
    table = (square_side(config, "image_size", 336) // side) ** 2 * width
    outputs = config.count("out_hidden_size", default=4096)
    layers = _layers(
        width,
        tokens,
        number=config.count("depth", default=24),
        attention=_attention(
            width, config.count("num_heads", default=12), width, qkv_bias=config.flag("attention_bias", default=False)
        ),
        # the gated MLP of a layer has the width of the model behind the tower
        mlp=DenseMlp(hidden_size=width, ffn_size=outputs, gated=True, norm_size=width),
        first_norm=True,
        last_norm=True,
    )
    merger = [
        Projection(inputs=width * merged, outputs=outputs, bias=True),
        Projection(inputs=outputs, outputs=outputs, activation=True),
        DenseMlp(hidden_size=outputs, ffn_size=inner, gated=True, norm_size=2 * outputs),
    ]
    return [
        _Step(blocks=[Projection(inputs=values, outputs=width, bias=True, table=table)], width=width, tokens=tokens),
        layers,
        _Step(blocks=merger, width=outputs, tokens=tokens // merged, is_projection=True),
    ]


def _kimi(config: Config, work: TowerWork) -> _Steps:
    """Read the tower of Kimi K2.5: a table of positions in height and width, and a last norm."""
    width, heads = config.count("hidden_size", default=1152), config.count("num_attention_heads", default=16)
    kernel = config.numbers("merge_kernel_size", [2, 2])
    tokens = _any_patches(work, math.prod(kernel))
    values = 3 * square_side(config, "patch_size", 14) ** 2
    table = config.count("pos_emb_height", default=64) * config.count("pos_emb_width", default=64) * width
    config.read.add("pos_emb_time")  # sines, which are no parameters
    layers = _layers(
        width,
        tokens,
        number=config.count("num_hidden_layers", default=27),
        attention=_attention(width, heads, 2 * width, qkv_bias=True, output_bias=True),
        mlp=DenseMlp(
            hidden_size=width,
            ffn_size=config.count("intermediate_size", default=4304),
            gated=False,
            bias=True,
            norm_size=2 * width,
        ),
        last_norm=True,
    )
    embedding = Projection(inputs=values, outputs=width, bias=True, table=table)
    return [_Step(blocks=[embedding], width=width, tokens=tokens), layers]


_TOWERS: dict[str, Callable[[Config, TowerWork], _Steps]] = {
    "clip_vision_model": _clip,
    "glm4v_moe_vision": _glm4v,
    "glm4v_vision": _glm4v,
    "internvl_vision": _internvl,
    "kimi_k25_vision": _kimi,
    "llama4_vision_model": _llama4,
    "pixtral": _pixtral,
    "qwen2_5_vl_vision": _qwen2_5,
    "qwen3_vl_moe_vision": _qwen3,
    "qwen3_vl_vision": _qwen3,
    "siglip_vision_model": _siglip,
}
"""Reader of each type of vision_config."""

_DEFAULT_TOWER = {
    "gemma3": "siglip_vision_model",
    "glm4v_moe": "glm4v_moe_vision",
    "internvl": "internvl_vision",
    "kimi_k25": "kimi_k25_vision",
    "llama4": "llama4_vision_model",
    "llava": "clip_vision_model",
    "mistral3": "pixtral",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen3_vl": "qwen3_vl_vision",
    "qwen3_vl_moe": "qwen3_vl_moe_vision",
}
"""Type of vision_config that each model type has by default."""

_ANY_TOWER = ("gemma3", "llava", "mistral3")
"""Model types whose files choose the type of the tower."""


# Projections


def _of_qwen2_5(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    merged = vision.count("spatial_merge_size", default=2) ** 2
    outputs = vision.count("out_hidden_size", default=3584)
    blocks = _merger(last.width * merged, outputs, norm_width=last.width, norm_size=last.width)
    return [_Step(blocks=blocks, width=last.width * merged, tokens=last.tokens // merged, is_projection=True)]


def _of_qwen3(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    width = vision.count("hidden_size", default=1152)
    outputs = vision.count("out_hidden_size", default=3584)
    blocks = _merger(last.width, outputs, norm_width=width, norm_size=2 * width)
    return [_Step(blocks=blocks, width=last.width, tokens=last.tokens, is_projection=True)]


def _of_gemma3(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    width, tokens = vision.count("hidden_size"), config.count("mm_tokens_per_image", default=256)
    block = Projection(inputs=width, outputs=text_hidden, norm_width=width, norm_size=width)
    return [_Step(blocks=[block], width=width, tokens=tokens, is_projection=True)]


def _of_mistral3(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    width, merged = last.width, config.count("spatial_merge_size", default=2) ** 2
    bias = config.flag("multimodal_projector_bias", default=False)
    _check_layers_chosen(config, default=-1)
    merging = Projection(inputs=width * merged, outputs=width, norm_width=width, norm_size=width)
    blocks = [merging, *_two_products(width, text_hidden, bias=bias)]
    return [_Step(blocks=blocks, width=width * merged, tokens=_merged(last.tokens, merged), is_projection=True)]


def _merged(tokens: int, merged: int) -> int:
    if tokens % merged:
        rule, nearest = f"must be a multiple of {merged}", str(max(1, round(tokens / merged)) * merged)
        raise ConfigError(rule, key="job.towers.vision.patches", value=tokens, nearest=nearest)
    return tokens // merged


def _two_products(width: int, text_hidden: int, *, bias: bool) -> list[AbstractBlock]:
    first = Projection(inputs=width, outputs=text_hidden, bias=bias, activation=True)
    return [first, Projection(inputs=text_hidden, outputs=text_hidden, bias=bias)]


def _check_layers_chosen(config: Config, *, default: int) -> None:
    """Refuse several layers of the tower, whose values would stand beside each other."""
    value = config.value("vision_feature_layer", default=default)
    if not isinstance(value, int):
        raise ConfigError("must be one layer", key="vision_feature_layer", value=value)


def _of_llama4(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    inputs = vision.count("vision_output_dim", default=7680)
    if inputs != vision.count("projector_output_dim", default=4096):
        raise ConfigError("must equal projector_output_dim", key="vision_config.vision_output_dim", value=inputs)
    block = Projection(inputs=inputs, outputs=text_hidden)
    return [_Step(blocks=[block], width=inputs, tokens=last.tokens, is_projection=True)]


def _of_llava(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    bias = config.flag("multimodal_projector_bias", default=True)
    _check_layers_chosen(config, default=-2)
    is_cut = config.value("vision_feature_select_strategy", default="default") == "default"
    blocks = _two_products(last.width, text_hidden, bias=bias)
    return [_Step(blocks=blocks, width=last.width, tokens=last.tokens - is_cut, is_projection=True)]


def _of_internvl(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    merged = _inverse(config, "downsample_ratio") ** 2
    width = last.width * merged
    _check_layers_chosen(config, default=-1)
    first, second = _two_products(width, text_hidden, bias=True)
    assert isinstance(first, Projection), "the first of the two"
    blocks = [replace(first, norm_width=width, norm_size=2 * width), second]
    return [_Step(blocks=blocks, width=width, tokens=(last.tokens - 1) // merged, is_projection=True)]


def _of_kimi(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:
    width = config.count("projection_hidden_size", default=1152)
    if width != last.width:
        raise ConfigError("must be the tower's width", key="projection_hidden_size", value=width)
    merged = math.prod(vision.numbers("merge_kernel_size", [2, 2]))
    blocks = _merger(width * merged, text_hidden, norm_width=width, norm_size=2 * width)
    return [_Step(blocks=blocks, width=width * merged, tokens=last.tokens // merged, is_projection=True)]


def _in_tower(config: Config, vision: Config, last: _Step, text_hidden: int) -> _Steps:  # noqa: ARG001
    return []


_PROJECTIONS: dict[str, Callable[[Config, Config, _Step, int], _Steps]] = {
    "gemma3": _of_gemma3,
    "glm4v_moe": _in_tower,
    "internvl": _of_internvl,
    "kimi_k25": _of_kimi,
    "llama4": _of_llama4,
    "llava": _of_llava,
    "mistral3": _of_mistral3,
    "qwen2_5_vl": _of_qwen2_5,
    "qwen3_vl": _of_qwen3,
    "qwen3_vl_moe": _of_qwen3,
}
"""Projection of each model type."""
