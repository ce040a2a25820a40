"""The keys of DeepSpeed's configuration file that we write, and the rules that DeepSpeed asserts.

Sources: DeepSpeed 0.19 runtime/config.py (`DeepSpeedConfig._batch_assertion`, `_do_error_check`,
`_reject_removed_config_keys`), runtime/zero/config.py, runtime/pipe/engine.py, module_inject/auto_ep_folding.py
(`build_folding_spec` and what is validated after it), module_inject/auto_ep_config.py
(`validate_autoep_post_detection`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hardware.io.errors import ConfigError, did_you_mean
from tests.oracles.frameworks.published_rules import Facts, PublishedRule, at_least, hold_to, number, required
from tuner.export.flag_table import FlagValue, Values

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
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
    "bf16.enabled": bool,
    "fp16.enabled": bool,
    INTERVAL: int,
    TP: int,
    UP: int,
    DP: int,
    "expert_parallel.enabled": bool,
    EP: int,
}
"""Keys by their path, and what each holds."""

_CONFIG = "DeepSpeed runtime/config.py DeepSpeedConfig"
_FOLDING = "DeepSpeed module_inject/auto_ep_folding.py"


def _data_parallel(values: Values) -> int:
    """Data parallel ranks that the batch sizes imply."""
    return number(values, BATCH) // (number(values, MICRO) * number(values, ACCUMULATION))


def _pipeline_ranks(values: Values, facts: Facts) -> int:
    """Ranks of one replica that the file does not speak of: a pipeline's, or what the script splits."""
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
        rule="must be what the batch sizes imply",
        source=f"{_CONFIG}._batch_assertion",
        holds=lambda v, _: DP not in v or number(v, DP) == _data_parallel(v),
    ),
    PublishedRule(
        key=UP,
        rule="stands with data_parallel_size, and their product is the world size",
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
    """The values of a configuration file, by their path.

    Raises:
        ConfigError: it is no JSON object, or DeepSpeed would refuse it; it cites the rule.
    """
    try:
        content = json.loads(text)
    except ValueError:
        raise ConfigError("is no JSON", value=text) from None
    if not isinstance(content, dict):
        raise ConfigError("must be a JSON object", value=text)
    content.pop("comments", None)
    values = flattened(content)
    hold_to_types(values, DEEPSPEED_KEYS)
    hold_to(values, facts, DEEPSPEED_RULES)
    return values


def flattened(content: Mapping[str, Any], prefix: str = "") -> dict[str, FlagValue]:
    """Nested mappings as one, its keys the paths."""
    found: dict[str, FlagValue] = {}
    for name, value in content.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def hold_to_types(values: Values, known: Mapping[str, type]) -> None:
    """Looks whether each key is known and holds what it should.

    Raises:
        ConfigError: one is not, or holds something else.
    """
    for key, value in values.items():
        if key not in known:
            raise ConfigError("is no key of this framework", value=key, nearest=did_you_mean(key, known))
        if type(value) is not known[key]:
            raise ConfigError(f"must be of type {known[key].__name__}", key=key, value=value)


def said_by_deepspeed(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """What of a configuration the file says, by dimension; `beside` is the ranks of a replica that it leaves open."""
    return {
        "dp": _data_parallel(values),
        "mbs": number(values, MICRO),
        "tp": number(values, TP),
        "up": number(values, UP),
        "ep": number(values, EP),
        "zero_stage": number(values, STAGE),
        "beside": _pipeline_ranks(values, facts),
        "global_batch_size": number(values, BATCH),
    }
