"""Dense model types whose attention has windows or other norms: Gemma, Mistral, Qwen, OLMo, EXAONE, and their kin."""

from __future__ import annotations

from dataclasses import replace

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.mask import Mask
from costmodels.job.hugging_face.config import Config
from costmodels.job.hugging_face.rows import FULL, SLIDING, attention, layer_types, mlp, model, windows
from costmodels.job.model_spec import ModelSpec
from hardware.io.errors import ConfigError


def with_window(config: Config, spec: ModelSpec, *, default: int = 0) -> ModelSpec:
    """Return a model with the same window in all layers; `default` is that of a missing key, null means none."""
    is_there = "sliding_window" in config.mapping
    window = config.count("sliding_window", default=0 if is_there else default, minimum=0)
    return spec.with_masks([Mask(window=window)] * spec.num_layers)


def with_upper_windows(config: Config, spec: ModelSpec) -> ModelSpec:
    """Return a Qwen model: windows, if they are used at all, from layer `max_window_layers` on."""
    first = config.count("max_window_layers", default=28, minimum=0)
    window = config.count("sliding_window", default=4096, minimum=0)
    if not config.flag("use_sliding_window", default=False):
        config.read.add("layer_types")
        return spec
    own = [SLIDING if at >= first else FULL for at in range(spec.num_layers)]
    kinds = layer_types(config, own)
    return spec.with_masks([Mask(window=window if kind == SLIDING else 0) for kind in kinds])


def with_pattern(config: Config, spec: ModelSpec, *, default: int, window: int = 4096) -> ModelSpec:
    """Return a Gemma model: every so manieth layer, by `sliding_window_pattern`, sees all keys, the others a window."""
    period = config.count("sliding_window_pattern", default=config.value("_sliding_window_pattern", default=default))
    kinds = layer_types(config, [FULL if (at + 1) % period == 0 else SLIDING for at in range(spec.num_layers)])
    size = config.count("sliding_window", default=window, minimum=0)
    return spec.with_masks([Mask(window=size if kind == SLIDING else 0) for kind in kinds])


def olmo(config: Config, name: str) -> ModelSpec:
    """Read OLMo 2 or 3: norms after attention and MLP, and one over all queries and keys."""
    bias, layers = config.flag("attention_bias", default=False), config.count("num_hidden_layers")
    is_third = config.value("model_type") == "olmo3"
    own = [SLIDING if is_third and (at + 1) % 4 else FULL for at in range(layers)]
    kinds = layer_types(config, own)
    masks = windows(config, kinds)
    dense = mlp(config, size=config.count("intermediate_size"))
    mixers = [attention(config, norm="wide", bias=bias, output_bias=bias, mask=mask) for mask in masks]
    return model(config, [(mixer, dense) for mixer in mixers], name=name, tied=False)


def seed_oss(config: Config, name: str) -> ModelSpec:
    """Read Seed-OSS: biases of queries, keys and values, and perhaps of the output."""
    mixer = attention(
        config,
        head_dim=128,
        bias=config.flag("attention_bias", default=True),
        output_bias=config.flag("attention_out_bias", default=False),
    )
    dense = mlp(config, size=config.count("intermediate_size"), bias=config.flag("mlp_bias", default=False))
    return model(config, [(mixer, dense)] * config.count("num_hidden_layers"), name=name, tied=False)


def exaone4(config: Config, name: str) -> ModelSpec:
    """Read EXAONE 4: one layer of four sees all keys; queries and keys are normalised."""
    layers, period = config.count("num_hidden_layers"), config.value("sliding_window_pattern", default=4)
    if isinstance(period, str):  # such as LLLG
        own = [FULL if period[at % len(period)] == "G" or at == layers - 1 else SLIDING for at in range(layers)]
    else:
        every = config.count("sliding_window_pattern", default=4, minimum=0)
        own = [SLIDING if every and (at + 1) % every else FULL for at in range(layers)]
    masks = windows(config, layer_types(config, own))
    dense = mlp(config, size=config.count("intermediate_size"))
    return model(config, [(attention(config, norm="head", mask=mask), dense) for mask in masks], name=name, tied=False)


def smollm3(config: Config, name: str) -> ModelSpec:
    """Read SmolLM3: some layers are without positions."""
    layers, bias = config.count("num_hidden_layers"), config.flag("attention_bias", default=False)
    interval = config.count("no_rope_layer_interval", default=4)
    rotary = config.numbers("no_rope_layers", [int((at + 1) % interval != 0) for at in range(layers)])
    uses = config.flag("use_sliding_window", default=False)
    own = [SLIDING if uses and rotary[at] == 0 else FULL for at in range(layers)]
    masks = windows(config, layer_types(config, own))
    dense = mlp(config, size=config.count("intermediate_size"), bias=config.flag("mlp_bias", default=False))
    rows = [
        (attention(config, bias=bias, output_bias=bias, rotary=bool(turns), mask=mask), dense)
        for turns, mask in zip(rotary, masks, strict=True)
    ]
    return model(config, rows, name=name, tied=True)


def ministral(config: Config, name: str) -> ModelSpec:
    """Read Ministral: windows in the layers that `layer_types` names."""
    layers = config.count("num_hidden_layers")
    is_third = config.value("model_type") == "ministral3"
    has_window = config.count("sliding_window", default=0, minimum=0)
    kinds = layer_types(config, [SLIDING if has_window and not is_third else FULL] * layers)
    masks = windows(config, kinds)
    dense = mlp(config, size=config.count("intermediate_size"))
    size = 128 if is_third else None
    return model(
        config, [(attention(config, head_dim=size, mask=mask), dense) for mask in masks], name=name, tied=False
    )


def gemma4(config: Config, name: str) -> ModelSpec:
    """Read a Gemma 4 text model.

    Full layers have heads of their own size, whose values may be their keys. Experts stand beside the MLP. The last
    layers of small models take keys and values of earlier ones, and every layer has inputs of its own, which a small
    MLP adds to the hidden values.
    """
    from costmodels.job.hugging_face.experts import gemma4_experts  # noqa: PLC0415 # it reads windows too

    layers = config.count("num_hidden_layers")
    kinds = layer_types(config, [FULL if (at + 1) % 6 == 0 or at == layers - 1 else SLIDING for at in range(layers)])
    window, shares = config.count("sliding_window", default=512), config.flag("attention_k_eq_v", default=False)
    config.read.add("use_bidirectional_attention")
    bias = config.flag("attention_bias", default=False)
    local = attention(
        config, head_dim=256, bias=bias, output_bias=bias, norm="head", norms=2.0, mask=Mask(window=window)
    )
    size = config.count("global_head_dim", default=512)
    kv_heads = config.count("num_global_key_value_heads", default=local.num_kv_heads) if shares else local.num_kv_heads
    everywhere = replace(
        local,
        head_dim=size,
        num_kv_heads=kv_heads,
        qk_norm_size=2 * size,
        kv_projections=1 if shares else 2,
        mask=Mask(),
    )
    dense = mlp(config, size=config.count("intermediate_size"), norms=2.0)
    first_shared = layers - config.count("num_kv_shared_layers", default=0, minimum=0)
    is_wide = config.flag("use_double_wide_mlp", default=False)
    width = config.count("hidden_size_per_layer_input", default=256, minimum=0)
    own = (mlp(config, size=width, gated=False),) if width else ()
    changes, rows = _changes_of_layers(config), list[tuple[AbstractBlock, ...]]()
    for layer, kind in enumerate(kinds):
        mixer, ffn = everywhere if kind == FULL else local, dense
        if layer in changes:  # transformers writes the sizes of full layers anew
            own_size = changes[layer].count("head_dim", default=mixer.head_dim)
            kv_heads = changes[layer].count("num_key_value_heads", default=local.num_kv_heads)
            mixer = replace(mixer, head_dim=own_size, num_kv_heads=kv_heads, qk_norm_size=2 * own_size)
            changes[layer].check_rest()
        if layer >= first_shared:  # neither products nor norms of keys
            mixer = replace(mixer, kv_projections=0, qk_norm_size=mixer.head_dim)
            ffn = replace(dense, ffn_size=dense.ffn_size * (2 if is_wide else 1))
        rows.append((mixer, *gemma4_experts(config, ffn), *own))
    rows_of_table = config.count("vocab_size_per_layer_input", default=262_144)
    found = model(config, rows, name=name, tied=True)
    if not width:
        return found
    inputs = replace(
        found.embedding, layer_inputs=layers * width, layer_vocab_size=rows_of_table, layer_norm_size=width
    )
    return replace(found, embedding=inputs)


def _changes_of_layers(config: Config) -> dict[int, Config]:
    """Return the keys that `per_layer_config` changes of single layers, by the layer."""
    if not config.has("per_layer_config"):
        return {}
    each = config.under("per_layer_config")
    for key in each.mapping:
        if not str(key).isdecimal():
            raise ConfigError("must be the number of a layer", key="per_layer_config", value=key)
    return {int(key): each.under(key) for key in each.mapping}
