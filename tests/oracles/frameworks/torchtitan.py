"""Readers for torchtitan's flags and for functions that set a recipe's fields, and the rules that torchtitan asserts.

Sources: torchtitan 0.3 config/configs.py (`TrainingConfig`, `ParallelismConfig`), trainer.py (`Trainer.Config` and the
batch sizes in `Trainer.__init__`), distributed/parallel_dims.py (`ParallelDims._validate`, `build_mesh`),
distributed/pipeline_parallel.py (`_get_pipeline_metadata`, `_build_pipeline_schedule`),
distributed/activation_checkpoint.py; torch/distributed/pipelining/schedules.py (`ScheduleInterleaved1F1B`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import partial

from hardware.io.errors import ConfigError, did_you_mean
from tests.oracles.frameworks.published_rules import Facts, PublishedRule, at_least, check_rules, number, required
from tuner.export.flag_table import Flag, FlagValue, Values, read_flags
from tuner.export.torchtitan_flags import (
    CONTEXT,
    CP,
    EP,
    FIRST,
    GLOBAL,
    LAST,
    LENGTH,
    LOCAL,
    MAIN_MODULES,
    MICRO,
    MODULES,
    NO_GRAPHS,
    PER_STAGE,
    POLICIES,
    POLICY,
    PP,
    REPLICATE,
    RESHARD,
    ROUNDS,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    SHARD,
    STEP_TOKENS,
    TOKENS,
    TORCHTITAN_FLAGS,
    TORCHTITAN_MAIN_FLAGS,
    TP,
    WHOLE_NORMS,
)

_DIMS = "torchtitan distributed/parallel_dims.py ParallelDims._validate"
_STAGES = "torchtitan distributed/pipeline_parallel.py"
_TRAINER = "torchtitan trainer.py Trainer"


def _parts(values: Values) -> tuple[tuple[str, ...], ...]:
    """Return the names of the modules of each part of the model, or an empty tuple if they are not given."""
    parts = values.get(MODULES)
    return tuple(tuple(str(part).split(",")) for part in parts) if isinstance(parts, tuple) else ()


def _layers_of_parts(values: Values) -> tuple[int, ...]:
    """Return the number of layers of each part."""
    return tuple(sum(module.startswith("layers.") for module in part) for part in _parts(values))


def _expected_modules(facts: Facts) -> list[str]:
    """Return the names of all modules of the model, in their order."""
    return ["tok_embeddings", *(f"layers.{at}" for at in range(facts.num_layers)), "norm", "lm_head"]


def _virtual_stages(values: Values, facts: Facts) -> int:
    """Return the number of parts of the model, as `_get_pipeline_metadata` computes it."""
    if _parts(values):
        return len(_parts(values))
    if values.get(PER_STAGE) is not None:
        counted = facts.num_layers + number(values, FIRST) + number(values, LAST)
        return -(-counted // number(values, PER_STAGE))
    return number(values, PP) * (2 if _is_interleaved(values) else 1)


def _fits_a_part(key: str, values: Values, facts: Facts) -> bool:
    """Return whether the layers that the first or last stage lacks fit into one part."""
    if _parts(values) or number(values, PP) == 1:
        return True
    counted = facts.num_layers + number(values, FIRST) + number(values, LAST)
    return number(values, key) <= counted // _virtual_stages(values, facts)


def _data_parallel(values: Values) -> int:
    """Return the data parallel degree."""
    return number(values, REPLICATE) * number(values, SHARD)


def _is_interleaved(values: Values) -> bool:
    """Return whether the schedule gives each rank several parts of the model."""
    return values.get(SCHEDULE) == "Interleaved1F1B"


def _micro_batches(values: Values) -> int:
    """Return the number of micro-batches in a local batch."""
    return number(values, LOCAL) // number(values, MICRO)


def _has_equal_rounds(values: Values, _: Facts) -> bool:
    """Return whether the micro-batches divide into rounds of equal length, as ScheduleInterleaved1F1B requires."""
    if not _is_interleaved(values) or number(values, PP) == 1:
        return True
    micro_batches = _micro_batches(values)
    return micro_batches % max(1, micro_batches // number(values, PP)) == 0


def _fits_schedule(values: Values, facts: Facts) -> bool:
    """Return whether the number of parts per rank fits the schedule."""
    each = _virtual_stages(values, facts) // number(values, PP)
    return number(values, PP) == 1 or (each >= 2) == _is_interleaved(values)


TORCHTITAN_RULES: tuple[PublishedRule, ...] = (
    *(at_least(1, key, _DIMS) for key in (REPLICATE, SHARD, TP, PP, CP, EP, MICRO, PER_STAGE, LOCAL, GLOBAL, LENGTH)),
    *(at_least(0, key, _STAGES) for key in (FIRST, LAST)),
    PublishedRule(
        key=SHARD,
        rule="dp_replicate*dp_shard*cp*tp*pp must be the world size",
        source=_DIMS,
        holds=lambda v, f: _data_parallel(v) * number(v, CP) * number(v, TP) * number(v, PP) == f.num_devices,
    ),
    PublishedRule(
        key=GLOBAL,
        rule="must be divisible by the local batch size times the data parallel degree",
        source=_TRAINER,
        holds=lambda v, _: number(v, GLOBAL) % (number(v, LOCAL) * _data_parallel(v)) == 0,
    ),
    PublishedRule(
        key=LOCAL,
        rule="must be divisible by pipeline_parallel_microbatch_size",
        source=_TRAINER,
        holds=lambda v, _: number(v, PP) == 1 or number(v, LOCAL) % number(v, MICRO) == 0,
    ),
    PublishedRule(
        key=NO_GRAPHS,
        rule="must be on with a pipeline",
        source=f"{_TRAINER}.Config",
        holds=lambda v, _: number(v, PP) == 1 or bool(v.get(NO_GRAPHS)),
    ),
    PublishedRule(
        key=LENGTH,
        rule="must be divisible by tp * 2cp",
        source="torchtitan distributed/parallel_dims.py seq_len_divisor",
        holds=lambda v, _: number(v, LENGTH) % (number(v, TP) * 2 * number(v, CP)) == 0,
    ),
    PublishedRule(
        key=TP,
        rule="must divide the attention heads and the key-value heads",
        source="torchtitan pull request 2577: DTensor shards whole heads",
        holds=lambda v, f: f.num_heads % number(v, TP) == 0 and f.num_kv_heads % number(v, TP) == 0,
    ),
    PublishedRule(
        key=WHOLE_NORMS,
        rule="excludes --parallelism.enable_sequence_parallel",
        source="torchtitan config/configs.py ParallelismConfig",
        holds=lambda v, _: not (v.get(WHOLE_NORMS) and v.get(SEQUENCE_PARALLEL)),
    ),
    PublishedRule(
        key=EP,
        rule="must divide dp_shard*cp*tp, the ranks that experts are sharded over",
        source="torchtitan distributed/parallel_dims.py ParallelDims.build_mesh",
        holds=lambda v, _: number(v, SHARD) * number(v, CP) * number(v, TP) % number(v, EP) == 0,
    ),
    PublishedRule(
        key=EP,
        rule="must divide the number of experts",
        source="torchtitan distributed/expert_parallel: experts are sharded into equal parts",
        holds=lambda v, f: number(v, EP) == 1 or (f.num_experts > 0 and f.num_experts % number(v, EP) == 0),
    ),
    PublishedRule(
        key=PP,
        rule="must divide the number of parts of the model",
        source=f"{_STAGES} _get_pipeline_metadata",
        holds=lambda v, f: number(v, PP) == 1 or _virtual_stages(v, f) % number(v, PP) == 0,
    ),
    *(
        PublishedRule(
            key=key,
            rule="must not exceed the layers of a part, including embedding and head",
            source=f"{_STAGES} _generate_llm_fqn_per_model_part",
            holds=partial(_fits_a_part, key),
        )
        for key in (FIRST, LAST)
    ),
    PublishedRule(
        key=SCHEDULE,
        rule="needs one part on each rank for 1F1B, and at least two for Interleaved1F1B",
        source=f"{_STAGES} _get_pipeline_metadata",
        holds=_fits_schedule,
    ),
    PublishedRule(
        key=MODULES,
        rule="must name each module of the model once, in order",
        source=f"{_STAGES} _split_module",
        holds=lambda v, f: not _parts(v) or [name for part in _parts(v) for name in part] == _expected_modules(f),
    ),
    PublishedRule(
        key=LOCAL,
        rule="must contain a number of micro-batches that divides into rounds of equal length",
        source="torch/distributed/pipelining/schedules.py ScheduleInterleaved1F1B",
        holds=_has_equal_rounds,
    ),
    PublishedRule(
        key=LOCAL,
        rule="must contain at least as many micro-batches as there are stages",
        source="torch/distributed/pipelining/schedules.py Schedule1F1B",
        holds=lambda v, _: number(v, PP) == 1 or _is_interleaved(v) or _micro_batches(v) >= number(v, PP),
    ),
)


_MAIN = "torchtitan config/training.py TrainingConfig"

TORCHTITAN_MAIN_RULES: tuple[PublishedRule, ...] = (
    *(required(key, _MAIN) for key in (TOKENS, STEP_TOKENS, CONTEXT)),
    *(at_least(1, key, f"{_MAIN}.__post_init__") for key in (TOKENS, STEP_TOKENS, CONTEXT)),
    *(at_least(1, key, _DIMS) for key in (TP, PP, REPLICATE, SHARD, EP, ROUNDS)),
    PublishedRule(
        key=TOKENS,
        rule="must be a multiple of max_context_length, so that micro-batches are whole sequences",
        source="assumed: Meshtune plans whole sequences",
        holds=lambda v, _: number(v, TOKENS) % number(v, CONTEXT) == 0,
    ),
    PublishedRule(
        key=STEP_TOKENS,
        rule="must be divisible by the tokens of an accumulation step on all data parallel ranks",
        source="torchtitan trainer.py Trainer.__init__",
        holds=lambda v, _: (
            number(v, STEP_TOKENS)
            % (number(v, TOKENS) * (number(v, ROUNDS) if number(v, PP) > 1 else 1) * _data_parallel(v))
            == 0
        ),
    ),
    PublishedRule(
        key=MAIN_MODULES,
        rule="excludes pipeline_parallel_layers_per_stage",
        source="torchtitan config/parallelism.py ParallelismConfig.__post_init__",
        holds=lambda v, _: MAIN_MODULES not in v or PER_STAGE not in v,
    ),
    PublishedRule(
        key=EP,
        rule="must be at least tp for a model with experts",
        source="torchtitan config/validation.py validate_model_training_config",
        holds=lambda v, f: f.num_experts == 0 or number(v, EP) >= number(v, TP),
    ),
)


def check_torchtitan(arguments: Sequence[str], facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the flags and the policy of the subcommand.

    Raises:
        ConfigError: torchtitan would reject the arguments; the message cites the rule.
    """
    values = _read(arguments, TORCHTITAN_FLAGS)
    check_rules(values, facts, TORCHTITAN_RULES)
    return values


def check_torchtitan_main(text: str, facts: Facts) -> dict[str, FlagValue]:
    """Return the values that a function sets in a recipe of the main branch, by flags in 0.3's form, and the policy.

    Raises:
        ConfigError: the text is no such function, or torchtitan would reject its values; the message cites the rule.
    """
    values = _read(_as_arguments(text), TORCHTITAN_MAIN_FLAGS)
    check_rules(values, facts, TORCHTITAN_MAIN_RULES)
    check_rules(_as_released(values), facts, TORCHTITAN_RULES)
    return values


def _as_arguments(text: str) -> list[str]:
    """Return the fields that `parallelise` replaces as arguments in the form of 0.3, with the policy as the last.

    Raises:
        ConfigError: the text is not Python, or has no such function.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"is not Python: {error}") from error
    calls = {call.arg: call.value for call in ast.walk(tree) if isinstance(call, ast.keyword)}
    policy = calls.get("activation_checkpoint")
    words: list[str] = []
    for section in ("training", "parallelism"):
        replaced = calls.get(section)
        if not isinstance(replaced, ast.Call) or policy is None:
            raise ConfigError("is not replaced by the function", key=section)
        for keyword in replaced.keywords:
            words += _as_words(f"--{section}.", str(keyword.arg), ast.literal_eval(keyword.value))
    name = policy.func if isinstance(policy, ast.Call) else None
    owner = name.value.id if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) else "none"
    return [*words, f"{POLICY}:{owner.removesuffix('AC').lower()}"]


def _as_words(prefix: str, name: str, value: object) -> list[str]:
    """Return a field as a flag with its values; None, which is a recipe's own default, has no words."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"{prefix}{'' if value else 'no_'}{name}"]
    if isinstance(value, list):
        return [f"{prefix}{name}", *(",".join(part) for part in value)]
    return [f"{prefix}{name}", str(value)]


def said_by_torchtitan_main(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the main branch's values to dimensions of a configuration."""
    return said_by_torchtitan(_as_released(values), facts)


def _as_released(values: Values) -> dict[str, FlagValue]:
    """Convert the main branch's values to those of 0.3, with batches in sequences."""
    length, mbs = number(values, CONTEXT), number(values, TOKENS) // number(values, CONTEXT)
    is_pipeline = number(values, PP) > 1
    converted = {flag: value for flag, value in values.items() if flag in TORCHTITAN_FLAGS or flag == POLICY}
    converted |= {
        LENGTH: length,
        LOCAL: mbs * (number(values, ROUNDS) if is_pipeline else 1),
        GLOBAL: number(values, STEP_TOKENS) // length,
    }
    if is_pipeline:
        converted[MICRO] = mbs
    if MAIN_MODULES in values:
        converted[MODULES] = values[MAIN_MODULES]
    return converted


def _read(arguments: Sequence[str], table: Mapping[str, Flag]) -> dict[str, FlagValue]:
    """Return the values of the flags, and the policy of the subcommand, which must be last."""
    policy: str | None = None
    if arguments and arguments[-1].startswith(f"{POLICY}:"):
        policy = arguments[-1].partition(":")[2]
        arguments = arguments[:-1]
        if policy not in POLICIES:
            raise ConfigError("is not a policy", key=POLICY, value=policy, nearest=did_you_mean(policy, POLICIES))
    if any(word.startswith(f"{POLICY}:") for word in arguments):
        raise ConfigError("is a subcommand, which must be last", key=POLICY)
    values = read_flags(arguments, table)
    if policy is not None:
        values[POLICY] = policy
    return values


def said_by_torchtitan(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the values to dimensions of a configuration; `layers` are those of an uneven pipeline."""
    pp, shard = number(values, PP), number(values, SHARD)
    dp = _data_parallel(values)
    stage = 0
    if shard > 1 or RESHARD in values:
        stage = 3 if values.get(RESHARD) == "always" else 2
    return {
        "pp": pp,
        "tp": number(values, TP),
        "dp": dp,
        "cp": number(values, CP),
        "up": 1,
        "vpp": _virtual_stages(values, facts) // pp if pp > 1 else 1,
        "ep": number(values, EP),
        "mbs": number(values, MICRO) if pp > 1 else number(values, LOCAL),
        "recompute": values.get(POLICY),
        "zero_stage": stage,
        "sequence_parallel": not values.get(WHOLE_NORMS),
        "expert_tp": 0,
        "dp_shard": shard if stage and shard != dp else 0,
        "layers": _layers_of_parts(values) or None,
        "global_batch_size": number(values, GLOBAL),
        "sequence_length": number(values, LENGTH),
    }
