"""Keys of `trial: {backend: command}`, and the backend that they build."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from costmodels.job.training_job import TrainingJob
from hardware.io.config_file import DocumentedModel
from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.secret_texts import digest_words, hide_words
from trials.command.backend import CommandBackend, Launch
from trials.command.candidate_plans import LayerPlans, OwnPlans
from trials.command.knob_files import TrialFile, read_trial_file
from trials.command.log_pattern import LogPattern, find_pattern
from trials.command.placeholders import (
    FLAGS,
    KNOBS,
    PLACEHOLDERS,
    PLAN,
    PROFILE,
    SIZES_ELSEWHERE,
    check_text,
    names_in,
    variables_in,
    without_wildcards,
)
from trials.command.slurm.jobs import SlurmJobs, Tasks, check_options, study_prefix
from trials.command.training_folder import CHECKPOINT, NEW_CHECKPOINT, PROGRESS, TRAINING, TrainingFolder, step_in
from trials.framework_flags import FlagExporter, Flags, WordRules
from trials.knobs.knob import Knob
from trials.own_step import OwnStepPlans, World
from trials.trial_keys import AbstractTrialKeys, ProxyOptions, StudyParts


class LogKeys(DocumentedModel):
    """`trial.log:` where no framework's name says it."""

    pattern: Annotated[list[str], Field(min_length=1)] | None = None
    """Regular expressions with named groups for step time, memory and so on; see [your own
    command](own-command.md#what-is-read).
    """

    format: str | None = None
    """Name of a framework's format, in place of `pattern`."""

    steps_per_line: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of training steps that the time of one line covers, as of the updates in verl's step."""


class TrainingKeys(DocumentedModel):
    """`trial.training:`, for trials inside of a training that goes on."""

    folder: str
    """Folder of the checkpoints that trials leave, relative to the study file; all hosts have to see it."""

    start: str | None = None
    """Folder of the checkpoint that the first trial loads, relative to the study file.

    Default: none: the training begins with new weights
    """

    start_step: Annotated[int, Field(ge=0)] | None = None
    """Number of training steps that `start` holds.

    Default: what the folder says, as those of Megatron-LM and torchtitan do
    """


class CommandKeys(AbstractTrialKeys):
    """`trial:` with `backend: command`."""

    OWN_STEPS: ClassVar[frozenset[World]] = frozenset({"jax", "torch"})

    # none changes what a trial runs: they say where files are kept, and where in the cluster it runs
    WITHOUT_MEANING: ClassVar[frozenset[str]] = AbstractTrialKeys.WITHOUT_MEANING | {
        *("logs", "profile", "sbatch", "srun", "training")
    }

    backend: Literal["command"]
    """Trials run your own command; see [your own command](own-command.md)."""

    command: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, with [placeholders](own-command.md). With `{plan}`, they run the candidates' [sharding
    plans](plans-in-your-code.md#plans-in-your-program), also those of a step of your own.
    """

    flags: str | None = None
    """Framework whose flags take the place of `{flags}`: `megatron`, `mindspeed`, `bridge`, `maxtext`, `swift`, `verl`
    `torchtitan` (0.3; later versions take no flags) or `torchtitan-toml` (0.2, whose commands name a TOML file). In a
    command without `{flags}`, the flags in which a configuration differs from the command are exchanged where they
    stand.
    """

    environment: dict[str, str | None] = Field(default_factory=dict)
    """Environment variables in addition to the worker's; null removes a variable."""

    directory: str = "."
    """Working directory of the command, relative to the study file."""

    log: str | LogKeys = "megatron"
    """Format of the log lines: `megatron`, `mindspeed`, `bridge`, `torchtitan`, `deepspeed`, `nemo`, `nanotron`,
    `maxtext`, `swift` or `verl`; or `{pattern: [...]}`.
    """

    launch: Launch | Literal["slurm"] = "per_host"
    """Whether the command is started on every host (`per_host`), `once` if it reaches the hosts by itself, or as a job
    of [Slurm](slurm.md) (`slurm`).
    """

    sbatch: list[str] = Field(default_factory=list)
    """Options of sbatch for the job of a trial, such as `--partition=gpu`, with `launch: slurm`."""

    tasks: Tasks = "per_host"
    """What a job starts, with `launch: slurm`: the command on every host (`per_host`), once for each device
    (`per_device`), as `srun --ntasks-per-node=8 python` does, or `once` on the first host, for `mpirun`.
    """

    srun: list[str] = Field(default_factory=list)
    """Further options of the srun that starts the command on every host of the job, such as `--container-image=...`,
    with `launch: slurm`.
    """

    files: dict[str, str] = Field(default_factory=dict)
    """JSON, YAML and TOML files by names of your choice, relative to the study file. Each trial gets a copy in which
    [knobs](knobs.md) have their values; `{NAME}` is its path.
    """

    warmup_steps: Annotated[int, Field(ge=0, le=1000)] = 2
    """Number of step times in the log that are dropped."""

    steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of step times in the log that are measured after those."""

    logs: str | None = None
    """Folder for whole logs, relative to the study file.

    Default: none: the study keeps the end of each log
    """

    profile: str | None = None
    """Path of the traces of torch.profiler that the command leaves, whose operators correct all predictions: a folder,
    a file or a pattern with `*`, relative to the study file, with `{trial}` in it; see [your own
    command](own-command.md).

    Default: none: no operator times are read
    """

    hang_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """Silence of the command after which a trial counts as hanging [s]."""

    training: TrainingKeys | None = None
    """Lets trials run inside of a training that goes on, so that their steps count: each loads the latest checkpoint
    and saves another one; see [your own command](own-command.md#inside-a-training-that-goes-on).

    Default: none: what a trial trains is thrown away
    """

    proxy: ProxyOptions | None = None
    """Smaller jobs that run in place of candidates before any runs at full size, see below. The command must take their
    sizes: by `flags`, or by placeholders such as `{num_layers}`.
    """

    def build_model(self, study: StudyParts) -> CommandBackend:
        """Build the backend that runs the study's command.

        Raises:
            ConfigError: The command, its environment, its log or its profile is not described consistently.
        """
        job, found = study.setting.job, self._build(study, study.setting.job)
        if not self.takes_plan():
            return found
        return replace(found, plans=LayerPlans(job=job, cluster=study.cluster, planner=study.step_planner))

    def build_own_step(self, study: StudyParts, steps: OwnStepPlans) -> CommandBackend:
        """Build the backend that runs the study's command, which has the step of the study's factory.

        Raises:
            ConfigError: The command takes no plan, asks for what such a step has not, or is not described consistently.
        """
        found = self._build(study, None)
        if not self.takes_plan():
            raise ConfigError(
                f"must name {{{PLAN}}}, the file of a trial's plan, because trials of a step of your own run plans",
                key="trial.command",
                value=steps.step.factory,
                nearest=f'--plan, "{{{PLAN}}}" in trial.command, and tuner.load_plan in the program',
            )
        used = [name for text in self.texts() for name in names_in(text)]
        for name in ("sequence_length", "num_layers"):
            if name in used:
                raise ConfigError(
                    f"has no value for {{{name}}}, because a step of your own is no model of the catalog",
                    key="trial.command",
                    nearest="leave it out: the factory says the sizes",
                )
        if self.profile is not None:
            rule = "corrects predictions of models of the catalog, and not those of a step of your own"
            raise ConfigError(rule, key="trial.profile", value=self.profile, nearest="leave it out")
        return replace(found, plans=OwnPlans(steps=steps), batch=(steps.rows, steps.tokens))

    def _build(self, study: StudyParts, job: TrainingJob | None) -> CommandBackend:
        names = (*(knob.name for knob in study.knobs), *self.files, PLAN)
        for number, (argument, shown) in enumerate(zip(self.command, hide_words(self.command), strict=True)):
            with _errors_under(f"trial.command.{number}", shown=None if shown == argument else shown):
                check_text(argument, flags=True, knobs=names)
        for name, text in self.environment.items():
            if not name or "=" in name:
                raise ConfigError(
                    "is no name of an environment variable",
                    key="trial.environment",
                    value=name,
                    nearest=f"{name.partition('=')[0] or 'NAME'}: VALUE",
                )
            with _errors_under(f"trial.environment.{name}"):
                check_text(text or "", flags=False, knobs=names)
        _check_profile(self)
        training = _find_training(self, study)
        files = _read_files(self, study)
        _check_knobs(self, study.knobs, files)
        groups = study.cluster.groups
        if len(groups) > 1 and self.launch != "once":
            raise ConfigError(
                f"needs hosts with equally many devices, and the cluster has {len(groups)} groups of them",
                key="trial.launch",
                value=self.launch,
                nearest="launch: once, with a command that reaches all hosts",
            )
        base_dir = study.base_dir
        exporter = _find_flags(self, study.subject.flag_exporters())
        _check_sizes(self, exporter)
        logs = None if self.logs is None else (base_dir / self.logs).absolute()
        return CommandBackend(
            job=job,
            cluster=study.cluster,
            arguments=tuple(self.command),
            environment=tuple(self.environment.items()),
            variables=tuple((name, os.environ[name]) for name in self._variables() if name in os.environ),
            flags=exporter.write if exporter else None,
            said=_find_said(self, exporter),
            rules=exporter.rules if exporter else WordRules(),
            directory=(base_dir / self.directory).absolute(),
            pattern=_find_pattern(self.log),
            launch="per_host" if self.launch == "slurm" else self.launch,
            slurm=_find_jobs(self, study, logs),
            warmup_steps=self.warmup_steps,
            steps=self.steps,
            hang_limit_s=self.hang_limit_s,
            knobs=study.knobs,
            files=files,
            logs=logs,
            training=training,
            profile=self.profile,
            profile_root=base_dir.absolute(),
        )

    def files_read(self) -> Iterator[tuple[str, str]]:
        """Yield the files that trials get copies of, and the folder of the profiles.

        That is the part of their path before the first placeholder or wildcard.
        """
        for name, path in self.files.items():
            yield f"trial.files.{name}", path
        if self.profile is not None:
            yield "trial.profile", without_wildcards(self.profile.partition("{")[0])

    def framework(self) -> str | None:
        """Return the framework whose flags the command takes, or whose log it writes; None if neither is named."""
        if self.flags is not None:
            return self.flags
        return self.log if "log" in self.model_fields_set and isinstance(self.log, str) else None

    def own_words(self) -> Iterator[str]:
        """Yield the words of the command if its flags are exchanged in place."""
        if self.flags is not None and f"{{{FLAGS}}}" not in self.command:
            yield from self.command

    def config_files(self) -> Iterator[str]:
        """Yield the names of the files that trials get copies of."""
        yield from self.files

    def files_written(self) -> Iterator[tuple[str, str]]:
        """Yield the folders of whole logs and of checkpoints."""
        if self.logs is not None:
            yield "trial.logs", self.logs
        if self.training is not None:
            yield "trial.training.folder", self.training.folder

    def texts(self) -> list[str]:
        """Return the texts that may hold placeholders."""
        return [*self.command, *(text or "" for text in self.environment.values())]

    def takes_plan(self) -> bool:
        """Return whether the command takes the file of a candidate's plan, and no file of the user's of that name."""
        return PLAN not in self.files and any(PLAN in names_in(text) for text in self.texts())

    def _variables(self) -> list[str]:
        """Return the variables of the environment of `meshtune run` that the command refers to."""
        return variables_in(self.texts())

    def meaning(self) -> dict[str, Any]:
        """Return the keys that give a trial its meaning.

        The values of environment variables may be secrets, so only their digests are kept, and so for the secrets among
        the command's words.
        """
        digests = {
            name: None if text is None else hashlib.sha256(f"{name}={text}".encode()).hexdigest()[:16]
            for name, text in self.environment.items()
        }
        return AbstractTrialKeys.meaning(self) | {"command": digest_words(self.command), "environment": digests}


def _read_files(keys: CommandKeys, study: StudyParts) -> tuple[TrialFile, ...]:
    """Read the files that each trial gets a copy of."""
    knobs = {knob.name for knob in study.knobs}
    found = []
    for name, path in keys.files.items():
        with _errors_under(f"trial.files.{name}"):
            if not name.isidentifier() or name in {*PLACEHOLDERS, FLAGS, KNOBS} - {*TRAINING} or name in knobs:
                raise ConfigError("stands for something else, or is no name", value=name, nearest=f"{name}_file")
            if not any(name in names_in(text) for text in keys.texts()):
                raise ConfigError("is used nowhere", nearest=f"{{{name}}} in trial.command")
            found.append(read_trial_file(name, study.base_dir / path))
    return tuple(found)


def _check_knobs(keys: CommandKeys, knobs: Sequence[Knob], files: Sequence[TrialFile]) -> None:
    """Check that the value of each knob reaches the command."""
    texts = keys.texts()
    used = {name for text in texts for name in names_in(text)}
    known = {file.name: file for file in files}
    for number, knob in enumerate(knobs):
        place, key = knob.place, f"space.knobs.{number}"
        if place.takes_flags and keys.flags is None and f"{{{KNOBS}}}" not in keys.command:
            raise ConfigError(
                "has a flag, but no argument of the command takes it",
                key=f"{key}.flag",
                value=knob.name,
                nearest=f'the argument "{{{KNOBS}}}" in trial.command',
            )
        if place.file and place.file not in known:
            nearest = did_you_mean(place.file, known) if known else f"trial.files: {{{place.file}: PATH}}"
            raise ConfigError("is no file of trial.files", key=f"{key}.file", value=place.file, nearest=nearest)
        if place.file:
            for value in knob.values:
                with _errors_under(key):
                    known[place.file].with_values({place.key: value})
        if place.environment and place.environment in keys.environment:
            raise ConfigError("is set by trial.environment too", key=f"{key}.environment", value=place.environment)
        if not (place.takes_flags or place.file or place.environment or knob.name in used):
            raise ConfigError(
                "goes nowhere",
                key=key,
                value=knob.name,
                nearest=f"flag, environment, file and key, or the placeholder {{{knob.name}}} in trial.command",
            )


def _find_training(keys: CommandKeys, study: StudyParts) -> TrainingFolder | None:
    """Return the folder of the training in which trials run; None if what they train is thrown away."""
    texts = keys.texts()
    used, own = {name for text in texts for name in names_in(text)}, {*keys.files, *(knob.name for knob in study.knobs)}
    wanted = keys.training
    if wanted is None:
        if named := sorted((used - own) & set(TRAINING)):
            rule = f"is required, because the command contains {{{named[0]}}}"
            raise ConfigError(rule, key="trial.training", nearest="training: {folder: checkpoints}")
        return None
    if taken := sorted(own & set(TRAINING)):
        rule = f"needs {{{taken[0]}}}, and a knob or a file has that name"
        raise ConfigError(rule, key="trial.training", nearest=f"my_{taken[0]} for the knob or the file")
    for name in (CHECKPOINT, NEW_CHECKPOINT):
        if name not in used:
            rule = f"needs {{{name}}} in the command, which {'loads' if name == CHECKPOINT else 'saves'} it"
            flag = "--load" if name == CHECKPOINT else "--save"
            raise ConfigError(rule, key="trial.training", nearest=f'{flag}, "{{{name}}}" in trial.command')
    folder = (study.base_dir / wanted.folder).absolute()
    start = None if wanted.start is None else (study.base_dir / wanted.start).absolute()
    step = wanted.start_step
    if step is None and (folder / PROGRESS).exists():
        step = 0  # the training has left its first checkpoint behind, which may be gone
    if step is None:
        try:
            step = 0 if start is None else step_in(start)
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror}", key="trial.training.start", value=wanted.start
            ) from None
        if step is None:
            raise ConfigError(
                "is required, because the checkpoint does not say how many steps it holds",
                key="trial.training.start_step",
                nearest="start_step: 1000",
            )
    return TrainingFolder(study=study.name, folder=folder, start=start, start_step=step)


def _check_profile(keys: CommandKeys) -> None:
    """Check that the profile's place is given where the command names it, and is another one for each trial."""
    texts = keys.texts()
    nearest = "profile: traces/{trial}"
    if keys.profile is None:
        if any(PROFILE in names_in(text) for text in texts):
            rule = f"is required, because the command contains {{{PROFILE}}}"
            raise ConfigError(rule, key="trial.profile", nearest=nearest)
        return
    with _errors_under("trial.profile"):
        check_text(keys.profile, flags=False, variables=False)
    names = names_in(keys.profile)
    if "trial" not in names or PROFILE in names or {"master_address", "master_port"} & set(names):
        raise ConfigError(
            "must be a different path for each trial", key="trial.profile", value=keys.profile, nearest=nearest
        )


def _find_jobs(keys: CommandKeys, study: StudyParts, logs: Path | None) -> SlurmJobs | None:
    """Return the study's jobs in Slurm's queue; None if trials are no jobs."""
    options = {"sbatch": tuple(keys.sbatch), "srun": tuple(keys.srun)}
    for program, words in options.items():
        if words and keys.launch != "slurm":
            raise ConfigError("needs launch: slurm", key=f"trial.{program}", value=words[0], nearest="launch: slurm")
        with _errors_under(f"trial.{program}"):
            check_options(words, program=program)
    if keys.tasks != "per_host" and keys.launch != "slurm":
        raise ConfigError("needs launch: slurm", key="trial.tasks", value=keys.tasks, nearest="launch: slurm")
    if keys.launch != "slurm":
        return None
    for name in keys.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            rule = "is no name of a variable in a shell, which a job of Slurm is"
            raise ConfigError(rule, key="trial.environment", value=name, nearest="letters, digits and underscores")
    return SlurmJobs(
        study=study_prefix(study.name, study.storage),
        sbatch=options["sbatch"],
        srun=options["srun"],
        tasks=keys.tasks,
        outputs=logs or study.base_dir.absolute(),
        time_limit_s=keys.time_limit,
    )


def _find_flags(keys: CommandKeys, exporters: Mapping[str, FlagExporter]) -> FlagExporter | None:
    """Return the exporter of the command's flags; None where the command has placeholders only."""
    wanted = f"{{{FLAGS}}}" in keys.command
    if keys.flags is None:
        if wanted:
            raise ConfigError(
                f"is required, because the command contains {{{FLAGS}}}", key="trial.flags", nearest="megatron"
            )
        return None
    if keys.flags not in exporters:
        raise ConfigError(
            "is not a framework whose flags are known",
            key="trial.flags",
            value=keys.flags,
            nearest=did_you_mean(keys.flags, tuple(exporters)),
        )
    exporter = exporters[keys.flags]
    if not wanted and exporter.read is None:
        raise ConfigError(
            "are set, but no argument of the command takes them",
            key="trial.flags",
            value=keys.flags,
            nearest=f'the argument "{{{FLAGS}}}" in trial.command',
        )
    if wanted and exporter.ends_command and keys.command[-1] != f"{{{FLAGS}}}":
        raise ConfigError(
            "end with a subcommand, so no argument may follow them",
            key="trial.flags",
            value=keys.flags,
            nearest=f'"{{{FLAGS}}}" last in trial.command',
        )
    return exporter


def _check_sizes(keys: CommandKeys, exporter: FlagExporter | None) -> None:
    """Check that the command takes the sizes of smaller jobs, if the study has any."""
    if keys.proxy is None:
        return
    if keys.training is not None:
        raise ConfigError(
            "cannot run inside of a training, whose checkpoints are of the full model",
            key="trial.proxy",
            nearest="leave trial.training out",
        )
    texts = keys.texts()
    used = {name for text in texts for name in names_in(text)}
    wanted: list[tuple[str, tuple[str, ...]]] = []
    if exporter is None or not exporter.tells_layers:
        wanted.append(("the number of layers", ("num_layers",)))
    if exporter is None:
        wanted.append(("the batch", ("global_batch_size", "num_micro_batches")))
    if keys.launch == "once":
        wanted.append(("the number of hosts", ("num_hosts", "hosts", "num_devices", "world_size")))
    for what, names in wanted:
        if not used & {*names}:
            raise ConfigError(
                f"needs a command that takes {what} of a smaller job",
                key="trial.proxy",
                nearest=f"the placeholder {{{names[0]}}} in trial.command or trial.environment",
            )
    for number, word in enumerate(keys.command):
        flag, equals, value = word.partition("=")
        if equals or word.startswith("-"):
            value = value if equals else "".join(keys.command[number + 1 : number + 2])
            _check_not_fixed(flag, value, f"trial.command.{number}", word)
    for name, text in keys.environment.items():
        _check_not_fixed(name, text or "", f"trial.environment.{name}", text)
    _check_order(keys, exporter)


def _check_not_fixed(name: str, value: str, key: str, shown: str | None) -> None:
    """Check that a flag or a variable is no fixed number of hosts or devices, which smaller jobs have fewer of."""
    plain = name.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()
    size = plain if plain == "world_size" else SIZES_ELSEWHERE.get(plain)
    what = {"num_hosts": "hosts", "num_devices": "devices", "world_size": "devices"}.get(size or "")
    if what and value.isdigit():
        nearest = f"{{{size}}}, because smaller jobs have fewer"
        raise ConfigError(f"is a fixed number of {what}", key=key, value=shown, nearest=nearest)


def _check_order(keys: CommandKeys, exporter: FlagExporter | None) -> None:
    """Check that no word behind `{flags}` says the number of layers: of two, programs take the last."""
    place = f"{{{FLAGS}}}"
    if exporter is None or not exporter.tells_layers or place not in keys.command:
        return
    for number, word in enumerate(keys.command[keys.command.index(place) :], start=keys.command.index(place)):
        if re.split(r"[=\s]", word)[0] == "--num-layers":
            nearest = f'"{place}" behind it, or leave it out'
            raise ConfigError(
                "would replace the number of layers of smaller jobs",
                key=f"trial.command.{number}",
                value=word,
                nearest=nearest,
            )


def _find_said(keys: CommandKeys, exporter: FlagExporter | None) -> Flags | None:
    """Return the flags that the command's own words say; None where `{flags}` or placeholders take all values."""
    if exporter is None or exporter.read is None or f"{{{FLAGS}}}" in keys.command:
        return None
    said = exporter.read(keys.command)
    if said is None:
        raise ConfigError(
            f"are set, but the command has no {{{FLAGS}}}, and its own words tell no configuration",
            key="trial.flags",
            value=keys.flags,
            nearest=f'the argument "{{{FLAGS}}}" in trial.command, in place of the flags of the layout',
        )
    return said


def _find_pattern(log: str | LogKeys) -> LogPattern:
    """Return the expressions that read the command's log."""
    if isinstance(log, str):
        with _errors_under("trial.log"):
            return find_pattern(log)
    if (log.pattern is None) == (log.format is None):
        raise ConfigError("needs either pattern or format", key="trial.log")
    if log.format is not None:
        with _errors_under("trial.log.format"):
            return replace(find_pattern(log.format), steps_per_line=log.steps_per_line)
    with _errors_under("trial.log.pattern"):
        return LogPattern(expressions=tuple(log.pattern or ()), steps_per_line=log.steps_per_line)


@contextlib.contextmanager
def _errors_under(key: str, *, shown: str | None = None) -> Iterator[None]:
    """Report a mistake that is found inside the block under the key `key`, with `shown` for a value with a secret."""
    try:
        yield
    except ConfigError as error:
        if shown is not None:
            error = ConfigError(error.rule, key=error.key, value=shown, nearest=error.nearest)
        raise error.under(key) from None
