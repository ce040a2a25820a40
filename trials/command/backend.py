"""Backend `command`: a trial runs the user's own training command for some steps and reads its log.

The command is a list of arguments with placeholders (`placeholders.py`). It is started once on every host, once in
total if it reaches the other hosts by itself, as srun does, or as a job of Slurm (`slurm/`). It is ended with all
processes that it has started as soon as enough steps are measured.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from costmodels.job.parallel_config import DEGREES, ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from hardware.launched_hosts import launched
from trials.backend import HostNeeds, Observation, OnStart, OnStep, Status, TrialAbility
from trials.command.candidate_plans import FILE_NAME, CandidatePlans
from trials.command.host_program import HostPlan, UserCommand
from trials.command.knob_files import TrialFile
from trials.command.log_pattern import StepSize
from trials.command.log_watch import Wanted, Watched, watch_log
from trials.command.own_words import exchange_words
from trials.command.placeholders import KNOBS, PLAN, escape_braces, hosts_of, names_in, values_of, variables_in
from trials.command.slurm.job_program import JobPlan
from trials.command.slurm.jobs import SlurmJobs, job_options, job_plan
from trials.command.slurm.queue import cancel_named, check_accepted, check_programs
from trials.command.trace_program import add_traces
from trials.command.training_folder import NoProgressError, Progress, TrainingFolder, losses_of_training
from trials.command.what_starts import shown_plan, what_starts
from trials.framework_flags import Flags, WordRules, WriteFlags
from trials.knobs.knob import Knob, knob_environment, knob_file_keys, knob_words, today_of, without_knob_flags
from trials.knobs.places import text_of
from trials.rank_backend import AbstractRankBackend, is_cpu_cluster
from trials.ranks.contract import AbstractRanks, RankSetup
from trials.started import Started
from trials.submitted_job import check_outlives_job

Launch = Literal["per_host", "once"]
"""Whether the command is started on every host, or once and reaches the hosts by itself."""

LOG_FILE = re.compile(r"trial-(\d+)-host-(\d+)\.log")
"""File name of a whole log; see `HostPlan.log_name`."""

COMMAND_RANKS = RankSetup(modules=("trials.command.host_program",))
JOB_MODULES = ("trials.command.slurm.job_program",)


Environment = tuple[tuple[str, str | None], ...]
"""Environment variables with their values; None removes a variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandBackend(UserCommand, AbstractRankBackend):
    """Backend that runs a command.

    Attributes:
        job: Training job that the command runs; None for a step of the user's own.
        batch: Samples and tokens of a batch of such a step.
        cluster: Cluster that the command runs on.
        flags: Function that writes the flags of a configuration; None if the command has placeholders only.
        said: Flags that the words of the command say, which are exchanged in place; None if `{flags}` takes them.
        rules: Rules by which they are.
        launch: Whether the command is started on every host, or once.
        slurm: Jobs of the study, if each trial is one, whose srun starts the command on every host; else None.
        warmup_steps: Number of step times in the log that are dropped.
        steps: Number of step times that are measured after those.
        hang_limit_s: Silence of the command that means a hang [s].
        knobs: Knobs of the study.
        files: Files that each trial gets a copy of.
        plans: Plans of the candidates, of which each trial gets a file; None if the command takes none.
        training: Folder of the training in which trials run; None if what they train is thrown away.
    """

    job: TrainingJob | None
    cluster: Cluster
    flags: WriteFlags | None = None
    said: Flags | None = None
    rules: WordRules = field(default_factory=WordRules)
    launch: Launch = "per_host"
    slurm: SlurmJobs | None = None
    warmup_steps: int = 2
    steps: int = 5
    hang_limit_s: float = 600.0
    knobs: tuple[Knob, ...] = ()
    files: tuple[TrialFile, ...] = ()
    batch: tuple[int, int] = (0, 0)
    plans: CandidatePlans | None = None
    training: TrainingFolder | None = None

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of trials: real training, with knobs as flags, variables and keys of files, and of smaller jobs.

        Hosts may be idle if the command reaches its hosts by itself, or as a job of Slurm. Layers are told by flags or
        by a placeholder. Keys of a study check that a command takes the sizes of smaller jobs. A command that takes
        plans runs them.
        """
        chooses_hosts = self.launch == "once" or self.slurm is not None
        idle = {TrialAbility.IDLE_HOSTS} if chooses_hosts else set()
        texts = (*self.arguments, *(value or "" for _, value in self.environment))
        is_told = self.flags is not None or any("assignment" in names_in(text) for text in texts)
        layers = {TrialAbility.LAYERS} if is_told else set()
        plans = set() if self.plans is None else {TrialAbility.PLANS}
        return frozenset({TrialAbility.TRAINING, TrialAbility.KNOBS, TrialAbility.PROXIES} | idle | layers | plans)

    @property
    def hosts(self) -> tuple[HostNeeds, ...]:
        """Resources of a trial: all devices of every host for one process, or one core if Ray does not manage them."""
        if self.launch == "once" or self.slurm is not None:
            return (HostNeeds(),)
        cluster = launched(self.cluster)
        per_host = cluster.devices_per_host
        needs = (
            HostNeeds(cpus=per_host, processes=1) if is_cpu_cluster(cluster) else HostNeeds(gpus=per_host, processes=1)
        )
        return (needs,) * cluster.num_hosts

    @property
    def wants_hosts_alone(self) -> bool:
        """Whether trials need their hosts alone.

        They do, except on one host's CPUs, where each trial has its cores, and under Slurm, which gives hosts to jobs.
        """
        return self.slurm is None and (not is_cpu_cluster(self.cluster) or self.cluster.num_hosts > 1)

    @property
    def goes_on(self) -> bool:
        """Whether a trial begins with what the one before has left: it does inside of a training."""
        return self.training is not None

    @property
    def waits_in_queue(self) -> bool:
        """Whether a trial waits in a queue: it does as a job of Slurm."""
        return self.slurm is not None

    @property
    def rank_setup(self) -> RankSetup:
        """Modules of the program that runs the command, and of the one that reads its traces if it leaves any."""
        modules = COMMAND_RANKS.modules if self.slurm is None else JOB_MODULES
        return RankSetup(modules=modules if self.profile is None else (*modules, "trials.command.trace_program"))

    def check(self) -> None:
        """Check that the logs outlive a Ray job, that variables, directory and program are there, and sbatch's options.

        Directory and program are looked for if this machine runs them.

        Raises:
            ConfigError: The logs would be lost, a variable, the directory, the program or Slurm's programs are missing,
                or sbatch refuses the options of trials.
        """
        if self.logs is not None:
            nearest = "--set trial.logs= with an absolute path that every host can write to"
            check_outlives_job(self.logs, key="trial.logs", value=str(self.logs), nearest=nearest)
        if self.training is not None:
            folder, key = self.training.folder, "trial.training.folder"
            nearest = f"--set {key}= with an absolute path that every host can write to"
            check_outlives_job(folder, key=key, value=str(folder), nearest=nearest)
            self.training.check()
        self._check_variables()
        if len(self.hosts) > 1:
            return
        if not self.directory.is_dir():
            raise ConfigError("is not a directory", key="trial.directory", value=str(self.directory))
        if self.slurm is not None:
            check_programs()
            options = job_options(self.slurm, self.directory, num_hosts=self.cluster.num_hosts)
            check_accepted((*self.slurm.sbatch, *options))
            return  # the hosts of the job may have other programs than this machine
        program = self.arguments[0]
        if "{" in program:
            return
        environment = dict(self.environment)
        path = environment.get("PATH") or os.environ.get("PATH")
        place = self.directory / program if os.sep in program else program
        if shutil.which(place, path=path) is None:
            raise ConfigError(
                "cannot be run here as a program",
                key="trial.command.0",
                value=program,
                nearest="an absolute path, one relative to trial.directory, or a PATH that has it (trial.environment)",
            )

    def _check_variables(self) -> None:
        """Check that the environment has all variables that the command refers to."""
        given = {name for name, _ in self.variables}
        texts = (*self.arguments, *(text or "" for _, text in self.environment))
        if missing := [name for name in variables_in(texts) if name not in given]:
            settings = " ".join(f"{name}=..." for name in missing)
            raise ConfigError(
                f"refers to environment variables that are not set: {', '.join(missing)}",
                key="trial",
                nearest=f"export {settings} first, or take them out of trial.command and trial.environment",
            )

    def reduced(self, to: Reduction) -> Self:
        """Return the backend that runs the command on the proxy job, with its sizes as placeholders and flags."""
        flags = None if self.flags is None else self.flags.reduced(to)
        plans = None if self.plans is None else self.plans.reduced(to)
        assert self.job is not None, "no study of an own step has proxy jobs"
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster), flags=flags, plans=plans)

    def expected_steps(self, config: ParallelConfig) -> int | None:  # noqa: ARG002 # the contract's
        """Return the number of steps that the study asks for."""
        return self.steps

    def end_left_over(self) -> int:
        """Cancel the study's jobs that are still in Slurm's queue.

        Raises:
            ConfigError: Slurm does not answer.
        """
        return 0 if self.slurm is None else cancel_named(self.slurm.study)

    def measure_on(
        self, ranks: AbstractRanks, config: ParallelConfig, *, trial_number: int, on_step: OnStep, on_start: OnStart
    ) -> Observation:
        """Run the command on the hosts of the trial, and read the traces that it leaves."""
        if self.training is None:
            plan = self.plan(config, trial_number)
            return self._run(ranks, plan, config, on_step=on_step, on_start=on_start).observation
        progress, saves = self.training.progress(), self.training.place_of(trial_number)
        self.training.clean(progress)
        self.training.begin(progress, saves)
        plan = self.plan(config, trial_number, self._place_in_training(progress, saves))
        watched = self._run(ranks, plan, config, on_step=on_step, on_start=on_start)
        observation = watched.observation
        if watched.ended_well:
            layout = " ".join(f"{name}={value}" for name, value in config.values(DEGREES).items() if value != 1)
            try:
                after = self.training.advance(
                    progress, saves, steps=self._total_steps, trial=trial_number, layout=layout
                )
            except NoProgressError as error:
                return replace(observation, reason=f"its steps do not count: {error}")
            self.training.clean(after)
            steps = (("first_step", float(progress.step)), ("last_step", float(after.step)))
            losses = losses_of_training(watched.losses, progress.step, after.step)
            return replace(observation, conditions=(*observation.conditions, *steps), losses=losses)
        if observation.status is Status.OK:
            why = "the command did not end with status 0; does it end after step {last_step}?"
            return replace(observation, reason=f"its steps do not count: {why}")
        return observation

    @property
    def _total_steps(self) -> int:
        return self.warmup_steps + self.steps

    def _run(
        self, ranks: AbstractRanks, plan: HostPlan, config: ParallelConfig, *, on_step: OnStep, on_start: OnStart
    ) -> Watched:
        """Run the plan, and return what was seen of it."""
        wanted = Wanted(
            warmup_steps=self.warmup_steps,
            steps=self.steps,
            hang_limit_s=self.hang_limit_s,
            to_the_end=self.training is not None,
        )
        num_hosts, begun_s = len(self.hosts), time.time()
        if self.slurm is None:
            ranks.launch("trials.command.host_program:run_host", plan, num_ranks=num_hosts)
        else:
            job = self.job_of(self.slurm, plan, config)
            ranks.launch("trials.command.slurm.job_program:run_job", job, num_ranks=num_hosts)
        watched = watch_log(ranks, wanted, on_step=on_step, on_start=on_start)
        if self.profile is not None and watched.observation.status is Status.OK:
            ranks.kill()  # the command must have ended before its traces are read
            observation = add_traces(watched.observation, ranks, plan, num_hosts=num_hosts, begun_s=begun_s)
            watched = replace(watched, observation=observation)
        return watched

    def _place_in_training(self, progress: Progress, saves: Path) -> dict[str, str]:
        """Return the values of the placeholders that say where in the training a trial runs."""
        assert self.training is not None, "asked only inside of a training"
        return self.training.values(progress, saves, self._total_steps)

    def loading_nothing(self) -> Self:
        """Return this backend with trials that begin a training of their own."""
        if self.training is None:
            return self
        return replace(self, training=TrainingFolder(study="", folder=self.training.folder / "rehearsed"))

    def in_training(self) -> Mapping[str, Any] | None:
        """Return the state of the training in which the trials run; None if what they train is thrown away."""
        return None if self.training is None else self.training.progress().as_json()

    def plan(self, config: ParallelConfig, trial_number: int, training: Mapping[str, str] | None = None) -> HostPlan:
        """Return the work of each host in a trial.

        Args:
            config: Configuration of the trial.
            trial_number: Number of the trial.
            training: Values of the placeholders that say where in a training it runs; None for those of the next trial,
                or outside of a training.
        """
        if training is None and self.training is not None:
            training = self._place_in_training(self.training.progress(), self.training.place_of(trial_number))
        job, keys = self.job, knob_file_keys(self.knobs, config)
        samples, tokens = self.batch
        if job is not None:
            samples, tokens = job.global_batch_size, job.global_batch_size * job.sequence_length
        values = values_of(
            job, self.cluster, config, trial_number=trial_number, warmup_steps=self.warmup_steps, steps=self.steps
        ) | {name: text_of(value) for name, value in (today_of(self.knobs) | dict(config.knobs)).items()}
        values |= training or {}
        files = [(file.name, file.file_name, file.with_values(keys.get(file.name, {}))) for file in self.files]
        if self.plans is not None:
            values |= self.plans.values(config)
            files.append((PLAN, FILE_NAME, self.plans.text(config)))
        variables = [
            (name, None if value is None else text_of(value)) for name, value in knob_environment(self.knobs, config)
        ]
        command = {part.name: getattr(self, part.name) for part in fields(UserCommand)}
        arguments, flags, environment = self._words(config)
        return HostPlan(
            **command | {"arguments": arguments, "environment": (*environment, *variables)},
            values=tuple(values.items()),
            flags=flags,
            knobs=tuple(knob_words(self.knobs, config)),
            files=tuple(files),
            step=StepSize(samples=samples, tokens=tokens, devices=config.num_devices),
            log_name=f"trial-{trial_number:04}",
        )

    def _words(self, config: ParallelConfig) -> tuple[tuple[str, ...], tuple[str, ...], Environment]:
        """Return the command of a configuration, the flags that take the place of `{flags}`, and the environment."""
        flags = self.flags(config) if self.flags is not None else Flags()
        # the flags of knobs replace those of the framework, unless the command has a place for them
        takes_knobs = f"{{{KNOBS}}}" in self.arguments
        words = without_knob_flags(flags.arguments, self.knobs, config)
        if self.said is None:
            # knobs first, because some flags end with a subcommand
            own = words if takes_knobs else [*knob_words(self.knobs, config), *words]
            return self.arguments, tuple(own), (*flags.environment, *self.environment)
        now = without_knob_flags(self.said.arguments, self.knobs, config)
        arguments = exchange_words(
            self.arguments, _escaped(now), _escaped(words), self.rules, flags.refused - self.said.refused
        )
        if not takes_knobs:
            today = replace(config, knobs=tuple(today_of(self.knobs).items()))
            now, then = (_escaped(knob_words(self.knobs, one)) for one in (today, config))
            arguments = exchange_words(arguments, now, then, WordRules())
        changed = [entry for entry in flags.environment if entry not in self.said.environment]
        return tuple(arguments), (), (*self.environment, *changed)

    def job_of(self, jobs: SlurmJobs, plan: HostPlan, config: ParallelConfig) -> JobPlan:
        """Return the job of one trial; Slurm gives it any of its hosts, which are alike."""
        hosts = len(hosts_of(self.cluster, config))
        return job_plan(jobs, plan, num_hosts=hosts, devices_per_host=launched(self.cluster).devices_per_host)

    def starts(self, config: ParallelConfig, *, trial_number: int) -> Started:
        """Return the command, variables and files of a trial, and its batch file if it is a job."""
        plan = shown_plan(self.plan(config, trial_number))
        if self.slurm is None:
            num_hosts = len(self.hosts)
            return what_starts(plan, None, where=_on_hosts(num_hosts), num_hosts=num_hosts)
        num_hosts, tasks = len(hosts_of(self.cluster, config)), self.slurm.tasks
        each = f"for each of the {self.cluster.devices_per_host} devices of "
        where = {"once": "once, on its first host", "per_host": _on_hosts(num_hosts)} | {
            "per_device": f"{each}{f'{num_hosts} hosts' if num_hosts > 1 else 'one host'}"
        }
        several = 1 if tasks == "once" else num_hosts
        return what_starts(plan, self.job_of(self.slurm, plan, config), where=where[tasks], num_hosts=several)

    def keeping_logs(self, folder: Path) -> Self:
        """Return this backend with whole logs kept in a folder, unless the study names one."""
        return self if self.logs is not None else replace(self, logs=folder)

    def kept_logs(self) -> dict[int, tuple[Path, ...]]:
        """Return the whole logs in this machine's folder, in the order of their hosts, by the trial's number.

        Whoever may not read the folder sees none.
        """
        found: dict[int, dict[int, Path]] = {}
        may_read = self.logs is not None and os.access(self.logs, os.R_OK | os.X_OK, effective_ids=True)
        for path in self.logs.iterdir() if self.logs is not None and may_read and self.logs.is_dir() else ():
            match = LOG_FILE.fullmatch(path.name)
            if match and path.is_file():
                found.setdefault(int(match[1]), {})[int(match[2])] = path
        return {number: tuple(path for _, path in sorted(paths.items())) for number, paths in found.items()}


def _on_hosts(num_hosts: int) -> str:
    return f"once on each of {num_hosts} hosts" if num_hosts > 1 else "once on one host"


def _escaped(words: Sequence[str]) -> list[str]:
    return [escape_braces(word) for word in words]
