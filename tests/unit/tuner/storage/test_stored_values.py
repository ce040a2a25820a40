import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from hardware.io.errors import ConfigError
from hardware.price_file import LOWEST_PRICE
from tests.support.studies.command_line import assert_users_mistake
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.short_study import SHORT_STUDY
from tuner.run.loop import run_study
from tuner.storage.opening import find_study
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study that has run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "study.yaml").write_text(SHORT_STUDY)
    config = load_study(folder / "study.yaml", storage=f"sqlite:///{folder}/study.db")
    run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))
    return folder


@pytest.fixture
def altered(finished, tmp_path):
    """A function that executes a statement on a copy of its database, and returns the URL of the copy."""

    def alter(statement, *values):
        with (
            closing(sqlite3.connect(finished / "study.db")) as source,
            closing(sqlite3.connect(tmp_path / "copy.db")) as database,
        ):
            source.backup(database)
            database.execute(statement, values)
            database.commit()
        return f"sqlite:///{tmp_path}/copy.db"

    return alter


def put(value, path, text):
    """The JSON of a value in which `text` stands at a path."""
    whole = json.loads(json.dumps(value))
    *before, last = path
    inside = whole
    for step in before:
        inside = inside[step]
    inside[last] = "@@"
    return json.dumps(whole).replace('"@@"', text)


def stored(folder, table, key):
    """The first value of an attribute, with what identifies its row."""
    owner = table.replace("_user_attributes", "_id")
    with closing(sqlite3.connect(folder / "study.db")) as database:
        query = f"SELECT {owner}, value_json FROM {table} WHERE key = ?"  # noqa: S608 # names of this file
        row, text = database.execute(query, (key,)).fetchone()
    return owner, row, json.loads(text)


STRANGE = [
    ("trial", "observation", ("status",), '"melted"', "observation.status of trial 0"),
    ("trial", "observation", ("step_times_s", 0), "NaN", "observation.step_times_s.0 of trial 0"),
    ("trial", "observation", ("step_times_s", 0), "5e-324", "observation.step_times_s.0 of trial 0"),
    ("trial", "observation", ("elapsed_s",), "1e308", "observation.elapsed_s of trial 0"),
    ("trial", "observation", ("step_times_s",), "null", "observation.step_times_s of trial 0"),
    ("trial", "observation", ("step_times_s",), "[]", "observation.step_times_s of trial 0"),
    ("trial", "observation", ("operator_samples", 0, "count"), "{}", "observation.operator_samples.0.count of trial 0"),
    ("trial", "observation", ("conditions",), "[1, 2]", "observation.conditions of trial 0"),
    ("trial", "observation", ("peak_memory_bytes",), "Infinity", "observation.peak_memory_bytes of trial 0"),
    ("trial", "prediction", ("step_time_s",), "-1", "prediction.step_time_s of trial 0"),
    ("trial", "population", ("shares", 0), "[]", "population of trial 0"),
    ("trial", "population", ("shares", 0, -2), "2.0", "population of trial 0"),
    ("trial", "population", ("shares", 0, -2), "true", "population of trial 0"),
    ("trial", "ended", (), "null", "ended of trial 0"),
    ("study", "population:start", ("dimensions",), "NaN", "population:start.dimensions of the study"),
    ("study", "meaning", (), "null", "meaning of the study"),
    ("study", "meaning", ("space",), "null", "meaning.space of the study"),
    ("study", "driver", (), "[]", "driver of the study"),
    ("study", "driver", (), '{"host": 1}', "driver.host of the study"),
    ("study", "p_star", (), '"sure"', "p_star of the study"),
    ("study", "stop_reason", (), "{}", "stop_reason of the study"),
]


@pytest.mark.parametrize(("owner", "key", "path", "text", "where"), STRANGE, ids=lambda value: str(value)[:40])
def test_strange_value_is_refused_where_it_stands(finished, altered, owner, key, path, text, where):
    """A value of another form is refused by its attribute, its field and its trial, before anything uses it."""
    column, row, value = stored(finished, f"{owner}_user_attributes", key)
    update = f"UPDATE {owner}_user_attributes SET value_json = ? WHERE key = ? AND {column} = ?"  # noqa: S608 # as above
    url = altered(update, put([value], (0, *path), text)[1:-1], key, row)

    with pytest.raises(ConfigError, match=f"the value of {where} is") as caught:
        find_study(StorageAddress.parse(url), "small")
    assert caught.value.key == "storage"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial_user_attributes SET value_json = '{bad'",
        "UPDATE study_user_attributes SET value_json = '{bad'",
        "UPDATE trials SET state = 'MELTED'",
        "UPDATE trial_values SET value = 'text'",
        "UPDATE trial_values SET value = 5e-324",
        "UPDATE trials SET number = '1e999' WHERE number = 1",
        "UPDATE trials SET number = -1 WHERE number = 1",
        "UPDATE trial_params SET distribution_json = '[]'",
        "UPDATE study_directions SET direction = 'SIDEWAYS'",
    ],
)
def test_rows_that_optuna_cannot_read_are_refused(altered, statement):
    """Broken JSON, unknown words and values of another type end in one message about the storage."""
    with pytest.raises(ConfigError, match="cannot be used"):
        find_study(StorageAddress.parse(altered(statement)), "small")


@pytest.mark.parametrize("table", ["studies", "trials"])
def test_table_without_end_is_refused(altered, tmp_path, table):
    """A view in the place of a table, which may yield rows for ever, is refused before it is read."""
    url = altered(f"ALTER TABLE {table} RENAME TO hidden")
    endless = "WITH RECURSIVE n(study_id) AS (SELECT 1 UNION ALL SELECT study_id + 1 FROM n) SELECT * FROM n"
    with closing(sqlite3.connect(tmp_path / "copy.db")) as database:
        database.execute(f"CREATE VIEW {table} AS {endless}")

    with pytest.raises(ConfigError, match=f"it has a view '{table}', which no version makes"):
        find_study(StorageAddress.parse(url), "small")


def test_trigger_is_refused(altered):
    """A trigger, which writes what nobody asked for, is refused."""
    url = altered("CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END")

    with pytest.raises(ConfigError, match="it has a trigger 't'"):
        find_study(StorageAddress.parse(url), "small")


def test_command_tells_it_in_one_message(finished, altered, meshtune):
    """A command that meets such a value ends with status 2 and one message, and changes nothing."""
    url = altered("UPDATE trial_user_attributes SET value_json = '[]' WHERE key = 'observation'")

    for command in (("status",), ("best",), ("run", "--trials", "3")):
        assert_users_mistake(
            meshtune(command[0], finished / "study.yaml", "--storage", url, *command[1:]),
            "the value of observation of trial 0 is []",
            "if a newer version of Meshtune wrote it, use that version",
        )


def test_words_and_fields_of_a_newer_version_are_shown_or_left_alone(finished, altered, meshtune):
    """An unknown reason to stop is shown as it is, and unknown fields and attributes change nothing."""
    _, row, value = stored(finished, "trial_user_attributes", "observation")
    url = altered("UPDATE study_user_attributes SET value_json = '\"tired\"' WHERE key = 'stop_reason'")
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        newer = json.dumps({**value, "colour": "blue"})
        update = "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'observation' AND trial_id = ?"
        database.execute(update, (newer, row))
        database.execute("INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (1, 'mood', '[]')")
        database.commit()

    done = meshtune("status", finished / "study.yaml", "--storage", url)

    assert done.status == 0
    assert "stopped: tired (a word of another version of Meshtune)" in done.out


def test_what_cannot_be_read_is_not_written(tmp_path):
    """A trial that tells of an impossible step fails, with what it told, and the study can be read."""
    (tmp_path / "study.yaml").write_text(SHORT_STUDY)
    config = load_study(tmp_path / "study.yaml", storage=f"sqlite:///{tmp_path}/study.db")

    class Impossible(InProcessExecutor):
        def poll(self, timeout_s):
            return [(number, replace(seen, step_times_s=(1e-300,))) for number, seen in super().poll(timeout_s)]

    run_study(config, on_progress=lambda _: None, executor=Impossible(config.trials.backend))

    observed = [trial.user_attrs["observation"] for trial in find_study(config.storage, "small").get_trials()]
    assert observed
    assert all("step_times_s.0 of a trial is 1e-300" in each["reason"] for each in observed)


@pytest.mark.parametrize("price", ["1.0e-300", "5.0e-7", "0", "-1", ".inf", "1.0e+7"])
def test_prices_that_no_cost_could_be_read_of_are_refused(tmp_path, price):
    """A price beyond all real ones is refused before a trial has a cost that locks the study."""
    text = SHORT_STUDY + f"objective: [step_time, cost_per_token]\ncost: {{price_per_device_hour: {price}}}\n"
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_study(tmp_path / "study.yaml")


def test_a_study_of_the_lowest_price_can_be_read(tmp_path):
    """The costs of the lowest price that is taken are read again."""
    text = SHORT_STUDY + f"objective: [step_time, cost_per_token]\ncost: {{price_per_device_hour: {LOWEST_PRICE}}}\n"
    (tmp_path / "study.yaml").write_text(text)
    config = load_study(tmp_path / "study.yaml", storage=f"sqlite:///{tmp_path}/study.db")
    run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))

    values = [trial.values for trial in find_study(config.storage, "small").get_trials() if trial.values]
    assert all(0 < cost < 1e-3 for _, cost in values)
    assert values
