"""Exported settings of MaxText, and the rules that MaxText asserts.

Sources: MaxText configs/types.py (batches, pipeline, axes), utils/max_utils.py (`fill_unspecified_mesh_axes`),
configs/base.yml (keys, and the axes over which batch and weights are cut), layers/decoders.py (`get_remat_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hardware.io.errors import ConfigError, did_you_mean
from tests.oracles.frameworks.published_rules import Facts, PublishedRule, check_rules
from tuner.export.flag_table import FlagValue, Values

_AXES = ("data", "fsdp", "pipeline", "context", "context_usp_ulysses", "tensor", "tensor_sequence", "expert")
_COUNTS = (
    *("gradient_accumulation_steps", "max_target_length", "num_pipeline_microbatches"),
    *("num_layers_per_pipeline_stage", "num_pipeline_repeats"),
)
BATCH, POLICY, STRATEGY = "per_device_batch_size", "remat_policy", "context_parallel_strategy"
_POLICIES = ("none", "minimal", "full")
_STRATEGIES = ("all_gather", "ring", "ulysses", "usp")
_TYPES = "MaxText configs/types.py"


def _degree(values: Values, axis: str) -> int:
    return math.prod(int(values.get(f"{kind}_{axis}_parallelism", 1)) for kind in ("ici", "dcn"))  # type: ignore[arg-type] # counts


def _devices(values: Values) -> int:
    return math.prod(_degree(values, axis) for axis in _AXES)


def _micro_batch(values: Values) -> float:
    """Return the sequences that all devices take at once."""
    return float(str(values[BATCH])) * _devices(values)


def _stages(values: Values) -> int:
    return _degree(values, "pipeline")


def _parts(values: Values) -> int:
    """Return the micro-batches of a pipeline."""
    return int(values.get("num_pipeline_microbatches", _stages(values))) if _stages(values) > 1 else 1  # type: ignore[arg-type] # a count


def _cut(values: Values) -> int:
    return math.prod(_degree(values, axis) for axis in ("data", "fsdp", "expert"))


MAXTEXT_RULES: tuple[PublishedRule, ...] = (
    PublishedRule(
        key="ici_fsdp_parallelism",
        rule="times all other axes must be the number of devices",
        source="MaxText utils/max_utils.py fill_unspecified_mesh_axes",
        holds=lambda v, f: _devices(v) == f.num_devices,
    ),
    PublishedRule(
        key=BATCH,
        rule="times the devices must be whole batches of every rank",
        source=_TYPES,
        holds=lambda v, _: _micro_batch(v) % (_parts(v) * _cut(v)) == 0 and _micro_batch(v) > 0,
    ),
    PublishedRule(
        key="num_pipeline_microbatches",
        rule="must be a multiple of the stages",
        source=_TYPES,
        holds=lambda v, _: _parts(v) % _stages(v) == 0,
    ),
    PublishedRule(
        key="num_layers_per_pipeline_stage",
        rule="times stages and repeats must be the layers",
        source=_TYPES,
        holds=lambda v, f: (
            _stages(v) == 1
            or _stages(v) * int(v["num_layers_per_pipeline_stage"]) * int(v["num_pipeline_repeats"]) == f.num_layers
        ),  # type: ignore[arg-type] # counts
    ),
    PublishedRule(
        key="ici_tensor_parallelism",
        rule="must divide the key-value heads",
        source="jax NamedSharding (layers/attentions.py)",
        holds=lambda v, f: f.num_kv_heads % (_degree(v, "tensor") * _degree(v, "tensor_sequence")) == 0,
    ),
    PublishedRule(
        key="ici_expert_parallelism",
        rule="must divide the experts, and needs some",
        source="MaxText layers/moe.py",
        holds=lambda v, f: (
            _degree(v, "expert") == 1 or (f.num_experts > 0 and f.num_experts % _degree(v, "expert") == 0)
        ),
    ),
)


def check_maxtext(arguments: Sequence[str], facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the settings by key.

    Raises:
        ConfigError: A word is no setting, or MaxText would reject the values; the message cites the rule.
    """
    values: dict[str, FlagValue] = {}
    counts = (*(f"{kind}_{axis}_parallelism" for kind in ("ici", "dcn") for axis in _AXES), *_COUNTS)
    known = (*counts, BATCH, POLICY, STRATEGY)
    for word in arguments:
        key, _, text = word.partition("=")
        if key not in known:
            raise ConfigError("is no key of base.yml", value=key, nearest=did_you_mean(key, known))
        if key in values:
            raise ConfigError("is given twice", key=key)
        if key in counts and not (text.isdecimal() and int(text) > 0):
            raise ConfigError("must be a whole number of at least 1 (configs/types.py)", key=key, value=text)
        choices = {POLICY: _POLICIES, STRATEGY: _STRATEGIES}.get(key)
        if choices and text not in choices:
            raise ConfigError("is not a choice (configs/types.py)", key=key, value=text)
        if key == BATCH:
            try:
                float(text)
            except ValueError:
                raise ConfigError("must be a number (configs/types.py)", key=key, value=text) from None
        values[key] = int(text) if key in counts else text
    for key in (BATCH, "max_target_length"):
        if key not in values:
            raise ConfigError("is missing: base.yml has another (configs/base.yml)", key=key)
    check_rules(values, facts, MAXTEXT_RULES)
    return values


def said_by_maxtext(values: Values, _: Facts) -> dict[str, FlagValue]:
    """Convert the values to dimensions of a configuration."""
    strategy, ring = values.get(STRATEGY, "all_gather"), _degree(values, "context")
    sent = _degree(values, "context_usp_ulysses")
    copies, cut = _degree(values, "data"), _cut(values)
    return {
        "pp": _stages(values),
        "tp": _degree(values, "tensor") * _degree(values, "tensor_sequence"),
        "dp": cut,
        "cp": 1 if strategy == "ulysses" else ring,
        "up": ring if strategy == "ulysses" else sent,
        "vpp": int(values.get("num_pipeline_repeats", 1)),  # type: ignore[arg-type] # a count
        "ep": _degree(values, "expert"),
        "mbs": round(_micro_batch(values)) // (_parts(values) * cut),
        "recompute": {"minimal": "selective"}.get(str(values[POLICY]), str(values[POLICY])),
        "sequence_parallel": _degree(values, "tensor_sequence") > 1,
        "zero_stage": 3,
        "dp_shard": cut // copies if copies > 1 else 0,
        "global_batch_size": round(_micro_batch(values)) * int(values["gradient_accumulation_steps"]),  # type: ignore[arg-type] # a count
        "sequence_length": values["max_target_length"],
    }
