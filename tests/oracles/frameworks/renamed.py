"""Exported settings of programs that run megatron-core, turned back into flags and checked by Megatron-LM's rules.

Sources: Megatron-Bridge training/config.py (`ConfigContainer`: sections and fields), training/utils/omegaconf_utils.py
(grammar of overrides); ms-swift swift/megatron/arguments/megatron_args.py (names, switches with values); verl
trainer/config/engine/megatron.yaml, actor/actor.yaml; Hydra grammar/OverrideLexer.g4 (quoted values, lists).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from hardware.io.errors import ConfigError, did_you_mean
from tests.oracles.frameworks.megatron import MEGATRON_RULES, said_by_megatron
from tests.oracles.frameworks.published_rules import Facts, check_rules
from tuner.export.flag_table import FlagValue, Values, read_flags
from tuner.export.megatron_flags import MEGATRON_FLAGS

_OF_MODEL = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "sequence_parallel": "--sequence-parallel",
}
_OF_LAYERS = {
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "cp_comm_type": "--cp-comm-type",
    "recompute_granularity": "--recompute-granularity",
    "recompute_modules": "--recompute-modules",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
}
_UNEVEN = {
    "num_layers_in_first_pipeline_stage": "",
    "num_layers_in_last_pipeline_stage": "",
    "account_for_embedding_in_pipeline_split": "",
    "account_for_loss_in_pipeline_split": "",
}
"""Fields that a layout excludes (megatron-core transformer_config.py), so that exports turn them off."""
_LEVELS = {"hierarchical_context_parallel_sizes": "--hierarchical-context-parallel-sizes"}
_OF_OPTIMIZER = {
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "optimizer_offload_fraction": "--optimizer-offload-fraction",
    "overlap_cpu_optimizer_d2h_h2d": "--overlap-cpu-optimizer-d2h-h2d",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
}
_OF_DDP = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "data_parallel_sharding_strategy": "--data-parallel-sharding-strategy",
}


DERIVED = 2**16 * 3 * 5 * 7
"""Sequence length of a program that derives it from its data: one that every degree divides."""


def _under(prefix: str, *tables: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}{name}": flag for table in tables for name, flag in table.items()}


_ENGINE = "actor_rollout_ref.actor.megatron."
KEYS: dict[str, dict[str, str]] = {
    "bridge": {
        **_under("model.", _OF_MODEL, _OF_LAYERS, _LEVELS, _UNEVEN),
        **_under("optimizer.", _OF_OPTIMIZER),
        **_under("ddp.", _OF_DDP),
        "ddp.use_distributed_optimizer": "--use-distributed-optimizer",
        "optimizer.use_distributed_optimizer": "--use-distributed-optimizer",
        "ddp.num_distributed_optimizer_instances": "--num-distributed-optimizer-instances",
        "ddp.outer_dp_sharding_strategy": "--outer-dp-sharding-strategy",
        "checkpoint.ckpt_format": "--ckpt-format",
        "dist.use_torch_fsdp2": "--use-torch-fsdp2",
        "model.gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
        "model.seq_length": "--seq-length",
        "dataset.seq_length": "--seq-length",
        "train.micro_batch_size": "--micro-batch-size",
        "train.global_batch_size": "--global-batch-size",
    },
    "swift": {
        **_under("", _OF_MODEL, _OF_LAYERS, _OF_DDP),
        "account_for_embedding_in_pipeline_split": "",
        "account_for_loss_in_pipeline_split": "",
        **{name: flag for name, flag in _OF_OPTIMIZER.items() if "overlap" not in name},
        "use_distributed_optimizer": "--use-distributed-optimizer",
        "max_length": "--seq-length",
        "micro_batch_size": "--micro-batch-size",
        "global_batch_size": "--global-batch-size",
    },
    "verl": {
        **_under(_ENGINE, _OF_MODEL),
        f"{_ENGINE}use_distributed_optimizer": "--use-distributed-optimizer",
        **_under(f"{_ENGINE}override_transformer_config.", _OF_LAYERS, _LEVELS, _UNEVEN),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "--micro-batch-size",
    },
}
"""Flag of Megatron-LM for each key of each program."""


def arguments_back(program: str, arguments: Sequence[str], *, batch: int = 0, sequence: int = 0) -> list[str]:
    """Return the flags of Megatron-LM that a program's settings mean, with what these exports leave to the program.

    Args:
        program: Name of the export's target.
        arguments: Words of the export.
        batch: Global batch in sequences, where the program derives it from other settings.
        sequence: Sequence length, likewise.

    Raises:
        ConfigError: A word is no setting of the program.
    """
    table = KEYS[program]
    given: dict[str, list[str]] = {}
    for key, value in _SETTINGS[program](arguments):
        if key not in table:
            raise ConfigError("is no setting of the program (.py)", value=key, nearest=did_you_mean(key, table))
        flag = table[key]
        is_off = value in (["null"], ["none"], ["None"], ["False"], ["false"])
        if not flag:
            if not is_off:
                raise ConfigError("excludes a layout (transformer_config.py)", key=key, value=" ".join(value))
            continue
        if flag == "--no-gradient-accumulation-fusion":
            is_off = not is_off
        is_switch = MEGATRON_FLAGS[flag].kind == "switch"
        words = None if is_off else [] if is_switch else value
        if flag in given and words is not None and given[flag] != words:
            raise ConfigError("is set twice, to different values", key=key, value=" ".join(value))
        if words is not None:
            given[flag] = words
    if "--use-megatron-fsdp" not in given:
        given.pop("--data-parallel-sharding-strategy", None)  # without effect
    if given.get("--num-distributed-optimizer-instances") == ["1"]:
        del given["--num-distributed-optimizer-instances"]
    if given.get("--ckpt-format") == ["torch_dist"]:
        del given["--ckpt-format"]
    given.setdefault("--bf16", [])
    given.setdefault("--optimizer", ["adam"])
    if batch:
        given |= {"--global-batch-size": [str(batch)], "--seq-length": [str(sequence)]}
    if program == "swift" and "--use-megatron-fsdp" in given:  # it sets both by itself
        given |= {"--no-gradient-accumulation-fusion": [], "--ckpt-format": ["fsdp_dtensor"]}
    return [word for flag, words in given.items() for word in (flag, *words)]


def _hydra(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings of overrides `key=value`."""
    for word in arguments:
        key, _, value = word.lstrip("+").partition("=")
        if match := re.fullmatch(r"\[(.*)\]", value):
            yield key, [one.strip("'") for one in match[1].split(",")]
        else:
            yield key, [value.strip("'")]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings of options `--key value...`."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--"):
            found.append((word.removeprefix("--"), []))
        elif found:
            found[-1][1].append(word)
    yield from found


_SETTINGS: dict[str, Callable[[Sequence[str]], Iterator[tuple[str, list[str]]]]] = {
    "bridge": _hydra,
    "verl": _hydra,
    "swift": _options,
}


def check_renamed(program: str, arguments: Sequence[str], facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the settings by Megatron-LM's flags.

    Raises:
        ConfigError: A word is no setting of the program, or megatron-core would reject the values.
    """
    values = read_flags(arguments_back(program, arguments), MEGATRON_FLAGS)
    if program == "verl":  # both follow from the data and the mini-batch
        values |= {"--global-batch-size": facts.num_devices * 840, "--seq-length": DERIVED}
    check_rules(values, facts, MEGATRON_RULES)
    return values


def said_by_renamed(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the values to dimensions of a configuration, but for the batch where a program derives it."""
    said = said_by_megatron(values, facts)
    for name in ("global_batch_size", "sequence_length") if values.get("--seq-length") == DERIVED else ():
        del said[name]
    return said
