"""Studies that state a measurement of their current configuration, which counts as their first trial."""

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.commanded_study import run_here, write_study
from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.economics.device_time import device_time_of
from tuner.run.loop import run_study
from tuner.run.studies import stored_study
from tuner.storage.record import read_records
from tuner.study_file.config import load_study

MEASURED = "measured={step_time_s: 0.25, peak_memory_gib: 1.5, source: train.log}"


@pytest.fixture
def file(tmp_path):
    """A study whose current configuration takes 140 ms and more."""
    return write_study(tmp_path, trials=3)


def trials_of(file):
    """The records of a study that has been run."""
    return read_records(stored_study(load_study(file)))


def test_the_measurement_is_the_first_trial(file):
    """It counts as a completed trial of the current configuration, and no command is run for it."""
    config = load_study(file, overrides=[MEASURED])
    executor = InProcessExecutor(config.trials.backend)
    result = run_study(config, on_progress=lambda _: None, executor=executor)

    first = result.records[0]
    assert first.params == config.problem.current.values(config.problem.dimensions)
    assert (first.step_time_s, first.observation.peak_memory_bytes) == (0.25, 3 * 2**29)
    assert first.observation.taken_from == "train.log"
    assert len(result.records) == 3
    assert [number for number, _ in executor.seen] == [1, 2]
    assert first.params not in [config.values(first.params) for _, config in executor.seen]


def test_it_counts_for_the_confidence_and_the_gain(file):
    """The current configuration is explored by it, and the result is compared with it."""
    config = load_study(file, overrides=[MEASURED])
    result = run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))

    assert result.records[0].p_star is not None
    assert result.reference.step_time_s(result.records) == 0.25


def test_it_takes_no_device_time(file):
    """Device-hours are those of the trials that ran."""
    config = run_here(file, MEASURED)
    records = trials_of(file)

    assert device_time_of(config, records) == device_time_of(config, records[1:])


def test_status_and_report_say_where_it_comes_from(file, meshtune):
    """Both name the log, so that nobody takes the trial for one that was run."""
    run_here(file, MEASURED)

    assert "Trial 0 was measured by your log: train.log." in meshtune("status", file).out
    meshtune("report", file, "--out", file.parent / "report.html")
    assert "measured by your log: train.log" in (file.parent / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_resumed_study_counts_it_once(file):
    """A further run adds trials, and no second measurement, even if the file states another one."""
    run_here(file, MEASURED)
    run_here(file, MEASURED.replace("0.25", "0.5"), "search.max_trials=4")

    assert [record.observation.taken_from for record in trials_of(file)] == ["train.log", "", "", ""]
    assert trials_of(file)[0].step_time_s == 0.25


def test_a_study_may_state_it_later(file):
    """A study with trials counts it when its file states it; both measurements of the configuration are averaged."""
    run_here(file, "search.max_trials=1")
    run_here(file, MEASURED, "search.max_trials=2")

    assert [record.observation.taken_from for record in trials_of(file)] == ["", "train.log"]


def test_a_driver_that_died_while_counting_it_loses_nothing(file, monkeypatch):
    """A trial that was created but not told is told by the next driver, without running a command."""
    config = load_study(file, overrides=[MEASURED, "search.max_trials=1"])

    def die(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("tuner.run.ledger.Ledger.record", die)
        with pytest.raises(RuntimeError, match="killed"):
            run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))
    executor = InProcessExecutor(config.trials.backend)
    result = run_study(config, on_progress=lambda _: None, executor=executor)

    assert [record.step_time_s for record in result.records] == [0.25]
    assert executor.seen == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trial={backend: simulated}", "needs trials that train for real"),
        ("current=null", "needs `current`"),
        ("measured.step_time_s=0", "greater than 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(file, override, message):
    """A real step is no trial of a simulated study, and a step without a configuration is none at all."""
    with pytest.raises(ConfigError, match=message):
        load_study(file, overrides=[MEASURED, override])
