"""Exported keys of DeepSpeed's configuration file, and the rules that DeepSpeed asserts.

Sources: DeepSpeed 0.19 runtime/config.py (`DeepSpeedConfig._batch_assertion`, `_do_error_check`,
`_reject_removed_config_keys`), runtime/zero/config.py, runtime/pipe/engine.py, module_inject/auto_ep_folding.py
(`build_folding_spec` and the validation after it), module_inject/auto_ep_config.py
(`validate_autoep_post_detection`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hardware.io.errors import ConfigError, did_you_mean
from tests.oracles.frameworks.published_rules import Facts, PublishedRule, at_least, check_rules, number, required
from tuner.export.flag_table import FlagValue, Values

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
OFFLOAD = "zero_optimization.offload_optimizer.device"
STAGE, INTERVAL = "zero_optimization.stage", "pipeline.activation_checkpoint_interval"
TP, UP, DP, EP = (
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "data_parallel_size",
    "expert_parallel.autoep_size",
)
DEEPSPEED_KEYS: dict[str, type] = {
    BATCH: int,
    MICRO: int,
    ACCUMULATION: int,
    STAGE: int,
    "zero_optimization.overlap_comm": bool,
    OFFLOAD: str,
    "zero_optimization.offload_optimizer.pin_memory": bool,
    "bf16.enabled": bool,
    "fp16.enabled": bool,
    INTERVAL: int,
    TP: int,
    UP: int,
    DP: int,
    "expert_parallel.enabled": bool,
    EP: int,
}
"""Type of each key, by its path."""

_CONFIG = "DeepSpeed runtime/config.py DeepSpeedConfig"
_FOLDING = "DeepSpeed module_inject/auto_ep_folding.py"


def _data_parallel(values: Values) -> int:
    """Return the number of data parallel ranks that the batch sizes imply."""
    return number(values, BATCH) // (number(values, MICRO) * number(values, ACCUMULATION))


def _pipeline_ranks(values: Values, facts: Facts) -> int:
    """Return the number of ranks per replica for parallel dimensions that only the training script sets."""
    return facts.num_devices // (_data_parallel(values) * number(values, TP) * number(values, UP))


DEEPSPEED_RULES: tuple[PublishedRule, ...] = (
    *(required(key, _CONFIG) for key in (BATCH, MICRO, ACCUMULATION, STAGE)),
    *(at_least(1, key, f"{_CONFIG}._batch_assertion") for key in (BATCH, MICRO, ACCUMULATION)),
    *(at_least(1, key, _FOLDING) for key in (TP, UP, DP, EP)),
    at_least(0, INTERVAL, "DeepSpeed runtime/pipe/engine.py"),
    PublishedRule(
        key=STAGE,
        rule="must be 0, 1, 2 or 3",
        source="DeepSpeed runtime/zero/config.py ZeroStageEnum",
        holds=lambda v, _: v[STAGE] in (0, 1, 2, 3),
    ),
    PublishedRule(
        key=OFFLOAD,
        rule="must be none, cpu or nvme",
        source="DeepSpeed runtime/zero/offload_config.py OffloadDeviceEnum",
        holds=lambda v, _: v.get(OFFLOAD, "none") in ("none", "cpu", "nvme"),
    ),
    PublishedRule(
        key=BATCH,
        rule="must be micro-batch * accumulation * data parallel ranks",
        source=f"{_CONFIG}._batch_assertion",
        holds=lambda v, _: number(v, BATCH) % (number(v, MICRO) * number(v, ACCUMULATION)) == 0,
    ),
    PublishedRule(
        key=BATCH,
        rule="implies data parallel ranks which, times tp and sequence ranks, must divide the world size",
        source=f"{_CONFIG}._batch_assertion",
        holds=lambda v, f: f.num_devices % (_data_parallel(v) * number(v, TP) * number(v, UP)) == 0,
    ),
    PublishedRule(
        key=DP,
        rule="must equal the number of ranks that the batch sizes imply",
        source=f"{_CONFIG}._batch_assertion",
        holds=lambda v, _: DP not in v or number(v, DP) == _data_parallel(v),
    ),
    PublishedRule(
        key=UP,
        rule="requires data_parallel_size, and their product must be the world size",
        source="DeepSpeed __init__.py initialize (mesh of both)",
        holds=lambda v, f: (UP in v) == (DP in v) and (UP not in v or number(v, UP) * number(v, DP) == f.num_devices),
    ),
    PublishedRule(
        key=TP,
        rule="excludes Ulysses sequence parallelism",
        source=_FOLDING,
        holds=lambda v, _: number(v, TP) == 1 or number(v, UP) == 1,
    ),
    PublishedRule(
        key=EP,
        rule="must divide the number of experts",
        source="DeepSpeed module_inject/auto_ep_config.py validate_autoep_post_detection",
        holds=lambda v, f: number(v, EP) == 1 or (f.num_experts > 0 and f.num_experts % number(v, EP) == 0),
    ),
    PublishedRule(
        key=EP,
        rule="must divide the ranks of a stage",
        source=f"{_FOLDING} build_folding_spec",
        holds=lambda v, f: f.num_devices % number(v, EP) == 0,
    ),
    PublishedRule(
        key="bf16.enabled",
        rule="excludes fp16",
        source=_CONFIG,
        holds=lambda v, _: not (v.get("bf16.enabled") and v.get("fp16.enabled")),
    ),
    PublishedRule(
        key=STAGE,
        rule="must be 0 or 1 in a pipeline",
        source="DeepSpeed runtime/pipe/engine.py PipelineEngine.__init__",
        holds=lambda v, _: INTERVAL not in v or number(v, STAGE) <= 1,
    ),
)


def check_deepspeed(text: str, facts: Facts) -> dict[str, FlagValue]:
    """Return the values of a configuration file, by their path.

    Raises:
        ConfigError: the text is not a JSON object, or DeepSpeed would reject it; the message cites the rule.
    """
    try:
        content = json.loads(text)
    except ValueError:
        raise ConfigError("is not JSON", value=text) from None
    if not isinstance(content, dict):
        raise ConfigError("must be a JSON object", value=text)
    content.pop("comments", None)
    values = flattened(content)
    check_types(values, DEEPSPEED_KEYS)
    check_rules(values, facts, DEEPSPEED_RULES)
    return values


def flattened(content: Mapping[str, Any], prefix: str = "") -> dict[str, FlagValue]:
    """Convert nested mappings to one mapping, whose keys are dotted paths."""
    found: dict[str, FlagValue] = {}
    for name, value in content.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def check_types(values: Values, known: Mapping[str, type]) -> None:
    """Check that each key is known and its value has the declared type.

    Raises:
        ConfigError: a key is unknown, or a value has another type.
    """
    for key, value in values.items():
        if key not in known:
            raise ConfigError("is not a key of this framework", value=key, nearest=did_you_mean(key, known))
        if type(value) is not known[key]:
            raise ConfigError(f"must be of type {known[key].__name__}", key=key, value=value)


def said_by_deepspeed(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the file's values to dimensions of a configuration.

    `beside` is the number of ranks per replica that the file does not assign to a dimension.
    """
    return {
        "dp": _data_parallel(values),
        "mbs": number(values, MICRO),
        "tp": number(values, TP),
        "up": number(values, UP),
        "ep": number(values, EP),
        "offload": "optimizer" if values.get(OFFLOAD) == "cpu" else "none",
        "zero_stage": number(values, STAGE),
        "beside": _pipeline_ranks(values, facts),
        "global_batch_size": number(values, BATCH),
    }
