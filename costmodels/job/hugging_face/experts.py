"""Model types with experts: GLM, gpt-oss, Llama 4, MiniMax, Hunyuan, ERNIE, dots, DeepSeek with sparse attention."""

from __future__ import annotations

from dataclasses import replace

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.mask import Mask
from costmodels.blocks.sparse_latent_attention import SparseLatentAttention
from costmodels.job.hugging_face.config import Config
from costmodels.job.hugging_face.rows import (
    FULL,
    SLIDING,
    attention,
    check_length,
    experts,
    layer_types,
    mlp,
    model,
    windows,
)
from costmodels.job.model_spec import ModelSpec
from hardware.io.errors import ConfigError

CHUNKED = "chunked_attention"


def glm4_moe(config: Config, name: str) -> ModelSpec:
    """Read GLM-4.5 to 4.7: a first dense layer, then experts with a shared one."""
    bias = config.flag("attention_bias", default=False)
    norm = "head" if config.flag("use_qk_norm", default=False) else ""
    mixer = attention(config, bias=bias, norm=norm)
    mtp = config.count("num_nextn_predict_layers", default=0, minimum=0)
    return model(config, [(mixer, mlp) for mlp in _dense_first(config)], name=name, tied=False, mtp=mtp)


def dots1(config: Config, name: str) -> ModelSpec:
    """Read dots.llm1: windows, where a model has any, from layer `max_window_layers` on."""
    bias, layers = config.flag("attention_bias", default=False), config.count("num_hidden_layers")
    first = config.count("max_window_layers", default=62, minimum=0)
    has_window = config.count("sliding_window", default=0, minimum=0) > 0
    own = [SLIDING if has_window and at >= first else FULL for at in range(layers)]
    masks = windows(config, layer_types(config, own))
    mixers = [attention(config, bias=bias, output_bias=bias, norm="head", mask=mask) for mask in masks]
    return model(config, list(zip(mixers, _dense_first(config), strict=True)), name=name, tied=False)


def _dense_first(config: Config) -> list[AbstractBlock]:
    """Return the MLP of every layer: dense ones first, then routed experts with shared ones of the same size."""
    layers, size = config.count("num_hidden_layers"), config.count("moe_intermediate_size")
    shared = config.count("n_shared_experts", default=0, minimum=0)
    dense = mlp(config, size=config.count("intermediate_size"))
    routed = experts(
        config,
        number=config.first_count("n_routed_experts", "num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        size=size,
        shared=shared,
        shared_size=shared * size,
    )
    kinds = config.words("mlp_layer_types", ("dense", "sparse"))
    if kinds is not None:
        config.read.add("first_k_dense_replace")
        return [dense if kind == "dense" else routed for kind in check_length(config, "mlp_layer_types", kinds)]
    first = config.count("first_k_dense_replace", default=0, minimum=0)
    config.read.add("moe_layer_freq")
    return [dense if at < first else routed for at in range(layers)]


def deepseek_sparse(config: Config, name: str) -> ModelSpec:
    """Read DeepSeek-V3.2 or GLM-5: latent attention over the keys that an indexer chooses."""
    hidden_size, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    bias = config.flag("attention_bias", default=False)
    config.read.update(("num_key_value_heads", "head_dim", "layer_types"))
    mixer = SparseLatentAttention(
        hidden_size=hidden_size,
        num_heads=config.count("num_attention_heads"),
        q_lora_rank=config.count("q_lora_rank"),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
        down_bias=bias,
        output_bias=bias,
        mask=Mask(window=config.count("index_topk", default=2048)),
        index_heads=config.count("index_n_heads"),
        index_head_dim=config.count("index_head_dim", default=128),
        norm_size=hidden_size,
    )
    shared = replace(mixer, index_heads=0)
    owns = _own_indexers(config, layers)
    mtp = config.count("num_nextn_predict_layers", default=0, minimum=0)
    rows = [(mixer if own else shared, ffn) for own, ffn in zip(owns, _dense_first(config), strict=True)]
    return model(config, rows, name=name, tied=False, mtp=mtp)


def _own_indexers(config: Config, layers: int) -> list[bool]:
    """Return which layers have an indexer of their own; the others take the choice of an earlier one."""
    config.read.update(("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"))
    kinds = config.words("indexer_types", ("full", "shared"))
    if kinds is not None:
        return [kind == "full" for kind in check_length(config, "indexer_types", kinds)]
    every = config.count("index_topk_freq", default=1)
    offset = config.count("index_skip_topk_offset", default=2, minimum=0)
    pattern = config.value("index_topk_pattern", default=None)
    if isinstance(pattern, str):
        return [letter == "F" for letter in check_length(config, "index_topk_pattern", list(pattern))]
    return [max(at - offset + 1, 0) % every == 0 for at in range(layers)]


def mistral4(config: Config, name: str) -> ModelSpec:
    """Read Mistral 4: latent attention and experts."""
    hidden_size = config.count("hidden_size")
    config.read.update(("num_key_value_heads", "head_dim", "qk_head_dim"))
    mixer = LatentAttention(
        hidden_size=hidden_size,
        num_heads=config.count("num_attention_heads"),
        q_lora_rank=config.count("q_lora_rank", default=0, minimum=0),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
        norm_size=hidden_size,
    )
    return model(config, [(mixer, ffn) for ffn in _dense_first(config)], name=name, tied=False)


def gpt_oss(config: Config, name: str) -> ModelSpec:
    """Read gpt-oss: every second layer sees a window, each head has a sink, and routers and experts have biases."""
    layers = config.count("num_hidden_layers")
    kinds = layer_types(config, [FULL if (at + 1) % 2 == 0 else SLIDING for at in range(layers)])
    bias, window = config.flag("attention_bias", default=True), config.count("sliding_window", default=128)
    config.read.update(("experts_per_token", "initial_context_length"))
    routed = experts(
        config,
        number=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        size=config.count("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    mixers = {
        kind: attention(
            config,
            head_dim=64,
            bias=bias,
            output_bias=bias,
            sinks=True,
            mask=Mask(window=window if kind == SLIDING else 0),
        )
        for kind in (SLIDING, FULL)
    }
    return model(config, [(mixers[kind], routed) for kind in kinds], name=name, tied=False)


def llama4_text(config: Config, name: str) -> ModelSpec:
    """Read Llama 4: attention in chunks, every fourth layer over all keys without positions, experts in some layers."""
    layers, bias = config.count("num_hidden_layers"), config.flag("attention_bias", default=False)
    interval = config.count("no_rope_layer_interval", default=4)
    own = [int((at + 1) % interval != 0) for at in range(layers)]
    rotary = config.numbers("no_rope_layers", own) or own
    kinds = layer_types(config, [CHUNKED if turns else FULL for turns in rotary], (CHUNKED, FULL))
    chunk = config.count("attention_chunk_size", default=8192, minimum=0)
    config.flag("use_qk_norm", default=True)  # it has no parameters
    size, step = config.count("intermediate_size"), config.count("interleave_moe_layer_step", default=1)
    dense = mlp(config, size=config.count("intermediate_size_mlp", default=16_384))
    routed = experts(
        config,
        number=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok", default=1),
        size=size,
        shared=1,
        shared_size=size,
    )
    has_experts = set(config.numbers("moe_layers", list(range(step - 1, layers, step))))
    rows = []
    for at, kind in enumerate(kinds):
        mask = Mask(chunk=chunk if kind == CHUNKED else 0)
        mixer = attention(config, bias=bias, output_bias=bias, rotary=bool(rotary[at]), mask=mask)
        rows.append((mixer, routed if at in has_experts else dense))
    return model(config, rows, name=name, tied=False)


def qwen3_vl_moe_text(config: Config, name: str) -> ModelSpec:
    """Read the language model of Qwen3-VL with experts."""
    bias = config.flag("attention_bias", default=False)
    layers, step = config.count("num_hidden_layers"), config.count("decoder_sparse_step", default=1)
    only = set(config.numbers("mlp_only_layers", []))
    mixer = attention(config, bias=bias, output_bias=bias, norm="head")
    routed = experts(
        config,
        number=config.first_count("num_experts", "num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        size=config.count("moe_intermediate_size"),
    )
    dense = mlp(config, size=config.count("intermediate_size"))
    rows = [(mixer, dense if at in only or (at + 1) % step else routed) for at in range(layers)]
    return model(config, rows, name=name, tied=False)


def minimax_m2(config: Config, name: str) -> ModelSpec:
    """Read MiniMax-M2: one norm over all queries and one over all keys."""
    config.read.update(
        ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "attn_type_list", "shared_intermediate_size")
    )
    config.read.update(("use_qk_norm", "qk_norm_type", "use_routing_bias"))
    routed = experts(
        config,
        number=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        size=config.count("intermediate_size"),
    )
    mixer = attention(config, head_dim=128, norm="wide")
    return model(config, [(mixer, routed)] * config.count("num_hidden_layers"), name=name, tied=False)


def hunyuan_moe(config: Config, name: str) -> ModelSpec:
    """Read Hunyuan with experts; experts and the shared one have the size of `intermediate_size`, as in transformers.

    Published files may give every layer's size and choice as a list; they must be equal.
    """
    bias, size = config.flag("attention_bias", default=False), config.count("intermediate_size")
    config.read.update(("use_mixed_mlp_moe", "use_qk_norm", "use_cla", "cla_share_factor", "num_shared_expert"))
    config.read.update(("moe_intermediate_size", "attention_head_dim", "norm_type", "org_vocab_size"))
    config.read.update(("moe_drop_tokens", "moe_random_routing_dropped_token", "moe_layer_num_skipped", "mask_init_id"))
    config.read.update(("capacity_factor", "group_limited_greedy", "im_start_id", "im_end_id", "text_start_id"))
    config.read.update(("im_newline_id", "text_end_id", "pad_id", "class_num", "dense_list"))
    routed = experts(
        config,
        number=_equal(config, "num_experts"),
        top_k=_equal(config, "moe_topk"),
        size=size,
        shared=1,
        shared_size=size,
    )
    mixer = attention(config, bias=bias, output_bias=bias, norm="head")
    return model(config, [(mixer, routed)] * config.count("num_hidden_layers"), name=name, tied=False)


def _equal(config: Config, key: str) -> int:
    """Return a number that every layer has, given once or as a list of equal ones."""
    value = config.value(key, default=1)
    if not isinstance(value, list):
        return config.count(key, default=1)
    found = set(config.numbers(key, []))
    if len(found) != 1:
        raise ConfigError("must be the same for all layers", key=key, value=value)
    return found.pop()


def ernie4_5_moe(config: Config, name: str) -> ModelSpec:
    """Read ERNIE 4.5 with experts between a first and a last layer."""
    layers, bias = config.count("num_hidden_layers"), config.flag("use_bias", default=False)
    first = config.count("moe_layer_start_index", default=1, minimum=0)
    last = config.value("moe_layer_end_index", default=-1)
    end = layers - 1 if last == -1 else config.count("moe_layer_end_index", minimum=0)
    every = config.count("moe_layer_interval", default=1)
    size, shared = config.count("moe_intermediate_size"), config.count("moe_num_shared_experts", default=2, minimum=0)
    config.read.update(("moe_capacity", "moe_gate", "moe_use_aux_free"))
    routed = experts(
        config,
        number=config.count("moe_num_experts"),
        top_k=config.count("moe_k", default=6),
        size=size,
        shared=shared,
        shared_size=shared * size,
        router_bias=True,
    )
    dense = mlp(config, size=config.count("intermediate_size"), bias=bias)
    mixer = attention(config, bias=bias, output_bias=bias)
    rows = [(mixer, routed if first <= at <= end and (at + 1) % every == 0 else dense) for at in range(layers)]
    return model(config, rows, name=name, tied=True, head_bias=bias)


def longcat_flash(config: Config, name: str) -> ModelSpec:
    """Read LongCat-Flash: two attentions and two MLPs a layer, with experts beside them of which some are idle."""
    hidden_size = config.count("hidden_size")
    config.read.update(("num_key_value_heads", "head_dim", "qk_head_dim", "num_hidden_layers", "attention_method"))
    config.read.update(("zero_expert_type", "mla_scale_q_lora", "mla_scale_kv_lora", "router_bias"))
    mixer = LatentAttention(
        hidden_size=hidden_size,
        num_heads=config.count("num_attention_heads"),
        q_lora_rank=config.count("q_lora_rank", default=1536),
        kv_lora_rank=config.count("kv_lora_rank", default=512),
        qk_nope_head_dim=config.count("qk_nope_head_dim", default=128),
        qk_rope_head_dim=config.count("qk_rope_head_dim", default=64),
        v_head_dim=config.count("v_head_dim", default=128),
        norm_size=hidden_size,
    )
    dense = mlp(config, size=config.count("ffn_hidden_size", default=12_288))
    routed = experts(
        config,
        number=config.count("n_routed_experts", default=512),
        top_k=config.count("moe_topk", default=12),
        size=config.count("expert_ffn_hidden_size", default=2048),
        idle_experts=config.count("zero_expert_num", default=256, minimum=0),
        norms=0.0,
    )
    layers = config.count("num_layers", default=28)
    return model(config, [(mixer, dense, mixer, dense, routed)] * layers, name=name, tied=False)


def gemma4_experts(config: Config, dense: DenseMlp) -> tuple[AbstractBlock, ...]:
    """Return the MLP of a Gemma 4 layer, with experts beside it if the model has some."""
    if not config.flag("enable_moe_block", default=False):
        config.read.update(("num_experts", "top_k_experts", "moe_intermediate_size"))
        return (dense,)
    # the router scales its input by a vector, and each expert's weight by a number
    routed = experts(
        config,
        number=config.count("num_experts"),
        top_k=config.count("top_k_experts"),
        size=config.count("moe_intermediate_size"),
        router_bias=True,
        norms=4.0,
    )
    return dense, routed
