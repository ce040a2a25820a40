"""Build a study file from a framework's file and the values that its user adds.

The framework's file describes the current configuration. `new_study` is pure: it returns texts and writes none of them.
If values are missing, one message names all options that add them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from costmodels.job.decoder import Decoder
from costmodels.job.model_catalog import find_model, load_model, model_names, read_models
from costmodels.job.model_spec import ModelSpec, plain_model
from costmodels.job.parallel_config import DEGREES
from costmodels.job.runtime import find_runtime, runtime_names
from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping
from hardware.io.config_file import read_text
from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.input_file import open_input, reading_errors
from hardware.io.secret_texts import hide
from hardware.launched_hosts import launched
from trials.command.log_pattern import StepSize
from tuner.imports import WITH_FILE, Imported, Present, find_importer, present_of
from tuner.imports.bash.script import with_arguments
from tuner.imports.facts import facts_beyond
from tuner.imports.flags import flag_name
from tuner.imports.flagscale import join_files, train_file_of
from tuner.imports.gpt_neox import merge_gpt_neox
from tuner.imports.imported import Doubt, Unread
from tuner.imports.log import Measured, NoConfigurationError, StepsRead, import_log
from tuner.imports.trial_words import on_hosts
from tuner.imports.without_secrets import without_secrets
from tuner.study_file.answers import Added, check_complete, is_ignored
from tuner.study_file.cluster_keys import check_formats, cluster_keys, hosts_of, notes_on_domains, relative_path
from tuner.study_file.exported_flags import tells_layers
from tuner.study_file.in_training import OPTION, in_training, training_lines
from tuner.study_file.text import model_text, proxy_line, study_text

MOST_BYTES = 250_000
"""Largest file that is read [bytes]: scripts and configurations have a tenth, and reading one takes seconds."""

MANY_HOSTS = 8
"""Number of hosts from which on smaller jobs are proposed: a trial on all of them is worth sparing (assumed)."""

_DESCRIBING = ("name", "source", "assumed")
"""Keys of a decoder that do not change its training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewStudy:
    """Study file that is not written yet.

    Attributes:
        text: Text of the study file.
        model_file: Name of the model's own file beside it; empty if the study names another one.
        model_text: Text of the model's file.
        imported: Content of the framework's file.
        present: Current configuration, with its job.
        devices: Number of devices of the cluster.
        steps: Steps of the log, if the file is one whose steps are those of the current configuration.
        has_proxies: Whether trials are smaller jobs alone.
    """

    text: str
    model_file: str
    model_text: str
    imported: Imported
    present: Present
    devices: int
    steps: StepsRead | None = None
    has_proxies: bool = False

    @property
    def first_trial(self) -> str:
        """Options of `meshtune trial` for a first trial, and what it does."""
        if self.has_proxies:
            return "--once --proxy    # run it once, as a smaller job"
        return "--once    # run it once, and compare its step time with today's"

    @property
    def measured(self) -> Measured | None:
        """Measurement of the current configuration; None if the file is no log with steps that count."""
        return self.steps.measured if self.steps else None

    @property
    def measures(self) -> bool:
        """Whether trials run the user's own command."""
        return self.imported.command is not None and not self.imported.command.unknown

    @property
    def holds_secret(self) -> bool:
        """Whether the text shows a secret that no variable can stand for, as in an option of sbatch."""
        command = self.imported.command
        return (command is not None and command.shows_secret) or hide(self.text) != self.text


def read_import(framework: str, file: Path, text: str, arguments: tuple[str, ...] | None = None) -> Imported:
    """Read a file of a framework, and the file beside it that an experiment of FlagScale names.

    A launch script gets the arguments for its `$1`, `$2` and `$@`; None leaves them unknown.

    Raises:
        ConfigError: The text describes no configuration; the message names the file.
    """
    beside = train_file_of(text) if framework == "flagscale" else ""
    if beside and (file.parent / beside).is_file():
        text = join_files(text, read_text(file.parent / beside, most_bytes=MOST_BYTES))
    try:
        return find_importer(framework)(with_arguments(text, arguments) if arguments else text)
    except ConfigError as error:
        raise error.in_file(str(file)) from None


def read_several(framework: str, files: Sequence[Path], arguments: tuple[str, ...] | None = None) -> Imported:
    """Read the files of one training: those that GPT-NeoX's launcher merges, or a script with one file beside it.

    Recipes in Python may stand in several files.

    Raises:
        ConfigError: They describe no configuration, or cannot be joined; the message names a file.
    """
    if framework == "gpt-neox":
        return _read_gpt_neox(files)
    if len(files) > 2 and any(file.suffix != ".py" for file in files[1:]):
        raise ConfigError("is given more than twice: a script, and one file beside it", key=f"--from-{framework}")
    text, *beside = (read_text(file, most_bytes=MOST_BYTES) for file in files)
    try:
        return WITH_FILE[framework](with_arguments(text, arguments) if arguments else text, file="\n".join(beside))
    except ConfigError as error:
        raise error.in_file(str(files[0])) from None


def _read_gpt_neox(files: Sequence[Path]) -> Imported:
    """Read the files of one training with GPT-NeoX, merged as its launcher merges them.

    Raises:
        ConfigError: They describe no configuration, or cannot be merged; the message names a file.
    """
    texts = [(file, read_text(file, most_bytes=MOST_BYTES)) for file in files]
    return read_import("gpt-neox", files[0], merge_gpt_neox(texts) if len(texts) > 1 else texts[0][1])


def read_log(file: Path, *, after: int = 0) -> Imported:
    """Read the log of a training, as far as its first thousand steps, from behind so many lines on.

    Raises:
        NoConfigurationError: There is no configuration; the message names the file.
        ConfigError: The file cannot be read, or its configuration; the message names the file.
    """
    try:
        with reading_errors(file), io.TextIOWrapper(open_input(file), encoding="utf-8", errors="replace") as stream:
            return import_log(islice(stream, after, None) if after else stream, source=file.name)
    except NoConfigurationError as error:
        raise NoConfigurationError(error.rule, nearest=error.nearest, file=str(file)) from None
    except ConfigError as error:
        raise error.in_file(str(file)) from None


def with_command(imported: Imported, script: Imported, file: Path) -> Imported:
    """Return a log's configuration with the launch command of a script.

    Raises:
        ConfigError: The script has no launch command.
    """
    if script.command is None:
        raise ConfigError("has no launch command, and beside --from-log nothing else is read of it", file=str(file))
    return replace(imported, command=replace(script.command, script=file.name))


def new_study(imported: Imported, added: Added, *, file: Path, out: Path, model_at: str | None = None) -> NewStudy:
    """Build the study file `out`, from the content of a framework's file and what the user adds.

    A model that is not in the catalog gets a file beside it, which is named after the study file. `model_at` is then
    the value of `model:`; None is the name of that file.

    Raises:
        ConfigError: Values are missing, or contradict each other.
    """
    unsaid = imported.unsaid
    imported = without_secrets(_merge(imported, added))
    check_complete(imported, added, file)
    if added.runtime is not None and added.runtime not in runtime_names():
        raise ConfigError(
            "no such runtime in the catalog",
            key="--runtime",
            value=added.runtime,
            nearest=did_you_mean(added.runtime, runtime_names()),
        )
    name = _study_name(file)
    reference, model = _model(imported, added, name, file, out.parent)
    assert added.cluster is not None, "asked for before"
    keys = cluster_keys(added.cluster, hosts_of(imported), out.parent)
    try:
        cluster = cluster_from_mapping(keys, out.parent)
    except ConfigError as error:
        raise error.under("--cluster" if error.key == "name" else "cluster") from None
    imported = replace(imported, notes=(*imported.notes, *notes_on_domains(imported, cluster)))
    runtime = find_runtime(imported.runtime)
    try:
        check_formats(imported, cluster)
        present = present_of(imported, devices=cluster.num_devices, model=model, runtime=runtime)
    except ConfigError as error:
        raise error.in_file(str(file)) from None
    if imported.command is not None:
        command = on_hosts(imported.command, launched(cluster).num_hosts)
        if unsaid and command.framework in ("megatron", "mindspeed") and not command.unknown:
            command = replace(command, unknown=(f"its words do not say {', '.join(unsaid)}, which an option answers",))
        imported = replace(imported, command=command)
    training = _training(imported, added, out)
    if training:
        imported = replace(imported, command=in_training(imported.command))
    own_file = "" if reference else f"{out.stem}-model.yaml"
    steps = _read_steps(imported, present, cluster.num_devices)
    if steps is not None:
        imported = replace(imported, notes=(*imported.notes, *steps.notes))
    return NewStudy(
        text=study_text(
            imported,
            present,
            name=name,
            model=reference or model_at or own_file,
            cluster=keys,
            file=file,
            measured=steps.measured if steps else None,
            facts=facts_beyond(imported.facts, runtime, present.job, model),
            further=training or _proxy(imported, added, cluster, model),
        ),
        model_file=own_file,
        model_text="" if reference else model_text(model, file),
        imported=imported,
        present=present,
        devices=cluster.num_devices,
        steps=steps,
        has_proxies=added.trial_hosts is not None,
    )


def _training(imported: Imported, added: Added, out: Path) -> list[str]:
    """Return the lines of `trial:` for trials inside of a training; none where they are not asked for.

    Raises:
        ConfigError: The command cannot go on from a checkpoint, or trials shall be smaller jobs too.
    """
    if added.checkpoints is None:
        return []
    if added.trial_hosts is not None:
        rule = "needs trials at full size, and --trial-hosts makes them smaller jobs"
        raise ConfigError(rule, key=OPTION, value=added.checkpoints)
    return training_lines(in_training(imported.command), added.checkpoints, out)


def _proxy(imported: Imported, added: Added, cluster: Cluster, model: ModelSpec) -> list[str]:
    """Return the line of `trial:` for smaller jobs: asked for, or proposed where the command can be told its layers.

    Raises:
        ConfigError: Trials shall have as many hosts as the cluster.
    """
    hosts, all_hosts, command = added.trial_hosts, cluster.num_hosts, imported.command
    if hosts is not None:
        if not 0 < hosts < all_hosts:
            rule = f"must be from 1 to {all_hosts - 1}, below the hosts of the cluster"
            raise ConfigError(rule, key="--trial-hosts", value=hosts)
        return [proxy_line(hosts, is_asked=True)]
    proposes = command is not None and len(cluster.groups) == 1 and all_hosts >= MANY_HOSTS
    if command is None or not proposes or not tells_layers(command.flags or command.framework, model):
        return []
    return [proxy_line(2, is_asked=False)]


def _read_steps(imported: Imported, present: Present, devices: int) -> StepsRead | None:
    """Return the steps that a log holds of the configuration that it printed; None where the file is no such log."""
    if imported.steps is None:
        return None
    assert present.current, "a log states its degrees"
    samples = present.job["global_batch_size"]
    step = StepSize(samples=samples, tokens=samples * present.job["sequence_length"], devices=devices)
    return imported.steps.read(step)


_OF_CLUSTER = ("hosts", "devices_per_host")


def _merge(imported: Imported, added: Added) -> Imported:
    """Merge the values of the file and of the user, which replace the file's.

    A further dimension among the user's answers, such as the ZeRO stage, is a key of the job.
    """
    if "vocab_size" in added.answers and (added.model is not None or not imported.model):
        raise ConfigError(
            "replaces the vocabulary size of the file's own model, but the file has no model", key="--vocab-size"
        )
    degrees, job, model, missing = (
        dict(kind) for kind in (imported.degrees, imported.job, imported.model, imported.missing)
    )
    for key, value in added.answers.items():
        if key in DEGREES:
            degrees[key] = int(value)
        elif key == "vocab_size":
            model[key] = value
            missing.pop(key, None)
        elif key not in _OF_CLUSTER:
            job[key] = value
    known = {*degrees, *job} | ({"model"} if added.model is not None else set())
    answered = tuple(f"{key}: " for key in added.answers)
    of_file = ((degrees, imported.degrees), (job, imported.job))
    changed = [name for kind, own in of_file for name in own if kind[name] != own[name]]
    notes = tuple(note for note in imported.notes if not note.startswith(answered))
    if changed and imported.steps is not None:
        notes += (
            f"measured: an option replaces {' and '.join(changed)}, with which the log's steps were timed, so none is "
            "used and `current` has no step time",
        )
    return replace(
        imported,
        degrees=degrees,
        job=job,
        micro_batches=None if "global_batch_size" in added.answers else imported.micro_batches,
        open={name: why for name, why in imported.open.items() if name not in known},
        model=model,
        missing=missing,
        hosts=added.count("hosts") or imported.hosts,
        devices_per_host=added.count("devices_per_host") or imported.devices_per_host,
        runtime=added.runtime or imported.runtime,
        notes=notes,
        unread=(*imported.unread, *(_ignored(one, imported) for one in imported.doubts if is_ignored(one, added))),
        steps=None if changed else imported.steps,
    )


def _ignored(doubt: Doubt, imported: Imported) -> Unread:
    """Return the remark on a flag that the study leaves out, and that trials may nevertheless have."""
    words = () if imported.command is None else imported.command.arguments
    is_kept = any(word.startswith("--") and flag_name(word) == flag_name(doubt.flag) for word in words)
    still = ", and still in the trial's command" if is_kept else ""
    return Unread(what=doubt.flag, why=f"left out of the study, as --ignore-flags says{still}", line=doubt.line)


def _study_name(file: Path) -> str:
    stem = file.parent.resolve().name if file.name == "config.json" else file.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "study"


def _model(imported: Imported, added: Added, name: str, file: Path, folder: Path) -> tuple[str, ModelSpec]:
    """Return the value of `model:`, empty if the model needs a file of its own, and the model."""
    if added.model is not None:
        if added.model in model_names():
            return added.model, find_model(added.model)
        try:
            model = load_model(added.model, Path())
        except ConfigError as error:
            raise ConfigError(
                error.rule, key=error.key or "--model", value=error.value, nearest=error.nearest, file=error.file
            ) from None
        return relative_path(Path(added.model), folder), model
    if imported.model_name:
        return imported.model_name, find_model(imported.model_name)
    if imported.framework == "hugging-face":
        return relative_path(file, folder), load_model(str(file), Path())
    model = imported.named or _stated(imported, name, file)
    if not model.is_plain:
        return "", model
    sizes = _sizes(model)
    twin = next((known for known, other in read_models()[0].items() if other.is_plain and _sizes(other) == sizes), "")
    return twin, model


def _stated(imported: Imported, name: str, file: Path) -> ModelSpec:
    """Return the model whose sizes the file states."""
    known = {field.name for field in fields(Decoder)}
    assert imported.model.keys() <= known, "an importer names keys of a decoder"
    try:
        model = plain_model(name=name, source=f"the flags of {file.name}", **imported.model)
    except ConfigError as error:
        raise error.in_file(str(file)) from None
    return model if imported.blocks is None else imported.blocks.apply(model)


def _sizes(model: ModelSpec) -> dict[str, Any]:
    return {key: value for key, value in asdict(model.plain).items() if key not in _DESCRIBING}
