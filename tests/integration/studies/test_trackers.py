"""Trackers of experiments that a run tells of its trials, each with the real library and files on this machine."""

import json
import signal
import sys
import time

import pytest

import tuner.run.loop
from hardware.io.errors import ConfigError
from tests.support.studies.command_line import write_replay
from tests.support.studies.in_process_executor import InProcessExecutor
from tuner import load_study, run_study
from tuner.run.ledger import Ledger
from tuner.run.next_trial import NextTrial
from tuner.run.progress import Progress
from tuner.run.trackers import following
from tuner.run.trackers.contract import AbstractTracker
from tuner.search.stopping import StopReason

NUM_TRIALS = 11
"""Configurations of the measured rows."""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a replay of measured rows, three of them failed, in this process; its result and the notes."""
    monkeypatch.setattr(tuner.run.loop, "RayExecutor", lambda backend, **_options: InProcessExecutor(backend))
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)

    def call(*trackers, **changes):
        search = f"{{draws: 10, confidence: 1.0, callbacks: [{', '.join(trackers)}]}}"
        path = write_replay(tmp_path, search=search, **changes)
        notes = []
        result = run_study(load_study(path), on_progress=lambda progress: notes.append(progress.note))
        return result, [note for note in notes if note]

    return call


def told_of(result):
    """What a tracker should show of each trial: its status, its step time and its tp."""
    return {record.number: (record.status.value, record.step_time_s, record.params["tp"]) for record in result.records}


def test_tensorboard_shows_every_trial(run, tmp_path):
    """Event files hold each trial's configuration and status as hyperparameters, and its step time as a scalar."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams import plugin_data_pb2

    result, notes = run("tensorboard")

    seen = {}
    for folder in (tmp_path / "tensorboard" / "replayed").iterdir():
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
        times = [event.value for event in events.Scalars("step_time_s")] if events.Tags()["scalars"] else [None]
        number = int(folder.name.removeprefix("trial-"))
        seen[number] = (hparams["status"].string_value, times[0], hparams["tp"].number_value)
    assert told_of(result) == {
        number: (status, time_s and pytest.approx(time_s), tp) for number, (status, time_s, tp) in seen.items()
    }
    assert len(seen) == NUM_TRIALS
    assert {status for status, _, _ in seen.values()} == {"ok", "out_of_memory"}
    assert notes == []


def test_mlflow_shows_every_trial(run, tmp_path, monkeypatch, capfd):
    """A local store has an experiment of the study's name, with a run for each trial."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    result, notes = run("mlflow")

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("replayed")
    runs = client.search_runs([experiment.experiment_id])
    seen = {
        int(one.data.tags["trial"]): (
            one.data.tags["status"],
            one.data.metrics.get("step_time_s"),
            int(one.data.params["tp"]),
        )
        for one in runs
    }
    assert seen == told_of(result)
    assert len(seen) == NUM_TRIALS
    assert notes == []
    assert "INFO" not in capfd.readouterr().err  # lines of its own would break a table on a terminal


def kept_records(log):
    """The records in a file of Weights & Biases: LevelDB's log format, behind seven bytes of its own."""
    block, at, record = 32 * 1024, 7, b""
    while at + 7 <= len(log):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        record += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def test_wandb_keeps_every_trial(run, tmp_path, monkeypatch, capfd):
    """Offline runs on this machine's disk, one for each trial, hold configuration, status and step time."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")

    result, notes = run("wandb")

    seen = {}
    for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"):
        found, groups = {}, set()
        for record in map(Record.FromString, kept_records(path.read_bytes())):
            groups |= {record.run.run_group} - {""}
            items = [*record.run.config.update, *record.config.update, *record.history.item]
            found |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        assert groups == {"replayed"}
        seen[found["trial"]] = (found["status"], found.get("step_time_s"), found["tp"])
    assert seen == told_of(result)
    assert len(seen) == NUM_TRIALS
    assert notes == []
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", following.TRACKERS)
def test_a_missing_library_is_named_with_its_extra(run, monkeypatch, name):
    """Before the first trial, one message says what to install."""
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=rf"search.callbacks = '{name}': needs .* pip install 'meshtune\[{name}\]'"):
        run(name)


def test_wandb_without_an_account_is_refused(run, tmp_path, monkeypatch, capfd):
    """No run asks for a key on a terminal: a message names the ways out before the first trial."""
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(ConfigError, match=r"needs the key of an account; .*WANDB_MODE=offline"):
        run("wandb")
    assert "deprecated" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [("mlflow", "MLFLOW_TRACKING_URI", "nonsense://server"), ("wandb", "WANDB_API_KEY", "short")],
)
def test_a_tracker_that_cannot_be_opened_is_told_before_the_first_trial(run, monkeypatch, name, variable, value):
    """What a library says of an address or a key that it cannot use is one message."""
    pytest.importorskip(name)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv(variable, value)

    told = {"mlflow": "nonsense", "wandb": "API key must have"}[name]
    with pytest.raises(ConfigError, match=f"search.callbacks = '{name}': cannot be opened: .*{told}"):
        run(name)


@pytest.mark.parametrize(("name", "file"), [("mlflow", "mlflow.db"), ("tensorboard", "tensorboard")])
def test_a_file_in_the_place_of_a_tracker_is_kept(run, tmp_path, monkeypatch, name, file):
    """Where something else stands in the place of a tracker's files, a message says so, and it stays as it is."""
    pytest.importorskip(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / file).write_text("mine\n" * 1000, encoding="utf-8")

    with pytest.raises(ConfigError, match=f"search.callbacks = '{name}': cannot be opened: "):
        run(name)

    assert (tmp_path / file).read_text(encoding="utf-8") == "mine\n" * 1000


class Listing(AbstractTracker):
    """Tracker that lists the numbers of trials."""

    def __init__(self):
        self.told = []

    def log(self, trial):
        """Keep the number."""
        self.told.append(trial.number)


def test_a_trial_that_is_recorded_amid_an_interrupt_is_told(run, monkeypatch):
    """Trackers have every trial that the storage has, although an interrupt came while one was recorded."""
    listing, record = Listing(), Ledger.record
    monkeypatch.setitem(following.TRACKERS, "mlflow", lambda _: listing)

    def interrupted(ledger, number, observation):
        record(ledger, number, observation)
        if number == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Ledger, "record", interrupted)

    result, _ = run("mlflow")

    assert result.stop_reason is StopReason.INTERRUPTED
    assert 2 in listing.told
    assert listing.told == [trial.number for trial in result.records if trial.status is not None]


class Failing(AbstractTracker):
    """Tracker whose server is gone after the second trial."""

    def __init__(self):
        self.told = []

    def log(self, trial):
        """Keep two trials."""
        if len(self.told) == 2:
            raise OSError("no route to host\nat line 3")
        self.told.append(trial.number)


def test_a_tracker_that_fails_is_told_once_and_ends_nothing(run, monkeypatch):
    """The study goes on without it, and one note says why."""
    failing = Failing()
    monkeypatch.setitem(following.TRACKERS, "mlflow", lambda _: failing)

    result, notes = run("mlflow")

    assert notes == ["mlflow is told of no more trials: no route to host"]
    assert len(result.records) == NUM_TRIALS
    assert len(failing.told) == 2


def test_what_is_told_beside_a_note_is_told_once(tmp_path, monkeypatch):
    """A tracker's note comes with the progress that found it, whose trials and choices have been told already."""
    monkeypatch.setitem(following.TRACKERS, "mlflow", lambda _: Failing())
    monkeypatch.setattr(following._Followers, "notes", lambda _: iter(["mlflow is away"]))
    request, seen = load_study(write_replay(tmp_path, search="{callbacks: [mlflow]}")), []
    chosen = NextTrial(number=3, values={"tp": 2}, is_proxy=False, prospect=None)

    with following.tracked(request, seen.append) as tell:
        tell(Progress(done=2, running=1, budget=9, chosen=chosen))
        first, second = seen

    assert (first.note, first.chosen) == ("", chosen)
    assert (second.note, second.chosen, second.ended, second.opening) == ("mlflow is away", None, (), None)


class Slow(AbstractTracker):
    """Tracker that takes its time."""

    def log(self, trial):  # noqa: ARG002 # it keeps nothing
        """Wait."""
        time.sleep(3)


def test_a_slow_tracker_delays_no_trial_and_the_end_not_for_long(run, monkeypatch):
    """Trials end before it has taken them; the run waits for it no longer than the limit."""
    monkeypatch.setitem(following.TRACKERS, "wandb", lambda _: Slow())
    monkeypatch.setattr(following, "CLOSE_LIMIT_S", 0.5)
    begin_s = time.monotonic()

    _, notes = run("wandb")

    assert notes == ["trackers did not take all trials within 0.5 s"]
    assert time.monotonic() - begin_s < NUM_TRIALS * 3


@pytest.mark.parametrize(("trackers", "told"), [("mlflow, mlflow", "each tracker once"), ("mlflo", "'mlflo'")])
def test_a_tracker_is_named_once(run, trackers, told):
    """A study that names one twice is refused, and so is an unknown one."""
    with pytest.raises(ConfigError, match=told):
        run(trackers)
