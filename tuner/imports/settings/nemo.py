"""Importer for NeMo: commands `nemo llm pretrain`, and YAML files of NeMo 2 and NeMo 1.

NeMo 2's recipe is a factory in Python and is not run here: what no override and no file states is left open. A second
file states the rest: the YAML that `nemo llm pretrain --to-yaml` writes, or the `io.yaml` of a checkpoint. NeMo 1 has
one YAML file, and overrides over it.

Sources: NeMo 2.7 collections/llm/api.py and recipes/*.py (places of strategy, data and model in a recipe), nemo_run
cli/api.py and config.py (factories, `key=value`, YAML with `_target_`); NeMo 1.23
examples/nlp/language_modeling/megatron_gpt_pretraining.py and conf/megatron_gpt_config.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.export.nemo import FIELDS
from tuner.imports.bash.script import Command, Script, read_script
from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.keys import Keys
from tuner.imports.megatron import import_flags, launched_devices
from tuner.imports.model_names import catalog_model
from tuner.imports.settings.command import command_with_settings
from tuner.imports.settings.megatron_keys import effects_of, flags_from, with_open
from tuner.imports.settings.nemo_container import import_nemo_1
from tuner.imports.settings.words import Item, known_values, merged, overrides_among, unknown_values
from tuner.imports.torchrun import Launch, launch_of

_FLAG_OF = {path: flag for flag, path in FIELDS.items()} | {
    # a recipe's model takes some of the strategy's fields too
    f"model.config.{path.rpartition('.')[2]}": flag
    for flag, path in FIELDS.items()
}
_FLAG_OF |= {path: flag for flag, path in FIELDS.items()}
_HARMLESS = (
    *("data.", "log.", "resume.", "trainer.max_steps", "trainer.val_check_interval", "trainer.limit_val_batches"),
    *("trainer.limit_test_batches", "trainer.log_every_n_steps", "trainer.num_nodes", "trainer.devices", "tokenizer."),
    *("trainer.callbacks", "trainer.accumulate_grad_batches", "optim.lr_scheduler", "optim.config.lr", "executor"),
    *("run.", "trainer.plugins", "trainer.accelerator", "model.tokenizer", "trainer.use_distributed_sampler"),
)
_LEFT_OUT = ("log.", "resume.", "trainer.enable_checkpointing")
_EVERY_STEP = "trainer.log_every_n_steps"
_FIRST = "trials would need fields of NeMo 2, which NeMo 1 has not"
_NO_DTYPE = (
    "the command line of NeMo 2 reads no torch.dtype, and a pipeline needs trainer.strategy.pipeline_dtype; put the "
    "fields of `meshtune export --to nemo` into the recipe"
)
_CLASS = re.compile(r"\.([A-Za-z0-9]+?)Config(?:V?[0-9]+)?([0-9x]+[BM])?(?:\.|$)")


def import_nemo(text: str, *, file: str = "") -> Imported:
    """Read a script with a command of NeMo, or a YAML file.

    Args:
        text: Text of either.
        file: YAML of the recipe, or of NeMo 1's configuration, beside a script, or empty.

    Raises:
        ConfigError: The text is neither, it trains few of the weights, or a value is invalid.
    """
    if (loaded := _yaml(text)) is not None:
        return _of_file(loaded, {}, {}, "the file")
    base = _yaml(file) if file else {}
    if base is None:
        raise ConfigError("the second file is no YAML of NeMo, with the sections model and trainer")
    script = read_script(text)
    launch, items, is_first = _training_command(script)
    values, unknown = known_values(items), unknown_values(items)
    if is_first and not base:
        raise ConfigError(
            "runs megatron_gpt_pretraining.py, whose configuration stands in a YAML file",
            nearest="--from-nemo SCRIPT --from-nemo conf/megatron_gpt_config.yaml",
        )
    recipe = _recipe_of(items, launch)
    described = _of_file(base, values, unknown, recipe or "its recipe")
    command = _command(launch, script, items, is_first=is_first)
    if described.hosts is not None:
        return replace(described, command=command)
    left: list[Unread] = []
    hosts, devices_per_host = launched_devices(text, launch, left)
    return replace(described, hosts=hosts, devices_per_host=devices_per_host, command=command)


def _yaml(text: str) -> dict[str, Any] | None:
    """Return the mapping of a YAML file with sections of NeMo; None for any other text."""
    try:
        loaded = parse_yaml(text)
    except ConfigError:
        return None
    if not isinstance(loaded, dict):
        return None
    return (
        loaded if {"model", "trainer"} & {name for name, value in loaded.items() if isinstance(value, dict)} else None
    )


def _training_command(script: Script) -> tuple[Launch, list[Item], bool]:
    """Return the command that trains, with its words, and whether it is NeMo 1's.

    Raises:
        ConfigError: No command trains with NeMo.
    """
    for command in script.commands:
        texts = [word.text.rpartition("/")[2] for word in command.words]
        for at in range(len(texts) - 2):
            if texts[at] == "nemo" and texts[at + 1] == "llm" and texts[at + 2] in ("pretrain", "finetune"):
                return _nemo_launch(command, at), overrides_among(command.words[at + 3 :], {}), False
        launch = launch_of(command)
        if launch is not None and launch.name.startswith("megatron_gpt_") and "pretraining" in launch.name:
            return launch, overrides_among(launch.training, {}), True
        if launch is not None and any(word.text.startswith("trainer.strategy.") for word in launch.training):
            return launch, overrides_among(launch.training, {}), False
    raise ConfigError(
        "has no command of NeMo, such as `nemo llm pretrain --factory llama3_8b`",
        nearest="the YAML of the recipe, which `nemo llm pretrain ... --to-yaml FILE` writes, or a script's command by "
        "`meshtune init --capture -- bash SCRIPT`",
    )


def _nemo_launch(command: Command, at: int) -> Launch:
    words = command.words
    return Launch(
        outer=(*command.outer, *words[:at]),
        launcher=(),
        launcher_words=(),
        program=words[at : at + 3],
        training=words[at + 3 :],
        own=command.own,
    )


def _recipe_of(items: Sequence[Item], launch: Launch) -> str:
    """Return the name of the factory, or of the model's factory.

    Raises:
        ConfigError: It trains few of the weights.
    """
    found = ""
    words = [word.text for item in items for word in item.words]
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in ("--factory", "-f"):
            found = value if equals else behind
        elif name == "model" and equals and not found:
            found = value
        elif name.startswith("peft") and value not in ("None", "none"):
            raise ConfigError("is not supported: few of the weights are trained", key="peft", value=value)
    if launch.program[-1].text == "finetune" and not any(word.startswith("peft=") for word in words):
        raise ConfigError(
            "trains adapters unless peft=none says otherwise, which are not modelled", key="peft", nearest="peft=none"
        )
    return found


def _of_file(base: Mapping[str, Any], values: Mapping[str, Any], unknown: Mapping[str, str], recipe: str) -> Imported:
    """Return what a YAML file and the overrides over it say, of NeMo 2 or NeMo 1."""
    whole = merged(base, values)
    keys = Keys(whole)
    if keys.value("model.micro_batch_size") is not None or keys.value("model.mcore_gpt") is not None:
        return replace(import_nemo_1(whole), framework="nemo", notes=())
    return _described(base, whole, values, unknown, recipe)


def _described(
    base: Mapping[str, Any],
    whole: Mapping[str, Any],
    values: Mapping[str, Any],
    unknown: Mapping[str, str],
    recipe: str,
) -> Imported:
    """Return what a recipe of NeMo 2 says.

    Args:
        base: Its YAML; empty if it is not known.
        whole: The same with overrides.
        values: Known overrides by key.
        unknown: Reasons for overrides whose values are unknown.
        recipe: Name of the recipe.
    """
    keys = Keys(whole)
    if keys.value("peft") not in (None, "none"):
        raise ConfigError("is not supported: few of the weights are trained", key="peft")
    read = {path: keys.value(path) for path in _FLAG_OF if keys.value(path) is not None}
    if keys.value("trainer.strategy.fsdp") == "megatron":
        read["trainer.strategy.ddp.use_megatron_fsdp"] = True
    else:
        read.pop("trainer.strategy.ddp.data_parallel_sharding_strategy", None)  # recipes set it without effect
    precision = str(keys.value("trainer.plugins.precision") or keys.value("trainer.plugins._target_") or "bf16-mixed")
    given: dict[str, Any] = {"bf16": "bf16" in precision, "fp16": precision.startswith("16") or "fp16" in precision}
    if keys.value("trainer.plugins.fp8"):
        given["fp8"] = "hybrid"
        given["fp8_recipe"] = keys.value("trainer.plugins.fp8_recipe", "model.config.fp8_recipe")
    flags = flags_from({**read, **given}, {**_FLAG_OF, "bf16": "--bf16", "fp16": "--fp16", "fp8": "--fp8-format"})
    found = import_flags(flags, is_log=True)
    told, doubts = effects_of(values, _FLAG_OF, _HARMLESS, found.job)
    resized = [key for key in values if key in ("model.config.num_layers", "model.config.hidden_size")]
    name = "" if resized else catalog_model(_model_class(keys) or recipe.partition("(")[0])
    found = replace(
        found,
        framework="nemo",
        model={},
        missing={},
        model_name=name,
        hosts=keys.count("trainer.num_nodes"),
        devices_per_host=keys.count("trainer.devices"),
        unread=(*(replace(one, line=None) for one in found.unread), *told),
        doubts=(*found.doubts, *doubts),
        notes=(),
    )
    if base:
        reasons = {_FLAG_OF[key]: why for key, why in unknown.items() if key in _FLAG_OF}
        return with_open(found, set(_FLAG_OF.values()) - reasons.keys(), "", reasons)
    stated = {_FLAG_OF[key] for key in values if key in _FLAG_OF}
    job = dict(found.job)
    if "trainer.strategy.fsdp" not in values:
        job["zero_stage"] = 1  # recipes/optim/adam.py
    why = f"no override states it, and {recipe} is Python, which is not run (its YAML may be a second --from-nemo)"
    reasons = {_FLAG_OF[key]: reason for key, reason in unknown.items() if key in _FLAG_OF}
    return with_open(replace(found, job=job), stated, why, reasons)


def _model_class(keys: Keys) -> str:
    """Return the name of the model for its class, such as llama3-8b for `Llama3Config8B`."""
    match = _CLASS.search(keys.text("model.config._target_"))
    return "" if match is None or not match[2] else f"{match[1]}-{match[2]}".lower()


def _command(launch: Launch, script: Script, items: Sequence[Item], *, is_first: bool) -> LaunchCommand:
    """Return the command of a trial."""
    is_nemo = launch.program[0].text.rpartition("/")[2] == "nemo"
    found = command_with_settings(
        launch,
        script,
        items,
        framework="nemo",
        leaves=lambda key: key.startswith(_LEFT_OUT),
        sets={_EVERY_STEP: (f"{_EVERY_STEP}=1",)},
        unknown=(_FIRST if is_first else _NO_DTYPE,),
        starts_itself=is_nemo,
    )
    return replace(found, tasks="once" if is_nemo else found.tasks)
