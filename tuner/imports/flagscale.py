"""Importer for configurations of FlagScale (YAML), which runs Megatron-LM.

FlagScale has two files: one describes the experiment (hosts, task), and its `defaults:` name the other, which holds
the sections `system`, `model` and `data`. Hydra joins them. Both forms are read, and the joined form that Hydra writes
into an experiment's folder. All keys of the sections are flags of Megatron-LM with underscores, at any depth.

Sources: FlagOpen/FlagScale flagscale/runner/utils.py (`flatten_dict_to_args`), flagscale/runner/runner_train.py (hosts
and devices), examples/*/conf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flag
from tuner.imports.imported import Imported
from tuner.imports.keys import Keys
from tuner.imports.megatron import SIGNS, import_flags

_SECTIONS = ("system", "model", "data")
_SHAPE = {"--num-layers", "--hidden-size"}
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.]+)\}")


def train_file_of(text: str) -> str:
    """Return the path of the file that an experiment's `defaults:` name for training, relative to the experiment's.

    The path is empty if the text names none, or is no experiment.
    """
    try:
        loaded = parse_yaml(text)
    except ConfigError:
        return ""
    if not isinstance(loaded, dict) or any(name in loaded for name in ("train", *_SECTIONS)):
        return ""
    defaults = loaded.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        name = entry.get("train") if isinstance(entry, dict) else None
        if isinstance(name, str) and name and ".." not in PurePosixPath(name).parts:
            return str(PurePosixPath("train", name.removesuffix(".yaml") + ".yaml"))
    return ""


def join_files(experiment: str, train: str) -> str:
    """Join an experiment with its file for training, as Hydra does: the latter stands under `train:`."""
    indented = "\n".join(f"  {line}" for line in train.splitlines())
    return f"{experiment}\ntrain:\n{indented}\n"


def import_flagscale(text: str) -> Imported:
    """Read a file for training, or an experiment that is joined with one.

    Raises:
        ConfigError: the text is not such a file, it describes another task than training with Megatron-LM, or a value
            is invalid.
    """
    loaded = parse_yaml(text)
    if not isinstance(loaded, dict):
        raise ConfigError("must have a mapping at its top level, as files of FlagScale have")
    _refuse_other_tasks(Keys(loaded))
    train = loaded.get("train", loaded)
    sections = [train[name] for name in _SECTIONS if isinstance(train, dict) and isinstance(train.get(name), dict)]
    flags = [flag for section in sections for flag in _flags_in(section, loaded)]
    named = {flag.name for flag in flags}
    if not SIGNS & named:
        if train_file_of(text):
            raise ConfigError(f"names {train_file_of(text)}, which is not beside it", key="defaults")
        raise ConfigError("has no sections system: and model: with flags such as tensor_model_parallel_size")
    if not _SHAPE & named:
        raise ConfigError(
            "names no num_layers or hidden_size, so it trains no language model of Megatron-LM that the file describes",
            key="model",
        )
    hosts, devices_per_host = _devices(Keys(loaded))
    program = PurePosixPath(Keys(loaded).text("experiment.task.entrypoint")).name
    return replace(
        import_flags(flags, program=program),
        framework="flagscale",
        runtime="megatron-core",
        hosts=hosts,
        devices_per_host=devices_per_host,
    )


def _refuse_other_tasks(keys: Keys) -> None:
    """Refuse tasks other than training, and training on several meshes.

    Raises:
        ConfigError: the key that says so.
    """
    for name, only in (("experiment.task.type", "train"), ("experiment.task.backend", "megatron")):
        value = keys.text(name, default=only)
        if value != only:
            raise ConfigError(f"must be {only}: Meshtune models no other tasks of FlagScale", key=name, value=value)
    for under in ("system", "train.system"):
        if keys.value(f"{under}.hetero.enable_hetero") is True:
            raise ConfigError(
                "trains on several meshes, each with its own degrees; Meshtune does not model this, and would need "
                "degrees for each mesh",
                key=f"{under}.hetero.enable_hetero",
            )


def _flags_in(section: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield the flags of a section as FlagScale passes them: true is a switch, false and null are left out."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flags_in(value, whole)
        elif value is not None and value is not False:
            items = value if isinstance(value, list) else [] if value is True else [value]
            words = tuple(_word(item, whole) for item in items)
            yield Flag(name=f"--{str(name).replace('_', '-')}", line=0, values=words)


def _word(value: Any, whole: Mapping[str, Any]) -> Argument:
    """Return a value as a word; a reference to another key is replaced by that key's value."""
    text = str(value)
    found = _REFERENCE.fullmatch(text.strip())
    if found is not None:
        target = Keys(whole).value(found[1])
        if isinstance(target, (str, int, float)) and "${" not in str(target):
            return Argument(text=str(target), line=0)
    return Argument(text=text, line=0, unknown=f"{text} is filled in by Hydra" if "${" in text else "")


def _devices(keys: Keys) -> tuple[int | None, int | None]:
    """Return the number of hosts and of devices per host, each None if unknown.

    Without a file of hosts an experiment runs on one host. Its devices are those that its environment names.
    """
    if keys.value("experiment") is None:
        return None, None
    hosts, devices = (
        # a value such as ${env:WORLD_SIZE} is known at the start only
        None if "${" in keys.text(name) else keys.count(name)
        for name in ("experiment.runner.nnodes", "experiment.runner.nproc_per_node")
    )
    if keys.value("experiment.runner.nnodes") is None and keys.value("experiment.runner.hostfile") is None:
        hosts = 1
    named = keys.text("experiment.envs.CUDA_VISIBLE_DEVICES").split(",")
    if devices is None and named != [""]:
        devices = len(named)
    return hosts, devices
