"""Importer for Megatron-SWIFT: scripts with `megatron sft` or `megatron pt`, and the YAML that these take.

Its options are those of Megatron-LM with underscores, a value behind each, and defaults of its own. Variables of the
environment state the devices. A model is named by its weights.

Sources: ms-swift (main of August 2026) swift/megatron/arguments/megatron_args.py (names and defaults),
megatron_base_args.py (seq_length), swift/arguments/base_args/*.py (data and model), swift/cli/main.py (YAML files, and
variables of torchrun), swift/cli/_megatron/main.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.export.megatron_flags import MEGATRON_FLAGS, SEQUENCE, underscored
from tuner.export.swift import SWIFT
from tuner.imports.bash.script import Command, Script, read_script
from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.megatron import import_flags
from tuner.imports.model_names import catalog_model
from tuner.imports.settings.command import command_with_settings
from tuner.imports.settings.megatron_keys import effects_of, flags_from
from tuner.imports.settings.words import Item, flags_with_values, known_values, unknown_values
from tuner.imports.torchrun import Launch
from tuner.imports.trial_words import DEVICES, HOSTS, MEETING

_TRAINS = ("sft", "pt")
_FLAG_OF = {key: flag for flag, keys in SWIFT.keys.items() for key in keys} | {
    "packing_length": SEQUENCE,
    **{underscored(flag): flag for flag in MEGATRON_FLAGS if flag not in SWIFT.keys},
}
_DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "use_distributed_optimizer": True,
    "expert_tensor_parallel_size": 1,
    "bf16": True,
}
"""Its defaults where they are not Megatron-LM's. The number format is that of the weights, bf16 for nearly all."""
_VARIABLES = {
    "NNODES": ("{num_hosts}", HOSTS),
    "NODE_RANK": ("{host_rank}", HOSTS),
    "NPROC_PER_NODE": ("{devices_per_host}", DEVICES),
    "MASTER_ADDR": ("{master_address}", MEETING),
    "MASTER_PORT": ("{master_port}", MEETING),
}
"""Variables that it hands to torchrun, with their values in a trial and the reasons."""
_LEFT_OUT = ("save", "load", "save_steps", "save_interval", "save_total_limit", "async_save", "report_to")
_LEFT_BEGINNINGS = ("wandb_", "swanlab_", "tensorboard_", "profile")
_EVERY_STEP = "logging_steps"
_HARMLESS = frozenset(
    {
        *("model", "model_type", "dataset", "val_dataset", "cached_dataset", "packing", "padding_free", "system"),
        *("add_non_thinking_prefix", "enable_thinking", "loss_scale", "template", "agent_template", "use_hf", "lr"),
        *("attention_backend", "attn_impl", "moe_aux_loss_coeff", "cross_entropy_loss_fusion", "masked_softmax_fusion"),
        *("gradient_accumulation_fusion", "cross_entropy_fusion_impl", "finetune", "no_save_optim", "no_save_rng"),
        *("merge_lora", "output_dir", "add_version", "torch_dtype", "model_kwargs", "rope_scaling", "ddp_timeout"),
        *("external_plugins", "loss_type", "freeze_vit", "freeze_aligner", "freeze_llm", "vit_gradient_checkpointing"),
        *("vit_lr", "aligner_lr", "tuner_type", "train_type", "sft_type", "check_model", "truncation_strategy"),
        *("save_safetensors", "model_author", "model_name", "new_special_tokens", "max_epochs", "num_train_epochs"),
        *("load_safetensors", "load_from_cache_file", "split_dataset_ratio", "streaming", "bridge_backend", "ENV"),
        *("use_chat_template", "mtp_loss_scaling_factor", "save_strategy", "max_pixels", "columns", "interleave_prob"),
        *("dataset_num_proc", "dataloader_num_workers", "remove_unused_columns", "no_load_optim", "no_load_rng"),
        *("group_by_length", "strict", "stopping_strategy", "hub_token", "use_hf", "adam_beta1", "adam_beta2"),
    }
)
"""Options that change nothing that a study has, or that are read here."""
_OTHER_TASKS = ("seq_cls", "embedding", "reranker", "generative_reranker")


def import_swift(text: str, *, file: str = "") -> Imported:
    """Read a script, or a YAML file of options.

    Args:
        text: Text of either.
        file: YAML that the script's command names, or empty.

    Raises:
        ConfigError: The text is neither, it trains few of the weights or something else than a decoder, or a value is
            invalid.
    """
    if (options := _yaml(text)) is not None:
        variables = options.pop("ENV", None) or {}
        return _described(options, {}, variables if isinstance(variables, dict) else {}, ())
    script = read_script(text)
    command, at = _training_command(script)
    kind, words = command.words[at + 1].text, command.words[at + 2 :]
    named = next((word.text for word in words if re.search(r"\.(ya?ml|json)$", word.text)), "")
    is_named = bool(named) and words[0].text == named
    base: dict[str, Any] = {}
    if is_named:
        loaded = _yaml(file) if file else None
        if loaded is None:
            raise ConfigError(
                f"starts `megatron {kind}` with the options of {named}, which is another file",
                nearest=f"--from-swift SCRIPT --from-swift {named}",
            )
        variables = loaded.pop("ENV", None)
        base = loaded
    items = [Item(words=words[:1]), *flags_with_values(words[1:])] if is_named else flags_with_values(words)
    own = {name: _text_of(script, name) for name in _VARIABLES}
    own = {name: text for name, text in own.items() if text}
    return replace(
        _described({**base, **known_values(items)}, unknown_values(items), own, items),
        command=_command(script, command, at, items),
    )


def _yaml(text: str) -> dict[str, Any] | None:
    """Return the options of a YAML file; None for any other text."""
    try:
        loaded = parse_yaml(text)
    except ConfigError:
        return None
    return dict(loaded) if isinstance(loaded, dict) and {"model", "dataset", *_FLAG_OF} & loaded.keys() else None


def _training_command(script: Script) -> tuple[Command, int]:
    """Return the first command that trains with Megatron-SWIFT, and the position of `megatron` in it.

    Raises:
        ConfigError: No command trains with Megatron.
    """
    others = set()
    for command in script.commands:
        for at, word in enumerate(command.words[:-1]):
            program, kind = word.text.rpartition("/")[2], command.words[at + 1].text
            if program == "megatron" and kind in _TRAINS:
                return command, at
            if program in ("megatron", "swift"):
                others.add(f"{program} {kind}")
    found = ", ".join(sorted(others)[:3])
    if "megatron rlhf" in others:
        raise ConfigError(
            f"trains by {found}, which has more models than the one that is trained; Meshtune does not model this",
            nearest="`meshtune place` plans generation and training together",
        )
    if any(one.startswith("swift") for one in others):
        raise ConfigError(
            f"trains by {found}, which is the trainer of Hugging Face and not Megatron",
            nearest="--from-deepspeed with its configuration",
        )
    raise ConfigError("has no command `megatron sft` or `megatron pt`" + (f", only {found}" if found else ""))


def _text_of(script: Script, name: str) -> str:
    """Return the value of a variable, empty if it is unknown."""
    words = script.variables.get(name, ())
    return words[0].text if len(words) == 1 and not words[0].unknown else ""


def _described(
    options: Mapping[str, Any], unknown: Mapping[str, str], variables: Mapping[str, Any], items: Sequence[Item]
) -> Imported:
    """Return what options say.

    Args:
        options: Values by name.
        unknown: Reasons for options whose values are unknown.
        variables: Values of the environment's variables.
        items: Words of the command.
    """
    _refuse_others(options)
    settings = {**_DEFAULTS, **options}
    if options.get("fp16") is True:
        settings["bf16"] = None
    if str(settings["recompute_granularity"]).lower() == "none":
        settings["recompute_granularity"] = None
    if settings.get("sequence_parallel") and settings.get("tensor_model_parallel_size", 1) == 1:
        settings["sequence_parallel"] = None
    flags = flags_from({key: value for key, value in settings.items() if key in _FLAG_OF}, _FLAG_OF)
    found = import_flags(flags, is_log=True)
    told, doubts = effects_of(
        {key: value for key, value in options.items() if key not in _HARMLESS and not _is_left_out(key)},
        _FLAG_OF,
        (_EVERY_STEP,),
        found.job,
    )
    option_of = {flag: option for option, flag in _FLAG_OF.items()}
    opened = {key: why for key, flag in _open_by().items() if (why := unknown.get(flag))}
    name = str(options.get("model") or "")
    hosts, per_host = _number(variables, "NNODES"), _number(variables, "NPROC_PER_NODE")
    if per_host is None and hosts is None and "NPROC_PER_NODE" not in unknown and items:
        hosts, per_host = 1, 1  # it starts one process without torchrun
    if not options.get("packing"):
        told.append(Unread(what="packing", why="is not on; rows are read as max_length tokens each"))
    return replace(
        found,
        framework="swift",
        model_name=catalog_model(name),
        model={},
        missing={},
        degrees={key: size for key, size in found.degrees.items() if key not in opened},
        job={key: value for key, value in found.job.items() if key not in opened},
        open={**found.open, **opened},
        hosts=hosts if hosts is not None or per_host is None else 1,
        devices_per_host=per_host,
        unread=(*(replace(one, line=None) for one in found.unread), *told),
        doubts=(*(replace(one, flag=option_of.get(one.flag, one.flag)) for one in found.doubts), *doubts),
        notes=(f"the model is that of {name}: check that --model has its sizes",) if name else (),
    )


def _open_by() -> dict[str, str]:
    """Return the option that states each degree and key of the job."""
    return {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "mbs": "micro_batch_size",
        "recompute": "recompute_granularity",
        "sequence_length": "max_length",
        "global_batch_size": "global_batch_size",
    }


def _refuse_others(options: Mapping[str, Any]) -> None:
    """Refuse trainings of few of the weights, and of something else than a decoder.

    Raises:
        ConfigError: The option that says so.
    """
    for name in ("tuner_type", "train_type", "sft_type"):
        if str(options.get(name) or "full") != "full":
            raise ConfigError("is not supported: few of the weights are trained", key=name, value=options[name])
    if options.get("adapters"):
        raise ConfigError("is not supported: few of the weights are trained", key="adapters", value=options["adapters"])
    if options.get("freeze_llm") is True:
        raise ConfigError("is not supported: few of the weights are trained", key="freeze_llm", value=True)
    if options.get("task_type") in _OTHER_TASKS:
        raise ConfigError("trains no decoder of text", key="task_type", value=options["task_type"])


def _number(variables: Mapping[str, Any], name: str) -> int | None:
    text = str(variables.get(name, ""))
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text) else None


def _is_left_out(key: str) -> bool:
    return key in _LEFT_OUT or key.startswith(_LEFT_BEGINNINGS)


def _command(script: Script, command: Command, at: int, items: Sequence[Item]) -> LaunchCommand:
    """Return the command of a trial, which gets the devices by variables, as a script gives them."""
    words = command.words
    launch = Launch(
        outer=(*command.outer, *words[:at]),
        launcher=(),
        launcher_words=(),
        program=words[at : at + 2],
        training=words[at + 2 :],
        own=command.own,
    )
    found = command_with_settings(
        launch,
        script,
        items,
        framework="swift",
        leaves=_is_left_out,
        sets={_EVERY_STEP: (f"--{_EVERY_STEP}", "1")},
        starts_itself=True,
    )
    kept = [(name, value) for name, value in found.environment if name not in _VARIABLES]
    own = {name: value for name, (value, _) in _VARIABLES.items()}
    reasons = {name: why for name, (_, why) in _VARIABLES.items()}
    return replace(found, environment=(*kept, *own.items()), reasons={**found.reasons, **reasons})
