"""Importer for torchtitan: TOML files of older versions, and launch scripts with flags.

A flag has the form `--parallelism.tensor_parallel_degree 2`.

Sources: torchtitan 0.3.0 config/configs.py (TrainingConfig, ParallelismConfig), config/manager.py (flags), and the
train_configs/*.toml of earlier versions, where some keys were under `experimental` and `training`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from hardware.io.errors import ConfigError
from tuner.imports.bash.script import Script, read_script
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flags, flags_among
from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.keys import Keys
from tuner.imports.torchrun import launch_of
from tuner.imports.torchtitan_command import command_of

_LAUNCHER = ("--nnodes", "--nproc_per_node", "--nproc-per-node")
_POLICY = "activation-checkpoint:"
"""Beginning of the subcommand that selects the recomputation policy."""
_SIGNS = ("--parallelism.", "--training.")
"""Beginnings of the flags that identify a command of torchtitan."""
_MODELS = {
    "llama3.8b": "llama3-8b",
    "llama3.70b": "llama3-70b",
    "llama3.405b": "llama3-405b",
    "deepseek_v3.671b": "deepseek-v3",
}
"""Models in the catalog by torchtitan's name and flavor."""
_CHUNKS = {"interleaved1f1b": 2, "interleavedzerobubble": 2, "zbvzerobubble": 2, "dualpipev": 2, "loopedbfs": 2}
"""Default number of virtual stages per rank, by schedule (torchtitan distributed/pipeline_parallel.py)."""


def import_torchtitan(text: str) -> Imported:
    """Read a configuration file or a launch script.

    Raises:
        ConfigError: the text is not a torchtitan configuration, or a value is invalid.
    """
    mapping, devices, command = _read(text)
    keys = Keys(mapping)
    if keys.value("parallelism") is None and keys.value("training") is None:
        raise ConfigError("has neither of torchtitan's sections [training] and [parallelism]")
    unread: list[Unread] = []
    degrees, copies, stage = _degrees(keys, unread)
    batch = keys.value("training.global_batch_size")
    job: dict[str, Any] = {
        "sequence_length": keys.number("training.seq_len", default=2048),
        "precision": _precision(keys),
        "optimizer": "sgd" if keys.text("optimizer.name").lower() == "sgd" else "adam",
        "recompute": _recompute(keys),
        "zero_stage": stage,
    }
    if isinstance(batch, int) and batch > 0:
        job["global_batch_size"] = batch
    if degrees["tp"] > 1:
        job["sequence_parallel"] = keys.flag("parallelism.enable_sequence_parallel", default=True)
    local = keys.number("training.local_batch_size", "training.batch_size", default=8)
    name = f"{keys.text('model.name', default=keys.text('module'))}.{keys.text('model.flavor')}".lower()
    named = re.sub(r"^([a-z0-9_]+?)_([0-9]+b)$", r"\1.\2", keys.text("config").lower())
    model = _MODELS.get(name) or _MODELS.get(named) or ""
    return Imported(
        framework="torchtitan",
        runtime="torchtitan",
        model_name=model,
        job=job,
        degrees=degrees,
        micro_batches=None if "global_batch_size" in job else max(1, local // degrees["mbs"]),
        copies=copies,
        hosts=None if devices is None else devices[0],
        devices_per_host=None if devices is None else devices[1],
        command=command,
        unread=tuple(unread),
        notes=()
        if model
        else (f"{keys.text('model.flavor') or 'the model'} is not in the catalog: name it with --model",),
    )


def _read(text: str) -> tuple[Mapping[str, Any], tuple[int, int] | None, LaunchCommand | None]:
    """Return the keys, the number of hosts and of devices per host, and the launch command.

    The last two are None for a TOML file, and for a script that does not state them.
    """
    try:
        return tomllib.loads(text), None, None
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
    script = read_script(text)
    words = [word for command in script.commands for word in command.words]
    mapping: dict[str, Any] = {}
    # Collect the flags into the sections that a TOML file would have.
    for flag in flags_among(words):
        section, dot, key = flag.name.removeprefix("--").partition(".")
        key = key.replace("-", "_")
        values = [one for one in flag.values if not one.text.startswith(_POLICY)]
        for policy in flag.values[len(values) :]:
            mapping["activation_checkpoint"] = {"mode": policy.text.removeprefix(_POLICY)}
        if values and values[0].unknown:
            continue
        value = _parse_value(values[0].text) if values else not key.startswith("no_")
        key = key if values else key.removeprefix("no_")
        if dot and section in ("training", "parallelism", "activation_checkpoint", "model", "optimizer"):
            mapping.setdefault(section, {})[key] = value
        elif section in ("module", "config"):
            mapping[section] = value
    if not mapping:
        raise ConfigError(f"is not TOML ({problem}), and has no flags such as --parallelism.tensor_parallel_degree")
    launcher = Flags([flag for flag in flags_among(words) if flag.name in _LAUNCHER])
    per_host = launcher.text("--nproc_per_node") or launcher.text("--nproc-per-node")
    per_host = per_host or next((one.text for one in script.variables.get("NGPU", ())), "")
    sizes = (launcher.text("--nnodes") or "1", per_host)
    if not all(re.fullmatch(r"[1-9][0-9]{0,4}", text) for text in sizes):
        return mapping, None, _command(script)
    return mapping, (int(sizes[0]), int(sizes[1])), _command(script)


def _command(script: Script) -> LaunchCommand | None:
    """Return the command that starts the trainer, or None if the script does not start it."""

    def sections(words: tuple[Argument, ...]) -> int:
        return sum(word.text.startswith(_SIGNS) for word in words)

    best = max(script.commands, key=lambda command: sections(command.words), default=None)
    launch = launch_of(best) if best is not None and sections(best.words) else None
    return None if launch is None else command_of(launch, script)


def _parse_value(text: str) -> Any:
    if re.fullmatch(r"-?[0-9]{1,12}", text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _degrees(keys: Keys, unread: list[Unread]) -> tuple[dict[str, int], int, int]:
    """Return the degrees, the number of copies of the sharded states, and the ZeRO stage that FSDP corresponds to."""
    under = ("parallelism", "experimental", "training")

    def degree(name: str) -> int:
        value = keys.value(*(f"{section}.{name}" for section in under))
        # -1 means all ranks that the other degrees leave, which keys.number would reject.
        if value == -1:
            return -1
        return keys.number(*(f"{section}.{name}" for section in under), default=1)

    pp, local = (
        degree("pipeline_parallel_degree"),
        keys.number("training.local_batch_size", "training.batch_size", default=8),
    )
    size = keys.count("parallelism.pipeline_parallel_microbatch_size", default=1)
    degrees = {
        "pp": pp,
        "tp": degree("tensor_parallel_degree"),
        "cp": degree("context_parallel_degree"),
        "ep": degree("expert_parallel_degree"),
        "mbs": min(size or 1, local) if pp > 1 else local,
        "vpp": 1,
    }
    schedule = keys.text("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule").lower()
    if pp > 1:
        degrees["vpp"] = _CHUNKS.get(schedule, 1)
    if schedule not in ("", "1f1b", "interleaved1f1b") and pp > 1:
        unread.append(Unread(what="pipeline_parallel_schedule", why=f"{schedule} is not modelled; read as 1F1B"))
    if keys.value("parallelism.pipeline_parallel_layers_per_stage") is not None:
        unread.append(
            Unread(what="pipeline_parallel_layers_per_stage", why="is not read; check vpp of the current configuration")
        )
    replicas = degree("data_parallel_replicate_degree")
    value = keys.value("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree")
    shards = -1 if value is None else value
    if shards != -1:
        shards = degree("data_parallel_shard_degree")
        degrees["dp"] = replicas * shards
    if shards == 1:
        if pp * replicas > 1:
            unread.append(
                Unread(what="data_parallel_shard_degree", why="1 means that nothing is sharded; read as ZeRO 0")
            )
        return degrees, 1, 0
    # Weights that stay gathered after the forward pass are ZeRO 2; with a pipeline this is the default.
    policy = keys.text("parallelism.fsdp_reshard_after_forward", default="default")
    keeps = policy == "never" or (policy == "default" and pp > 1)
    return degrees, replicas, 2 if keeps else 3


def _precision(keys: Keys) -> str:
    """Return the number format of matrix products."""
    converters = keys.value("model.converters") or []
    if any("float8" in str(one) for one in converters):
        return "fp8"
    wide = keys.text("training.mixed_precision_param", default="bfloat16") == "float32"
    return "fp32" if wide else "bf16"


def _recompute(keys: Keys) -> str:
    """Return the recomputation mode; every policy other than none and full is read as selective."""
    mode = keys.text("activation_checkpoint.mode", default="selective").lower()
    return mode if mode in ("none", "full") else "selective"
