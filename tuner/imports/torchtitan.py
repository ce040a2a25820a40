"""Importer for torchtitan: TOML files of older versions, and launch scripts with flags.

A flag has the form `--parallelism.tensor_parallel_degree 2`. From 0.3 on, flags change a recipe in Python, which is not
executed: what neither a flag nor a known recipe states is asked for.

Sources: torchtitan 0.3.0 config/configs.py (TrainingConfig, ParallelismConfig), config/manager.py (flags) and
models/llama3/config_registry.py (recipes); the repository's config/training.py and config/parallelism.py after 0.3
(batches in tokens); and the train_configs/*.toml of earlier versions, where some keys were under `experimental` and
`training`, and a pipeline cut a batch into as many micro-batches as it had stages.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError
from tuner.export.torchtitan_flags import POLICY
from tuner.imports.bash.script import Script, read_script
from tuner.imports.bash.texts import Argument
from tuner.imports.facts import facts_in_environment, facts_in_flags
from tuner.imports.flags import Flag, Flags, flag_name, flags_among
from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.keys import Keys
from tuner.imports.megatron import SIGNS as MEGATRON
from tuner.imports.named_models import named_model
from tuner.imports.optimizer_names import read_optimizer
from tuner.imports.titan_recipe import sections_of
from tuner.imports.torchrun import launch_of
from tuner.imports.torchtitan_command import FROM_FILE, command_of
from tuner.imports.torchtitan_keys import doubts_about

_STARTERS = ("torchrun", "python", "python3", "bash", "srun", "sbatch", "export", "cd", "source", "set", "mpirun")
"""Words of a shell script that no TOML file has as a word of its own."""
_LAUNCHER = ("--nnodes", "--nproc_per_node", "--nproc-per-node")
_POLICY = f"{POLICY}:"
"""Beginning of the subcommand that selects the recomputation policy."""
_SIGNS = ("--parallelism.", "--training.", FROM_FILE)
"""Beginnings of the flags that identify a command of torchtitan."""
_STARTS = ("torchtitan.train", "torchtitan/train.py", "--config")
"""Words of such a command that may have no flags of its layout."""
_MODELS = {
    "llama2.13b": "llama2-13b",
    "llama3.8b": "llama3-8b",
    "llama3.70b": "llama3-70b",
    "llama3.405b": "llama3-405b",
    "deepseek_v3.671b": "deepseek-v3",
}
"""Models in the catalog by torchtitan's name and flavor."""
_OTHER_MODELS = {
    "flux": "is a diffusion model of images",
    "siglip": "is a model of images",
    "qwen3_vl": "is a model of images and text",
    "kimi_linear": "has linear attention",
    "qwen3_next": "has linear attention",
    "lfm2": "has convolutions in place of attention",
    "nemotron3": "has state-space layers (Mamba)",
}
"""Models of torchtitan and its experiments that are no decoder with attention, by the beginning of their name."""
_UNDER = ("parallelism", "experimental", "training")
"""Sections where versions have had the degrees."""
_STATED_BY = {
    "sequence_length": ("training.seq_len",),
    "mbs": ("training.local_batch_size", "training.batch_size"),
    "recompute": ("activation_checkpoint.mode",),
    "tp": tuple(f"{section}.tensor_parallel_degree" for section in _UNDER),
    "pp": tuple(f"{section}.pipeline_parallel_degree" for section in _UNDER),
    "cp": tuple(f"{section}.context_parallel_degree" for section in _UNDER),
}
"""Keys that state what a recipe may set otherwise than torchtitan's defaults."""
_SECTIONS = ("training", "parallelism", "activation_checkpoint", "model", "optimizer", "compile", "loss", "float8")
"""Sections of which flags of a script are read."""
_NOT_MODELLED = {
    "optimizer.early_step_in_backward": "Meshtune assumes that the optimizer runs after the last backward pass"
}
_FP8_RECIPES = {"tensorwise": "tensorwise", "rowwise": "blockwise", "rowwise_with_gw_hp": "blockwise"}
"""Scaling of tensors in fp8 by torchtitan's names; a row is a block."""
_CHUNKS = {"interleaved1f1b": 2, "interleavedzerobubble": 2, "zbvzerobubble": 2, "dualpipev": 2, "loopedbfs": 2}
"""Default number of virtual stages per rank, by schedule (torchtitan distributed/pipeline_parallel.py)."""


def import_torchtitan(text: str, *, file: str = "") -> Imported:
    """Read a configuration file or a launch script.

    Args:
        text: Text of the file or the script.
        file: Text of the TOML file that the script's command names, or of the Python with its recipe; flags of the
            command replace values of the file.

    Raises:
        ConfigError: the text is not a torchtitan configuration, or a value is invalid.
    """
    mapping, devices, command = _read(text, file)
    is_recipe = not file and not _is_toml(text)
    whole = _with_recipe(mapping) if is_recipe else mapping
    if not isinstance(whole.get("parallelism"), Mapping) and not isinstance(whole.get("training"), Mapping):
        raise ConfigError("has neither of torchtitan's sections [training] and [parallelism]")
    keys = Keys(_in_sequences(whole))
    _refuse_other_models(keys)
    open_keys = _open(keys) if is_recipe else _open_in_file(keys)
    unread = [
        Unread(what=name, why=f"not modelled: {why}") for name, why in _NOT_MODELLED.items() if keys.value(name) is True
    ]
    degrees, copies, stage = _degrees(keys, unread)
    optimizer, why = read_optimizer("torchtitan", keys.text("optimizer.name"))
    if why:
        open_keys["optimizer"] = f"optimizer.name: {why}"
    batch = keys.value("training.global_batch_size")
    job: dict[str, Any] = {
        "sequence_length": keys.number("training.seq_len", default=2048),
        "precision": _precision(keys, unread),
        "optimizer": optimizer,
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
    listed = None if model else named_model("torchtitan", name, keys.text("config"))
    facts, unclear = facts_in_flags(Flags(_as_flags(keys.mapping)), ("torchtitan",), holds_more=is_recipe)
    stated = keys.text("quantize.linear.float8.recipe_name", "float8.recipe_name")
    recipe = _FP8_RECIPES.get(stated or "tensorwise" if _has_float8(keys) else "")
    facts |= {"fp8_recipe": recipe} if recipe else {}
    return Imported(
        framework="torchtitan",
        runtime="torchtitan",
        facts={**facts, **facts_in_environment(command.environment if command else ())},
        model_name=model,
        named=listed,
        job={name: value for name, value in job.items() if name not in open_keys},
        degrees={name: size for name, size in degrees.items() if name not in open_keys},
        open=open_keys,
        micro_batches=None if "global_batch_size" in job or open_keys else max(1, local // degrees["mbs"]),
        copies=copies,
        hosts=None if devices is None else devices[0],
        devices_per_host=None if devices is None else devices[1],
        command=command,
        unread=(*unread, *unclear),
        doubts=tuple(doubts_about(mapping)),
        notes=(
            *(
                ()
                if model or listed
                else (f"{keys.text('model.flavor') or 'the model'} is not in the catalog: name it with --model",)
            ),
            *_without_flags(command),
        ),
    )


def _without_flags(command: LaunchCommand | None) -> tuple[str, ...]:
    """Return a note on a command without flags of its layout, whose program may be one that takes none."""
    if command is None or any(word.startswith((*_SIGNS, POLICY)) for word in command.arguments):
        return ()
    return (
        "the script has no flags of its layout: trials add those of torchtitan 0.3, which later versions do not take",
    )


def _as_flags(mapping: Mapping[str, Any]) -> list[Flag]:
    """Return the keys of a configuration as the flags that state them."""
    found = []
    for section, keys in mapping.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else ():
            if isinstance(value, bool):
                name, words = (key if value else f"no_{key}"), []
            else:
                name, words = key, [",".join(map(str, value)) if isinstance(value, list) else str(value)]
            texts = tuple(Argument(text=word, line=0) for word in words)
            found.append(Flag(name=f"--{section}.{name}", line=0, values=texts))
    return found


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@functools.cache
def recipes() -> Mapping[str, Mapping[str, Any]]:
    """Return the values of torchtitan's own recipes, by name and section."""
    return read_mapping(Path(__file__).with_name("torchtitan_recipes.yaml"))


def _with_recipe(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a script's flags over those of its recipe, if the recipe is a known one."""
    merged = dict(mapping)
    for section, values in recipes().get(str(mapping.get("config", "")).lower(), {}).items():
        given = mapping.get(section)
        merged[section] = {**values, **(given if isinstance(given, Mapping) else {})}
    return merged


def _in_sequences(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with batches in sequences, where versions after 0.3 state them in tokens.

    Raises:
        ConfigError: a number of tokens is not a multiple of the context length.
    """
    training = mapping.get("training")
    if not isinstance(training, Mapping) or "num_tokens_per_microbatch_per_dp_rank" not in training:
        return dict(mapping)
    keys = Keys(mapping)
    length = keys.number("training.max_context_length", "training.seq_len", default=2048)

    def sequences(name: str) -> int:
        tokens = keys.number(f"training.{name}", default=length)
        if tokens % length:
            raise ConfigError(
                f"must be a multiple of max_context_length = {length}: Meshtune models whole sequences",
                key=f"training.{name}",
                value=tokens,
            )
        return tokens // length

    mbs = sequences("num_tokens_per_microbatch_per_dp_rank")
    parallelism = mapping.get("parallelism")
    parallelism = dict(parallelism) if isinstance(parallelism, Mapping) else {}
    rounds = keys.number("parallelism.num_pp_microbatches", default=1)
    is_pipeline = keys.number("parallelism.pipeline_parallel_degree", default=1) > 1
    changed = {"seq_len": length, "local_batch_size": mbs * rounds if is_pipeline else mbs}
    if keys.value("training.num_tokens_per_train_step") not in (None, -1):
        changed["global_batch_size"] = sequences("num_tokens_per_train_step")
    parallelism["pipeline_parallel_microbatch_size"] = mbs
    return {**mapping, "training": {**training, **changed}, "parallelism": parallelism}


def _refuse_other_models(keys: Keys) -> None:
    """Refuse recipes of LoRA, and models that are no decoder with attention.

    Raises:
        ConfigError: a converter adds adapters, or the model is of another kind.
    """
    name = (keys.text("model.name") or keys.text("module")).lower()
    for kind, what in _OTHER_MODELS.items():
        if name.startswith(kind):
            raise ConfigError(
                f"{what}; Meshtune does not model this, and would need its layers and their kernels",
                key="model.name",
                value=name,
            )
    if any("lora" in name for name in _converters(keys)):
        raise ConfigError(
            "trains adapters (LoRA); Meshtune does not model this, and would need memory and time of frozen weights "
            "with small trained matrices beside them",
            key="model.converters",
        )


def _open(keys: Keys) -> dict[str, str]:
    """Return what neither a flag nor a known recipe states, with the reason."""
    recipe = keys.text("config") or "the recipe"
    why = f"no flag states it, and {recipe} is not read"
    found = {name: why for name, stated in _STATED_BY.items() if keys.value(*stated) is None}
    if "pp" in found and keys.value("parallelism.fsdp_reshard_after_forward") is None:
        found["zero_stage"] = "a pipeline changes its default"
    return found


def _open_in_file(keys: Keys) -> dict[str, str]:
    """Return what a TOML file leaves open: the first versions recomputed without a key that says so."""
    is_of_2024 = keys.value("training.data_parallel_degree") is not None
    if is_of_2024 and keys.value("activation_checkpoint.mode") is None:
        return {"recompute": "this version of torchtitan has no key for it"}
    return {}


def _read(text: str, file: str) -> tuple[Mapping[str, Any], tuple[int, int] | None, LaunchCommand | None]:
    """Return the keys, the number of hosts and of devices per host, and the launch command.

    Flags of a script replace the values of the TOML file that it names.

    The last two are None for a TOML file, and for a script that does not state them.
    """
    try:
        return tomllib.loads(text), None, None
    except (ValueError, RecursionError) as error:
        problem = str(error)
    script = read_script(text)
    words = [word for command in script.commands for word in command.words]
    named = Flags([flag for flag in flags_among(words) if flag.name in ("--module", "--config")])
    mapping = sections_of(file, named.text("--module") or "", named.text("--config") or "") if file else {}
    # Collect the flags into the sections that a TOML file would have.
    for flag in flags_among(words):
        section, dot, key = flag.name.removeprefix("--").removeprefix("quantize.linear.").partition(".")
        key = key.replace("-", "_")
        values = [one for one in flag.values if not one.text.startswith(_POLICY)]
        for policy in flag.values[len(values) :]:
            mapping["activation_checkpoint"] = {"mode": policy.text.removeprefix(_POLICY)}
        if values and values[0].unknown:
            continue
        value = _parse_value(values[0].text) if values else not key.startswith("no_")
        key = key if values else key.removeprefix("no_")
        if dot and section in _SECTIONS:
            mapping.setdefault(section, {})[key] = value
        elif section in ("module", "config"):
            mapping[section] = value
    if not mapping:
        raise _no_configuration(text, words, problem)
    launcher = Flags([flag for flag in flags_among(words) if flag.name in _LAUNCHER])
    per_host = launcher.text("--nproc_per_node") or launcher.text("--nproc-per-node")
    per_host = per_host or next((one.text for one in script.variables.get("NGPU", ())), "")
    sizes = (launcher.text("--nnodes") or "1", per_host)
    if not all(re.fullmatch(r"[1-9][0-9]{0,4}", text) for text in sizes):
        return mapping, None, _command(script)
    return mapping, (int(sizes[0]), int(sizes[1])), _command(script)


def _no_configuration(text: str, words: Sequence[Argument], problem: str) -> ConfigError:
    """Return the error for a text that is neither a TOML file nor a script with torchtitan's flags.

    Args:
        text: Text of the file.
        words: Words of its commands, if it is a script.
        problem: Reason why it is no TOML.
    """
    if not text.startswith("#!") and not any(word.text in _STARTERS for word in words):
        return ConfigError(f"is not TOML ({problem}), and has no flags such as --parallelism.tensor_parallel_degree")
    named = next((word.text for word in words if word.text.endswith(".toml") and not word.unknown), "")
    if named:
        nearest = f"--from-torchtitan {named}, the file that it names, or `--capture -- bash SCRIPT`, which reads both"
    elif MEGATRON & {flag_name(word.text) for word in words}:
        return ConfigError(
            "is a shell script with flags of Megatron-LM, and none of torchtitan", nearest="--from-megatron"
        )
    else:
        nearest = "`meshtune init --capture -- bash SCRIPT` finds the command that it starts"
    return ConfigError(
        "is a shell script without flags of torchtitan, such as --parallelism.tensor_parallel_degree, so that its "
        "configuration stands elsewhere",
        nearest=nearest,
    )


def _command(script: Script) -> LaunchCommand | None:
    """Return the command that starts the trainer, on all devices if one does; None if the script does not start it."""

    def sections(words: tuple[Argument, ...]) -> int:
        return sum(word.text.startswith(_SIGNS) or word.text in _STARTS for word in words)

    launches = [launch for one in script.commands if sections(one.words) and (launch := launch_of(one))]
    best = max(launches, key=lambda one: (bool(one.starter), sections((*one.program, *one.training))), default=None)
    return None if best is None else command_of(best, script)


def _parse_value(text: str) -> Any:
    if re.fullmatch(r"-?[0-9]{1,12}", text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _degrees(keys: Keys, unread: list[Unread]) -> tuple[dict[str, int], int, int]:
    """Return the degrees, the number of copies of the sharded states, and the ZeRO stage that FSDP corresponds to."""

    def degree(name: str) -> int:
        value = keys.value(*(f"{section}.{name}" for section in _UNDER))
        # -1 means all ranks that the other degrees leave, which keys.number would reject.
        if value == -1:
            return -1
        return keys.number(*(f"{section}.{name}" for section in _UNDER), default=1)

    pp, local = (
        degree("pipeline_parallel_degree"),
        keys.number("training.local_batch_size", "training.batch_size", default=8),
    )
    size = _micro_batch(keys, pp, local)
    degrees = {
        "pp": pp,
        "tp": degree("tensor_parallel_degree"),
        "cp": degree("context_parallel_degree"),
        "ep": degree("expert_parallel_degree"),
        "mbs": min(size, local) if pp > 1 else local,
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
    name = "data_parallel_shard_degree"
    if keys.value(*(f"{section}.{name}" for section in _UNDER)) is None:
        name = "data_parallel_degree"  # its name in 2024
    value = keys.value(*(f"{section}.{name}" for section in _UNDER))
    shards = -1 if value is None else value
    if shards != -1:
        shards = degree(name)
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


def _micro_batch(keys: Keys, pp: int, local: int) -> int:
    """Return the sequences of one micro-batch of a pipeline.

    Versions of 2024 state the number of micro-batches instead, which is that of the stages by default.
    """
    number = keys.count(*(f"{section}.pipeline_parallel_microbatches" for section in _UNDER))
    if number is None and isinstance(keys.value("experimental"), Mapping):
        number = pp if pp > 1 else None
    if number is not None:
        return max(1, local // number)
    return keys.number("parallelism.pipeline_parallel_microbatch_size", default=1)


def _converters(keys: Keys) -> list[str]:
    """Return the names of the model's converters, which older files have as one text."""
    found = keys.value("model.converters", "model_converters.converters") or []
    return [str(one).lower() for one in (found if isinstance(found, list) else str(found).split(","))]


def _precision(keys: Keys, unread: list[Unread]) -> str:
    """Return the number format of matrix products."""
    if _has_float8(keys):
        return "fp8"
    if any("nvfp4" in one for one in _converters(keys)):
        return "nvfp4"
    if any("mx" in one for one in _converters(keys)):
        unread.append(Unread(what="model.converters", why="the MX format is read as fp8"))
        return "fp8"
    wide = keys.text("training.mixed_precision_param", default="bfloat16") == "float32"
    return "fp32" if wide else "bf16"


def _has_float8(keys: Keys) -> bool:
    """Return whether linear layers are torchao's, which scales whole tensors without a recipe (docs/float8.md)."""
    old = keys.value("float8.enable_float8_linear", "training.enable_fp8_linear", "training.fp8_linear")
    return bool(old) or any("float8" in one for one in _converters(keys))


def _recompute(keys: Keys) -> str:
    """Return the recomputation mode; every policy other than none and full is read as selective."""
    mode = keys.text("activation_checkpoint.mode", default="selective").lower()
    return mode if mode in ("none", "full") else "selective"
