from contextlib import suppress

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.in_process_executor import run_here as run
from trials.backend import Observation, Status
from tuner.run.alike_failures import alike_failures
from tuner.run.loop import run_study
from tuner.run.studies import stored_study
from tuner.storage.record import counted, excused_in_words, read_records
from tuner.study_file.config import load_study

STUDY = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
current: {tp: 8}
space: {pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}
search: {draws: 10, confidence: 1.0}
trial: {backend: simulated}
"""
OK = Observation(status=Status.OK, step_times_s=(1.0,))
LACK = Observation(status=Status.OUT_OF_MEMORY, reason="CUDA out of memory")


def crash(reason="exit status 1: FileNotFoundError: /data/wiki_17.idx", status=Status.CRASHED, **values):
    """A failed trial."""
    return Observation(status=status, reason=reason, **values)


def numbered(*observations):
    """Trials by their numbers, as they ended."""
    return list(enumerate(observations))


@pytest.mark.parametrize(
    ("observations", "alike"),
    [
        ([crash()] * 2, ()),
        ([crash()] * 3, (0, 1, 2)),
        ([crash("port 4711 is taken"), crash("port 4712 is taken"), crash("port 4713 is taken")], (0, 1, 2)),
        ([crash(), crash("another error"), crash()], ()),
        ([LACK, crash(), crash(), crash()], (1, 2, 3)),
        ([LACK] * 4, ()),
        ([crash(), LACK, crash(), crash()], ()),
        ([crash(), Observation(status=Status.CANCELLED, reason="stopped"), crash(), crash()], (0, 2, 3)),
        ([OK, *[crash()] * 5], ()),
        ([crash(status=Status.TIMEOUT, step_times_s=(1.0,)), *[crash()] * 3], ()),
        ([crash("was cut off at 60 s", Status.TIMEOUT)] * 3, (0, 1, 2)),
        ([crash("hangs: printed nothing", Status.INCIDENT)] * 3, (0, 1, 2)),
        ([crash("was killed by SIGKILL", Status.INCIDENT, killed_by="SIGKILL")] * 3, ()),
        ([crash("x"), crash("x", Status.INCIDENT), crash("x")], ()),
        ([], ()),
    ],
)
def test_failures_in_a_row_that_are_alike(observations, alike):
    """Three failures in a row that differ in numbers only are enough where no step was ever measured, unless memory
    may be the cause, which SIGKILL may stand for.
    """
    assert alike_failures(numbered(*observations)) == alike


class Script:
    """Backend that ends each trial as the next observation says, and the rest well."""

    def __init__(self, *observations):
        self.observations = list(observations)

    def measure(self, _config, **_):
        """Return the next observation."""
        return self.observations.pop(0) if self.observations else OK


@pytest.fixture
def study(tmp_path):
    """A function that loads the study, each time as its own command would."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    return lambda *overrides: load_study(file, overrides=overrides, storage=f"sqlite:///{tmp_path / 'study.db'}")


def test_a_command_that_always_fails_ends_the_study(study):
    """Three trials are spent, the reason is told, and nothing is the best."""
    result, executor = run(study(), Script(*[crash()] * 9))

    assert (result.stop_reason, result.fails_alike, result.best) == ("fails_alike", (0, 1, 2), None)
    assert len(executor.seen) == 3


def test_a_mended_command_goes_on_as_if_nothing_had_failed(study):
    """The same study measures the current configuration first, its failed candidates are tried again, and the trials
    that failed do not count against its budget.
    """
    run(study(), Script(*[crash()] * 3))

    result, executor = run(study("search.max_trials=3"), Script())

    assert result.stop_reason == "max_trials"
    assert [number for number, _ in executor.seen] == [3, 4, 5]
    assert executor.seen[0][1].tp == 8
    records = read_records(stored_study(study()))
    assert [record.status for record in records] == [Status.CRASHED] * 3 + [Status.OK] * 3
    assert [record.number for record in counted(records)] == [3, 4, 5]
    assert excused_in_words(records).startswith("3 more failed alike")
    assert excused_in_words(records[3:]) == ""


def test_a_command_that_is_not_mended_fails_once_more(study):
    """A resumed study whose next trial fails alike ends at once; another failure begins a new row."""
    run(study(), Script(*[crash()] * 3))

    again, executor = run(study(), Script(*[crash()] * 9))
    other, later = run(study(), Script(*[crash("something else")] * 9))

    assert (again.fails_alike, len(executor.seen)) == ((0, 1, 2, 3), 1)
    assert (other.fails_alike, len(later.seen)) == ((4, 5, 6), 3)


def test_a_study_in_which_something_ran_does_not_end(study):
    """After a success, crashes belong to their candidates."""
    result, _ = run(study("search.max_trials=7"), Script(OK, *[crash()] * 6))

    assert (result.stop_reason, len(result.records)) == ("max_trials", 7)


def test_a_trial_in_flight_that_succeeds_lets_the_study_go_on(study):
    """The study waits for trials that run beside the failures, and goes on if one of them measures a step."""
    result, _ = run(study("search.max_trials=6", "search.parallel_trials=4"), Script(*[crash()] * 3), slots=4)

    assert (result.stop_reason, result.fails_alike) == ("max_trials", ())
    assert result.best is not None


@pytest.mark.slow
def test_the_command_may_be_mended_in_the_study_file(study):
    """As long as all trials failed alike, the section of trials may change, but not the job; later neither may."""
    run(study(), Script(*[crash()] * 3))
    with pytest.raises(ConfigError, match="global_batch_size"):
        run(study("job.global_batch_size=128"), Script())

    result, _ = run(study("trial.seed=5", "search.max_trials=1"), Script())

    assert result.best is not None
    with pytest.raises(ConfigError, match="seed"):
        run(study("trial.seed=6"), Script())


@pytest.mark.slow
def test_the_first_trial_is_told_before_any_runs(study):
    """The first progress names the trial that comes first and why, in a new study and in one that goes on."""
    told = []

    class Stop:
        """Executor that ends the run before anything is submitted."""

        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            """Do nothing."""

    for overrides in ((), ("current=null",)):
        with suppress(KeyboardInterrupt):
            run_study(study(*overrides), on_progress=told.append, executor=Stop())
    run(study("search.max_trials=1"))
    run_study(study("search.max_trials=2"), on_progress=told.append, executor=Stop())

    openings = [progress.opening for progress in told if progress.opening]
    assert [opening.why for opening in openings] == ["current", "predicted", "learned"]
    assert openings[0].values["tp"] == 8
    assert all(opening.predicted_s > 0 for opening in openings)
