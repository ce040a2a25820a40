"""Exported keys of GPT-NeoX's file, and the rules that GPT-NeoX and its DeepSpeed assert.

Sources: EleutherAI/gpt-neox megatron/neox_arguments/arguments.py (`calculate_batch_parameters`,
`check_batch_parameters`, `validate_types`, `validate_keys`), neox_args.py (types), megatron/mpu/initialize.py
(`initialize_model_parallel`), megatron/model/transformer.py (`mpu.divide` of heads); DeepSpeed runtime/pipe/engine.py
and moe/layer.py.
"""

from __future__ import annotations

from tests.oracles.frameworks.deepspeed import ACCUMULATION, BATCH, MICRO, OFFLOAD, STAGE, check_types, flattened
from tests.oracles.frameworks.published_rules import (
    Facts,
    PublishedRule,
    at_least,
    check_rules,
    number,
    required,
    yaml_mapping,
)
from tuner.export.flag_table import FlagValue, Values

PP, TP, EP = "pipe_parallel_size", "model_parallel_size", "moe_expert_parallel_size"
LENGTH, RECOMPUTE, SEQUENCE_PARALLEL = "seq_length", "checkpoint_activations", "sequence_parallel"
PRECISION = "precision"

GPT_NEOX_KEYS: dict[str, type] = {
    PP: int,
    TP: int,
    EP: int,
    LENGTH: int,
    BATCH: int,
    MICRO: int,
    ACCUMULATION: int,
    STAGE: int,
    OFFLOAD: str,
    "zero_optimization.offload_optimizer.pin_memory": bool,
    RECOMPUTE: bool,
    "checkpoint_num_layers": int,
    SEQUENCE_PARALLEL: bool,
    PRECISION: str,
    "bf16.enabled": bool,
    "fp16.enabled": bool,
}
"""Type of each key, by its path."""

_BATCHES = "gpt-neox megatron/neox_arguments/arguments.py check_batch_parameters"
_TYPES = "gpt-neox megatron/neox_arguments/neox_args.py"
_RANKS = "gpt-neox megatron/mpu/initialize.py initialize_model_parallel"


def _stages(values: Values) -> int:
    """Return the number of pipeline stages; size 0 is none."""
    return max(number(values, PP, 0), 1)


def _data_parallel(values: Values, facts: Facts) -> int:
    """Return the number of data parallel ranks."""
    return facts.num_devices // (_stages(values) * number(values, TP))


GPT_NEOX_RULES: tuple[PublishedRule, ...] = (
    *(required(key, _TYPES) for key in (PP, TP, LENGTH, BATCH, MICRO, ACCUMULATION, STAGE)),
    at_least(0, PP, _RANKS),
    *(at_least(1, key, _RANKS) for key in (TP, EP)),
    *(at_least(1, key, _BATCHES) for key in (BATCH, MICRO, ACCUMULATION, LENGTH)),
    PublishedRule(
        key=TP,
        rule="times pipe_parallel_size must divide the world size",
        source=_RANKS,
        holds=lambda v, f: f.num_devices % (_stages(v) * number(v, TP)) == 0,
    ),
    PublishedRule(
        key=BATCH,
        rule="must be the micro-batch times accumulation times the data parallel ranks",
        source=_BATCHES,
        holds=lambda v, f: number(v, BATCH) == number(v, MICRO) * number(v, ACCUMULATION) * _data_parallel(v, f),
    ),
    PublishedRule(
        key=PP,
        rule="must not exceed the layers of the model",
        source="DeepSpeed runtime/pipe/module.py PipelineModule",
        holds=lambda v, f: _stages(v) <= f.num_layers,
    ),
    PublishedRule(
        key=TP,
        rule="must divide the attention heads and the key-value heads",
        source="gpt-neox megatron/model/transformer.py ParallelSelfAttention",
        holds=lambda v, f: f.num_heads % number(v, TP) == 0 and f.num_kv_heads % number(v, TP) == 0,
    ),
    PublishedRule(
        key=STAGE,
        rule="must be 0, 1, 2 or 3",
        source="DeepSpeed runtime/zero/config.py",
        holds=lambda v, _: number(v, STAGE) in range(4),
    ),
    PublishedRule(
        key=OFFLOAD,
        rule="must be none, cpu or nvme",
        source="DeepSpeed runtime/zero/offload_config.py OffloadDeviceEnum",
        holds=lambda v, _: v.get(OFFLOAD, "none") in ("none", "cpu", "nvme"),
    ),
    PublishedRule(
        key=STAGE,
        rule="must be 0 or 1 with a pipeline, which only pipe_parallel_size 0 switches off",
        source="DeepSpeed runtime/pipe/engine.py PipelineEngine",
        holds=lambda v, _: number(v, STAGE) < 2 or number(v, PP) == 0,
    ),
    PublishedRule(
        key=EP,
        rule="must divide the experts and the data parallel ranks",
        source="DeepSpeed moe/layer.py MoE",
        holds=lambda v, f: (
            number(v, EP) == 1
            or (f.num_experts > 0 and f.num_experts % number(v, EP) == 0 and _data_parallel(v, f) % number(v, EP) == 0)
        ),
    ),
    PublishedRule(
        key=SEQUENCE_PARALLEL,
        rule="needs model_parallel_size above 1, which divides seq_length",
        source=_TYPES,
        holds=lambda v, _: (
            not v.get(SEQUENCE_PARALLEL) or (number(v, TP) > 1 and number(v, LENGTH) % number(v, TP) == 0)
        ),
    ),
    PublishedRule(
        key=PRECISION,
        rule="must be fp16, fp32 or bfloat16",
        source=_TYPES,
        holds=lambda v, _: v.get(PRECISION, "fp32") in ("fp16", "fp32", "bfloat16"),
    ),
    PublishedRule(
        key="fp16.enabled",
        rule="excludes bf16.enabled",
        source="DeepSpeed runtime/config.py DeepSpeedConfig",
        holds=lambda v, _: not (v.get("fp16.enabled") and v.get("bf16.enabled")),
    ),
)


def check_gpt_neox(text: str, facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the file, by their path.

    Raises:
        ConfigError: the text is not a YAML mapping, or GPT-NeoX would reject it; the message cites the rule.
    """
    values = flattened(yaml_mapping(text))
    check_types(values, GPT_NEOX_KEYS)
    check_rules(values, facts, GPT_NEOX_RULES)
    return values


def said_by_gpt_neox(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the file's values to dimensions of a configuration."""
    return {
        "pp": _stages(values),
        "tp": number(values, TP),
        "dp": _data_parallel(values, facts),
        "cp": 1,
        "up": 1,
        "vpp": 1,
        "ep": number(values, EP),
        "mbs": number(values, MICRO),
        "recompute": "full" if values.get(RECOMPUTE) else "none",
        "offload": "optimizer" if values.get(OFFLOAD) == "cpu" else "none",
        "zero_stage": number(values, STAGE),
        "sequence_parallel": bool(values.get(SEQUENCE_PARALLEL)),
        "global_batch_size": number(values, BATCH),
        "sequence_length": number(values, LENGTH),
    }
