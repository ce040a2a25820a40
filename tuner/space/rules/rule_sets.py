"""All rules, and those that each framework obeys; a runtime profile names its set."""

from __future__ import annotations

from costmodels.job.parallel_config import DIMENSIONS
from tuner.space.rules.degrees import DEGREE_RULES
from tuner.space.rules.experts import EXPERT_RULES
from tuner.space.rules.pipeline import PIPELINE_RULES
from tuner.space.rules.sequence import SEQUENCE_RULES
from tuner.space.rules.states import STATE_RULES
from tuner.space.rules.tensor import TENSOR_RULES

RULES = {
    rule.name: rule
    for rule in (*DEGREE_RULES, *TENSOR_RULES, *SEQUENCE_RULES, *PIPELINE_RULES, *EXPERT_RULES, *STATE_RULES)
}
"""All rules by their names."""

_EVERY_RUNTIME = ("devices", "heads", "pp_layers", "global_batch")

_CHOICES = ("recompute_supported", "offload_supported", "zero_supported")

_FURTHER = (*_CHOICES, "zero_needs_replicas", "sequence_parallel_needs_tp")

# HSDP: Megatron-LM --num-distributed-optimizer-instances, torchtitan data_parallel_replicate_degree, llm-foundry
# sharding_strategy HYBRID_SHARD, MaxText ici_data_parallelism beside ici_fsdp_parallelism, InternEvo zero1.size
_SHARD = ("dp_shard_within_dp", "dp_shard_holds_experts", "dp_shard_distinct")

_LAYERS_AGAIN = ("recompute_layers_alone", "recompute_layers_distinct")

_MEGATRON = (
    *("devices", "heads", "global_batch"),
    *("kv_heads", "projection", "kv_heads_ulysses", "scanned_heads", "ffn", "sequence_ranks", "layers_or_layout"),
    *("vpp_shortens", "vpp_two_stages", "vpp_filled", "experts", "ep_within_stage", "expert_tp_distinct"),
    *(*_FURTHER, *_LAYERS_AGAIN),
    "experts_need_sequence_parallel",
)

_FSDP2 = ("fsdp2_ep", "fsdp2_untied", "fsdp2_fp16")

_OF_MINDSPEED = {"layers_or_layout": "chunks_filled", "vpp_filled": "vpp_micro_batches"}

_MEGATRON_2021 = (
    *_EVERY_RUNTIME,
    *("kv_heads", "ffn", "layers", "vpp_three_stages", "vpp_micro_batches", "no_cp", "no_up", "no_ep"),
    *(*_CHOICES, *_LAYERS_AGAIN),
)

# trials/jax_training and trials/torch_training/planned: costmodels/sharding writes plans by hand for whole key heads
# and equal parts only
_PLANNED = (
    *("devices", "kv_heads_whole", "kv_heads_ulysses", "ffn", "sequence_parts", "vocabulary"),
    *("no_pp", "no_vpp", "experts", "ep_whole_axes", "token_chunks"),
    *_FURTHER,
)

_SETS: dict[str, tuple[str, ...]] = {
    # FlexParallel 4.1: found by search over rules, it reproduces all twelve search-space sizes of Table 2 exactly
    "flexparallel": (
        *("devices", "tp_divides_host", "heads", "sequence_chunks", "global_batch"),
        *("layers", "vpp_three_stages", "vpp_micro_batches", "experts", "ep_within_dp"),
        *_FURTHER,
    ),
    # megatron-core 0.16 transformer_config.py, schedules.py and parallel_state.py (the experts' own tensor degree;
    # several instances of the distributed optimizer, each with all experts); Megatron-LM training/arguments.py;
    # distributed/fsdp/mcore_fsdp_adapter.py (Megatron-FSDP makes its mesh of all ranks, without a dimension of stages)
    "megatron": (
        *(*_MEGATRON, *_SHARD, "offload_needs_sharding", *_FSDP2, "fsdp2_dp_shard", "fsdp2_offload"),
        *("offload_of_optimizer", "zero_of_optimizer", "dp_shard_of_optimizer", "zero_without_pp", "ffn_halves"),
    ),
    # a framework that nobody named: most that have all of these dimensions descend from Megatron-LM (assumed)
    "unknown": (*_MEGATRON, "fsdp2_pp", *_FSDP2),
    # MindSpeed runs Megatron-LM's checks, repeats key-value heads for Ulysses, fills short chunks with no-op layers
    # (features_manager/pipeline_parallel/noop_layers.py), and knows one instance of the distributed optimizer and
    # rounds of pp micro-batches (both assumed)
    "mindspeed": (*(_OF_MINDSPEED.get(rule, rule) for rule in _MEGATRON if rule != "kv_heads_ulysses"),),
    # nanotron 0.4 parallel/context.py, config/parallelism_config.py (dp, pp, tp and experts beside them),
    # models/llama.py (whole key-value heads), parallel/pipeline_parallel/engine.py (one schedule, no interleaving)
    "nanotron": (
        *("devices", "pp_layers", "global_batch", "kv_heads_whole", "ffn"),
        *("no_vpp", "no_cp", "no_up", "no_ep", "pp_nearly_filled", "sequence_parallel_length"),
        *_FURTHER,
    ),
    # Megatron-LM v2 megatron/arguments.py (interleaving from 3 stages on), megatron/model/transformer.py (heads and
    # layers divide), megatron/schedules.py (micro-batches); no expert, context or sequence parallelism yet
    "megatron-2021": (*_MEGATRON_2021, "no_sequence_parallel"),
    # Megatron-LM v3: the same checks, and sequence parallelism (Korthikanti et al. 2022)
    "megatron-2022": (*_MEGATRON_2021, "sequence_parallel_length", "sequence_parallel_needs_tp"),
    # bigscience-workshop/Megatron-DeepSpeed: DeepSpeed's 1F1B engine (DeepSpeed issue 1110); partitions may be uneven
    # (BLOOM's prequel ran 70 layers on 12 stages); DeepSpeed runtime/pipe/engine.py refuses ZeRO 2 and 3
    "megatron-deepspeed": (
        *_EVERY_RUNTIME,
        *("kv_heads", "ffn", "no_vpp", "no_cp", "no_up", "no_ep"),
        *(*_CHOICES, "offload_needs_sharding", "zero_needs_replicas", "no_sequence_parallel"),
    ),
    # gpt-neox megatron/model/transformer.py: mpu.divide of key-value heads ("we do not yet clone KV heads in MQA across
    # TP ranks"), DeepSpeed's MoE with moe_expert_parallel_size; DeepSpeed runtime/pipe/engine.py (one schedule, no ZeRO
    # 2 and 3 with a pipeline); context parallelism is an open pull request (1299)
    "gpt-neox": (
        *("devices", "pp_layers", "global_batch", "kv_heads_whole", "ffn", "no_vpp", "no_cp", "no_up"),
        *("experts", "ep_within_dp", "offload_needs_sharding", "zero_without_pp", "zero_3_without_experts"),
        "sequence_parallel_length",
        *_FURTHER,
    ),
    # PaddleNLP trainer/training_args.py (sep or context parallelism, no sharding 2 and 3 with a pipeline); Paddle
    # fleet/meta_parallel/pipeline_parallel.py (interleaving from 3 stages on) and parallel_layers/pp_layers.py (equal
    # parts); key-value heads as in Megatron and experts over dp are assumed
    "paddle": (
        *_EVERY_RUNTIME,
        *("kv_heads", "kv_heads_ulysses", "ffn", "cp_or_up", "sequence_context"),
        *("layers", "vpp_three_stages", "vpp_filled", "experts", "ep_within_dp"),
        *("zero_without_pp", "sequence_parallel_length"),
        *_FURTHER,
    ),
    # torchtitan 0.3 distributed/parallel_dims.py (mesh, ep), trainer.py (sequence), distributed/fsdp.py (experts),
    # distributed/pipeline_parallel.py (any split), models/common/decoder.py (key-value heads, tied embeddings);
    # torch/distributed/pipelining/schedules.py (micro-batches)
    "torchtitan": (
        *("devices", "global_batch", "kv_heads_whole", "ffn", "no_up", "sequence_split", "sequence_blocks"),
        *("chunks_filled", "vpp_shortens", "vpp_two_stages", "vpp_rounds", "pp_filled", "pp_untied", "experts"),
        *("ep_within_shards", "experts_cut_evenly", "expert_tp_uncut"),
        *_FURTHER,
        *("dp_shard_within_dp", "dp_shard_distinct"),
    ),
    # trials/torch_training: DTensor shards into equal parts, ring attention takes balanced chunks, Ulysses repeats
    # key-value heads, torch/distributed/pipelining/schedules.py (rounds of micro-batches), experts over a whole stage
    "torch-reference": (
        *("devices", "heads", "global_batch", "kv_heads_whole", "ffn", "sequence"),
        *("chunks_filled", "vpp_shortens", "vpp_two_stages", "vpp_rounds", "vpp_filled"),
        *("experts", "ep_within_stage", "expert_tp_distinct"),
        *(*_FURTHER, "recompute_layers_distinct"),
        "experts_need_sequence_parallel",
        *_SHARD,
    ),
    # llm-foundry issue 1743 (FSDP and HSDP alone are supported; its set_torch_tp is an experiment),
    # llmfoundry/models/utils/config_moe_args.py (moe_world_size divides the ranks)
    "fsdp": (
        *("devices", "global_batch", "no_pp", "no_tp", "no_cp", "no_up", "no_vpp", "experts", "ep_within_dp"),
        *_FURTHER,
        *_SHARD,
    ),
    # maxtext configs/types.py (stages * repeats * layers per stage = layers; stages divide micro-batches),
    # kernels/attention/ulysses_attention.py (heads), pull request 1445 (load-balanced context parallelism); jax shards
    # a weight's dimension only into equal parts, which gives the rules on heads and MLP sizes
    "maxtext": (
        *("devices", "global_batch", "pp_layers", "kv_heads_whole", "kv_heads_ulysses", "ffn"),
        *("cp_or_up", "sequence_context", "layers", "vpp_two_stages", "pp_micro_batches", "experts", "ep_within_dp"),
        *(*_CHOICES, "sequence_parallel_needs_tp"),
        *_SHARD,
    ),
    # InternEvo core/context/parallel_context.py (one group for tp or isp, experts), core/parallel/shard.py
    # (partition_uniform), core/scheduler/pipeline_scheduler_1f1b.py (micro-batches), doc/code-docs/source/parallel.rst
    # (modes mtp, msp, fsp, isp), core/parallel/comm/isp.py (repeats key-value heads for its all-to-all)
    "internevo": (
        *("devices", "heads", "global_batch", "kv_heads_whole", "ffn", "tp_or_context", "sequence_context"),
        *("chunks_filled", "vpp_layers", "vpp_two_stages", "vpp_micro_batches"),
        *("experts", "experts_by_dp", "ep_within_dp_cp", "sequence_parallel_length"),
        *_FURTHER,
        *_SHARD,
    ),
    "jax-reference": (*_PLANNED, "global_batch"),
    # the ranks run the operators of one micro-batch
    "torch-planned": (*_PLANNED, "one_micro_batch"),
    # mindformers modules/transformer/transformer.py (TransformerOpParallelConfig: micro_batch_num >= pipeline_stage,
    # ring and Ulysses also together; FeedForward: dp // ep), models/utils.py (LayerSetting: offsets per mini stage),
    # models/llama/llama_transformer.py (key-value heads by model_parallel * Ulysses degree)
    "mindformers": (
        *("devices", "global_batch", "kv_heads_whole", "kv_heads_ulysses", "ffn", "sequence_context"),
        *("chunks_filled", "vpp_shortens", "vpp_two_stages", "vpp_filled", "pp_filled", "experts", "ep_within_dp"),
        "sequence_parallel_length",
        *_FURTHER,
    ),
}
"""Rules of each framework by name, with its sources beside it, and without those on dimensions that it lacks."""


def _with_absent(rules: tuple[str, ...]) -> tuple[str, ...]:
    """Add the rules that keep optional dimensions at their default where a framework has no rules for them."""
    return rules + tuple(f"no_{name}" for name in _OPTIONAL if not any(rule.startswith(name) for rule in rules))


_OPTIONAL = tuple(name for name, dimension in DIMENSIONS.items() if not dimension.choices)
"""Further dimensions that are numbers, where 0 stands for another's value. A runtime itself offers choices."""

RULE_SETS = {name: _with_absent(rules) for name, rules in _SETS.items()}
"""Rules of each framework by name."""

LAYER_PADDING = {"flexparallel": 8}
"""Multiple up to which a rule set fills the layers with no-op layers, whatever the runtime's profile says."""

FORMER_RULES = {
    "megatron": ("pp_layers", "vpp_micro_batches"),
    "mindspeed": ("layers", "pp_layers"),
    "unknown": ("pp_layers", "vpp_micro_batches"),
}
"""Rules that sets had in earlier versions, which studies may still switch off."""

THINNING_RULES = ("vpp_shortens",)
"""Rules that leave out what can be launched and gains little; not in force where a study lists the dimension."""

DUPLICATE_RULES = (
    *("zero_needs_replicas", "sequence_parallel_needs_tp", "expert_tp_distinct", "dp_shard_distinct"),
    "recompute_layers_distinct",
)
"""Rules that only remove duplicates from an opened dimension; they never refuse a value that the job fixes."""
