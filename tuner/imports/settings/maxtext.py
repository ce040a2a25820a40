"""Importer for MaxText: a command of its trainer, or a YAML file of settings.

A command names a YAML file and sets keys by `key=value`. That file may be given beside the script; without it the
defaults of base.yml hold, and a command that names another file says so.

Sources: MaxText (main of August 2026) configs/base.yml (keys and defaults), configs/types.py (batches and pipeline),
configs/models/*.yml (sizes), layers/decoders.py (policies of recomputation), utils/max_utils.py (axes of -1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.export.maxtext import AXES
from tuner.imports.bash.script import Script, read_script
from tuner.imports.imported import Doubt, Imported, LaunchCommand, Unread
from tuner.imports.keys import Keys
from tuner.imports.model_names import catalog_model
from tuner.imports.named_models import named_model
from tuner.imports.optimizer_names import read_optimizer
from tuner.imports.settings.command import command_with_settings
from tuner.imports.settings.words import Item, known_values, merged, overrides_among, unknown_values
from tuner.imports.torchrun import Launch, launch_of

_TRAINER = re.compile(
    r"(max[Tt]ext|MaxText)\.(.*\.)?(train|train_compile|train_sft|train_sft_native)$|maxtext.*\.train$"
)
_OTHER_TASKS = ("rl", "dpo", "grpo", "distill", "decode", "inference", "lora")
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_ALL_SAVED = ("none",)
_OFFLOADS = ("qkv_proj_offloaded", "minimal_offloaded")
_CUT = tuple(f"{kind}_{axis}_parallelism" for kind in ("ici", "dcn") for axis in AXES)
_OTHER_AXES = {
    "sequence": "cuts the activations of norms along the sequence",
    "fsdp_transpose": "cuts weights along another dimension",
    "context_autoregressive": "is for inference",
    "autoregressive": "is for inference",
    "diloco": "exchanges weights every few steps",
}
"""Axes that are not modelled, with what they do."""
_REPLACED = frozenset(
    {
        *_CUT,
        *("per_device_batch_size", "gradient_accumulation_steps", "max_target_length", "remat_policy"),
        *("num_pipeline_microbatches", "num_layers_per_pipeline_stage", "num_pipeline_repeats"),
        *("context_parallel_strategy", "opt_type"),
    }
)
"""Keys that `{flags}` sets (tuner/export/maxtext.py)."""
_CHECKPOINTS = "enable_checkpointing"
_LEFT_OUT = ("profiler", "skip_first_n_steps_for_profiler", "profiler_steps", "enable_tensorboard")
_BLOCKS = {"llama2": {}, "mistral": {}, "mixtral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {}, "qwen3_moe": {}}
"""Blocks of decoders whose layers are alike, with fields of a ModelSpec that the block implies."""
_DEFAULTS: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "quantization": "",
    "remat_policy": "full",
    "max_target_length": 2048,
    "per_device_batch_size": 12.0,
    "gradient_accumulation_steps": 1,
    "opt_type": "adamw",
    "dcn_data_parallelism": -1,
    "ici_fsdp_parallelism": -1,
    "decoder_block": "llama2",
    "base_emb_dim": 2048,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "base_mlp_dim": 7168,
    "base_num_decoder_layers": 16,
    "head_dim": 128,
    "vocab_size": 32_000,
}
"""Defaults of base.yml."""


def import_maxtext(text: str, *, file: str = "") -> Imported:
    """Read a script with a command of the trainer, or a YAML file.

    Args:
        text: Text of either.
        file: YAML that the command names, or that of its model, or empty.

    Raises:
        ConfigError: The text is neither, it is for another task than training all weights, or a value is invalid.
    """
    if (loaded := _yaml(text)) is not None:
        return _described(loaded, {})
    base = _yaml(file) if file else {}
    if base is None:
        raise ConfigError("the second file is no YAML of MaxText, with keys such as per_device_batch_size")
    script = read_script(text)
    launch, items = _training_command(script)
    described = _described({**base, **known_values(items)}, unknown_values(items))
    named = next((word.text for item in items for word in item.words if word.text.endswith((".yml", ".yaml"))), "")
    unread = list(described.unread)
    if not file and named and PurePosixPath(named).name != "base.yml":
        why = f"is another file, read with the defaults of base.yml; give it beside the script: --from-maxtext {named}"
        unread.append(Unread(what=named, why=why))
    return replace(described, command=_command(launch, script, items), unread=tuple(unread))


def _yaml(text: str) -> dict[str, Any] | None:
    """Return the settings of a YAML file; None for any other text."""
    try:
        loaded = parse_yaml(text)
    except ConfigError:
        return None
    signs = {*_REPLACED, "base_emb_dim", "model_name", "base_config"}
    return loaded if isinstance(loaded, dict) and signs & loaded.keys() else None


def _training_command(script: Script) -> tuple[Launch, list[Item]]:
    """Return the command of the trainer, with its words.

    Raises:
        ConfigError: No command starts it.
    """
    others = []
    for command in script.commands:
        launch = launch_of(command)
        if launch is None:
            continue
        program = ".".join(launch.program[-1].text.removesuffix(".py").split("/"))
        if launch.program[-1].unknown and "axtext" in program.lower():
            # `maxtext.trainers.pre_train.$EXECUTABLE`, where EXECUTABLE is train unless an argument says otherwise
            program = re.sub(r"\$\{?\w+\}?$", "train", program)
        if _TRAINER.search(program):
            return launch, overrides_among(launch.training, {})
        others += [program] if "axtext" in program.lower() else []
    if others:
        raise ConfigError(f"starts no training of MaxText, only {', '.join(dict.fromkeys(others[:3]))}")
    raise ConfigError(
        "has no command of MaxText's trainer, such as `python3 -m maxtext.trainers.pre_train.train base.yml`",
        nearest="`meshtune init --capture -- bash SCRIPT` finds the command that it starts",
    )


def _described(given: Mapping[str, Any], unknown: Mapping[str, str]) -> Imported:
    """Return what settings say, over the defaults of base.yml."""
    keys = Keys(merged(_DEFAULTS, given))
    _refuse_others(keys)
    unread: list[Unread] = []
    doubts: list[Doubt] = []
    degrees, copies, opened = _degrees(keys, unknown, doubts)
    of_replica = math.prod(degrees[name] for name in ("tp", "cp", "up", "pp") if name in degrees)
    rounds = keys.number("gradient_accumulation_steps", default=1)
    for key in ("per_device_batch_size", "max_target_length", "remat_policy"):
        if key in unknown:
            opened[{"per_device_batch_size": "mbs", "remat_policy": "recompute"}.get(key, "sequence_length")] = unknown[
                key
            ]
    mbs = None if {"mbs", "pp", "tp", "cp"} & opened.keys() else _micro_batch(keys, of_replica, degrees["pp"])
    if mbs is not None:
        degrees["mbs"] = mbs
    if degrees.get("pp", 1) > 1:
        stages = keys.count("num_pipeline_microbatches") if keys.value("num_pipeline_microbatches") != -1 else None
        rounds *= stages or degrees["pp"]
    model_name, model = _model(keys, given, unread)
    sized = _sizes_among(given)
    listed = None if model or model_name or sized else named_model("maxtext", keys.text("model_name"))
    optimizer, why = read_optimizer("maxtext", keys.text("opt_type"))
    if why:
        opened["optimizer"] = f"opt_type: {why}"
    job: dict[str, Any] = {
        "sequence_length": keys.number("max_target_length", default=2048),
        "precision": _precision(keys, unread),
        "optimizer": optimizer,
        "recompute": _recompute(keys, unread),
        "zero_stage": 3,
    }
    if degrees.get("tp", 1) > 1:
        job["sequence_parallel"] = _size(keys, "tensor_sequence") > 1
    return Imported(
        framework="maxtext",
        runtime="maxtext",
        model=model,
        model_name=model_name,
        named=listed,
        job={name: value for name, value in job.items() if name not in opened},
        degrees={name: size for name, size in degrees.items() if name not in opened},
        open={name: why for name, why in opened.items() if name != "sequence_length"},
        micro_batches=None if opened.keys() & {"mbs", "pp"} else rounds,
        copies=copies,
        hosts=None,
        unread=tuple(unread),
        doubts=tuple(doubts),
        notes=()
        if model or model_name or listed
        else (f"the model {keys.text('model_name') or 'of the file'} is not in the catalog: name it with --model",),
    )


def _refuse_others(keys: Keys) -> None:
    """Refuse trainings of adapters.

    Raises:
        ConfigError: The key that says so.
    """
    for name in ("lora_input_adapters_path", "enable_lora"):
        if keys.value(name):
            raise ConfigError("is not supported: few of the weights are trained", key=name, value=keys.value(name))


def _size(keys: Keys, axis: str) -> int:
    """Return the degree of an axis; -1 if one of its two factors is what the others leave."""
    sizes = [keys.value(f"{kind}_{axis}_parallelism") for kind in ("ici", "dcn")]
    for kind, size in zip(("ici", "dcn"), sizes, strict=True):
        if size is not None and not (
            isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or size == -1)
        ):
            raise ConfigError("must be a whole number, or -1", key=f"{kind}_{axis}_parallelism", value=size)
    return -1 if -1 in sizes else math.prod(size or 1 for size in sizes)


def _degrees(keys: Keys, unknown: Mapping[str, str], doubts: list[Doubt]) -> tuple[dict[str, int], int, dict[str, str]]:
    """Return the degrees, the number of copies of the sharded states, and what is open.

    The data parallel degree is what the other degrees leave of the devices.
    """
    sizes = {axis: _size(keys, axis) for axis in AXES}
    for axis, what in _OTHER_AXES.items():
        if _size(keys, axis) not in (1, -1):
            doubts.append(Doubt(flag=f"ici_{axis}_parallelism", why=f"{what}, which is not modelled"))
    strategy = keys.text("context_parallel_strategy", default="all_gather")
    ring, sent = sizes["context"], sizes["context_usp_ulysses"]
    degrees = {
        "pp": sizes["pipeline"],
        "tp": sizes["tensor"] * sizes["tensor_sequence"],
        "cp": 1 if strategy == "ulysses" else ring,
        "up": ring if strategy == "ulysses" else sent,
        "ep": sizes["expert"],
        "vpp": 1,
    }
    if strategy == "all_gather" and ring > 1:
        doubts.append(
            Doubt(flag="context_parallel_strategy", why="all_gather is not modelled; ignored, it counts as ring")
        )
    repeats = keys.value("num_pipeline_repeats")
    if sizes["pipeline"] > 1 and isinstance(repeats, int) and repeats > 0:
        degrees["vpp"] = repeats
    axes = {"pp": ("pipeline",), "tp": ("tensor", "tensor_sequence"), "cp": ("context",), "ep": ("expert",)}
    opened: dict[str, str] = {}
    for name, of in axes.items():
        reasons = [unknown[key] for axis in of for key in _CUT if key[4:] == f"{axis}_parallelism" and key in unknown]
        if reasons or degrees[name] < 0:
            opened[name] = reasons[0] if reasons else "-1 is what the other axes leave of the devices"
    if sizes["pipeline"] > 1 and repeats in (None, -1):
        opened["vpp"] = "num_pipeline_repeats is not there: it follows from the layers of a stage"
    copies = sizes["data"] if sizes["data"] > 0 else 1
    if min(sizes["data"], sizes["fsdp"], sizes["expert"]) > 0 and not opened:
        degrees["dp"] = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    return degrees, copies, opened


def _micro_batch(keys: Keys, of_replica: int, pp: int) -> int:
    """Return the sequences of a micro-batch: those of a device, times the devices of a replica.

    Raises:
        ConfigError: They are no whole number.
    """
    of_device = keys.value("per_device_batch_size")
    if isinstance(of_device, bool) or not isinstance(of_device, (int, float)) or not 0 < of_device < 1e6:
        raise ConfigError("must be a number above 0", key="per_device_batch_size", value=of_device)
    rounds = keys.value("num_pipeline_microbatches")
    parts = 1 if pp == 1 else rounds if isinstance(rounds, int) and rounds > 0 else pp
    found = Fraction(of_device).limit_denominator(4096) * of_replica / parts
    if found.denominator != 1:
        raise ConfigError(
            f"a micro-batch has {float(found):g} sequences: Meshtune models whole sequences",
            key="per_device_batch_size",
            value=of_device,
        )
    return int(found)


def _precision(keys: Keys, unread: list[Unread]) -> str:
    """Return the number format of matrix products."""
    quantization = keys.text("quantization").lower()
    if "fp8" in quantization:
        return "fp8"
    if quantization:
        unread.append(Unread(what="quantization", why=f"{quantization} is not modelled; read as without it"))
    return _PRECISIONS.get(keys.text("dtype"), "bf16")


def _recompute(keys: Keys, unread: list[Unread]) -> str:
    """Return the mode of recomputation; every policy between none and full is read as selective."""
    policy = keys.text("remat_policy", default="full").lower()
    if policy in ("full", "none"):
        return policy
    if policy in _OFFLOADS or (policy == "custom" and "offload" in map(str, keys.mapping.values())):
        unread.append(Unread(what="remat_policy", why=f"{policy} keeps activations on the host, which is not modelled"))
    elif policy != "minimal":
        why = f"{policy} is read as selective; a trial that changes it to another kind and back has `minimal`"
        unread.append(Unread(what="remat_policy", why=why))
    return "selective"


def _sizes_among(given: Mapping[str, Any]) -> set[str]:
    return {key for key in given if key.startswith("base_")} - {"base_config", "base_output_directory"}


def _model(keys: Keys, given: Mapping[str, Any], unread: list[Unread]) -> tuple[str, dict[str, Any]]:
    """Return the model's name in the catalog, or its fields where the settings state its sizes."""
    name = keys.text("model_name", default="default")
    known = catalog_model(name)
    sizes = _sizes_among(given)
    if (known and not sizes) or (name != "default" and not sizes):
        return known, {}
    scale = keys.value("global_parameter_scale")
    if scale not in (None, 1):
        unread.append(
            Unread(what="global_parameter_scale", why="makes the model larger by a factor, which is not read")
        )
        return "", {}
    block = keys.text("decoder_block", default="llama2")
    if block not in _BLOCKS or not {"base_emb_dim", "base_num_decoder_layers"} <= sizes:
        return "", {}
    gated = keys.value("mlp_activations") in (None, ["silu", "linear"], ["gelu", "linear"])
    experts = keys.number("num_experts", default=1)
    fields: dict[str, Any] = {
        "num_layers": keys.number("base_num_decoder_layers", default=16),
        "hidden_size": keys.number("base_emb_dim", default=2048),
        "num_heads": keys.number("base_num_query_heads", default=16),
        "num_kv_heads": keys.number("base_num_kv_heads", default=16),
        "head_dim": keys.number("head_dim", default=128),
        "ffn_size": keys.number("base_mlp_dim", default=7168),
        "gated_ffn": gated,
        "vocab_size": keys.number("vocab_size", default=32_000),
        "tied_embeddings": keys.flag("logits_via_embedding"),
        "norm": "rms",
        "qk_norm": keys.flag("use_qk_norm"),
        **_BLOCKS[block],
    }
    if experts > 1:
        fields |= {
            "num_experts": experts,
            "top_k": keys.number("num_experts_per_tok", default=1),
            "expert_ffn_size": keys.number("base_moe_mlp_dim", "base_mlp_dim", default=7168),
        }
    return "", fields


def _command(launch: Launch, script: Script, items: Sequence[Item]) -> LaunchCommand:
    """Return the command of a trial, which starts once on each host: JAX has all devices of one."""
    return command_with_settings(
        launch,
        script,
        items,
        framework="maxtext",
        leaves=_LEFT_OUT.__contains__,
        sets={_CHECKPOINTS: (f"{_CHECKPOINTS}=false",)},
        starts_itself=True,
    )
