"""Answers that a user of `meshtune init` adds to a file, and the message that lists all missing ones."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from costmodels.job.parallel_config import DIMENSIONS, Value
from costmodels.job.training_job import PRECISIONS
from costmodels.optimizers.registry import OPTIMIZERS
from hardware.cluster_file import cluster_names
from hardware.io.errors import ConfigError, did_you_mean
from tuner.imports import Imported
from tuner.imports.imported import Doubt
from tuner.study_file.questions import IGNORE, QUESTIONS

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
"""Ends of the names of shell scripts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """What a user adds to the file by options; None adds nothing.

    Attributes:
        cluster: Name of the cluster in the catalog.
        model: Model to use instead of the file's: name in the catalog, or path.
        runtime: Name of the runtime profile.
        answers: Values of keys of QUESTIONS, which replace the file's.
        trial_hosts: Number of hosts that trials occupy at most, by smaller jobs; None lets them take all.
        checkpoints: Folder of the checkpoints of a training, inside of which trials run; None runs them outside of one.
        ignored: Names of the script's flags, with dashes, that the study leaves out.
        command: Command line so far, up to `--` and from there on, to which a message adds what is missing.
    """

    cluster: str | None = None
    model: str | None = None
    runtime: str | None = None
    answers: Mapping[str, Value] = field(default_factory=dict)
    trial_hosts: int | None = None
    checkpoints: str | None = None
    ignored: frozenset[str] = frozenset()
    command: tuple[str, str] = ("meshtune init", "")

    def count(self, key: str) -> int | None:
        """Return the answer to a question about a number."""
        return None if key not in self.answers else int(self.answers[key])


def parse_answer(key: str, text: str) -> Value:
    """Read the value of a question's option.

    Raises:
        ConfigError: The value is none of the key; the message names the option.
    """
    option = QUESTIONS[key].option
    named = {"precision": PRECISIONS, "optimizer": tuple(OPTIMIZERS)}.get(key)
    if named is not None:
        if text not in named:
            raise ConfigError(f"is no {key}", key=option, value=text, nearest=did_you_mean(text, named))
        return text
    if key not in DIMENSIONS:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
            raise ConfigError("must be a whole number of at least 1", key=option, value=text)
        return int(text)
    try:
        value = DIMENSIONS[key].parse(text, option)
        DIMENSIONS[key].check(value)
    except ConfigError as error:
        raise ConfigError(error.rule, key=option, value=text, nearest=error.nearest) from None
    return value


def parse_ignored(text: str) -> frozenset[str]:
    """Read the names of flags that the study leaves out; their dashes in front may be left out."""
    return frozenset(_with_dashes(name.strip()) for name in text.split(",") if name.strip())


def _with_dashes(name: str) -> str:
    """Return the name of a flag with two dashes in front, and dashes in place of underscores."""
    return f"--{name.lstrip('-').replace('_', '-')}"


def is_ignored(doubt: Doubt, added: Added) -> bool:
    """Return whether the user wants the study without the doubted flag."""
    return _with_dashes(doubt.flag) in added.ignored


def open_doubts(imported: Imported, added: Added) -> tuple[Doubt, ...]:
    """Return the doubts that no answer settles, and that the user does not ignore."""
    return tuple(one for one in imported.doubts if not is_ignored(one, added) and one.key not in added.answers)


def check_complete(imported: Imported, added: Added, file: Path) -> None:
    """Check that no value is missing, in a file that was merged with what its user adds.

    Raises:
        ConfigError: Values are missing. The message lists them with their reasons, and the command that adds them.
    """
    asked = dict.fromkeys(_missing(imported, added))
    ignorable = [one for one in open_doubts(imported, added) if not one.key]
    if not asked and not ignorable:
        return
    by_reason: dict[str, list[str]] = {}
    for option, why in asked:
        by_reason.setdefault(why, []).append(option)
    listed = [f"{', '.join(dict.fromkeys(group))}: {why}" for why, group in by_reason.items()]
    listed += _ignorable(ignorable)
    before, behind = added.command
    options = [option for option, _ in asked]
    if ignorable:
        options.append(f"{IGNORE.option} {_names((*sorted(added.ignored), *(one.flag for one in ignorable)))}")
    listed.append(f"Add what it leaves open: {' '.join(filter(None, (before, *dict.fromkeys(options), behind)))}")
    read = f"--from-{imported.framework} {shlex.quote(str(file))}"
    is_script = imported.command is not None or file.suffix in SCRIPTS
    if imported.open and is_script and read in before:
        words = f"-- bash {shlex.quote(str(file))} {behind.removeprefix('-- ')}".strip()
        listed.append(f"Or let the script decide, by a run of it: {before.replace(read, '--capture')} {words}")
    raise ConfigError("does not say everything that a study needs", file=str(file), listed=tuple(listed))


def _ignorable(doubts: Sequence[Doubt]) -> Iterable[str]:
    """Yield one line for each reason of doubts that only the user can settle, with the flags."""
    by_reason: dict[str, list[Doubt]] = {}
    for one in doubts:
        by_reason.setdefault(one.why, []).append(one)
    for why, group in by_reason.items():
        named = ", ".join(f"{one.flag}{f' (line {one.line})' if one.line else ''}" for one in group)
        yield (
            f"{IGNORE.option} {_names([one.flag for one in group])}: {named}: {why}. If it changes nothing that a "
            "study has, or you study the job without it, say so by this option"
        )


def _names(flags: Iterable[str]) -> str:
    """Return the names of flags without their dashes, with commas between them, as a shell takes them."""
    return shlex.quote(",".join(dict.fromkeys(flag.removeprefix("--") for flag in flags)))


def _missing(imported: Imported, added: Added) -> Iterable[tuple[str, str]]:
    """Return the options for all that is missing, each with the reason."""
    unread = {one.what: str(one) for one in imported.unread}
    if added.cluster is None:
        yield (
            "--cluster WHICH",
            f'no file says what its devices are; a device, "64x H100", a file, or one of: {", ".join(cluster_names())}',
        )
    if imported.hosts is None and "dp" not in imported.degrees:
        yield _option("hosts"), _told(unread, "--nnodes", "--num-nodes") or "the number of hosts is not there"
    if imported.devices_per_host is None and (why := _told(unread, "--nproc-per-node", "--num-gpus")):
        yield _option("devices_per_host"), why
    has_model = added.model is not None or imported.model_name or imported.named is not None
    if not has_model and not imported.model:
        why = imported.open.get("model", "is not there")
        yield "--model NAME", f"the model {why}: name of the catalog, or path of a config.json or a model's YAML"
    asked = {} if has_model else dict(imported.missing)
    if not imported.model or asked.keys() - QUESTIONS.keys():
        asked.pop("vocab_size", None)  # the named model has one
    for key, flag in asked.items():
        yield (
            _option(key) if key in QUESTIONS else "--model NAME",
            unread.get(flag, flag if " " in flag else f"{flag} is not there"),
        )
    needed = [] if "sequence_length" in imported.job else ["sequence_length"]
    if "global_batch_size" not in imported.job and imported.micro_batches is None:
        needed.append("global_batch_size")
    doubts = {one.key: one for one in reversed(open_doubts(imported, added))}
    for key in QUESTIONS:
        if key in imported.open or key in needed:
            yield _option(key), imported.open.get(key, "the file does not state it")
        elif key in doubts:
            yield _option(key), f"{doubts[key]} (or {IGNORE.option} {_names([doubts[key].flag])})"


def _told(unread: Mapping[str, str], *flags: str) -> str:
    """Return why one of the flags could not be read, or nothing."""
    return next((unread[flag] for flag in flags if flag in unread), "")


def _option(key: str) -> str:
    return f"{QUESTIONS[key].option} {QUESTIONS[key].metavar}"
