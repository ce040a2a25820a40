"""A disk that fills up under a study."""

from dataclasses import dataclass

import pytest

from hardware.io.errors import ConfigError
from tests.chaos.disk import SmallDisk, why_no_disk
from tests.chaos.invariants import Disturbed, loses_nothing, records_each_once, spends_its_budget
from tests.chaos.stored import read_stored
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.repeated_searches import replayed
from trials.backend import AbstractBackend
from tuner.run.loop import run_study
from tuner.storage.opening import NOTHING_IS_LOST
from tuner.study_file.config import load_study

BUDGET = 4


@pytest.fixture
def disk(tmp_path):
    """A small one."""
    if why_no_disk():
        pytest.skip(why_no_disk())
    own = SmallDisk(tmp_path / "disk")
    yield own
    own.close()


@dataclass
class Filling:
    """Measures, and fills the disk while it measures the third trial."""

    backend: AbstractBackend
    disk: SmallDisk

    def measure(self, config, *, trial_number):
        """As the executor calls it."""
        if trial_number == 2:
            self.disk.fill()
        return self.backend.measure(config, trial_number=trial_number)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_full_disk_is_told_and_costs_no_recorded_trial(disk, kind, tmp_path):
    """A disk without room ends the run with one message that says so; with room again, the next run completes the
    study, and what was recorded before is as it was.
    """
    storage = f"{kind}:///{disk.folder / 'study'}"
    config = load_study(replayed(tmp_path), overrides=[f"search.max_trials={BUDGET}"], storage=storage)

    with pytest.raises(ConfigError, match=f"make room there, and {NOTHING_IS_LOST}"):
        run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(Filling(config.trials.backend, disk)))
    disk.empty()
    before = read_stored(storage)
    run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))
    study = Disturbed(budget=BUDGET, moments=(before,), stored=read_stored(storage))

    assert sum(trial.has_ended for trial in before.trials) == 2
    assert [*loses_nothing(study), *records_each_once(study), *spends_its_budget(study)] == []
