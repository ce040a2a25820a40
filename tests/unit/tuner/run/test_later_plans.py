"""Plans that are made beside trials: the study ends with all of them, as if they had been made before."""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.planned_studies import NUM_SHAPES, planned_study_text
from trials.backend import TrialAbility
from tuner.forecast import planned_candidates
from tuner.forecast.planned_candidates import plan_rest, prepare
from tuner.plans import layer_plans
from tuner.run import loop
from tuner.run.later_plans import LaterPlans
from tuner.run.loop import run_study
from tuner.search.stopping import StopReason
from tuner.storage.record import LAYER_PLANS
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

SEARCH = "{max_trials: 40, confidence: 1.0, tolerance: 0, draws: 10}"


@pytest.fixture
def config(tmp_path):
    """Return a simulated study with three shapes and few candidates."""
    text = planned_study_text(search=SEARCH, trial="{backend: simulated, noise: 0.001}")
    (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
    return load_study(tmp_path / "study.yaml", storage=f"sqlite:///{tmp_path / 'meshtune.db'}")


@pytest.fixture(autouse=True)
def one_leader(monkeypatch):
    """Plan one shape before the first trial."""
    monkeypatch.setattr(planned_candidates, "AUTO_SHAPES", 1)


def prepared_with_leader(config):
    """Return the study with its leading shape planned."""
    return prepare(config, StoredStudies(config.storage), runs=True, leaders_first=True)


class Late(InProcessExecutor):
    """Executor that lets the planning begin once some trials were measured."""

    def poll(self, timeout_s, /):
        """Measure a trial; after the second, plans are made."""
        ended = super().poll(timeout_s)
        if len(self.seen) == 2:
            self.may_plan.set()
        return ended


def run_with(config, monkeypatch, executor_class=Late, slots=1, takes_turns=False):
    """Run a study whose other shapes are planned after two trials; return the result and the executor."""
    prepared = prepared_with_leader(config)
    executor = executor_class(backend=prepared.backend, slots=slots)
    executor.may_plan = threading.Event()

    def plan_late(*args):
        assert takes_turns or executor.may_plan.wait(60)
        return plan_rest(*args)

    def later_plans(prepared, **_):
        return LaterPlans(prepared, plan_late, takes_turns=takes_turns)

    monkeypatch.setattr(loop, "LaterPlans", later_plans)
    return run_study(prepared, executor=executor), executor


def test_only_leaders_are_planned_before_the_first_trial(config):
    """The rest is left, unless all shapes lead."""
    prepared = prepared_with_leader(config)
    planned = plan_rest(prepared, lambda _, __: None, print)

    assert len(prepared.problem.layer_plans) == 1
    assert prepared.is_left_to_plan
    assert len(planned.problem.layer_plans) == NUM_SHAPES
    assert not planned.is_left_to_plan


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("takes_turns", [False, True])
def test_the_study_ends_with_the_candidates_of_all_plans(config, monkeypatch, slots, takes_turns):
    """Every candidate is tried once, with its own plan, though most of the plans came after the first trials."""
    whole = prepare(config, StoredStudies(config.storage), runs=True)
    result, executor = run_with(config, monkeypatch, slots=slots, takes_turns=takes_turns)

    grid = whole.problem.space().grid
    assert result.stop_reason is StopReason.EXHAUSTED
    assert result.num_candidates == len(grid)
    assert sorted(str(one) + one.plan for _, one in executor.seen) == sorted(
        str(one) + one.plan for one in map(grid.config, range(len(grid)))
    )
    assert result.prepared.problem.layer_plans == whole.problem.layer_plans
    for number, chosen in executor.seen:
        (record,) = (each for each in result.records if each.number == number)
        assert record.step_time_s == pytest.approx(
            whole.backend.measure(chosen, trial_number=number).step_time_s, rel=1e-12
        )


def test_a_study_that_was_interrupted_goes_on_with_its_plans(config, monkeypatch):
    """All plans stand in the storage once they are taken, and the next run plans nothing."""
    run_with(config, monkeypatch)
    stored = StoredStudies(config.storage).find(config.name).user_attrs[LAYER_PLANS]
    again = prepared_with_leader(config)

    assert len(stored["plans"]) == NUM_SHAPES
    assert len(again.problem.layer_plans) == NUM_SHAPES
    assert not again.is_left_to_plan


@pytest.mark.parametrize("slots", [1, 2])
def test_plans_take_turns_with_trials(config, monkeypatch, slots):
    """Where they do, no shape is planned while a trial runs, the first trial comes first, and others come between."""
    monkeypatch.setattr(planned_candidates, "SHAPES_AT_ONCE", 1)
    prepared = prepared_with_leader(config)
    executor = InProcessExecutor(backend=prepared.backend, slots=slots)
    plan_layer, seen = layer_plans.plan_layer, []

    def watched(task):
        seen.append((executor.pending, len(executor.seen)))
        return plan_layer(task)

    monkeypatch.setattr(layer_plans, "plan_layer", watched)
    monkeypatch.setattr(planned_candidates, "_start_planner", _in_this_process)
    monkeypatch.setattr(loop, "LaterPlans", lambda prepared, **_: LaterPlans(prepared, takes_turns=True))
    run_study(prepared, executor=executor)

    measured = [num_measured for _, num_measured in seen]
    assert [pending for pending, _ in seen] == [()] * (NUM_SHAPES - 1)
    assert measured[0] > 0
    assert measured == sorted(set(measured))


@contextmanager
def _in_this_process(_):
    yield lambda groups: [planned_candidates._plan_several(tasks, None) for tasks in groups]


def test_trials_that_train_take_turns_with_plans(tmp_path):
    """Such a study begins with its leaders' plans, as a simulated one does."""
    file = Path("configs/studies/cpu-torch-planned.yaml")
    config = load_study(file, storage=f"sqlite:///{tmp_path / 'meshtune.db'}", overrides=["planner.name=descent"])
    prepared = prepared_with_leader(config)

    assert TrialAbility.TRAINING in config.trials.backend.abilities
    assert prepared.is_left_to_plan
    assert len(prepared.problem.layer_plans) == 1


def test_a_run_that_ends_waits_for_no_turn(config):
    """Shapes that wait for their turn are given up."""
    planned = []

    def plan(_, on_planned, __):
        planned.append(on_planned(0, 1))

    plans = LaterPlans(prepared_with_leader(config), plan, takes_turns=True)
    plans.begin()
    plans.close()

    assert planned == []


def test_a_fault_of_the_planner_ends_the_run(config):
    """What the thread raises is raised where its plans are taken."""

    def fail(*_):
        raise MemoryError

    plans = LaterPlans(prepared_with_leader(config), fail)
    plans.begin()

    with pytest.raises(MemoryError):
        plans.take(60)
    assert not plans.is_busy


def test_planning_ends_with_the_run(config):
    """A run that is over waits for no more than the shapes at hand."""
    begun, went_on = threading.Event(), threading.Event()

    def plan_for_ever(_, on_planned, __):
        while True:
            begun.set()
            on_planned(0, 1)

    plans = LaterPlans(prepared_with_leader(config), plan_for_ever)
    plans.begin()
    assert begun.wait(60)
    closing = threading.Thread(target=lambda: (plans.close(), went_on.set()))
    closing.start()

    assert went_on.wait(60)


def test_with_pins_all_is_planned_first(tmp_path):
    """A mistake in a pin is told before the first trial."""
    pinned = planned_study_text(planner="{name: descent, pins: [{op: '*.dense_mlp.up', dim: ffn, axis: up}]}")
    (tmp_path / "pinned.yaml").write_text(pinned, encoding="utf-8")
    prepared = prepared_with_leader(load_study(tmp_path / "pinned.yaml"))

    assert len(prepared.problem.layer_plans) == NUM_SHAPES
    assert not prepared.is_left_to_plan


def test_a_study_with_shapes_that_are_never_planned_goes_on(tmp_path):
    """No plan by hand copies key heads to more ranks than there are heads; the study says so, and can be read again."""
    space = "{pp: [1], tp: [2, 16], cp: [1], up: [1], mbs: [1]}"
    text = planned_study_text(space=space, trial="{backend: simulated}")
    (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
    for num_trials in (1, 2):
        config = load_study(
            tmp_path / "study.yaml",
            storage=f"sqlite:///{tmp_path / 'meshtune.db'}",
            overrides=[f"search.max_trials={num_trials}"],
        )
        prepared = prepare(config, StoredStudies(config.storage), runs=True)
        result = run_study(prepared, executor=InProcessExecutor(backend=prepared.backend))

        assert None in prepared.problem.layer_plans.values()
        assert len(result.records) == num_trials
