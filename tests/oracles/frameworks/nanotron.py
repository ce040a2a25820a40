"""Exported keys of nanotron's YAML file, and the rules that nanotron asserts.

Sources: nanotron config/parallelism_config.py, config/config.py (dacite is strict: it rejects unknown keys and other
types), parallel/context.py (`ParallelContext.__init__`: the product of degrees is the world size),
parallel/tensor_parallel/nn.py (shards of equal size), trainer.py (batches of a step).
"""

from __future__ import annotations

import math

from tests.oracles.frameworks.deepspeed import check_types, flattened
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

DP, PP, TP = "parallelism.dp", "parallelism.pp", "parallelism.tp"
EP, CP = "parallelism.expert_parallel_size", "parallelism.context_parallel_size"
ENGINE, MODE, ASYNC = "parallelism.pp_engine", "parallelism.tp_mode", "parallelism.tp_linear_async_communication"
RECOMPUTE = "parallelism.recompute_layer"
LENGTH, MICRO = "tokens.sequence_length", "tokens.micro_batch_size"
ACCUMULATION, STAGE = "tokens.batch_accumulation_per_replica", "optimizer.zero_stage"

NANOTRON_KEYS: dict[str, type] = {
    DP: int,
    PP: int,
    TP: int,
    EP: int,
    CP: int,
    ENGINE: str,
    MODE: str,
    ASYNC: bool,
    RECOMPUTE: bool,
    LENGTH: int,
    MICRO: int,
    ACCUMULATION: int,
    STAGE: int,
}
"""Type of each key, by its path."""

_DEGREES = "nanotron parallel/context.py ParallelContext.__init__"
_ARGS = "nanotron config/parallelism_config.py ParallelismArgs"
_TOKENS = "nanotron config/config.py TokensArgs"

NANOTRON_RULES: tuple[PublishedRule, ...] = (
    *(required(key, _ARGS) for key in (DP, PP, TP)),
    *(required(key, _TOKENS) for key in (LENGTH, MICRO, ACCUMULATION)),
    *(at_least(1, key, _DEGREES) for key in (DP, PP, TP, EP, CP)),
    *(at_least(1, key, _TOKENS) for key in (LENGTH, MICRO, ACCUMULATION)),
    PublishedRule(
        key=DP,
        rule="times pp, tp, expert_parallel_size and context_parallel_size must be the world size",
        source=_DEGREES,
        holds=lambda v, f: math.prod(number(v, key) for key in (DP, PP, TP, EP, CP)) == f.num_devices,
    ),
    PublishedRule(
        key=ENGINE,
        rule="must be afab or 1f1b",
        source="nanotron config/utils_config.py cast_str_to_pipeline_engine",
        holds=lambda v, _: v.get(ENGINE, "afab") in ("afab", "1f1b"),
    ),
    PublishedRule(
        key=MODE,
        rule="must be ALL_REDUCE or REDUCE_SCATTER",
        source="nanotron parallel/tensor_parallel/enum.py TensorParallelLinearMode",
        holds=lambda v, _: str(v.get(MODE, "ALL_REDUCE")).upper() in ("ALL_REDUCE", "REDUCE_SCATTER"),
    ),
    PublishedRule(
        key=ASYNC,
        rule="requires REDUCE_SCATTER",
        source="nanotron parallel/tensor_parallel/nn.py TensorParallelRowLinear",
        holds=lambda v, _: not v.get(ASYNC) or v.get(MODE) == "REDUCE_SCATTER",
    ),
    PublishedRule(
        key=STAGE,
        rule="must be 0 or 1",
        source="nanotron helpers.py init_optimizer_and_grad_accumulator: ZeroDistributedOptimizer is stage 1",
        holds=lambda v, _: v.get(STAGE, 0) in (0, 1),
    ),
    PublishedRule(
        key=TP,
        rule="must divide the attention heads, and divide the key-value heads or be a multiple of them",
        source="nanotron models/llama.py CausalSelfAttention",
        holds=lambda v, f: (
            f.num_heads % number(v, TP) == 0
            and (f.num_kv_heads % number(v, TP) == 0 or number(v, TP) % f.num_kv_heads == 0)
        ),
    ),
    PublishedRule(
        key=PP,
        rule="must not exceed the layers of the model",
        source="nanotron models/base.py build_model",
        holds=lambda v, f: number(v, PP) <= f.num_layers,
    ),
    PublishedRule(
        key=LENGTH,
        rule="must be divisible by tp with REDUCE_SCATTER",
        source="nanotron parallel/tensor_parallel/distributed_differentiable_primitives.py reduce_scatter_sum",
        holds=lambda v, _: v.get(MODE) != "REDUCE_SCATTER" or number(v, LENGTH) % number(v, TP) == 0,
    ),
    PublishedRule(
        key=EP,
        rule="must divide the number of experts",
        source="nanotron examples/moe",
        holds=lambda v, f: number(v, EP) == 1 or (f.num_experts > 0 and f.num_experts % number(v, EP) == 0),
    ),
)


def check_nanotron(text: str, facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the file's sections, by their path.

    Raises:
        ConfigError: the text is not a YAML mapping, or nanotron would reject it; the message cites the rule.
    """
    values = read_nanotron(text)
    check_types(values, NANOTRON_KEYS)
    check_rules(values, facts, NANOTRON_RULES)
    return values


def read_nanotron(text: str) -> dict[str, FlagValue]:
    """Return the unchecked values of the file, by their path.

    Raises:
        ConfigError: the text is not a YAML mapping.
    """
    return flattened(yaml_mapping(text))


def said_by_nanotron(values: Values, _: Facts) -> dict[str, FlagValue]:
    """Convert the file's values to dimensions of a configuration."""
    dp, mbs = number(values, DP), number(values, MICRO)
    return {
        "pp": number(values, PP),
        "tp": number(values, TP),
        "dp": dp,
        "cp": number(values, CP),
        "up": 1,
        "vpp": 1,
        "ep": number(values, EP),
        "mbs": mbs,
        "recompute": "full" if values.get(RECOMPUTE) else "none",
        "zero_stage": number(values, STAGE, 0),
        "sequence_parallel": values.get(MODE) == "REDUCE_SCATTER",
        "global_batch_size": dp * mbs * number(values, ACCUMULATION),
        "sequence_length": number(values, LENGTH),
    }
