"""Wall clock of trials by their parts."""

import pytest

from tests.support.studies.commanded_study import run_here, write_study
from trials.backend import Observation, Status
from tuner.answers.trial_parts import TrialParts, parts_of
from tuner.storage.record import read_records
from tuner.storage.stored_studies import StoredStudies


def observed(**told):
    """An observation of three steps of 2 s after 20 s, in a trial of 27 s."""
    steps = {"step_times_s": (2.0, 2.0, 2.0), "elapsed_s": 27.0, "measured_after_s": 20.0}
    return Observation(status=Status.OK, **steps, conditions=tuple(told.items()))


@pytest.mark.parametrize(
    ("told", "parts"),
    [
        (
            {"queued_s": 60.0, "start_s": 15.0, "warmup_s": 5.0},
            TrialParts(queued_s=60.0, start_s=15.0, warmup_s=5.0, steps_s=7.0),
        ),
        ({"compile_s": 9.0, "warmup_s": 3.0}, TrialParts(start_s=8.0, warmup_s=12.0, steps_s=7.0)),
        ({}, TrialParts(steps_s=7.0)),
    ],
    ids=["a command in a queue", "a compiled step", "nothing told"],
)
def test_parts_are_those_that_an_observation_tells(told, parts):
    """Start, compiling with warm-up, and measured steps make up a trial's own time; the queue is beside it."""
    assert parts_of(observed(**told)) == parts


def test_a_command_tells_its_start_from_its_steps(tmp_path):
    """A trial of a command has all parts but that of the queue, and together they are no more than it took."""
    config = run_here(write_study(tmp_path, trials=2))

    (seen, *_) = [
        record.observation
        for record in read_records(StoredStudies(config.storage).find(config.name))
        if record.status is Status.OK
    ]

    parts = parts_of(seen)
    assert parts.queued_s is None
    assert parts.start_s >= 0  # the program says what its steps took, and takes less
    assert parts.warmup_s >= 0
