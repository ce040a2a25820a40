"""A study with its layers planned: what its predictions and trials count, and what its storage keeps."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from costmodels.job.parallel_config import HAND, ConfigGrid, ParallelConfig
from costmodels.surrogates.predicted import PLAN_ERROR, predict
from tests.support.studies.planned_studies import NUM_SHAPES, planned_study_text
from tuner.forecast import planned_candidates
from tuner.forecast.candidates import predict_candidate
from tuner.forecast.planned_candidates import as_stored, by_hand, plan_problem, planned_in_words, prepare, unused_pins
from tuner.forecast.sizes import best_by_size
from tuner.plans.layer_planning import LayerPlanning, shape_text
from tuner.plans.layer_plans import plan_lines
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study
from tuner.study_file.meaning import first_difference

AUTO = LayerPlanning(name="descent", is_auto=True)
PIN = "{op: '*.dense_mlp.up', dim: ffn, axis: up}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the study stands."""
    return tmp_path_factory.mktemp("planned")


@pytest.fixture(scope="module")
def config(folder):
    """The study before it is planned."""
    (folder / "study.yaml").write_text(planned_study_text(), encoding="utf-8")
    return load_study(folder / "study.yaml", storage=f"sqlite:///{folder / 'planned.db'}")


@pytest.fixture(scope="module")
def planned(config):
    """The same planned."""
    return prepare(config, StoredStudies(config.storage), runs=True)


def config_with(folder, name, **changes):
    """Another study in that folder."""
    (folder / f"{name}.yaml").write_text(planned_study_text(**changes), encoding="utf-8")
    return load_study(folder / f"{name}.yaml")


def with_planning(config, planning):
    """The study with another planner."""
    return replace(config, problem=replace(config.problem, planning=planning))


def heard(config, grid, **options):
    """What planning tells while it goes on, and the problem."""
    told = []
    found = plan_problem(config.problem, grid, on_planned=lambda done, count: told.append((done, count)), **options)
    return told, found


def chosen_of(config, **degrees):
    """The candidate that has these degrees."""
    grid = config.problem.space().grid
    found = [one for one in map(grid.config, range(len(grid))) if degrees.items() <= asdict(one).items()]
    assert len(found) == 1
    return found[0]


def test_every_shape_is_planned_once(config):
    """Planning tells how many shapes there are, and then that all are done."""
    told, found = heard(config, config.problem.space().grid)

    assert told == [(0, NUM_SHAPES), (NUM_SHAPES, NUM_SHAPES)]
    assert len(found.layer_plans) == NUM_SHAPES


def test_a_study_of_the_plan_by_hand_is_left_as_it_is(folder):
    """With megatron nothing is planned and nothing changes."""
    plain = config_with(folder, "megatron", planner="{name: megatron}")
    told, found = heard(plain, plain.problem.space().grid)

    assert found is plain.problem
    assert told == []


def test_a_plan_stands_beside_the_one_by_hand(config, planned):
    """A shape whose plan differs has every candidate twice, and any other shape once, with all else equal."""
    grid, plain = (each.problem.space().grid for each in (planned, config))
    rows = [grid.config(position) for position in range(len(grid))]
    differing = {shape for shape, plan in planned.problem.layer_plans.items() if plan["differs"]}

    assert [row for row in rows if row.plan == HAND] == [plain.config(position) for position in range(len(plain))]
    assert {shape_text(row) for row in rows if row.plan == "descent"} == differing
    for row in rows:
        assert (replace(row, plan="descent") in rows) == (shape_text(row) in differing)
    assert 0 < len(differing) < NUM_SHAPES
    assert planned.problem.dimensions == (*config.problem.dimensions, "plan")


def test_predictions_and_trials_count_the_plan_of_the_candidate(config, planned):
    """A planned candidate's step is shorter, for the estimate and in the world of trials; its twin's is as before."""
    twin = chosen_of(config, tp=1, up=2)
    up = replace(twin, plan="descent")
    trial, trial_by_hand = (planned.backend.measure(each, trial_number=0).step_time_s for each in (up, twin))

    assert (
        predict_candidate(planned.problem, up)["step_time_s"] < predict_candidate(planned.problem, twin)["step_time_s"]
    )
    assert trial < trial_by_hand
    assert predict_candidate(planned.problem, twin) == predict_candidate(config.problem, twin)
    assert trial_by_hand == config.trials.backend.measure(twin, trial_number=0).step_time_s


def test_a_plan_that_is_predicted_to_lose_is_a_candidate_too(folder):
    """Along cp a plan sends less, but the ring by hand is hidden: trials may tell, so that both are candidates."""
    ring = config_with(folder, "ring", space="{pp: [1], tp: [1], cp: [2], up: [1], mbs: [1]}")
    found = plan_problem(ring.problem, ring.problem.space().grid)
    (plan,) = found.layer_plans.values()

    assert plan["step_time_s"] < plan["by_hand_step_time_s"]
    assert plan["predicted_ratio"] > 1
    assert any("more than by hand" in line for line in plan_lines(plan))
    assert [found.space().grid.config(position).plan for position in range(2)] == [HAND, "descent"]


def test_a_plan_changes_its_fastest_candidate_as_it_says(planned):
    """The stated ratio is that of the planned candidate's prediction and its twin's."""
    grid = planned.problem.space().grid
    for chosen in map(grid.config, np.flatnonzero(grid.is_planned).tolist()):
        twin = replace(chosen, plan=HAND)
        ratio = (
            predict_candidate(planned.problem, chosen)["step_time_s"]
            / predict_candidate(planned.problem, twin)["step_time_s"]
        )
        assert ratio == pytest.approx(planned.problem.layer_plans[shape_text(chosen)]["predicted_ratio"])
    assert grid.is_planned.any()


def test_a_prediction_has_the_plan_of_its_candidate(planned):
    """A planned candidate's prediction holds the plan, which adds up; that of a candidate by hand holds none."""
    grid = planned.problem.space().grid
    for chosen in map(grid.config, range(len(grid))):
        plan = predict_candidate(planned.problem, chosen).get("plan")
        assert (plan is None) == (chosen.plan == HAND)
        if plan is not None:
            assert plan == planned.problem.layer_plans[shape_text(chosen)]
            assert plan["mesh"] == {name: getattr(chosen, name) for name in ("up", "tp") if getattr(chosen, name) > 1}
            assert sum(each["seconds"] for each in plan["collectives"]) == pytest.approx(plan["comm_s"])
            assert plan["comm_s"] < plan["step_time_s"] < plan["by_hand_step_time_s"]


def test_what_plans_are_worth_is_an_error_that_all_layouts_share(planned):
    """The surrogate has a column for plans, equal for all planned candidates and zero for those by hand."""
    grid = planned.problem.space().grid
    column = predict(planned.problem.subject.measured_setting, grid).constant_effects[:, -1]

    assert set(column[grid.is_planned]) == {PLAN_ERROR}
    assert set(column[~grid.is_planned]) == {0.0}


def test_auto_plans_the_leading_shapes(folder, monkeypatch):
    """Of more shapes than AUTO_SHAPES those of the fastest predicted candidates are planned, and a note says so."""
    monkeypatch.setattr(planned_candidates, "AUTO_SHAPES", 2)
    auto = with_planning(config_with(folder, "auto"), AUTO)
    _, found = heard(auto, auto.problem.space().grid)
    step_s = {
        shape: min(
            predict_candidate(auto.problem, one)["step_time_s"]
            for one in map(auto.problem.space().grid.config, range(len(auto.problem.space().grid)))
            if shape_text(one) == shape
        )
        for shape in plan_problem(
            replace(auto.problem, planning=LayerPlanning(name="descent")), auto.problem.space().grid
        ).layer_plans
    }

    assert list(found.layer_plans) == sorted(step_s, key=step_s.__getitem__)[:2]
    assert planned_in_words(found) == (
        "sharding plans were made for the layers of the 2 leading of 3 shapes; planner.name: descent plans all"
    )


@pytest.mark.parametrize(
    ("changes", "planning"),
    [
        ({"runtime": "jax-reference"}, AUTO),
        ({"runtime": "megatron-core"}, LayerPlanning()),
        ({"runtime": "torch-reference", "trial": "{backend: torch}"}, LayerPlanning()),
        ({"trial": "{backend: command, command: [python, train.py]}"}, LayerPlanning()),
    ],
)
def test_auto_plans_for_frameworks_that_run_plans(folder, changes, planning):
    """Left out, the planner is `descent` where the framework can execute its plans, and else the plan by hand."""
    assert config_with(folder, "framework", planner=None, space="{}", **changes).problem.planning == planning


def test_predictions_under_auto_plan_only_what_is_named(folder):
    """Without stored plans nothing is planned under `auto`, except for a configuration that names a plan."""
    auto = with_planning(config_with(folder, "named"), AUTO)
    chosen, stored = chosen_of(auto, tp=1, up=2), StoredStudies(auto.storage)

    assert prepare(auto, stored).problem is auto.problem
    assert prepare(auto, stored, chosen).problem is auto.problem
    assert list(prepare(auto, stored, replace(chosen, plan="descent")).problem.layer_plans) == [shape_text(chosen)]


def test_the_plan_by_hand_is_told_the_same_way(config):
    """Where nothing was planned, the plan by hand stands in its place and differs from itself in nothing."""
    told = by_hand(config.problem, chosen_of(config, tp=1, up=2))

    assert told["differs"] == {}
    assert told["step_time_s"] == told["by_hand_step_time_s"]


# What is stored


def test_what_is_stored_comes_back(config, planned):
    """Through JSON and back, the study is the same, and nothing is planned again."""
    stored = json.loads(json.dumps(as_stored(planned.problem)))
    told, found = heard(config, config.problem.space().grid, stored=stored)

    assert told == []
    assert found.setting.runtime.layer_changes == planned.problem.setting.runtime.layer_changes
    assert found.layer_plans == planned.problem.layer_plans


def test_shapes_that_are_not_stored_are_planned(config, planned):
    """A wider space, or a configuration outside of it, is planned where it is new."""
    stored = json.loads(json.dumps(as_stored(planned.problem)))
    grid = config.problem.space().grid
    wider = [*map(grid.config, range(len(grid))), ParallelConfig(tp=4, dp=4)]
    told, found = heard(config, ConfigGrid.from_configs(wider), stored=stored)

    assert told == [(0, 1), (1, 1)]
    assert len(found.layer_plans) == NUM_SHAPES + 1
    assert found.layer_plans.items() >= planned.problem.layer_plans.items()


def test_the_planner_gives_trials_their_meaning(config, planned, folder):
    """Another planner or other pins are another study; what was planned, and the planner that `auto` takes, are not."""
    plain = config_with(folder, "by-name", planner="{name: megatron}")
    pinned = config_with(folder, "pinned", planner=f"{{name: descent, pins: [{PIN}]}}")

    assert planned.request.meaning == config.meaning
    assert config_with(folder, "left-out", planner=None).meaning == plain.meaning
    assert "planner" not in plain.meaning
    for other in (plain, pinned, config_with(folder, "other", planner="{name: recursive}")):
        difference = first_difference(config.meaning, other.meaning)
        assert difference is not None
        assert difference[0].startswith("planner")


# Pins


def test_pins_are_obeyed_where_a_shape_has_their_axis(folder):
    """With a pin on up the shapes that have it hold it, and that without is planned as if there were none."""
    pinned = config_with(folder, "obeyed", planner=f"{{name: descent, pins: [{PIN}]}}")
    found = plan_problem(pinned.problem, pinned.problem.space().grid)

    pins = {tuple(plan["mesh"]): plan["pins"] for plan in found.layer_plans.values()}
    held = [{"pin": "*.dense_mlp.up ffn on up", "ops": 2, "held": 2}]
    assert pins == {("tp",): [], ("up",): held, ("up", "tp"): held}
    assert unused_pins(found) == ()


def test_a_pin_that_no_shape_has_devices_for_is_told(folder):
    """A pin on an axis that no candidate has, or into more parts than any has, is named by its number."""
    pins = f"[{PIN}, {{op: '*.core', dim: kv_heads, axis: cp}}, {{op: '*.core', dim: kv_heads, axis: tp, ways: 8}}]"
    pinned = config_with(folder, "unused", planner=f"{{name: recursive, pins: {pins}}}")
    told = unused_pins(plan_problem(pinned.problem, pinned.problem.space().grid))

    assert told == (
        "planner.pins[1]: no candidate has the devices for *.core kv_heads on cp",
        "planner.pins[2]: no candidate has the devices for *.core kv_heads 8 ways on tp",
    )


def test_sizes_are_planned_too(folder):
    """The best of each number of hosts is predicted with its layers planned."""
    space = "{pp: [1], tp: [1], cp: [1], up: [2], mbs: [1]}"
    sizes = {
        planner: next(
            best_by_size(
                config_with(folder, planner, space=space, planner=f"{{name: {planner}}}").problem, (2,), file=""
            )
        )
        for planner in ("megatron", "descent")
    }

    assert sizes["descent"].step_time_s < sizes["megatron"].step_time_s
