"""Reader for Megatron-LM's flags, and the rules that Megatron-LM asserts.

Sources: Megatron-LM megatron/training/arguments.py (`_add_distributed_args`, `_add_training_args`, `_add_moe_args`,
`validate_args`), megatron-core 0.16.1 model_parallel_config.py and transformer/transformer_config.py (`__post_init__`),
transformer/pipeline_parallel_layer_layout.py (`validate_layer_layout`), parallel_state.py
(`initialize_model_parallel`), num_microbatches_calculator.py, pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from tests.oracles.frameworks.published_rules import Facts, PublishedRule, at_least, check_rules, number, required
from tuner.export.flag_table import FlagValue, Values, read_flags
from tuner.export.megatron_flags import (
    COMM,
    CP,
    EP,
    EXPERT_TP,
    GLOBAL,
    GRANULARITY,
    INSTANCES,
    LAYOUT,
    LEVELS,
    MEGATRON_FLAGS,
    MICRO,
    OF_ROUND,
    PP,
    SEQUENCE,
    SHARDING,
    TP,
    VPP,
)

_ARGUMENTS = "Megatron-LM megatron/training/arguments.py validate_args"
_TRANSFORMER = "megatron-core transformer/transformer_config.py __post_init__"
_SIZES = (TP, PP, CP, EP, EXPERT_TP, MICRO, GLOBAL, SEQUENCE, VPP, INSTANCES, "--recompute-num-layers")


def replicas(values: Values, facts: Facts) -> int:
    """Return the data parallel degree: the number of devices over tp*pp*cp."""
    return facts.num_devices // (number(values, TP) * number(values, PP) * number(values, CP))


def num_micro_batches(values: Values, facts: Facts) -> int:
    """Return the number of micro-batches per step on each replica."""
    return number(values, GLOBAL) // (number(values, MICRO) * replicas(values, facts))


def layout_of(text: str) -> tuple[int, ...] | None:
    """Parse a layout in the form that the exporter writes into layers per part. Return None for any other text.

    Modules of multi-token prediction (m) may stand in the last part, or in the one before.
    """
    found = re.fullmatch(r"E((?:t(?:\*\d+)?)?(?:\|(?:t(?:\*\d+)?)?)*m*\|?)L", text)
    if found is None:
        return None
    return tuple(int(part[2:] or 1) if part else 0 for part in found[1].replace("m", "").split("|"))


def _layout_parts(values: Values) -> tuple[int, ...]:
    """Return the number of layers of each part of a given layout."""
    return layout_of(str(values[LAYOUT])) or ()


def _num_parts(values: Values) -> int:
    """Return the number of virtual stages of the whole pipeline."""
    return number(values, PP) * number(values, VPP)


def _num_chunks(values: Values) -> int:
    """Return the number of virtual stages of each stage of the pipeline."""
    return len(_layout_parts(values)) // number(values, PP) if values.get(LAYOUT) else number(values, VPP)


def _has_whole_rounds(values: Values, facts: Facts) -> bool:
    """Return whether rounds of micro-batches, pp without the flag, leave no stage idle in the last one."""
    whole, size = num_micro_batches(values, facts), number(values, OF_ROUND, number(values, PP))
    return number(values, PP) <= size <= whole and (whole % size == 0 or whole % size >= number(values, PP))


def _stage_ranks(values: Values, facts: Facts) -> int:
    """Return the number of ranks of one pipeline stage."""
    return facts.num_devices // number(values, PP)


def _expert_ranks(values: Values) -> int:
    """Return the number of ranks that hold one copy of the experts of a stage."""
    return number(values, EP) * number(values, EXPERT_TP, number(values, TP))


def _has_equal_instances(values: Values, facts: Facts) -> bool:
    """Return whether the data and context parallel ranks divide into instances of the optimizer."""
    ranks = replicas(values, facts) * number(values, CP)
    return ranks % number(values, INSTANCES) == 0


def _has_equal_expert_instances(values: Values, facts: Facts) -> bool:
    """Return whether the data parallel ranks of experts divide into instances of the optimizer."""
    if EP not in values:
        return True
    return _stage_ranks(values, facts) // _expert_ranks(values) % number(values, INSTANCES) == 0


def _words(value: FlagValue) -> tuple[str, ...]:
    """Return the words of a value; a single word is a list of one."""
    return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


def _product(value: FlagValue) -> int:
    """Return the product of a list of numbers."""
    return math.prod(map(int, value)) if isinstance(value, tuple) else 1


def _ulysses(values: Values) -> int:
    """Return the number of ranks of the all-to-all."""
    words = _words(values.get(COMM))
    if "a2a+p2p" in words:
        levels = values.get(LEVELS)
        return int(levels[0]) if isinstance(levels, tuple) else 1
    return number(values, CP) if "a2a" in words else 1


def all_to_all_rule(key: str, source: str, up: Callable[[Values], int]) -> PublishedRule:
    """Return the rule that the all-to-all of Ulysses distributes whole attention heads.

    Args:
        key: Flag that selects Ulysses.
        source: Source of the rule.
        up: Function that returns the number of ranks of the all-to-all.
    """
    return PublishedRule(
        key=key,
        rule="all-to-all distributes whole heads: tp times its ranks must divide the attention heads",
        source=source,
        holds=lambda v, f: f.num_heads % (number(v, TP) * up(v)) == 0,
    )


COMMON_RULES: tuple[PublishedRule, ...] = (
    *(at_least(1, key, _ARGUMENTS) for key in _SIZES),
    PublishedRule(
        key=TP,
        rule="world size must be divisible by tp*pp*cp",
        source=_ARGUMENTS,
        holds=lambda v, f: f.num_devices % (number(v, TP) * number(v, PP) * number(v, CP)) == 0,
    ),
    required(MICRO, _ARGUMENTS),
    PublishedRule(
        key=GLOBAL,
        rule="global batch must be divisible by micro-batch size times data parallel size",
        source="megatron-core num_microbatches_calculator.py ConstantNumMicroBatchesCalculator",
        holds=lambda v, f: v.get(GLOBAL) is None or (number(v, GLOBAL) % (number(v, MICRO) * replicas(v, f)) == 0),
    ),
    PublishedRule(
        key="--sequence-parallel",
        rule="can't be used without tensor parallelism",
        source="megatron-core model_parallel_config.py __post_init__",
        holds=lambda v, _: not v.get("--sequence-parallel") or number(v, TP) > 1,
    ),
    PublishedRule(
        key="--sequence-parallel",
        rule="is required for experts with tensor parallelism",
        source="megatron-core transformer/moe/moe_layer.py MoELayer.forward",
        holds=lambda v, f: bool(v.get("--sequence-parallel")) or number(v, TP) == 1 or not f.num_experts,
    ),
    PublishedRule(
        key=TP,
        rule="must divide the attention heads",
        source=_TRANSFORMER,
        holds=lambda v, f: f.num_heads % number(v, TP) == 0,
    ),
    PublishedRule(
        key=TP,
        rule="must divide the key-value heads, or be a multiple of them",
        source=_TRANSFORMER,
        holds=lambda v, f: f.num_kv_heads % number(v, TP) == 0 or number(v, TP) % f.num_kv_heads == 0,
    ),
    PublishedRule(
        key=SEQUENCE,
        rule="must be a multiple of 2 * context-parallel-size",
        source=_ARGUMENTS,
        holds=lambda v, _: number(v, CP) == 1 or number(v, SEQUENCE) % (2 * number(v, CP)) == 0,
    ),
    PublishedRule(
        key=SEQUENCE,
        rule="must be divisible by tensor-model-parallel-size with sequence parallelism",
        source="megatron-core tensor_parallel/mappings.py _split_along_first_dim",
        holds=lambda v, _: (
            not v.get("--sequence-parallel") or number(v, SEQUENCE) // number(v, CP) % number(v, TP) == 0
        ),
    ),
    PublishedRule(
        key=EP,
        rule="needs a model with experts",
        source=_ARGUMENTS,
        holds=lambda v, f: number(v, EP) == 1 or f.num_experts > 0,
    ),
    PublishedRule(
        key=EP,
        rule="must divide the number of experts",
        source=_ARGUMENTS,
        holds=lambda v, f: number(v, EP) == 1 or f.num_experts % number(v, EP) == 0,
    ),
    PublishedRule(
        key=EP,
        rule="is not supported with fp16 training",
        source=_ARGUMENTS,
        holds=lambda v, _: number(v, EP) == 1 or not v.get("--fp16"),
    ),
    PublishedRule(
        key=EP,
        rule="times the experts' tensor degree must divide the ranks of a stage",
        source="megatron-core parallel_state.py initialize_model_parallel",
        holds=lambda v, f: EP not in v or _stage_ranks(v, f) % _expert_ranks(v) == 0,
    ),
    PublishedRule(
        key="--moe-grouped-gemm",
        rule="supports bf16 only",
        source=_ARGUMENTS,
        holds=lambda v, _: not v.get("--moe-grouped-gemm") or bool(v.get("--bf16")),
    ),
    PublishedRule(
        key="--bf16",
        rule="excludes --fp16",
        source=_ARGUMENTS,
        holds=lambda v, _: not (v.get("--bf16") and v.get("--fp16")),
    ),
    PublishedRule(
        key="--use-distributed-optimizer",
        rule="does not shard the states of SGD",
        source="megatron-core optimizer/distrib_optimizer.py DistributedOptimizer",
        holds=lambda v, _: not v.get("--use-distributed-optimizer") or v.get("--optimizer") != "sgd",
    ),
    PublishedRule(
        key="--overlap-param-gather",
        rule="needs the distributed optimizer or Megatron-FSDP",
        source=_ARGUMENTS,
        holds=lambda v, _: (
            not v.get("--overlap-param-gather")
            or bool(v.get("--use-distributed-optimizer") or v.get("--use-megatron-fsdp"))
        ),
    ),
    PublishedRule(
        key="--overlap-param-gather",
        rule="needs --overlap-grad-reduce",
        source=_ARGUMENTS,
        holds=lambda v, _: not v.get("--overlap-param-gather") or bool(v.get("--overlap-grad-reduce")),
    ),
    PublishedRule(
        key="--recompute-method",
        rule="must be given with full recomputation, and only with it",
        source=f"{_ARGUMENTS}; {_TRANSFORMER}",
        holds=lambda v, _: (v.get(GRANULARITY) == "full") == (v.get("--recompute-method") is not None),
    ),
    PublishedRule(
        key="--recompute-num-layers",
        rule="must be given with full recomputation, and only with it",
        source=_TRANSFORMER,
        holds=lambda v, _: (v.get(GRANULARITY) == "full") == (v.get("--recompute-num-layers") is not None),
    ),
)
"""Rules that both Megatron-LM and MindSpeed-LLM assert."""

MEGATRON_RULES: tuple[PublishedRule, ...] = (
    *COMMON_RULES,
    PublishedRule(
        key=VPP,
        rule="excludes a layout, which implies it",
        source=_ARGUMENTS,
        holds=lambda v, _: v.get(VPP) is None or v.get(LAYOUT) is None,
    ),
    PublishedRule(
        key=PP,
        rule="times the virtual stages must divide the number of layers unless there is a layout",
        source=f"{_ARGUMENTS}; {_TRANSFORMER}",
        holds=lambda v, f: v.get(LAYOUT) is not None or f.num_layers % _num_parts(v) == 0,
    ),
    PublishedRule(
        key=VPP,
        rule="needs pipeline-model-parallel-size > 1",
        source=_ARGUMENTS,
        holds=lambda v, _: _num_chunks(v) == 1 or number(v, PP) > 1,
    ),
    PublishedRule(
        key=OF_ROUND,
        rule="must be from pp to the number of micro-batches, and leave none or at least pp for the last round",
        source="megatron-core pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving",
        holds=lambda v, f: _num_chunks(v) == 1 or _has_whole_rounds(v, f),
    ),
    PublishedRule(
        key=LAYOUT,
        rule="must contain each module of multi-token prediction once",
        source="megatron-core transformer/pipeline_parallel_layer_layout.py validate_layer_layout",
        holds=lambda v, f: v.get(LAYOUT) is None or str(v[LAYOUT]).count("m") == f.num_mtp_layers,
    ),
    PublishedRule(
        key=LAYOUT,
        rule="must consist of E, layers (t*n) separated by bars, and L",
        source="megatron-core transformer/pipeline_parallel_layer_layout.py validate_layer_layout",
        holds=lambda v, _: v.get(LAYOUT) is None or layout_of(str(v[LAYOUT])) is not None,
    ),
    PublishedRule(
        key=LAYOUT,
        rule="must have a multiple of pipeline-model-parallel-size parts",
        source=_ARGUMENTS,
        holds=lambda v, _: v.get(LAYOUT) is None or len(_layout_parts(v)) % number(v, PP) == 0,
    ),
    PublishedRule(
        key=LAYOUT,
        rule="must contain each layer of the model once",
        source="megatron-core transformer/pipeline_parallel_layer_layout.py validate_layer_layout",
        holds=lambda v, f: v.get(LAYOUT) is None or sum(_layout_parts(v)) == f.num_layers,
    ),
    PublishedRule(
        key=LEVELS,
        rule="must multiply to context-parallel-size",
        source=_ARGUMENTS,
        holds=lambda v, _: v.get(LEVELS) is None or _product(v[LEVELS]) == number(v, CP),
    ),
    PublishedRule(
        key=COMM,
        rule="a2a+p2p needs --hierarchical-context-parallel-sizes",
        source=_ARGUMENTS,
        holds=lambda v, _: "a2a+p2p" not in _words(v.get(COMM)) or v.get(LEVELS) is not None,
    ),
    all_to_all_rule(
        COMM, "TransformerEngine attention/dot_product_attention/context_parallel.py AttnFuncWithCPAndQKVOA2A", _ulysses
    ),
    PublishedRule(
        key=INSTANCES,
        rule="must divide the data parallel ranks, including the context parallel ones",
        source="megatron-core parallel_state.py initialize_model_parallel",
        holds=_has_equal_instances,
    ),
    PublishedRule(
        key=INSTANCES,
        rule="must divide the experts' data parallel ranks",
        source="megatron-core parallel_state.py initialize_model_parallel",
        holds=_has_equal_expert_instances,
    ),
    PublishedRule(
        key="--optimizer-cpu-offload",
        rule="must be used together with --use-precision-aware-optimizer",
        source=_ARGUMENTS,
        holds=lambda v, _: not v.get("--optimizer-cpu-offload") or bool(v.get("--use-precision-aware-optimizer")),
    ),
    PublishedRule(
        key="--use-precision-aware-optimizer",
        rule="needs the distributed optimizer",
        source="megatron-core optimizer/optimizer_config.py __post_init__",
        holds=lambda v, _: not v.get("--use-precision-aware-optimizer") or bool(v.get("--use-distributed-optimizer")),
    ),
    PublishedRule(
        key="--ckpt-format",
        rule="must be fsdp_dtensor with Megatron-FSDP, and only with it",
        source=_ARGUMENTS,
        holds=lambda v, _: bool(v.get("--use-megatron-fsdp")) == (v.get("--ckpt-format") == "fsdp_dtensor"),
    ),
    PublishedRule(
        key="--use-torch-fsdp2",
        rule="excludes pipelines, expert parallelism, fp16, fused accumulation and all other sharding",
        source=_ARGUMENTS,
        holds=lambda v, _: (
            not v.get("--use-torch-fsdp2")
            or (
                (number(v, PP), number(v, EP)) == (1, 1)
                and bool(v.get("--no-gradient-accumulation-fusion"))
                and v.get("--ckpt-format") in (None, "torch_dist", "torch_dcp")
                and not any(v.get(f"--{one}") for one in ("use-distributed-optimizer", "use-megatron-fsdp", "fp16"))
            )
        ),
    ),
    PublishedRule(
        key="--recompute-modules",
        rule="requires selective recomputation",
        source=_TRANSFORMER,
        holds=lambda v, _: v.get("--recompute-modules") is None or v.get(GRANULARITY) == "selective",
    ),
    PublishedRule(
        key="--fp4-format",
        rule="excludes --fp8-format",
        source=_ARGUMENTS,
        holds=lambda v, _: not (v.get("--fp4-format") and v.get("--fp8-format")),
    ),
)


def check_megatron(arguments: Sequence[str], facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the flags.

    Raises:
        ConfigError: Megatron-LM would reject the flags; the message cites the rule.
    """
    values = read_flags(arguments, MEGATRON_FLAGS)
    check_rules(values, facts, MEGATRON_RULES)
    return values


def said_by_megatron(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the values to dimensions of a configuration; `layers` are those of an uneven pipeline."""
    layout = layout_of(str(values[LAYOUT])) if values.get(LAYOUT) is not None else None
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    stage = stages[str(values[SHARDING])] if values.get("--use-megatron-fsdp") else 0
    if values.get("--use-torch-fsdp2"):
        stage = 2 if values.get("--torch-fsdp2-no-reshard-after-forward") else 3
    return {
        **common_dimensions(values, facts, up=_ulysses(values)),
        "vpp": len(layout) // number(values, PP) if layout else number(values, VPP),
        "offload": "optimizer" if values.get("--optimizer-cpu-offload") else "none",
        "zero_stage": stage or int(bool(values.get("--use-distributed-optimizer"))),
        "dp_shard": replicas(values, facts) // number(values, INSTANCES) if number(values, INSTANCES) > 1 else 0,
        "layers": layout,
    }


def common_dimensions(values: Values, facts: Facts, *, up: int) -> dict[str, FlagValue]:
    """Return the dimensions whose flags Megatron-LM and MindSpeed-LLM share, given the ranks of the all-to-all."""
    tp, expert_tp = number(values, TP), number(values, EXPERT_TP, number(values, TP))
    is_block = values.get("--recompute-method") == "block"
    return {
        "pp": number(values, PP),
        "tp": tp,
        "dp": replicas(values, facts),
        "cp": number(values, CP) // up,
        "up": up,
        "ep": number(values, EP),
        "mbs": number(values, MICRO),
        # the method block repeats some layers of each virtual stage, the others none
        "recompute": "none" if is_block else values.get(GRANULARITY) or "none",
        "recompute_layers": number(values, "--recompute-num-layers") if is_block else 0,
        "sequence_parallel": bool(values.get("--sequence-parallel")),
        "expert_tp": 0 if expert_tp == tp else expert_tp,
        "global_batch_size": number(values, GLOBAL),
        "sequence_length": number(values, SEQUENCE),
    }
