"""Tables beside Optuna's in which a study keeps its runs and operator times for later studies.

    meshtune_runs               one row per trial that has ended: its setting, configuration and outcome
    meshtune_operator_samples   one row per operator time of such a trial
    meshtune_rehearsals         one row per candidate that was rehearsed; see ../rehearsals.py
    meshtune_history            the version of the first two

A row describes its run in full: job, cluster and the runtime's facts stand in it as JSON, so that it can be read
without the study that made it. `model`, `device` and `runtime` are for looking things up.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    func,
    inspect,
    select,
)
from sqlalchemy.exc import DBAPIError

from costmodels.job.described_model import describe_model
from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from hardware.io.errors import ConfigError, shown_url
from trials.backend import Observation
from tuner.search.earlier_runs import facts_of, log_spread
from tuner.storage.store import AbstractStore, Rows

VERSION = 1
NAME_LENGTH = 255

CREATE_ATTEMPTS = 5
CREATE_PAUSE_S = 0.2
"""Pause before another attempt [s]: studies that create the tables of one database at the same time stumble over each
other; the tables stay."""

METADATA = MetaData()

_VERSION = Table("meshtune_history", METADATA, Column("version", Integer, primary_key=True, autoincrement=False))

RUNS = Table(
    "meshtune_runs",
    METADATA,
    Column("study", String(512), primary_key=True),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("model", String(NAME_LENGTH), nullable=False),
    Column("device", String(NAME_LENGTH), nullable=False),
    Column("runtime", String(NAME_LENGTH), nullable=False),
    Column("job", Text, nullable=False),
    Column("cluster", Text, nullable=False),
    Column("facts", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("status", String(32), nullable=False),
    Column("origin", String(32), nullable=False),
    Column("step_time_s", Double),  # the median of what was measured, however the trial ended
    Column("num_steps", Integer, nullable=False),
    Column("log_spread", Double, nullable=False),
    Column("peak_memory_bytes", BigInteger),
    Column("recorded_at", DateTime(timezone=True), server_default=func.now()),
    Index("meshtune_runs_by_setting", "device", "runtime", "model"),
)

SAMPLES = Table(
    "meshtune_operator_samples",
    METADATA,
    Column("study", String(512), primary_key=True),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("model", String(NAME_LENGTH), nullable=False),
    Column("device", String(NAME_LENGTH), nullable=False),
    Column("runtime", String(NAME_LENGTH), nullable=False),
    Column("precision", String(32), nullable=False),
    Column("origin", String(32), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("phase", String(32), nullable=False),
    Column("shape", Text, nullable=False),
    Column("time_s", Double, nullable=False),
    Column("count", Integer, nullable=False),
    Column("name", String(NAME_LENGTH), nullable=False),
    Index("meshtune_operator_samples_by_setting", "device", "runtime", "model"),
)

REHEARSALS = Table(
    "meshtune_rehearsals",
    METADATA,
    Column("study", String(512), primary_key=True),
    Column("candidate", String(64), primary_key=True),
    Column("config", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("recorded_at", DateTime(timezone=True), server_default=func.now()),
)


def make_tables(store: AbstractStore) -> None:
    """Create the tables if the store lacks them; the version is written last, once all are there.

    Raises:
        ConfigError: Another version made them.
    """
    for attempt in range(CREATE_ATTEMPTS):
        try:
            with store.connection(METADATA) as connection:
                is_versioned = has_tables(connection)
                if is_versioned and inspect(connection).has_table(REHEARSALS.name):
                    return
            version = {"version": VERSION}
            store.create_tables(METADATA, Rows(table=_VERSION, key=version, rows=[] if is_versioned else [version]))
            return
        except DBAPIError as error:
            collided = "exists" in str(error) or "UNIQUE" in str(error) or "duplicate" in str(error)
            if attempt + 1 == CREATE_ATTEMPTS or not collided:
                raise
            time.sleep(CREATE_PAUSE_S)


def keep_run(
    store: AbstractStore, study: str, trial: int, setting: Setting, config: ParallelConfig, observation: Observation
) -> None:
    """Keep the outcome of a trial, all or nothing; a trial that was kept before is replaced, not doubled.

    The tables must exist: see `make_tables`.
    """
    keys = {
        "study": study,
        "trial": trial,
        "model": setting.job.model.name[:NAME_LENGTH],
        "device": device_names([device.name for device in setting.cluster.devices])[:NAME_LENGTH],
        "runtime": setting.runtime.name[:NAME_LENGTH],
        "origin": observation.origin,
    }
    steps_s = observation.step_times_s
    run = {
        **keys,
        # a clock other than the wall stands behind the origin: earlier versions then take no such run for theirs
        "origin": observation.origin if observation.clock == "wall" else f"{observation.origin}:{observation.clock}",
        "job": _json(_job_of(setting.job)),
        "cluster": _json(asdict(setting.cluster)),
        "facts": _json(dict(facts_of(setting))),
        "config": _json(config.values(DEGREES + FURTHER_DIMENSIONS)),
        "status": str(observation.status),
        "step_time_s": statistics.median(steps_s) if steps_s else None,
        "num_steps": len(steps_s),
        "log_spread": log_spread(steps_s),
        "peak_memory_bytes": observation.peak_memory_bytes,
    }
    samples = [
        {
            **keys,
            "position": position,
            "precision": setting.job.precision,
            "kind": str(sample.kind),
            "phase": str(sample.phase),
            "shape": _json(sample.shape),
            "time_s": sample.time_s,
            "count": sample.count,
            "name": sample.name[:NAME_LENGTH],
        }
        for position, sample in enumerate(observation.timed_samples)
    ]
    key = {"study": study, "trial": trial}
    store.replace_rows(Rows(table=SAMPLES, key=key, rows=samples), Rows(table=RUNS, key=key, rows=[run]))


def _job_of(job: TrainingJob) -> dict[str, Any]:
    values = {field.name: getattr(job, field.name) for field in fields(job)}
    sequences = None if job.sequences is None else asdict(job.sequences)
    return values | {"model": describe_model(job.model), "sequences": sequences}


def device_names(names: list[str]) -> str:
    """Return the unlike devices of a cluster in one word, for looking up."""
    return " + ".join(dict.fromkeys(names))


def has_tables(connection: Connection) -> bool:
    """Return whether some study of this version has kept its runs in the database.

    Raises:
        ConfigError: Another version made the tables.
    """
    if not inspect(connection).has_table(_VERSION.name):
        return False
    version = connection.execute(select(_VERSION.c.version)).scalars().first()
    if version not in (None, VERSION):
        raise ConfigError(
            f"holds a history of version {version}, and this Meshtune keeps version {VERSION}",
            key="storage",
            value=shown_url(connection.engine.url.render_as_string()),
            nearest=f"install {'an older' if str(version) < str(VERSION) else 'a newer'} Meshtune",
        )
    return version is not None


def _json(value: Mapping[str, Any] | tuple[float, ...]) -> str:
    return json.dumps(value, separators=(",", ":"))
