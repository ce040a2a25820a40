import numpy as np
import pytest

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.predicted import Predicted
from tests.support.studies.broken_studies import study
from tests.support.studies.in_process_executor import InProcessExecutor
from trials.backend import Observation, Status
from tuner.run.loop import run_study
from tuner.run.memory_limit import hold_to_limit, with_room
from tuner.search.posterior import posterior_of
from tuner.study_file.config import load_study

GIB = 2**30


def observed(peak_gib, status=Status.OK):
    """A trial whose fullest device held so much."""
    return Observation(
        status=status, step_times_s=(1.0,), peak_memory_bytes=None if peak_gib is None else peak_gib * GIB
    )


@pytest.mark.parametrize(
    ("peak_gib", "free", "fits"),
    [(92, 0.08, True), (93, 0.08, False), (93, None, True), (None, 0.08, True), (99, 0.0, True)],
)
def test_a_peak_that_leaves_too_little_does_not_fit(peak_gib, free, fits):
    """Of 100 GiB a limit of 8% leaves 92, and a trial that took more counts as out of memory, with the reason."""
    found = hold_to_limit(observed(peak_gib), 100 * GIB, free)

    assert (found.status is Status.OK) is fits
    assert found.step_times_s == (1.0,)
    assert fits or found.reason == "left 7.0% of the memory free, and limits.free_memory is 8.0%"


def test_other_ends_stay_as_they_are():
    """A trial that ended otherwise keeps its status, whatever its peak."""
    assert hold_to_limit(observed(99, Status.PRUNED), 100 * GIB, 0.08).status is Status.PRUNED


def test_the_posterior_knows_the_limit():
    """With a limit, draws leave out candidates that would fit without it."""
    grid = ConfigGrid.from_configs([ParallelConfig(dp=1), ParallelConfig(dp=2)])
    predicted = Predicted.of_times(np.ones(2), np.zeros((2, 1)))
    posterior = posterior_of(predicted, grid)

    assert with_room(posterior, None) is posterior
    assert with_room(posterior, 0.25).predicted.capacity_bytes == pytest.approx(0.75 * predicted.capacity_bytes)


def test_the_best_of_a_study_leaves_the_memory_free(tmp_path):
    """In a study with a limit the best trial has left that much free, and those that did not are out of memory."""
    path = tmp_path / "study.yaml"
    text = study(limits="{free_memory: 0.6}", search="{draws: 20, max_trials: 8}", space="{pp: [1], cp: [1], up: [1]}")
    path.write_text(text, encoding="utf-8")
    config = load_study(path, storage=f"sqlite:///{tmp_path / 'study.db'}")

    found = run_study(config, executor=InProcessExecutor(config.trials.backend))

    assert config.problem.options.memory_headroom == 0.6
    room_bytes = 0.4 * config.problem.setting.cluster.memory_bytes
    peaks = [(record.observation.peak_memory_bytes, record.status) for record in found.records]
    assert all((peak <= room_bytes) is (status is Status.OK) for peak, status in peaks if peak is not None)
    assert found.best.observation.peak_memory_bytes <= room_bytes
