"""Targets: databases and journals, which earlier studies have left and others may have changed."""

from __future__ import annotations

import functools
import io
import json
import sqlite3
import tempfile
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

import optuna

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ParallelConfig
from hardware.dynamics import LinkEvent, Trace
from hardware.io.errors import ConfigError
from tests.fuzz.mutation import of_bytes, of_json, of_lines
from tests.fuzz.target import Target
from tests.support.studies.broken_studies import study
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.short_study import SHORT_STUDY
from trials.backend import Observation, OperatorSample, Status
from tuner.cli.main import commands
from tuner.replan.cluster_states import Figures, Setup
from tuner.run.loop import run_study
from tuner.search.observations import OBSERVATION
from tuner.storage.history import keep_run, make_tables, read_past
from tuner.storage.history.tables import METADATA, RUNS, SAMPLES
from tuner.storage.opening import find_study, open_store, reading
from tuner.storage.record import MEANING
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.study_file.storage_address import StorageAddress
from tuner.watch.hosts import Seat
from tuner.watch.link_shares import Links, LinkShare, PairRates
from tuner.watch.policy import Standing
from tuner.watch.state import Kept, read_state, write_state

optuna.logging.set_verbosity(optuna.logging.ERROR)

SAMPLE = OperatorSample(kind=OpKind.MATMUL, phase=Phase.FORWARD, shape=(1.0, 512.0, 64.0), time_s=2e-3, count=32)
OBSERVED = Observation(status=Status.OK, step_times_s=(2.0, 2.1), peak_memory_bytes=2**30, operator_samples=(SAMPLE,))
CONFIG = ParallelConfig(tp=8)


@functools.cache
def _journal() -> bytes:
    """A study that an older version has left, and a run of another one in tables."""
    with tempfile.TemporaryDirectory() as folder:
        config = _study(Path(folder))
        url = f"journal:///{folder}/study.journal"
        store = open_store(StorageAddress.parse(url))
        make_tables(store)
        keep_run(store, "other", 0, config.problem.setting, CONFIG, OBSERVED)
        left = optuna.create_study(study_name="left", storage=store.storage)
        left.set_user_attr(MEANING, json.loads(json.dumps(config.meaning)))
        trial = left.ask()
        for name, value in CONFIG.values(config.problem.dimensions).items():
            trial.suggest_categorical(name, [value])
        trial.set_user_attr(OBSERVATION, OBSERVED.as_json())
        left.tell(trial, 2.0)
        return Path(folder, "study.journal").read_bytes()


@functools.cache
def _database() -> bytes:
    """The same run in a database of small pages."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "study.db")).touch()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA page_size=1024")
            connection.execute("VACUUM")
        config = _study(Path(folder))
        journal = Path(folder, "study.journal")
        journal.write_bytes(_journal())
        with (
            reading(StorageAddress.parse(f"journal:///{journal}"), METADATA) as rows,
            closing(sqlite3.connect(path)) as connection,
        ):
            for table in METADATA.sorted_tables:
                names = [column.name for column in table.columns if column.name != "recorded_at"]
                connection.execute(f"CREATE TABLE {table.name} ({', '.join([*names, 'recorded_at'])})")
                for row in rows.execute(table.select()).mappings():
                    connection.execute(
                        f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",  # noqa: S608 # our own names
                        [row[name] for name in names],
                    )
            connection.commit()
        assert config.problem.setting is not None
        return path.read_bytes()


def _study(folder: Path) -> StudyRequest:
    path = folder / "study.yaml"
    path.write_text(study(), encoding="utf-8")
    return load_study(path)


def _rows() -> bytes:
    """The values of the database, by table and column."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "study.db")).write_bytes(_database())
        with closing(sqlite3.connect(path)) as connection:
            connection.row_factory = sqlite3.Row
            found = {
                table.name: dict(connection.execute(f"SELECT * FROM {table.name}").fetchone())  # noqa: S608 # our own name
                for table in (RUNS, SAMPLES)
            }
    for name in ("job", "cluster", "facts", "config"):
        found[RUNS.name][name] = json.loads(found[RUNS.name][name])
    return json.dumps(found).encode()


def _read_rows(data: bytes, folder: Path) -> None:
    """A database with other values; what is no text or number stands there as JSON."""
    try:
        tables = json.loads(data)
    except (ValueError, RecursionError):
        return  # no rows
    (path := folder / "rows.db").write_bytes(_database())
    with closing(sqlite3.connect(path)) as connection:
        for table in (RUNS, SAMPLES):
            changes = tables.get(table.name, {}) if isinstance(tables, dict) else {}
            for name in {column.name for column in table.columns} & set(changes if isinstance(changes, dict) else ()):
                value = changes[name]
                is_plain = (
                    value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63)
                )
                told = value if is_plain else json.dumps(value)
                try:
                    connection.execute(f"UPDATE {table.name} SET {name} = ?", [told])  # noqa: S608 # our own names
                except UnicodeEncodeError:
                    continue
        connection.commit()
    read_past([StorageAddress.parse(f"sqlite:///{path}")], base_dir=folder)


def _read_database(data: bytes, folder: Path) -> None:
    for left in folder.glob("bytes.db*"):
        left.unlink()
    (path := folder / "bytes.db").write_bytes(data)
    read_past([StorageAddress.parse(f"sqlite:///{path}")], base_dir=folder)


def _read_journal(data: bytes, folder: Path) -> None:
    (path := folder / "study.journal").write_bytes(data)
    read_past([StorageAddress.parse(f"journal:///{path}")], base_dir=folder)
    found = find_study(StorageAddress.parse(f"journal:///{path}"), "left")
    if found is not None:
        found.get_trials()


COMMANDS = (("status", "--json"), ("trials", "--json"), ("best", "--json"), ("status",), ("best",))
"""Commands that read a study, with their options."""

OF_STUDIES = ("studies", "study_user_attributes", "trials", "trial_user_attributes", "trial_params", "trial_values")
"""Optuna's tables of what a study holds."""


class _Brief(InProcessExecutor):
    """Executor that keeps the time of one operator, so that inputs are small."""

    def poll(self, timeout_s: float) -> list[tuple[int, Observation]]:
        """The next trial's end."""
        return [
            (number, replace(seen, operator_samples=seen.operator_samples[:1]))
            for number, seen in super().poll(timeout_s)
        ]


@functools.cache
def _ended(kind: str) -> bytes:
    """The file of a study that has run, as a database or a journal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ended.yaml").write_text(SHORT_STUDY, encoding="utf-8")
        config = load_study(folder / "ended.yaml", storage=f"{kind}:///{folder}/ended")
        run_study(config, on_progress=lambda _: None, executor=_Brief(config.trials.backend))
        if kind == "journal":
            return (folder / "ended").read_bytes()
        with closing(sqlite3.connect(folder / "ended")) as source, closing(sqlite3.connect(folder / "copy")) as whole:
            source.backup(whole)  # with what is still in the log beside it
        return (folder / "copy").read_bytes()


def _values() -> bytes:
    """What Optuna's tables hold of that study, by table and row; texts that are JSON as what they say."""
    with tempfile.TemporaryDirectory() as name:
        (path := Path(name, "ended.db")).write_bytes(_ended("sqlite"))
        with closing(sqlite3.connect(path)) as connection:
            connection.row_factory = sqlite3.Row
            found = {
                table: [
                    {key: _parsed(row[key]) for key in row.keys()}  # noqa: SIM118 # a row's own iteration is over values
                    for row in connection.execute(f"SELECT * FROM {table}")  # noqa: S608 # our own names
                ]
                for table in OF_STUDIES
            }
    return json.dumps(found).encode()


def _parsed(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) and value[:1] in "[{" else value
    except ValueError:
        return value


def _read_values(data: bytes, folder: Path) -> None:
    """Commands on a database whose tables hold other values."""
    try:
        tables = json.loads(data)
    except (ValueError, RecursionError):
        return  # no values
    for left in folder.glob("values.db*"):
        left.unlink()
    (path := folder / "values.db").write_bytes(_ended("sqlite"))
    with closing(sqlite3.connect(path)) as connection:
        for table in OF_STUDIES:
            rows = tables.get(table, []) if isinstance(tables, dict) else []
            names = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for number, row in enumerate(rows if isinstance(rows, list) else [], start=1):
                for name in names & set(row if isinstance(row, dict) else ()):
                    _put(connection, table, number, name, row[name])
        connection.commit()
    _ask(f"sqlite:///{path}", folder)


def _put(connection: sqlite3.Connection, table: str, number: int, name: str, value: object) -> None:
    is_plain = value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63)
    with suppress(UnicodeEncodeError, sqlite3.IntegrityError, ValueError):
        connection.execute(
            f"UPDATE {table} SET {name} = ? WHERE rowid = ?",  # noqa: S608 # our own names
            [value if is_plain else json.dumps(value), number],
        )


def _read_ended_journal(data: bytes, folder: Path) -> None:
    (path := folder / "ended.journal").write_bytes(data)
    _ask(f"journal:///{path}", folder)


def _ask(url: str, folder: Path) -> None:
    """Every command on a storage; the first refusal counts once all were asked."""
    (study := folder / "ended.yaml").write_text(SHORT_STUDY, encoding="utf-8")
    refusals = []
    for command, *options in COMMANDS:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            try:
                commands().main([command, str(study), "--storage", url, *options], standalone_mode=False)
            except ConfigError as error:
                refusals.append(error)
    if refusals:
        raise refusals[0]


@functools.cache
def _watch() -> bytes:
    """The state of a watch whose job runs on one of two hosts."""
    with tempfile.TemporaryDirectory() as folder:
        config, file = _study(Path(folder)), Path(folder, "state.json")
        hosts = tuple(range(config.problem.setting.cluster.num_hosts))
        figures = Figures(step_time_s=1.5, state_bytes=1e9, devices_per_host=8, nic_bytes_per_s=5e10)
        setup = Setup(hosts=hosts, config=CONFIG)
        standing = Standing(running=setup, since_s=7.0, at_s=8.0, figures=figures, lost_steps={setup: 2.5})
        seats = tuple(Seat(node=f"n{host}", is_lost=False) for host in hosts)
        slow = Trace(events=(LinkEvent(time_s=1.0, link="inter", share=0.5),))
        pair = PairRates(sender="n0", receiver="n1", reference_bytes_per_s=1e9, recent_bytes_per_s=(9e8,))
        links = Links(pairs=(pair,), shares=(LinkShare(link=("n0", "n1"), share=0.5, found=(0.25,)),))
        kept = Kept(source="slurm", began_s=1e9, standing=standing, seats=seats, trace=slow, links=links)
        write_state(file, config, kept)
        return file.read_bytes()


def _read_watch(data: bytes, folder: Path) -> None:
    file = folder / "state.json"
    file.write_bytes(data)
    read_state(file, _study(folder))


TARGETS = (
    Target(name="history", read=_read_rows, mutation=of_json, seeds=lambda: (_rows(),)),
    Target(name="study values", read=_read_values, mutation=of_json, seeds=lambda: (_values(),)),
    Target(name="study journal", read=_read_ended_journal, mutation=of_lines, seeds=lambda: (_ended("journal"),)),
    Target(name="watch state", read=_read_watch, mutation=of_json, seeds=lambda: (_watch(),)),
    Target(name="database", read=_read_database, mutation=of_bytes, seeds=lambda: (_database(),)),
    Target(name="journal", read=_read_journal, mutation=of_lines, seeds=lambda: (_journal(),)),
)
