"""Importer for Megatron-Bridge: scripts that run a recipe with overrides, recipes in Python, and their YAML.

Nothing is run: a recipe's Python is read as text. A second file beside a script, the Python or the `to_yaml` of its
recipe, states what no override does; overrides replace its values. What none of them states is left open.

Sources: Megatron-Bridge 0.6 (main of August 2026) scripts/training/run_recipe.py (options and overrides),
scripts/performance/argument_parser.py, training/utils/omegaconf_utils.py, recipes/common.py (bf16, and the distributed
optimizer, in every recipe).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.export.bridge import BRIDGE
from tuner.imports.bash.script import Script, read_script
from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.megatron import launched_devices
from tuner.imports.model_names import catalog_model
from tuner.imports.settings.bridge_container import fp8_recipe_of, import_container
from tuner.imports.settings.command import command_with_settings
from tuner.imports.settings.megatron_keys import effects_of, with_open
from tuner.imports.settings.python_recipe import Recipe, functions_of, merged_recipe, read_recipe
from tuner.imports.settings.words import Item, known_values, merged, overrides_among, unknown_values
from tuner.imports.torchrun import Launch, launch_of

OPTIONS = {
    option: keys
    for options, keys in (
        (("-tp", "--tensor_model_parallel_size"), ("model.tensor_model_parallel_size",)),
        (("-pp", "--pipeline_model_parallel_size"), ("model.pipeline_model_parallel_size",)),
        (("-cp", "--context_parallel_size"), ("model.context_parallel_size",)),
        (("-vp", "--virtual_pipeline_model_parallel_size"), ("model.virtual_pipeline_model_parallel_size",)),
        (("-ep", "--expert_model_parallel_size"), ("model.expert_model_parallel_size",)),
        (("-etp", "-et", "--expert_tensor_parallel_size"), ("model.expert_tensor_parallel_size",)),
        (("-mb", "--micro_batch_size"), ("train.micro_batch_size",)),
        (("-gb", "--global_batch_size"), ("train.global_batch_size",)),
        (("-sl", "--seq_length"), ("dataset.seq_length", "model.seq_length")),
    )
    for option in options
}
"""Options of its scripts that set keys, by their short and long names."""

_PROGRAMS = ("run_recipe.py", "run_script.py", "setup_experiment.py")
_SUBMITS = "setup_experiment.py"
_SECTIONS = ("model", "train", "ddp", "optimizer", "dataset", "checkpoint", "logger", "mixed_precision", "peft")
_NAMES = ("--recipe", "--model", "--recipe_name", "--model_recipe_name", "-mr", "-m")
_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""Mixed precision of each --compute_dtype (scripts/performance/utils/precision.py, perf_recipes/_common.py)."""
_TUNES_FEW = re.compile(r"(^|[_-])(lora|dora|peft|canonical_lora)([_-]|$)")
_FLAG_OF = {key: flag for flag, keys in BRIDGE.keys.items() for key in keys}
_LEFT_OUT = (
    *("checkpoint.save", "checkpoint.save_interval", "checkpoint.load", "checkpoint.async_save", "profiling."),
    *("logger.tensorboard_dir", "logger.wandb_", "logger.mlflow_", "logger.comet_"),
)
"""Keys that a trial must not have, or beginnings of them."""
_INTERVAL = "logger.log_interval"
_HARMLESS = (
    *("train.", "dataset.", "checkpoint.", "logger.", "scheduler.", "validation.", "rng.", "tokenizer.", "profiling."),
    *("dist.", "rerun_state_machine.", "straggler.", "ft.", "nvrx_straggler.", "inprocess_restart.", "tensor_inspect."),
    *("mixed_precision", "mixed_precision.", "comm_overlap.", "env_vars.", "optimizer.lr", "optimizer.min_lr"),
    *("optimizer.weight_decay", "optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps"),
    *("optimizer.clip_grad", "ddp.check_for_nan_in_grad", "ddp.average_in_collective", "model.attention_dropout"),
    *("model.hidden_dropout", "model.apply_rope_fusion", "model.cross_entropy_loss_fusion", "model.init_method_std"),
    *("model.cross_entropy_fusion_impl", "model.rotary_percent", "model.variable_seq_lengths"),
)
"""Keys and sections that change nothing that a study has, or that are read elsewhere."""


def import_bridge(text: str, *, file: str = "") -> Imported:
    """Read a script or a YAML file.

    Args:
        text: Text of either.
        file: YAML of the recipe's configuration beside a script, or empty.

    Raises:
        ConfigError: The text is neither, it trains few of the weights, or a value is invalid.
    """
    if (loaded := _container(text)) is not None:
        return _described(loaded, {}, {}, "the file")
    if (functions := functions_of(text)) is not None:
        return _of_python(read_recipe(functions, _only_recipe(functions)), {}, {}, _only_recipe(functions))
    script = read_script(text)
    launch, items = _training_command(script)
    recipe, mode = _recipe_of(items)
    if _TUNES_FEW.search(recipe) or _TUNES_FEW.search(mode):
        raise ConfigError("is not supported: few of the weights are trained", key="--recipe", value=recipe or mode)
    values, unknown = known_values(items), unknown_values(items)
    options = _options(items)
    precision = _PRECISIONS.get(options.get("--compute_dtype") or options.get("-c") or "")
    values = {**({"mixed_precision": precision} if precision else {}), **values}
    described = _with_file(file, values, unknown, recipe or "its recipe")
    left: list[Unread] = []
    hosts, devices_per_host = launched_devices(text, launch, left)
    submits = launch.name == _SUBMITS
    if submits:
        hosts, devices_per_host = _submitted_devices(items)
    return replace(
        described,
        hosts=hosts,
        devices_per_host=devices_per_host,
        command=_command(launch, script, items),
        unread=(*described.unread, *left),
    )


def _with_file(file: str, values: Mapping[str, Any], unknown: Mapping[str, str], recipe: str) -> Imported:
    """Return what a command says over the file beside it: the YAML or the Python of its recipe.

    Raises:
        ConfigError: The file is neither, or has no such recipe.
    """
    base = _container(file) if file else {}
    if base is not None:
        return _described(base, values, unknown, recipe)
    if (functions := functions_of(file)) is not None:
        return _of_python(read_recipe(functions, recipe), values, unknown, recipe)
    raise ConfigError(
        "the second file is no YAML of a ConfigContainer, which `cfg.to_yaml(path)` writes, and no Python with recipes"
    )


def _only_recipe(functions: Mapping[str, Any]) -> str:
    """Return the name of the recipe of a Python file, or `main` of a program that changes one and trains.

    Raises:
        ConfigError: The file has several recipes, or none.
    """
    recipes = [name for name in functions if name.endswith("_config") and not name.startswith("_")]
    if len(recipes) == 1 or (not recipes and "main" in functions):
        return recipes[0] if recipes else "main"
    raise ConfigError(
        f"has {len(recipes)} recipes, and no command says which one runs",
        nearest="--from-bridge SCRIPT --from-bridge FILE, where SCRIPT has --recipe NAME"
        + (f", such as {recipes[0]}" if recipes else ""),
    )


def _of_python(recipe: Recipe, values: Mapping[str, Any], unknown: Mapping[str, str], name: str) -> Imported:
    """Return what a recipe's Python says, with overrides over it."""
    others = set(recipe.others)
    if others and others <= _COMMON.keys():
        kind = next((one for one in recipe.others if _COMMON[one]), "")
        recipe = replace(recipe, values={**_UNSET, **_COMMON.get(kind, {}), **recipe.values})
    whole = merged_recipe(recipe, values, unknown)
    if _TUNES_FEW.search(name):
        raise ConfigError("is not supported: few of the weights are trained", key="recipe", value=name)
    found = _described(merged({}, whole.values), values, whole.unknown, name, weights=recipe.weights)
    told = [
        Unread(what=f"{one}()", why="may set further fields; it stands in another file, which is not read")
        for one in dict.fromkeys(recipe.others)
        if one not in _COMMON
    ]
    return replace(found, unread=(*found.unread, *told))


def _container(text: str) -> dict[str, Any] | None:
    """Return the mapping of a YAML file with sections of a ConfigContainer; None for any other text."""
    try:
        loaded = parse_yaml(text)
    except ConfigError:
        return None
    is_one = isinstance(loaded, dict) and any(isinstance(loaded.get(name), dict) for name in ("model", "train"))
    return loaded if is_one else None


def _training_command(script: Script) -> tuple[Launch, list[Item]]:
    """Return the command that runs a recipe, with its words.

    Raises:
        ConfigError: No command runs one.
    """
    found = []
    for command in script.commands:
        launch = launch_of(command)
        if launch is None:
            continue
        items = overrides_among(launch.training, OPTIONS)
        settings = sum(key.partition(".")[0] in _SECTIONS and "." in key for item in items for key in item.keys)
        if settings or launch.name in _PROGRAMS:
            found.append((launch.name in _PROGRAMS, settings, launch, items))
    if not found:
        raise ConfigError(
            "starts no recipe of Megatron-Bridge: no command has run_recipe.py or overrides such as "
            "model.tensor_model_parallel_size=2",
            nearest="the YAML of the recipe's configuration, which `cfg.to_yaml(path)` writes, or `meshtune init "
            "--capture -- bash SCRIPT`, which finds the command that a script starts",
        )
    best = max(found, key=lambda one: one[:2])
    return best[2], best[3]


def _recipe_of(items: Sequence[Item]) -> tuple[str, str]:
    """Return the name of the recipe and the mode of training, as far as options state them."""
    options = _options(items)
    names = [options[name] for name in _NAMES if options.get(name)]
    if {"-m", "-mr"} <= options.keys():
        names = [options["-mr"]]
    task = options.get("--mode") or options.get("--task") or ""
    return (names[0] if names else ""), task


def _options(items: Sequence[Item]) -> dict[str, str]:
    """Return the words behind options that set no key."""
    words = [word for item in items if not item.keys for word in item.words]
    found = {}
    for word, behind in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.text.partition("=")
        if word.text.startswith("-"):
            known = "" if behind is None or behind.unknown else behind.text
            found[name] = value if equals else known
    return found


def _submitted_devices(items: Sequence[Item]) -> tuple[int | None, int | None]:
    """Return the hosts and devices of each that setup_experiment.py asks for; 8 of each host by default."""
    options = _options(items)

    def number(*names: str) -> int | None:
        text = next((options[name] for name in names if name in options), "")
        return int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text) else None

    devices, per_host = number("-ng", "--num_gpus"), number("-gn", "--gpus_per_node")
    in_host = per_host or (4 if options.get("-g", options.get("--gpu", "")).startswith("gb") else 8)
    if devices is None:
        return None, per_host
    return (devices // in_host, in_host) if devices >= in_host else (1, devices)


def _described(
    base: Mapping[str, Any], values: Mapping[str, Any], unknown: Mapping[str, str], recipe: str, weights: str = ""
) -> Imported:
    """Return what a configuration and the overrides over it say.

    Args:
        base: Configuration; empty if it is not known.
        values: Known overrides by key.
        unknown: Reasons for overrides whose values are unknown, by key.
        recipe: Name of the recipe.
        weights: Name of the weights whose model it has, if its Python names them.
    """
    whole = merged(base, values)
    if not isinstance(whole.get("model"), dict):
        whole["model"] = {}
    imported = import_container(whole)
    told, doubts = effects_of(values, _FLAG_OF, _HARMLESS, imported.job)
    told = [Unread(what=one.what, why=one.why) for one in (*imported.unread, *told)]
    found = replace(
        imported, framework="bridge", unread=tuple(told), doubts=(*imported.doubts, *doubts), notes=(), command=None
    )
    if {"num_layers", "hidden_size", "num_attention_heads"} <= whole["model"].keys():
        reasons = {key: why for key, why in unknown.items() if key in _FLAG_OF}
        return _without(found, reasons)
    stated = {_FLAG_OF[key] for key in _keys_in(whole) if key in _FLAG_OF and key not in unknown}
    why = (
        f"no override states it, and the recipe {recipe} is not read: its Python or YAML may be a second --from-bridge"
    )
    keys = set(_keys_in(whole))
    model = "" if keys & _SIZES else catalog_model(weights or recipe)
    job, facts = dict(found.job), dict(found.facts)
    if not keys & _SHARDING:
        job["zero_stage"] = 1  # recipes/common.py
    mixed = whole.get("mixed_precision")
    if not isinstance(mixed, str) and not (isinstance(mixed, dict) and {"bf16", "fp16"} & mixed.keys()):
        job["precision"] = "nvfp4" if "nvfp4" in recipe else "fp8" if "fp8" in recipe else "bf16"
        facts |= {"fp8_recipe": scaling} if (scaling := fp8_recipe_of(recipe)) else {}
    reasons = {_FLAG_OF[key]: why for key, why in unknown.items() if key in _FLAG_OF}
    return with_open(replace(found, model_name=model, job=job, facts=facts), stated, why, reasons)


_UNSET: Mapping[str, Any] = {
    **dict.fromkeys(("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"), 1),
    **dict.fromkeys(("model.context_parallel_size", "model.expert_model_parallel_size"), 1),
    "model.virtual_pipeline_model_parallel_size": None,
    "model.sequence_parallel": False,
    "model.recompute_granularity": None,
}
"""Fields of a model that no recipe has set (megatron-core model_parallel_config.py, transformer_config.py)."""
_COMMON: Mapping[str, Mapping[str, Any]] = {
    "_pretrain_common": {"train.global_batch_size": 32, "train.micro_batch_size": 2, "dataset.seq_length": 4096},
    "_sft_common": {"train.global_batch_size": 128, "train.micro_batch_size": 1, "dataset.seq_length": 2048},
    "_benchmark_common": {},
    "_llama_benchmark_common": {},
    "_enable_overlap_param_gather_with_optimizer_step": {},
    "pretrain": {},
    "finetune": {},
}
"""Functions that recipes share, which set no degree, with what they set of the batch.

Source: Megatron-Bridge 0.6 recipes/common.py, perf_recipes/_common.py, perf_recipes/llama/common.py.
"""
_SHARDING = frozenset({"ddp.use_distributed_optimizer", "ddp.use_megatron_fsdp", "optimizer.use_distributed_optimizer"})
_SIZES = frozenset(f"model.{name}" for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_moe_experts"))
"""Keys that make another model of the recipe's."""


def _without(imported: Imported, unknown: Mapping[str, str]) -> Imported:
    """Return a whole configuration with what overrides with unknown values state left open."""
    flags = {_FLAG_OF[key]: why for key, why in unknown.items()}
    opened = with_open(imported, [flag for flag in _FLAG_OF.values() if flag not in flags], "", flags)
    return replace(opened, model=imported.model, missing=imported.missing)


def _keys_in(mapping: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings."""
    for name, value in mapping.items():
        yield f"{path}{name}"
        if isinstance(value, Mapping):
            yield from _keys_in(value, f"{path}{name}.")


def _command(launch: Launch, script: Script, items: Sequence[Item]) -> LaunchCommand:
    """Return the command of a trial."""
    submits = (f"{_SUBMITS} submits a job and does not wait for its steps; a trial runs run_script.py in the job",)
    return command_with_settings(
        launch,
        script,
        items,
        framework="bridge",
        leaves=lambda key: key.startswith(_LEFT_OUT),
        sets={_INTERVAL: (f"{_INTERVAL}=1",)},
        unknown=submits if launch.name == _SUBMITS else (),
    )
