"""What trials in flight take of the budgets of time and device-hours."""

from types import SimpleNamespace

import pytest

from tests.support.studies.short_study import SHORT_STUDY
from tuner.run.spending import Spending
from tuner.search.stopping import StopReason
from tuner.study_file.config import load_study


@pytest.fixture
def options(tmp_path):
    """Options of a search with a budget of one device-hour and ten minutes."""
    (tmp_path / "study.yaml").write_text(SHORT_STUDY, encoding="utf-8")
    search = load_study(tmp_path / "study.yaml").search
    return search.model_copy(update={"budget_device_hours": 1.0, "max_minutes": 10.0})


def running(pending, *, queued=(), reported=()):
    """Return an executor with these trials."""
    return SimpleNamespace(pending=pending, queued=queued, reported=dict(reported))


def test_the_rest_of_the_budgets(options):
    """Elapsed time and ended trials are taken off the budgets, and nothing is below zero."""
    left = Spending(options, occupies_devices=True).left(240.0, 1800.0)

    assert (left.seconds_left, left.device_hours_left) == (360.0, 0.5)
    left = Spending(options, occupies_devices=True).left(1e6, 1e6)
    assert (left.seconds_left, left.device_hours_left) == (0.0, 0.0)


def test_trials_in_flight_use_up_device_hours(options):
    """Two trials on eight devices each take an hour of one device in 225 s, counted from when they were seen to run."""
    spending = Spending(options, occupies_devices=True)
    spending.look(running((1, 2)), 100.0, 0.0, lambda _: 8)
    spending.look(running((1, 2)), 324.0, 0.0, lambda _: 8)
    assert spending.used_up is None
    spending.look(running((1, 2)), 325.0, 0.0, lambda _: 8)
    assert spending.used_up is StopReason.DEVICE_HOURS


def test_trials_that_do_not_run_use_up_nothing(options):
    """Neither a trial in a queue nor one that has ended counts."""
    spending = Spending(options, occupies_devices=True)
    spending.look(running((1, 2), queued=(2,)), 0.0, 0.0, lambda _: 1000)
    spending.look(running((2,), queued=(2,)), 500.0, 0.0, lambda _: 1000)

    assert spending.used_up is None


def test_without_devices_only_steps_count(options):
    """A simulated trial has taken the time of its steps on its devices, however long it runs."""
    spending = Spending(options, occupies_devices=False)
    spending.look(running((1,), reported={1: (100.0, 100.0)}), 0.0, 0.0, lambda _: 8)
    spending.look(running((1,), reported={1: (100.0, 100.0)}), 599.0, 0.0, lambda _: 8)
    assert spending.used_up is None
    spending.look(running((1,), reported={1: (100.0,) * 5}), 599.5, 0.0, lambda _: 8)
    assert spending.used_up is StopReason.DEVICE_HOURS


def test_time_is_used_up_whatever_runs(options):
    """The budget of time ends a study also where nothing runs."""
    spending = Spending(options, occupies_devices=True)
    spending.look(running(()), 600.0, 0.0, lambda _: 8)

    assert spending.used_up is StopReason.MINUTES
