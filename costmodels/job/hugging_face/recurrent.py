"""Model types whose layers mix tokens by a state: Qwen3-Next, Kimi Linear, Nemotron, Granite, Jamba and others."""

from __future__ import annotations

import math
from collections.abc import Mapping

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.delta_attention import DeltaAttention
from costmodels.blocks.gated_delta_net import GatedDeltaNet
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.lightning_attention import LightningAttention
from costmodels.blocks.mamba1 import Mamba1
from costmodels.blocks.mamba2 import Mamba2
from costmodels.blocks.short_convolution import ShortConvolution
from costmodels.job.hugging_face.config import Config
from costmodels.job.hugging_face.rows import FULL, attention, check_length, experts, layer_types, mlp, model
from costmodels.job.model_spec import ModelSpec
from hardware.io.errors import ConfigError

LINEAR = "linear_attention"


def qwen3_next(config: Config, name: str) -> ModelSpec:
    """Read Qwen3-Next or Qwen3.5: three layers of four are gated delta nets, the fourth is attention with a gate."""
    hidden_size, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    every, bias = config.count("full_attention_interval", default=4), config.flag("attention_bias", default=False)
    kinds = layer_types(config, [FULL if (at + 1) % every == 0 else LINEAR for at in range(layers)], (LINEAR, FULL))
    linear = GatedDeltaNet(
        hidden_size=hidden_size,
        num_key_heads=config.count("linear_num_key_heads", default=16),
        num_value_heads=config.count("linear_num_value_heads", default=32),
        key_head_dim=config.count("linear_key_head_dim", default=128),
        value_head_dim=config.count("linear_value_head_dim", default=128),
        conv_size=config.count("linear_conv_kernel_dim", default=4),
        norm_size=hidden_size,
    )
    full = attention(config, head_dim=256, bias=bias, output_bias=bias, norm="head", gated=True)
    config.read.update(("attn_output_gate", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"))
    ffns: list[AbstractBlock]
    if config.has("num_experts"):
        shared = config.count("shared_expert_intermediate_size", default=512)
        routed = experts(
            config,
            number=config.count("num_experts"),
            top_k=config.count("num_experts_per_tok"),
            size=config.count("moe_intermediate_size"),
            shared=1,
            shared_size=shared,
            shared_gate=True,
        )
        step, only = config.count("decoder_sparse_step", default=1), set(config.numbers("mlp_only_layers", []))
        dense = mlp(config, size=config.count("intermediate_size", default=shared))
        ffns = [dense if at in only or (at + 1) % step else routed for at in range(layers)]
    else:
        ffns = [mlp(config, size=config.count("intermediate_size"))] * layers
    rows = [(full if kind == FULL else linear, ffn) for kind, ffn in zip(kinds, ffns, strict=True)]
    return model(config, rows, name=name, tied=False)


def kimi_linear(config: Config, name: str) -> ModelSpec:
    """Read Kimi Linear: three layers of four are delta attention, the fourth latent attention without positions.

    Its own files number the layers from 1 in `linear_attn_config`; those of transformers list `layer_types`.
    """
    hidden_size, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    own = config.under("linear_attn_config") if config.has("linear_attn_config") else Config(mapping={})
    otherwise = [FULL if at and at % 4 == 0 else LINEAR for at in range(layers)]
    if own.has("full_attn_layers"):
        full_layers, linear_layers = (set(own.numbers(key, [])) for key in ("full_attn_layers", "kda_layers"))
        if full_layers & linear_layers or full_layers | linear_layers != set(range(1, layers + 1)):
            rule = f"must share the layers 1 to {layers} with kda_layers"
            raise ConfigError(rule, key="linear_attn_config.full_attn_layers", value=sorted(full_layers))
        otherwise = [FULL if at + 1 in full_layers else LINEAR for at in range(layers)]
    kinds = layer_types(config, otherwise, (LINEAR, FULL))
    linear = DeltaAttention(
        hidden_size=hidden_size,
        num_heads=own.count("num_heads", config.value("linear_num_heads", default=32)),
        head_dim=own.count("head_dim", config.value("linear_head_dim", default=128)),
        conv_size=own.count("short_conv_kernel_size", config.value("linear_conv_kernel_dim", default=4)),
        norm_size=hidden_size,
    )
    bias = config.flag("attention_bias", default=False)
    config.read.update(("num_key_value_heads", "head_dim", "mla_use_nope", "num_expert_group", "topk_group", "n_group"))
    config.read.update(("model_max_length", "moe_renormalize", "moe_router_activation_func", "use_grouped_topk"))
    if config.count("num_nextn_predict_layers", default=0, minimum=0):
        raise ConfigError("must be 0: no such model is published", key="num_nextn_predict_layers")
    full = LatentAttention(
        hidden_size=hidden_size,
        num_heads=config.count("num_attention_heads"),
        q_lora_rank=config.count("q_lora_rank", default=0, minimum=0),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
        down_bias=bias,
        output_bias=bias,
        rotary=False,
        norm_size=hidden_size,
    )
    size, shared = config.count("moe_intermediate_size"), config.first_count("num_shared_experts", "n_shared_experts")
    routed = experts(
        config,
        number=config.first_count("num_experts", "num_local_experts"),
        top_k=config.first_count("num_experts_per_token", "num_experts_per_tok"),
        size=size,
        shared=shared,
        shared_size=shared * size,
    )
    if config.count("moe_layer_freq", default=1) != 1:
        raise ConfigError("must be 1", key="moe_layer_freq", value=config.value("moe_layer_freq"))
    first = config.count("first_k_dense_replace", default=1, minimum=0)
    told = config.words("mlp_layer_types", ("dense", "sparse"))
    sparse = ["dense" if at < first else "sparse" for at in range(layers)] if told is None else told
    dense = mlp(config, size=config.count("intermediate_size"))
    both = zip(kinds, check_length(config, "mlp_layer_types", sparse), strict=True)
    found = [(full if kind == FULL else linear, dense if ffn == "dense" else routed) for kind, ffn in both]
    return model(config, found, name=name, tied=False)


def _mamba2(config: Config, prefix: str = "mamba_", *, heads: str, norms: float = 1.0, **own: bool) -> Mamba2:
    """Return the state space that keys with a prefix describe."""
    hidden_size, num_heads = config.count("hidden_size"), config.count(f"{prefix}{heads}")
    size = config.value(f"{prefix}d_head", default="auto")
    expand = config.value(f"{prefix}expand", default=2)
    inner = config.value(f"{prefix}d_ssm", default=None) or int(hidden_size * _number(f"{prefix}expand", expand))
    head_dim = int(_number(f"{prefix}d_ssm", inner)) // num_heads if size == "auto" else config.count(f"{prefix}d_head")
    return Mamba2(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=config.count(f"{prefix}n_groups", default=1),
        state_size=config.count(f"{prefix}d_state", default=256),
        conv_size=config.count(f"{prefix}d_conv", default=4),
        conv_bias=config.flag(f"{prefix}conv_bias", default=True),
        norms=norms,
        norm_size=hidden_size,
        **own,
    )


def _number(key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise ConfigError("must be a number above 0", key=key, value=value)


def nemotron_h(config: Config, name: str) -> ModelSpec:
    """Read Nemotron-H or Nemotron 3: each layer is one block, a state space, attention, an MLP or experts."""
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    told = {**{kind: kind for kind in names.values()}, LINEAR: "mamba", FULL: "attention"}
    found = config.words("layers_block_type", tuple(told))
    kinds = [told[kind] for kind in found or ()] or _by_letters(config, "hybrid_override_pattern", names)
    mtp, predicting = config.count("num_nextn_predict_layers", default=0, minimum=0), list[str]()
    if mtp:
        # the class's own: attention, then experts
        listed = config.words("mtp_layers_block_type", tuple(told))
        letters = _by_letters(config, "mtp_hybrid_override_pattern", names, default="*E")
        predicting = [told[kind] for kind in listed or ()] or letters
    used = {*kinds, *predicting}
    config.read.update(("num_hidden_layers", "hybrid_override_pattern", "attention_bias", "n_shared_experts", "expand"))
    config.read.update(("mtp_layers_block_type", "mtp_hybrid_override_pattern", "moe_shared_expert_overlap"))
    config.read.update(("mamba_expand", "mamba_d_conv", "mamba_num_groups", "attention_head_dim", "sliding_window"))
    hidden_size, bias = config.count("hidden_size"), config.flag("use_bias", default=False)
    blocks: dict[str, AbstractBlock] = {}
    if "mamba" in used:
        blocks["mamba"] = Mamba2(
            hidden_size=hidden_size,
            num_heads=config.count("mamba_num_heads", default=128),
            head_dim=config.count("mamba_head_dim", default=64),
            num_groups=config.count("n_groups", default=8),
            state_size=config.count("ssm_state_size", default=128),
            conv_size=config.count("conv_kernel", default=4),
            conv_bias=config.flag("use_conv_bias", default=True),
            proj_bias=bias or config.flag("mamba_proj_bias", default=False),
            output_bias=bias,
            norm_size=hidden_size,
        )
    if "attention" in used:
        blocks["attention"] = attention(config, head_dim=128, rotary=False)
    if "mlp" in used:
        has_bias = config.flag("mlp_bias", default=False)
        blocks["mlp"] = mlp(config, size=config.count("intermediate_size"), gated=False, bias=has_bias)
    if "moe" in used:
        config.check_off("mlp_bias")  # shared experts would have biases, routed ones not
        shared = config.count("moe_shared_expert_intermediate_size", default=0, minimum=0)
        blocks["moe"] = experts(
            config,
            number=config.count("n_routed_experts"),
            top_k=config.count("num_experts_per_tok"),
            size=config.count("moe_intermediate_size"),
            gated=False,
            shared=1,
            shared_size=shared,
            latent_size=config.count("moe_latent_size", default=0, minimum=0),
        )
    for key in ("intermediate_size", "mlp_bias", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"):
        config.read.add(key)
    config.read.update(("moe_shared_expert_intermediate_size", "moe_latent_size", "head_dim"))
    config.read.update(("num_attention_heads", "num_key_value_heads", "mamba_num_heads", "mamba_head_dim", "n_groups"))
    config.read.update(("ssm_state_size", "conv_kernel", "use_conv_bias", "mamba_proj_bias"))
    mtp_layer = [blocks[kind] for kind in predicting]
    return model(config, [(blocks[kind],) for kind in kinds], name=name, tied=False, mtp=mtp, mtp_layer=mtp_layer)


def _by_letters(config: Config, key: str, names: Mapping[str, str], default: str | None = None) -> list[str]:
    """Return the kind of every layer that a pattern names by letters."""
    pattern = config.value(key) if default is None else config.value(key, default=default)
    if not isinstance(pattern, str) or set(pattern) - set(names):
        raise ConfigError(f"must consist of {', '.join(names)}", key=key, value=pattern)
    return [names[letter] for letter in pattern]


def granite_hybrid(config: Config, name: str) -> ModelSpec:
    """Read Granite 4: state spaces and attention, each with a shared MLP and perhaps experts beside it."""
    names = {"mamba": "mamba", LINEAR: "mamba", "attention": "attention", FULL: "attention"}
    found = config.words("layer_types", tuple(names)) or config.words("layers_block_type", tuple(names))
    config.read.update(("layers_block_type", "layer_types"))
    kinds = check_length(config, "layer_types", found or ["mamba"] * config.count("num_hidden_layers"))
    bias = config.flag("attention_bias", default=False)
    has_bias = config.flag("mamba_proj_bias", default=False)
    mixers: dict[str, AbstractBlock] = {
        "mamba": _mamba2(config, heads="n_heads", proj_bias=has_bias, output_bias=has_bias),
        "attention": attention(config, bias=bias, output_bias=bias),
    }
    shared = config.count("shared_intermediate_size", default=1024)
    number, size = config.count("num_local_experts", default=8, minimum=0), config.count("intermediate_size")
    top_k = config.count("num_experts_per_tok", default=2, minimum=0)
    ffn: AbstractBlock = mlp(config, size=shared)
    if number:
        ffn = experts(config, number=number, top_k=top_k, size=size, shared=1, shared_size=shared)
    return model(config, [(mixers[names[kind]], ffn) for kind in kinds], name=name, tied=False)


def falcon_h1(config: Config, name: str) -> ModelSpec:
    """Read Falcon-H1: attention and a state space side by side in every layer, then an MLP."""
    bias, has_mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    state = _mamba2(
        config,
        heads="n_heads",
        norms=0.0,
        has_norm=config.flag("mamba_rms_norm", default=False),
        proj_bias=config.flag("mamba_proj_bias", default=False),
        output_bias=config.flag("projectors_bias", default=False),
    )
    config.read.update(("mamba_use_mlp", "attn_layer_indices", "num_hidden_layers", "mlp_expansion_factor"))
    mixer = attention(config, bias=bias, output_bias=bias)
    ffn = mlp(config, size=config.count("intermediate_size"), bias=has_mlp_bias)
    return model(config, [(mixer, state, ffn)] * config.count("num_hidden_layers"), name=name, tied=False)


def bamba(config: Config, name: str) -> ModelSpec:
    """Read Bamba: state spaces, with attention in the layers of a list."""
    layers, bias = config.count("num_hidden_layers"), config.flag("attention_bias", default=False)
    named = set(config.numbers("attn_layer_indices", []))
    has_bias = config.flag("mamba_proj_bias", default=False)
    state = _mamba2(config, heads="n_heads", proj_bias=has_bias, output_bias=has_bias)
    mixer = attention(config, bias=bias, output_bias=bias)
    ffn = mlp(config, size=config.count("intermediate_size"), bias=config.flag("mlp_bias", default=False))
    return model(config, [(mixer if at in named else state, ffn) for at in range(layers)], name=name, tied=False)


def jamba(config: Config, name: str) -> ModelSpec:
    """Read Jamba: one attention in so many layers, and experts in every second one."""
    hidden_size, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    rank = config.value("mamba_dt_rank", default="auto")
    state = Mamba1(
        hidden_size=hidden_size,
        inner_size=config.count("mamba_expand", default=2) * hidden_size,
        state_size=config.count("mamba_d_state", default=16),
        step_rank=math.ceil(hidden_size / 16) if rank == "auto" else config.count("mamba_dt_rank"),
        conv_size=config.count("mamba_d_conv", default=4),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        proj_bias=config.flag("mamba_proj_bias", default=False),
        has_norms=True,
        norm_size=hidden_size,
    )
    size = config.count("intermediate_size")
    mixer, dense = attention(config, rotary=False), mlp(config, size=size)
    number, top_k = config.count("num_experts", default=16), config.count("num_experts_per_tok", default=2)
    routed: AbstractBlock = experts(config, number=number, top_k=top_k, size=size) if number > 1 else dense
    period, offset = config.count("attn_layer_period", default=8), config.count("attn_layer_offset", 4, minimum=0)
    every, first = config.count("expert_layer_period", default=2), config.count("expert_layer_offset", 1, minimum=0)
    rows = [
        (mixer if at % period == offset else state, routed if at % every == first else dense) for at in range(layers)
    ]
    return model(config, rows, name=name, tied=False)


def mamba2(config: Config, name: str) -> ModelSpec:
    """Read Mamba 2: state spaces alone."""
    hidden_size, bias = config.count("hidden_size"), config.flag("use_bias", default=False)
    state = Mamba2(
        hidden_size=hidden_size,
        num_heads=config.count("num_heads", default=128),
        head_dim=config.count("head_dim", default=64),
        num_groups=config.count("n_groups", default=8),
        state_size=config.count("state_size", default=128),
        conv_size=config.count("conv_kernel", default=4),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=bias,
        output_bias=bias,
        norm_size=hidden_size,
    )
    config.read.update(("expand", "rms_norm"))
    return model(config, [(state,)] * config.count("num_hidden_layers"), name=name, tied=False)


def lfm2(config: Config, name: str) -> ModelSpec:
    """Read LFM2, dense or with experts: short convolutions, and attention in some layers."""
    hidden_size, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    has_experts = config.value("model_type") == "lfm2_moe"
    named = set(config.numbers("full_attn_idxs", list(range(layers))))
    kinds = layer_types(config, [FULL if at in named else "conv" for at in range(layers)], ("conv", FULL))
    short = ShortConvolution(
        hidden_size=hidden_size,
        conv_size=config.count("conv_L_cache", default=3),
        bias=config.flag("conv_bias", default=False),
        norm_size=hidden_size,
    )
    mixer = attention(config, norm="head")
    ffns: list[AbstractBlock]
    if has_experts:
        first = config.count("num_dense_layers", default=2, minimum=0)
        routed = experts(
            config,
            number=config.count("num_experts"),
            top_k=config.count("num_experts_per_tok"),
            size=config.count("moe_intermediate_size"),
        )
        config.read.add("use_expert_bias")
        dense = mlp(config, size=config.count("intermediate_size"))
        ffns = [dense if at < first else routed for at in range(layers)]
    else:
        ffns = [mlp(config, size=_lfm2_size(config))] * layers
    is_tied = config.value("tie_embedding", default=True) is not False
    rows = [(mixer if kind == FULL else short, ffn) for kind, ffn in zip(kinds, ffns, strict=True)]
    config.read.update(("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "conv_dim"))
    config.read.update(
        ("block_use_swiglu", "block_use_xavier_init", "conv_dim_out", "conv_use_xavier_init", "num_heads")
    )
    config.read.update(("use_pos_enc",))
    return model(config, rows, name=name, tied=is_tied)


def _lfm2_size(config: Config) -> int:
    """Return the inner size of LFM2's MLPs, which the class may make two thirds of the stated one."""
    size = config.first_count("block_ff_dim", "intermediate_size")
    config.read.update(("intermediate_size", "block_ffn_dim_multiplier", "block_multiple_of"))
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return size
    factor = _number("block_ffn_dim_multiplier", config.value("block_ffn_dim_multiplier", default=1.0))
    multiple = config.count("block_multiple_of", default=256)
    return multiple * math.ceil(int(factor * int(2 * size / 3)) / multiple)


def minimax(config: Config, name: str) -> ModelSpec:
    """Read MiniMax-01: lightning attention, with softmax attention in some layers, and experts."""
    hidden_size, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    published = config.numbers("attn_type_list", [(at + 1) % 2 for at in range(layers)])
    kinds = layer_types(config, [FULL if one else LINEAR for one in published], (LINEAR, FULL))
    mixer = attention(config)
    linear = LightningAttention(
        hidden_size=hidden_size,
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        chunk=config.count("block_size", default=256),
        norm_size=hidden_size,
    )
    routed = experts(
        config,
        number=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        size=config.count("intermediate_size"),
    )
    config.read.update(("postnorm", "shared_intermediate_size", "shared_moe_mode", "sliding_window"))
    return model(config, [(mixer if kind == FULL else linear, routed) for kind in kinds], name=name, tied=False)
