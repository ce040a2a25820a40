"""Importer for verl: the training of its actor with Megatron, from a script with overrides.

verl trains an actor, generates with it, and may score with further models. A study tunes the actor's training alone,
whose time verl logs as `timing_s/update_actor`; everything else of a step is told and stays as it is. A step of the
study is one update: a mini-batch of prompts, each with its answers.

Sources: verl 0.7 trainer/config/actor/actor.yaml, engine/megatron.yaml and data/legacy_data.yaml (names and defaults),
workers/megatron_workers.py (`ppo_mini_batch_size *= rollout.n`), trainer/ppo/ray_trainer.py (timing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardware.io.errors import ConfigError
from tuner.export.megatron_flags import GLOBAL, MICRO, SEQUENCE
from tuner.export.verl import ENGINE, INNER, MICRO_KEY, VERL
from tuner.imports.bash.script import Script, read_script
from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.keys import Keys
from tuner.imports.megatron import import_flags
from tuner.imports.model_names import catalog_model
from tuner.imports.settings.command import command_with_settings
from tuner.imports.settings.megatron_keys import effects_of, flags_from
from tuner.imports.settings.words import Item, known_values, merged, overrides_among, unknown_values
from tuner.imports.torchrun import Launch, launch_of

_ACTOR = "actor_rollout_ref.actor"
_MINI = f"{_ACTOR}.ppo_mini_batch_size"
_PLAIN_INNER = INNER.lstrip("+")
_FLAG_OF = {key.lstrip("+"): flag for flag, keys in VERL.keys.items() for key in keys}
_DEFAULTS: Mapping[str, Any] = {
    f"{ENGINE}.sequence_parallel": True,
    f"{ENGINE}.use_distributed_optimizer": True,
    _MINI: 256,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.rollout.n": 1,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
"""Defaults of verl that are not Megatron-LM's."""
_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")
_INSIDE = f"{ENGINE}."
_HARMLESS = (
    *(f"{_INSIDE}{name}" for name in (*_OFFLOADS, "use_mbridge", "vanilla_mbridge", "use_dist_checkpointing", "seed")),
    *(f"{_INSIDE}dist_checkpointing_path", f"{_INSIDE}use_remove_padding", f"{_INSIDE}override_ddp_config."),
    *(f"{_PLAIN_INNER}.{name}" for name in ("attention_backend", "use_flash_attn", "gradient_accumulation_fusion")),
    f"{_PLAIN_INNER}.deallocate_pipeline_outputs",
)
"""Keys of the engine that are read elsewhere, or that change nothing that a study has."""
_LEFT_OUT = ("trainer.project_name", "trainer.experiment_name", "trainer.max_actor_ckpt_to_keep")


def import_verl(text: str) -> Imported:
    """Read a script whose command trains with verl.

    Raises:
        ConfigError: It has no such command, its actor is trained otherwise than with Megatron, or a value is invalid.
    """
    script = read_script(text)
    launch, items = _training_command(script)
    values, unknown = known_values(items), unknown_values(items)
    stated = {key.lstrip("+"): value for key, value in values.items()}
    _refuse_other_engines(stated, [word.text for item in items for word in item.words])
    described = _described({**_DEFAULTS, **stated}, stated, unknown)
    updates = _updates(Keys(merged({}, {**_DEFAULTS, **stated})))
    if updates > 1:
        why = f"a step of verl has {updates} updates of the actor; the study's step is one of them"
        described = replace(described, notes=(*described.notes, why))
    return replace(described, command=replace(_command(launch, script, items), steps_per_line=updates))


def _updates(keys: Keys) -> int:
    """Return the number of updates of the actor in one step: mini-batches of the batch, times epochs over it."""
    batch, mini = keys.value("data.train_batch_size"), keys.value(_MINI)
    epochs = keys.number(f"{_ACTOR}.ppo_epochs", default=1)
    if not (isinstance(batch, int) and isinstance(mini, int) and 0 < mini <= batch):
        return epochs
    return epochs * -(-batch // mini)


def _training_command(script: Script) -> tuple[Launch, list[Item]]:
    """Return the command of verl's trainer, with its words.

    Raises:
        ConfigError: No command starts it.
    """
    for command in script.commands:
        launch = launch_of(command)
        if launch is not None and launch.name.startswith("verl.") and "main_generation" not in launch.name:
            return launch, overrides_among(launch.training, {})
        if launch is not None and any(word.text.startswith(f"{_ACTOR}.") for word in launch.training):
            return launch, overrides_among(launch.training, {})
    raise ConfigError(
        "has no command of verl's trainer, such as `python3 -m verl.trainer.main_ppo`",
        nearest="`meshtune init --capture -- bash SCRIPT` finds the command that it starts",
    )


def _refuse_other_engines(values: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuse actors that are trained with FSDP, adapters, and trainers without an actor.

    Raises:
        ConfigError: What says so.
    """
    if (values.get("actor_rollout_ref.model.lora_rank") or values.get("model.lora_rank") or 0) != 0:
        raise ConfigError("is not supported: few of the weights are trained", key="actor_rollout_ref.model.lora_rank")
    strategy = values.get(f"{_ACTOR}.strategy")
    by_name = any("megatron" in word and word.startswith("--config-name") for word in words)
    by_key = any(key.startswith(f"{ENGINE}.") for key in values) or strategy == "megatron"
    if not (by_name or by_key):
        raise ConfigError(
            "trains its actor with FSDP, which Meshtune does not read; it reads actors with Megatron",
            key=f"{_ACTOR}.strategy",
            value=strategy or "fsdp",
            nearest="`meshtune place` plans generation and training together",
        )


def _described(settings: Mapping[str, Any], stated: Mapping[str, Any], unknown: Mapping[str, str]) -> Imported:
    """Return what the settings say of the actor's training.

    Args:
        settings: Values by key, with verl's defaults.
        stated: Values that the command states.
        unknown: Reasons for settings whose values are unknown.
    """
    keys = Keys(merged({}, settings))
    read = {key: value for key, value in settings.items() if key in _FLAG_OF}
    if read.get(f"{ENGINE}.tensor_model_parallel_size", 1) == 1:
        read[f"{ENGINE}.sequence_parallel"] = None
    length = keys.number("data.max_prompt_length", default=512) + keys.number("data.max_response_length", default=512)
    mini = keys.count(_MINI, default=256, minimum=0) or 0
    answers = keys.number("actor_rollout_ref.rollout.n", default=1)
    flags = flags_from(
        {**read, "sequence": length, "batch": mini * answers or None, "bf16": True},
        {**_FLAG_OF, "sequence": SEQUENCE, "batch": GLOBAL, "bf16": "--bf16"},
    )
    found = import_flags(flags, is_log=True)
    inside = {key: value for key, value in stated.items() if key.startswith(_INSIDE)}
    told, doubts = effects_of(inside, _FLAG_OF, _HARMLESS, found.job)
    opened = {
        name: unknown[key]
        for key, flag in _FLAG_OF.items()
        for name, of in _OPENED_BY.items()
        if flag == of and key in unknown
    }
    if keys.value(f"{_ACTOR}.use_dynamic_bsz") is True:
        most = keys.value(f"{_ACTOR}.ppo_max_token_len_per_gpu")
        why = f"micro-batches are filled up to {most or 16384} tokens for each rank (use_dynamic_bsz), and have no size"
        opened["mbs"] = why
    elif keys.value(MICRO_KEY) is None:
        opened.setdefault("mbs", f"{MICRO_KEY} is not there")
    for key in ("data.max_prompt_length", "data.max_response_length"):
        if key in unknown:
            told.append(Unread(what=key, why=f"{unknown[key]}; 512 by default"))
    away = [name for name in _OFFLOADS if keys.value(f"{ENGINE}.{name}") is True]
    if away:
        told.append(Unread(what=f"{ENGINE}.{away[0]}", why="keeps states on the host between updates; not modelled"))
    told.append(
        Unread(
            what="rollout, reference and critic",
            why="are not modelled: a step of the study is one update of the actor, and rows have the greatest length",
        )
    )
    name = str(keys.value("actor_rollout_ref.model.path") or "")
    return replace(
        found,
        framework="verl",
        model={},
        missing={},
        model_name=catalog_model(name),
        hosts=keys.count("trainer.nnodes", default=1) if "trainer.nnodes" not in unknown else None,
        devices_per_host=None if "trainer.n_gpus_per_node" in unknown else keys.count("trainer.n_gpus_per_node"),
        degrees={key: size for key, size in found.degrees.items() if key not in opened},
        job={key: value for key, value in found.job.items() if key not in opened},
        micro_batches=None,
        open={**found.open, **opened},
        unread=(*(replace(one, line=None) for one in found.unread), *told),
        doubts=(*found.doubts, *doubts),
        notes=(f"the model is that of {name}: check that --model has its sizes",) if name else (),
    )


_OPENED_BY = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "mbs": MICRO,
    "recompute": "--recompute-granularity",
}
"""Flag that states each degree and key of the job whose value may be unknown."""


def _command(launch: Launch, script: Script, items: Sequence[Item]) -> LaunchCommand:
    """Return the command of a trial, which reaches the other hosts by Ray."""
    found = command_with_settings(
        launch,
        script,
        items,
        framework="verl",
        leaves=lambda key: key in _LEFT_OUT,
        sets={"trainer.logger": ("trainer.logger=[console]",), "trainer.save_freq": ("trainer.save_freq=-1",)},
        starts_itself=True,
    )
    return replace(found, tasks="once")
