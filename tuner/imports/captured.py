"""Importer for a capture: the first training command among its records, read by its framework's importer.

The command is handed to the importer as a script of one line without any expansion, in which every word is quoted. So
one reader per framework serves scripts and captures, and a capture needs no evaluation of bash.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hardware.io.errors import ConfigError, shorten
from hardware.io.secret_texts import HIDDEN, hide, hide_command, hide_words, is_secret, secret_words
from trials.command.slurm.jobs import Tasks
from tuner.capture.launchers import TRAINING
from tuner.capture.record import Record, split_outputs
from tuner.capture.run_script import Capture
from tuner.capture.slurm import Allocation
from tuner.imports.bash.texts import Argument
from tuner.imports.deepspeed import import_deepspeed
from tuner.imports.gpt_neox import import_gpt_neox, merge_gpt_neox
from tuner.imports.imported import Imported, SlurmOptions
from tuner.imports.megatron import SIGNS, import_megatron
from tuner.imports.nanotron import import_nanotron
from tuner.imports.registry import WITH_FILE
from tuner.imports.session import is_of_tool
from tuner.imports.settings.programs import program_of
from tuner.imports.settings.verl import import_verl
from tuner.imports.slurm_launch import slurm_options
from tuner.imports.torchtitan import import_torchtitan
from tuner.imports.trainer_flags import SIGN, import_trainer

_CONFIG = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
"""Flags that name DeepSpeed's configuration file."""
_OF_DEEPSPEED = ("precision", "zero_stage", "offload")
"""Keys of the job in which DeepSpeed's file, and not the program's flags, decides."""
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
_PROCESS_STARTERS = ("srun", "mpirun", "mpiexec", "mpiexec.hydra")
_SUBMITTERS = ("sbatch", "salloc", "qsub", "ray")
"""Programs that submit a job, which a trial does in its own way."""
_LAUNCHER_MODULES = ("torch.distributed.launch", "torch.distributed.run")
_SHORTEST = 6
"""Length from which a secret is hidden wherever it occurs: a shorter one is a part of other words."""
_SHOWN = 3
"""Number of commands that an error message lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """Training command with the framework that reads it.

    Attributes:
        record: The command.
        framework: Name of the framework.
        text: The command as a script.
        file: Text of the configuration file that the command names, or empty.
    """

    record: Record
    framework: str
    text: str
    file: str = ""

    def imported(self) -> Imported:
        """Read the command with the importer of the framework."""
        if self.framework == "megatron":
            return import_megatron(self.text)
        if self.framework == "torchtitan":
            return import_torchtitan(self.text, file=self.file)
        if self.framework in WITH_FILE:
            return WITH_FILE[self.framework](self.text, file=self.file)
        if self.framework == "verl":
            return import_verl(self.text)
        if self.framework == "trainer":
            return import_trainer(self.text, config=self.file or None)
        of_file = {"nanotron": import_nanotron, "gpt-neox": import_gpt_neox, "deepspeed": import_deepspeed}
        return of_file[self.framework](self.file)


def import_captured(captured: Capture, *, recipe: str = "") -> Imported:
    """Read the first training command that a capture wrote down.

    Args:
        captured: Capture of a script.
        recipe: Text of the file with the recipe that a command runs, where no word of it names one.

    Raises:
        ConfigError: no recorded command is one of a known framework, or a value in it is invalid.
    """
    readings = [reading for record in captured.records if (reading := _reading(record, captured, recipe)) is not None]
    if not readings:
        raise _nothing(captured)
    first, found = _first_read(readings)
    others = [one for one in readings if one.record.words != first.record.words]
    if first.framework == "megatron" and (config := _deepspeed_file(first.record)) is not None:
        found = _with_deepspeed(found, import_deepspeed(config))
    if found.hosts is None or found.devices_per_host is None:
        stated = _allocation(first.record)
        found = replace(
            found, hosts=found.hosts or stated.hosts, devices_per_host=found.devices_per_host or stated.devices_per_host
        )
    if found.command is not None:
        # the text made here has a header of its own, also where there is no Slurm
        found = replace(
            found, command=replace(found.command, slurm=_slurm(first.record, captured, found.command.tasks))
        )
    notes = [*found.notes]
    if others:
        notes.append(
            f"{len(readings)} training commands were captured; the first that can be read is: {_shown(first.record)}"
        )
    if captured.stopped:
        notes.append(f"the script was ended: {captured.stopped}")
    return replace(
        found,
        open={name: _without_line(why) for name, why in found.open.items()},
        missing={key: _without_line(why) for key, why in found.missing.items()},
        unread=tuple(replace(one, line=None) for one in found.unread),
        doubts=tuple(replace(one, line=None) for one in found.doubts),
        notes=tuple(map(_without_line, notes)),
    )


def _without_line(text: str) -> str:
    """Return a text without lines, which would be those of the text made here, which the user never sees."""
    return re.sub(r" \(line \d+\)", "", text)


def _first_read(readings: Sequence[_Reading]) -> tuple[_Reading, Imported]:
    """Return the first command that can be read, since a script may evaluate a model before it trains one.

    Raises:
        ConfigError: none can be read; the error is that of the first.
    """
    refusals = []
    for one in readings:
        try:
            return one, one.imported()
        except ConfigError as refusal:
            refusals.append(refusal)
    error = refusals[0]
    key = re.sub(r"^line \d+: ", "", error.key) if error.key else None
    raise ConfigError(_without_line(error.rule), key=key, value=error.value, nearest=error.nearest)


def _reading(record: Record, captured: Capture, recipe: str) -> _Reading | None:
    """Return how to read a recorded command, or None if it is not one of a known framework."""
    if record.held_back:
        return None
    names = {word.partition("=")[0].replace("_", "-") for word in record.words if word.startswith("--")}
    yamls = [(Path(name), text) for name, text in record.files.items() if name.endswith((".yaml", ".yml"))]
    toml = next((text for name, text in record.files.items() if name.endswith(".toml")), "")
    nanotron = next((text for _, text in yamls if re.search(r"^parallelism:", text, re.M)), "")
    is_neox = bool(yamls) and any(word.endswith("deepy.py") for word in record.words)
    config = _deepspeed_file(record)
    program = program_of(record.words)
    ways = (
        (program, bool(program), recipe or (yamls[0][1] if yamls else "")),
        ("megatron", bool(SIGNS & names), ""),
        (
            "torchtitan",
            bool(toml) or _has_prefix(names, "--parallelism.") or _is_titans(names, record.words),
            toml or recipe,
        ),
        ("nanotron", bool(nanotron), nanotron),
        ("gpt-neox", is_neox, merge_gpt_neox(yamls) if is_neox else ""),
        ("trainer", SIGN in names and bool(names & set(_CONFIG)), config or ""),
        ("deepspeed", config is not None, config or ""),
    )
    found = next(((name, file) for name, is_read, file in ways if is_read), None)
    return (
        None
        if found is None
        else _Reading(framework=found[0], text=_as_script(record, captured), file=found[1], record=record)
    )


def _has_prefix(names: set[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _is_titans(names: set[str], words: Sequence[str]) -> bool:
    """Return whether a command is torchtitan's; of MindSpeed-LLM, `parallel` stands beside flags of `training`."""
    is_trainer = "torchtitan.train" in words or any(word.endswith("torchtitan/train.py") for word in words)
    return is_trainer or (_has_prefix(names, "--training.") and not _has_prefix(names, "--parallel."))


def _as_script(record: Record, captured: Capture) -> str:
    """Return the command as a script: Slurm's header, the script's own variables, the folder, and the command."""
    stated = _allocation(record)
    own = captured.own_environment(record)
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --nodes={stated.hosts}"] if stated.hosts else []
    lines += [f"#SBATCH --gpus-per-node={stated.devices_per_host}"] if stated.devices_per_host else []
    # Variables that hold a whole command, as scripts pass it to `bash -c`, are no settings of the program.
    kept = {
        name: value
        for name, value in own.items()
        if name not in _RANKS and " --" not in value and not is_of_tool(name, value)
    }
    asked = {name for name, value in kept.items() if _is_of_interpreter(value, captured)}
    lines += [f"export {name}={'$(python)' if name in asked else shlex.quote(value)}" for name, value in kept.items()]
    lines.append(f"cd {shlex.quote(record.directory)}")
    lines.append(" ".join(_quoted(word) for word in (*_around(record), *record.words)))
    lines += [f"# {line}" for line in (_deepspeed_file(record) or "").splitlines()]  # its ZeRO stage counts
    return "\n".join((*lines, ""))


def _is_of_interpreter(value: str, captured: Capture) -> bool:
    """Return whether a value holds a path of the interpreter that runs Meshtune, which the script asked for it.

    Where the environment of the script names that path, as an active virtual environment does, the path is the user's.
    """
    inherited = [text for name, text in captured.environment.items() if name != "PATH"]
    return sys.prefix in value and not any(sys.prefix in text for text in inherited)


def _quoted(word: str) -> str:
    """Return a word as one of a shell script, in which only commands whose output is not known are expanded."""
    parts = split_outputs(word)
    return "".join(f'"{text}"' if is_command else shlex.quote(text) for text, is_command in parts) or "''"


def _around(record: Record) -> tuple[str, ...]:
    """Return the words of the launchers and containers around the command, outermost first; not those that submit."""
    return tuple(word for outer in record.through if outer[0] not in _SUBMITTERS for word in outer)


def _srun(record: Record) -> tuple[str, ...]:
    """Return the srun that starts the command, with its options; nothing if none does."""
    return next((outer for outer in record.through if outer[0] == "srun"), ())


def _slurm(record: Record, captured: Capture, tasks: Tasks) -> SlurmOptions | None:
    """Return the options of the command's job: those of the script's `#SBATCH` lines, of sbatch and of srun."""
    given = next((outer[1:] for outer in record.through if outer[0] == "sbatch"), ())
    return slurm_options((*captured.header, *given), [Argument(text=word, line=0) for word in _srun(record)], tasks)


def _allocation(record: Record) -> Allocation:
    """Return the hosts, and the devices of each, on which the command starts, as far as launcher or Slurm state them.

    A program that srun or mpirun starts itself has one process for each device.
    """
    given = record.allocation
    if record.words[0] == "deepspeed":
        return Allocation(
            hosts=_number(record.words, "--num_nodes"), devices_per_host=_number(record.words, "--num_gpus")
        ).over(given)
    is_started = any(outer[0] in _PROCESS_STARTERS for outer in record.through)
    has_launcher = record.words[0] in TRAINING[2:] or any(word.startswith(_LAUNCHER_MODULES) for word in record.words)
    if has_launcher and (devices := _number(record.words, "--nproc_per_node")):
        is_one = not any(word.startswith("--nnodes") for word in record.words)  # torchrun's default
        hosts = 1 if is_one else _number(record.words, "--nnodes")
        return Allocation(hosts=hosts, devices_per_host=devices).over(given)
    if is_started and not has_launcher and (given.tasks_per_host or 1) > 1:
        return replace(given, devices_per_host=given.tasks_per_host)
    return given


def _number(words: Sequence[str], flag: str) -> int | None:
    """Return the whole number behind a flag, or None."""
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        text = value if equals else following
        if name.replace("-", "_") == flag.replace("-", "_") and re.fullmatch(r"[1-9][0-9]{0,5}", text):
            return int(text)
    return None


def _deepspeed_file(record: Record) -> str | None:
    """Return the text of DeepSpeed's configuration that the command names, or None."""
    for word, following in zip(record.words, (*record.words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name in _CONFIG and (text := record.files.get(value if equals else following)) is not None:
            return text
    return None


def _with_deepspeed(found: Imported, config: Imported) -> Imported:
    """Return what the flags state, with the precision, the ZeRO stage and the offloading of DeepSpeed's file."""
    job = {**found.job, **{name: config.job[name] for name in _OF_DEEPSPEED if name in config.job}}
    micro_batches = found.micro_batches
    if micro_batches is not None:  # Megatron-LM 1 leaves the batch to DeepSpeed
        micro_batches = max(micro_batches, config.micro_batches or 1)
        if batch := config.job.get("global_batch_size"):
            job["global_batch_size"], micro_batches = batch, None
    return replace(
        found,
        job=job,
        micro_batches=micro_batches,
        open={name: why for name, why in found.open.items() if name not in _OF_DEEPSPEED},
        unread=(*found.unread, *config.unread),
        doubts=(*found.doubts, *config.doubts),
    )


def without_known_secrets(captured: Capture) -> Capture:
    """Return the capture with `***` for each secret of its commands in what is told of it besides them."""
    known = _known_secrets(captured)

    def clean(text: str) -> str:
        for value in known:
            text = text.replace(value, HIDDEN)
        return hide(text)

    return replace(
        captured,
        output=clean(captured.output),
        written=tuple(map(clean, captured.written)),
        unseen=tuple(map(clean, captured.unseen)),
        unread=tuple(map(clean, captured.unread)),
    )


def _known_secrets(captured: Capture) -> list[str]:
    """Return the values that a name or a form tells to be secrets in the captured commands, the longest first."""
    found = {value for name, value in captured.environment.items() if is_secret(name, value)}
    for record in captured.records:
        found |= {value for name, value in record.environment.items() if is_secret(name, value)}
        found |= {secret.value for words in (record.words, *record.through) for secret in secret_words(words)}
    return sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)


def _nothing(captured: Capture) -> ConfigError:
    """Return the error for a capture without a training command, with the captured commands and the script's output."""
    commands = [record for record in captured.records if not record.held_back]
    ended = f"it was ended: {captured.stopped}" if captured.stopped else f"it ended with status {captured.status}"
    parts = ["no training command of a known framework was captured", ended]
    held = [record for record in captured.records if record.held_back]
    for what, records in (("captured", commands), ("held back", [] if commands else held)):
        if records:
            parts.append(f"{what} {len(records)}: {'; '.join(map(_shown, records[-_SHOWN:]))}")
    parts += captured.unread[:_SHOWN]
    if lines := [line.strip() for line in captured.output.splitlines() if line.strip()]:
        parts.append(f"its last output: {' | '.join(map(hide_command, lines[-_SHOWN:]))}")
    text = "; ".join(parts)
    for value in _known_secrets(captured):
        text = text.replace(value, HIDDEN)
    return ConfigError(
        text, nearest="set the variables that the script needs, pass its arguments, or read its log by --from-log"
    )


def _shown(record: Record) -> str:
    """Return the beginning of a command for messages."""
    return shorten(shlex.join(hide_words(record.words)), 120)
