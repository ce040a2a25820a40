"""Reader of the past runs that a database holds; it never changes the database.

Studies of today keep runs in tables of their own (tables.py). Older studies have their measurements in the attributes
of Optuna's trials. Those are read from Optuna's tables directly: opening a storage through Optuna would create the
tables that an older database lacks.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from optuna.distributions import json_to_distribution
from pydantic import TypeAdapter
from sqlalchemy import Connection, column, inspect, select, table

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.described_model import described_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError, quote_value
from trials.backend import Observation, Status
from tuner.search.earlier_runs import Fact, IsolatedSample, Past, PastRun, PastSample, facts_of_profile, log_spread
from tuner.search.observations import OBSERVATION
from tuner.search.parameters import ASSIGNMENT
from tuner.search.proxy.proxy_trials import PROXY
from tuner.storage.history.isolated import ALONE, read_isolated, shape_of
from tuner.storage.history.tables import METADATA, RUNS, SAMPLES, device_names, has_tables
from tuner.storage.opening import reading
from tuner.storage.record import MEANING
from tuner.study_file.storage_address import StorageAddress

_JOB = {name: TypeAdapter(kind) for name, kind in get_type_hints(TrainingJob).items() if name != "model"}
_CLUSTER = TypeAdapter(Cluster)
_CONFIG_FIELDS = frozenset(field.name for field in fields(ParallelConfig))

_STUDIES = table("studies", column("study_id"), column("study_name"))
_STUDY_ATTRIBUTES = table("study_user_attributes", column("study_id"), column("key"), column("value_json"))
_TRIALS = table("trials", column("trial_id"), column("study_id"), column("number"))
_PARAMS = table("trial_params", *map(column, ("trial_id", "param_name", "param_value", "distribution_json")))
_ATTRIBUTES = table("trial_user_attributes", column("trial_id"), column("key"), column("value_json"))

UNREADABLE = "trials of another version of Meshtune, whose job or cluster can't be read"
FOREIGN = "trials of other programs"

_UNREADABLE_ROW = (ConfigError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors over a row that another version, or somebody's hand, has written."""

_Mapping = Mapping[str, Any]
_Kept = set[tuple[str, int]]


def read_stored(address: StorageAddress, label: str, own: str | None) -> Past:
    """Return the past runs in a database, which must exist.

    Args:
        address: Address of the database.
        label: Text that tells the database apart from others in the groups of its runs.
        own: Name of the study that asks, whose runs are left out.

    Raises:
        ConfigError: The database cannot be read, or no study has ever stood in it.
    """
    with reading(address, METADATA) as connection:
        return _Reader(connection, label, own).read()


def group_of(study: str, label: str) -> str:
    """Return `PastRun.group` of the runs of a study in the database with this label."""
    return f"{study} ({label})"


class _Reader:
    """Reader of one database, which parses texts that many rows repeat once."""

    def __init__(self, connection: Connection, label: str, own: str | None) -> None:
        self.connection = connection
        self.label = label
        self.own = own
        self.understood: dict[tuple[Callable[[str], Any], str], Any] = {}
        self.skipped: Counter[str] = Counter()

    def read(self) -> Past:
        """Return all runs and samples."""
        kept: _Kept = set()
        runs: list[PastRun] = []
        samples: list[PastSample] = []
        alone: tuple[IsolatedSample, ...] = ()
        is_kept, is_optuna = has_tables(self.connection), inspect(self.connection).has_table(_STUDIES.name)
        if not is_kept and not is_optuna:
            raise ConfigError("holds no study")
        if is_kept:
            runs, kept = self.kept_runs()
            samples = self.kept_samples()
            alone = read_isolated(self.connection)
        if is_optuna:
            older = self.older(kept)
            runs, samples = [*runs, *older.runs], [*samples, *older.samples]
        return Past(runs=tuple(runs), samples=tuple(samples), alone=alone, skipped=dict(self.skipped))

    def group(self, study: str) -> str:
        """Return `PastRun.group` of a study's runs."""
        return group_of(study, self.label)

    def once(self, understand: Callable[[str], Any], text: str) -> Any:
        """Return `understand(text)`; equal texts give the same object."""
        key = (understand, text)
        if key not in self.understood:
            self.understood[key] = understand(text)
        return self.understood[key]

    def kept_runs(self) -> tuple[list[PastRun], _Kept]:
        """Return the rows of the table of runs, and the studies and trials that they are of."""
        columns = [column for column in RUNS.c if column.name != "recorded_at"]
        wanted = select(*columns).where(RUNS.c.study != (self.own or "")).order_by(RUNS.c.trial)
        runs: list[PastRun] = []
        kept: _Kept = set()
        for row in sorted(self.connection.execute(wanted), key=_study_of):
            kept.add((row.study, row.trial))
            try:
                runs.append(
                    PastRun(
                        group=self.group(row.study),
                        job=self.once(_parse_job, row.job),
                        cluster=self.once(_CLUSTER.validate_json, row.cluster),
                        runtime=row.runtime,
                        facts=self.once(_parse_facts, row.facts),
                        config=self.once(_parse_config, row.config),
                        status=Status(row.status),
                        step_time_s=_check_number(row.step_time_s, float) if row.status == Status.OK else None,
                        log_spread=_check_number(row.log_spread, float) or 0.0,
                        num_steps=_check_number(row.num_steps, int) or 0,
                        peak_memory_bytes=_check_number(row.peak_memory_bytes, int),
                        **_split_origin(row.origin),
                    )
                )
            except _UNREADABLE_ROW:
                self.skipped[UNREADABLE] += 1
        return runs, kept

    def kept_samples(self) -> list[PastSample]:
        """Return the rows of the table of operator times."""
        c = SAMPLES.c
        columns = (c.study, c.device, c.runtime, c.precision, c.origin, c.kind, c.phase, c.shape)
        wanted = select(*columns, c.time_s, c["count"], c.name).where(
            (c.study != (self.own or "")) & (c.runtime != ALONE)
        )
        kinds, phases = {str(kind): kind for kind in OpKind}, {str(phase): phase for phase in Phase}
        groups: dict[str, str] = {}
        samples = []
        rows = sorted(self.connection.execute(wanted.order_by(c.trial, c.position)), key=_study_of)
        for study, device, runtime, precision, origin, kind, phase, shape, time_s, count, name in rows:
            if kind not in kinds or phase not in phases:
                self.skipped["operator times of a kind that this version doesn't know"] += 1
                continue
            try:
                sample = PastSample(
                    group=groups.get(study) or groups.setdefault(study, self.group(study)),
                    device=device,
                    runtime=runtime,
                    precision=precision,
                    origin=origin,
                    kind=kinds[kind],
                    phase=phases[phase],
                    shape=self.once(shape_of, shape),
                    time_s=_check_number(time_s, float) or 0.0,
                    count=_check_number(count, int) or 0,
                    name=name,
                )
            except _UNREADABLE_ROW:
                self.skipped["operator times that can't be read"] += 1
                continue
            samples.append(sample)
        return samples

    def older(self, kept: _Kept) -> Past:
        """Return the runs in the attributes of trials that are not in `kept`."""
        observed = (
            select(_STUDIES.c.study_id, _STUDIES.c.study_name, _TRIALS.c.trial_id, _TRIALS.c.number)
            .join(_TRIALS, _TRIALS.c.study_id == _STUDIES.c.study_id)
            .where(_STUDIES.c.study_name != (self.own or ""))
            .order_by(_STUDIES.c.study_id, _TRIALS.c.number)
        )
        by_study: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for study_id, name, trial_id, number in self.connection.execute(observed):
            if (name, number) not in kept:
                by_study[study_id].append((name, trial_id))
        parts = [self.older_study(study_id, trials) for study_id, trials in by_study.items()]
        return Past(
            runs=tuple(run for runs, _ in parts for run in runs),
            samples=tuple(sample for _, samples in parts for sample in samples),
        )

    def older_study(self, study_id: int, trials: list[tuple[str, int]]) -> tuple[list[PastRun], list[PastSample]]:
        observations = self.attributes(study_id)
        observed = [(name, trial_id) for name, trial_id in trials if trial_id in observations]
        meaning = self.connection.execute(
            select(_STUDY_ATTRIBUTES.c.value_json).where(
                (_STUDY_ATTRIBUTES.c.study_id == study_id) & (_STUDY_ATTRIBUTES.c.key == MEANING)
            )
        ).scalar_one_or_none()
        if meaning is None:
            self.skipped[FOREIGN] += len(trials)
            return [], []
        if not observed:
            return [], []
        runs: list[PastRun] = []
        samples: list[PastSample] = []
        try:
            described = _Meaning(json.loads(meaning))
        except _UNREADABLE_ROW:
            self.skipped[UNREADABLE] += len(observed)
            return [], []
        params, assignments = self.params(study_id), self.assignments(study_id)
        for name, trial_id in observed:
            try:
                observation = Observation.from_json(json.loads(observations[trial_id]))
                dimensions = params.get(trial_id, {}) | {ASSIGNMENT: assignments.get(trial_id, "")}
                run = described.run(self.group(name), dimensions, observation)
            except _UNREADABLE_ROW:
                self.skipped[UNREADABLE] += 1
                continue
            if run is not None:
                runs.append(run)
                samples += described.samples(run.group, observation)
        return runs, samples

    def attributes(self, study_id: int) -> dict[int, str]:
        """Return the observation of each trial of a study that has one, and ran the study's own job."""
        wanted = (
            select(_ATTRIBUTES.c.trial_id, _ATTRIBUTES.c.key, _ATTRIBUTES.c.value_json)
            .join(_TRIALS, _TRIALS.c.trial_id == _ATTRIBUTES.c.trial_id)
            .where((_TRIALS.c.study_id == study_id) & _ATTRIBUTES.c.key.in_((OBSERVATION, PROXY)))
        )
        rows = list(self.connection.execute(wanted))
        smaller = {row.trial_id for row in rows if row.key == PROXY}
        return {row.trial_id: row.value_json for row in rows if row.trial_id not in smaller}

    def assignments(self, study_id: int) -> dict[int, str]:
        """Return the uneven work of each trial of a study whose work was uneven."""
        wanted = (
            select(_ATTRIBUTES.c.trial_id, _ATTRIBUTES.c.value_json)
            .join(_TRIALS, _TRIALS.c.trial_id == _ATTRIBUTES.c.trial_id)
            .where((_TRIALS.c.study_id == study_id) & (_ATTRIBUTES.c.key == ASSIGNMENT))
        )
        return {row.trial_id: str(json.loads(row.value_json)) for row in self.connection.execute(wanted)}

    def params(self, study_id: int) -> dict[int, dict[str, Any]]:
        wanted = (
            select(*_PARAMS.c)
            .join(_TRIALS, _TRIALS.c.trial_id == _PARAMS.c.trial_id)
            .where(_TRIALS.c.study_id == study_id)
        )
        params: dict[int, dict[str, Any]] = defaultdict(dict)
        for trial_id, name, value, distribution in self.connection.execute(wanted):
            params[trial_id][name] = self.once(json_to_distribution, distribution).to_external_repr(value)
        return params


class _Meaning:
    """Meaning of an older study's trials, from its attribute `meaning`."""

    def __init__(self, meaning: _Mapping) -> None:
        self.job: TrainingJob = _job_of({**meaning["job"], "model": meaning["model"]})
        self.cluster: Cluster = _CLUSTER.validate_python(meaning["cluster"])
        self.runtime = str(meaning["runtime"]["name"])
        self.facts = facts_of_profile(meaning["runtime"])
        self.dimensions = {name for name in _CONFIG_FIELDS if name in meaning["space"]["opened"]}
        self.defaults = self.job.fixed_values(sequence_parallel=meaning["runtime"]["sequence_parallel"])

    def run(self, group: str, params: _Mapping, observation: Observation) -> PastRun | None:
        """Return the run of one trial; None if its driver died before it had a candidate."""
        if not {"pp", "tp", "dp", *self.dimensions} <= set(params):
            return None
        return PastRun(
            group=group,
            job=self.job,
            cluster=self.cluster,
            runtime=self.runtime,
            facts=self.facts,
            config=ParallelConfig(**{**self.defaults, **params}),
            status=observation.status,
            step_time_s=observation.step_time_s,
            log_spread=log_spread(observation.step_times_s),
            num_steps=len(observation.step_times_s),
            peak_memory_bytes=observation.peak_memory_bytes,
            origin=observation.origin,
            clock=observation.clock,
        )

    def samples(self, group: str, observation: Observation) -> list[PastSample]:
        return [
            PastSample(
                group=group,
                device=device_names([device.name for device in self.cluster.devices]),
                runtime=self.runtime,
                precision=self.job.precision,
                origin=observation.origin,
                kind=sample.kind,
                phase=sample.phase,
                shape=sample.shape,
                time_s=sample.time_s,
                count=sample.count,
                name=sample.name,
            )
            for sample in observation.timed_samples
        ]


def _study_of(row: Sequence[Any]) -> str:
    """Return the key by which rows are sorted here, because each server sorts texts by a language of its own."""
    return str(row[0])


def _split_origin(text: str) -> dict[str, Any]:
    """Return the parts that `tables.keep_run` joined: `measured`, or `measured:virtual` where that is the clock."""
    origin, _, clock = text.partition(":")
    return {"origin": origin, "clock": clock or "wall"}


def _check_number(value: Any, kind: type) -> Any:
    """Return a number of a row, or None."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{quote_value(value)} is not measured")
    return kind(value)


def _parse_facts(text: str) -> tuple[Fact, ...]:
    return facts_of_profile(json.loads(text))


def _parse_job(text: str) -> TrainingJob:
    return _job_of(json.loads(text))


def _job_of(values: _Mapping) -> TrainingJob:
    known = {name: _JOB[name].validate_python(value) for name, value in values.items() if name in _JOB}
    return TrainingJob(model=described_model(values["model"]), **known)


def _parse_config(text: str) -> ParallelConfig:
    return ParallelConfig(**{name: value for name, value in json.loads(text).items() if name in _CONFIG_FIELDS})
