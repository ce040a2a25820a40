"""A study file from what a framework's file says of the configuration in use, and what its user adds.

`new_study` is pure: it returns the texts and writes none of them. What the file leaves open, and nobody added, is
asked for in one message that names the options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from costmodels.job.model_catalog import find_model, load_model, model_names
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import DEGREES
from costmodels.job.runtime import find_runtime, runtime_names
from hardware.cluster import cluster_from_mapping, cluster_names
from hardware.io.errors import ConfigError, did_you_mean
from tuner.imports import IMPORTERS, Imported, Present, present_of
from tuner.study_file.text import model_text, study_text

MOST_BYTES = 250_000
"""Of a file that is read here: scripts and configurations have a tenth, and a script of so many is read in seconds."""

_DESCRIBING = ("name", "source", "assumed")
"""Fields of a ModelSpec that change nothing of how it trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """What a user says beside the file; None is nothing.

    Attributes:
        cluster: Name in the catalog.
        hosts: Hosts of it.
        model: Name in the catalog, or path of a model's file.
        vocab_size: Rows of the embedding table.
        sequence_length: Tokens per sequence.
        global_batch_size: Sequences per step.
        runtime: Profile in place of the file's framework.
        config: Degrees that the file leaves open, or has otherwise.
    """

    cluster: str | None = None
    hosts: int | None = None
    model: str | None = None
    vocab_size: int | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    runtime: str | None = None
    config: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewStudy:
    """A study file that is not written yet.

    Attributes:
        text: Its text.
        model_file: Name of the model's file beside it; empty where it names a model otherwise.
        model_text: That file's text.
        imported: What was read.
        present: The configuration in use.
        devices: Devices of the cluster.
    """

    text: str
    model_file: str
    model_text: str
    imported: Imported
    present: Present
    devices: int

    @property
    def measures(self) -> bool:
        """Whether trials run the user's own command."""
        return self.imported.command is not None and not self.imported.command.unknown


def read_import(framework: str, file: Path, text: str) -> Imported:
    """What a file of that framework says.

    Raises:
        ConfigError: it can't mean a configuration; the message names the file.
    """
    try:
        return IMPORTERS[framework](text)
    except ConfigError as error:
        raise error.in_file(str(file)) from None


def new_study(imported: Imported, added: Added, *, file: Path, folder: Path, model_at: str | None = None) -> NewStudy:
    """The study file.

    Args:
        imported: What `file` says.
        added: What the user says besides.
        file: What was read.
        folder: Where the study file is to stand.
        model_at: What `model:` says where the model gets a file of its own; None is the file's name.

    Raises:
        ConfigError: something is missing, or what is there contradicts itself.
    """
    imported = _with(imported, added)
    _check_complete(imported, added, file)
    if added.runtime is not None and added.runtime not in runtime_names():
        raise ConfigError(
            "no such runtime in the catalog",
            key="--runtime",
            value=added.runtime,
            nearest=did_you_mean(added.runtime, runtime_names()),
        )
    name = _study_name(file)
    reference, model = _model(imported, added, name, file, folder)
    cluster_keys = _cluster(imported, added)
    try:
        cluster = cluster_from_mapping(cluster_keys, Path())
    except ConfigError as error:
        raise error.under("--cluster" if error.key == "name" else "cluster") from None
    runtime = find_runtime(imported.runtime)
    try:
        present = present_of(imported, devices=cluster.num_devices, model=model, runtime=runtime)
    except ConfigError as error:
        raise error.in_file(str(file)) from None
    own_file = "" if reference else f"{name}-model.yaml"
    return NewStudy(
        text=study_text(
            imported,
            present,
            name=name,
            model=reference or model_at or own_file,
            cluster=cluster_keys,
            file=file,
        ),
        model_file=own_file,
        model_text="" if reference else model_text(model, file),
        imported=imported,
        present=present,
        devices=cluster.num_devices,
    )


def _with(imported: Imported, added: Added) -> Imported:
    """What the file says, with what the user adds, which wins."""
    degrees = {**imported.degrees, **(added.config or {})}
    job = dict(imported.job)
    micro_batches = imported.micro_batches
    if added.sequence_length is not None:
        job["sequence_length"] = added.sequence_length
    if added.global_batch_size is not None:
        job["global_batch_size"], micro_batches = added.global_batch_size, None
    known = {*degrees, *job}
    model, missing = dict(imported.model), dict(imported.missing)
    if added.vocab_size is not None and model:
        model["vocab_size"] = added.vocab_size
        missing.pop("vocab_size", None)
    return replace(
        imported,
        degrees=degrees,
        job=job,
        micro_batches=micro_batches,
        open={name: why for name, why in imported.open.items() if name not in known},
        model=model,
        missing=missing,
        runtime=added.runtime or imported.runtime,
    )


def _check_complete(imported: Imported, added: Added, file: Path) -> None:
    """Asks for everything that is missing at once."""
    if added.vocab_size is not None and (added.model is not None or not imported.model):
        raise ConfigError("replaces that of the file's own model, and there is none", key="--vocab-size")
    needs = []
    if added.cluster is None:
        needs.append(f"--cluster NAME (what the devices are: {', '.join(cluster_names())})")
    if added.hosts is None and imported.hosts is None and "dp" not in imported.degrees:
        needs.append("--hosts N")
    has_model = added.model is not None or imported.model_name
    if not has_model and not imported.model:
        needs.append("--model NAME (of the catalog, or the path of a config.json or a model's YAML)")
    for field, flag in {} if has_model else imported.missing.items():
        option = "--vocab-size N" if field == "vocab_size" else "--model NAME"
        needs.append(f"{option} ({flag} is not there)")
    for key, option in {"sequence_length": "--sequence-length N", "global_batch_size": "--global-batch-size N"}.items():
        told = key in imported.job or (key == "global_batch_size" and imported.micro_batches is not None)
        if not told:
            needs.append(f"{option}{_because(imported.open.get(key))}")
    needs += [f"--config {name}=N{_because(imported.open[name])}" for name in DEGREES if name in imported.open]
    if needs:
        raise ConfigError(f"leaves open what a study needs; add {'; '.join(dict.fromkeys(needs))}", file=str(file))


def _because(why: str | None) -> str:
    return f" ({why})" if why else ""


def _study_name(file: Path) -> str:
    stem = file.parent.resolve().name if file.name == "config.json" else file.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "study"


def _model(imported: Imported, added: Added, name: str, file: Path, folder: Path) -> tuple[str, ModelSpec]:
    """What `model:` says, empty where the model needs a file of its own; and the model."""
    if added.model is not None:
        if added.model in model_names():
            return added.model, find_model(added.model)
        try:
            model = load_model(added.model, Path())
        except ConfigError as error:
            raise ConfigError(
                error.rule, key=error.key or "--model", value=error.value, nearest=error.nearest, file=error.file
            ) from None
        return _relative(Path(added.model), folder), model
    if imported.model_name:
        return imported.model_name, find_model(imported.model_name)
    if imported.framework == "hugging-face":
        return _relative(file, folder), load_model(str(file), Path())
    known = {field.name for field in fields(ModelSpec)}
    assert imported.model.keys() <= known, "an importer names fields of a ModelSpec"
    try:
        model = ModelSpec(name=name, source=f"the flags of {file.name}", **imported.model)
    except ConfigError as error:
        raise error.in_file(str(file)) from None
    sizes = _sizes(model)
    twin = next((other for other in model_names() if _sizes(find_model(other)) == sizes), "")
    return twin, model


def _sizes(model: ModelSpec) -> dict[str, Any]:
    return {key: value for key, value in asdict(model).items() if key not in _DESCRIBING}


def _relative(path: Path, folder: Path) -> str:
    """The path as a file in `folder` names it; it ends as paths of models do, or names a folder."""
    target, base = path.resolve(), folder.resolve()
    common = next((parent for parent in (base, *base.parents) if target.is_relative_to(parent)), None)
    if common is None or len(common.parts) == 1:
        return str(target)
    up = len(base.parts) - len(common.parts)
    relative = Path(*[".."] * up) / target.relative_to(common)
    return str(relative) if "/" in str(relative) else f"./{relative}"


def _cluster(imported: Imported, added: Added) -> dict[str, Any]:
    """The cluster's keys; hosts that the file or the user does not fill are not asked for."""
    assert added.cluster is not None, "asked for before"
    try:
        in_host = cluster_from_mapping({"name": added.cluster, "hosts": 1}, Path()).devices_per_host
    except ConfigError as error:
        raise ConfigError(error.rule, key="--cluster", value=added.cluster, nearest=error.nearest) from None
    per_host = imported.devices_per_host or in_host
    hosts = added.hosts or imported.hosts
    if hosts is None:
        devices = 1
        for name in ("pp", "tp", "dp", "cp", "up"):
            devices *= imported.degrees.get(name, 1)
        per_host = min(per_host, devices)
        hosts = max(1, devices // per_host)
    keys: dict[str, Any] = {"name": added.cluster, "hosts": hosts}
    return keys if per_host == in_host else keys | {"devices_per_host": per_host}
