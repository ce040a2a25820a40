"""A study's `planner:` key on the command line: predictions with plans, and runs that keep theirs."""

import re

import pytest

from tests.support.studies.broken_studies import REPLAY, rows, study
from tests.support.studies.command_line import assert_users_mistake
from tests.support.studies.planned_studies import NUM_SHAPES, planned_study_text
from tuner.storage.opening import find_study
from tuner.storage.record import LAYER_PLANS, PREDICTION
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

PLANNED = f"planned {NUM_SHAPES} of {NUM_SHAPES} layer shapes"


@pytest.fixture
def planned(tmp_path):
    """A study whose layers are planned."""
    path = tmp_path / "planned.yaml"
    path.write_text(planned_study_text(), encoding="utf-8")
    return path


@pytest.fixture
def by_hand(tmp_path):
    """The same with the plan by hand."""
    path = tmp_path / "by-hand.yaml"
    path.write_text(planned_study_text("{name: megatron}"), encoding="utf-8")
    return path


def stored(tmp_path):
    """The study in the default storage."""
    return find_study(StorageAddress.parse(f"sqlite:///{tmp_path / 'meshtune.db'}"), "planned")


def test_rank_plans_layers_and_tells_that_it_does(meshtune, planned, by_hand):
    """`rank` ranks planned candidates beside those by hand, and tells on stderr how many shapes it has planned."""
    done, plain = (meshtune("rank", path, "--json") for path in (planned, by_hand))

    assert (done.status, plain.status) == (0, 0)
    assert PLANNED in done.err
    assert plain.err == ""
    steps, by_hand_s = (
        {(row["tp"], row["up"], row.get("plan", "hand")): row["step_time_s"] for row in each.json["configs"]}
        for each in (done, plain)
    )
    assert {key: steps[key] for key in by_hand_s} == by_hand_s
    assert steps[1, 2, "descent"] < steps[1, 2, "hand"]


def test_rank_under_auto_answers_at_once(meshtune, tmp_path):
    """Before a run, `auto` plans nothing for `rank`, which answers as by hand."""
    by_name, path = (tmp_path / name for name in ("by-name.yaml", "auto.yaml"))
    for file, planner in ((by_name, "{name: megatron}"), (path, None)):
        file.write_text(planned_study_text(planner, runtime="jax-reference", space="{}"), encoding="utf-8")
    done, plain = (meshtune("rank", each, "--json") for each in (path, by_name))

    assert load_study(path).problem.planning.is_auto
    assert done.err == ""
    assert done.json == plain.json


def test_predict_tells_the_plan(meshtune, planned):
    """`predict --plan` says what the plan sends and where it differs from the one by hand, in words and as JSON."""
    config = "tp=1,up=2,dp=8,plan=descent"
    shown = meshtune("predict", planned, "--config", config, "--plan").out
    told = meshtune("predict", planned, "--config", config, "--plan", "--json").json["plan"]

    assert told["mesh"] == {"up": 2}
    assert told["planner"] == "descent"
    assert told["differs"]
    assert re.search(r"^Plan of llama3-8b of 2 layers on up=2 \(descent\): .* less than by hand$", shown, re.M)
    assert re.search(r"^  all_gather +up +\d+ x +[\d.,]+ MB +[\d.e-]+ s$", shown, re.M)
    assert re.search(r"^  layers\.0,1\.attention\.\S+: .*/up.* \(by hand .*/up.*\)$|\(by hand whole\)$", shown, re.M)
    assert re.search(r"fastest candidate's step is predicted to take [\d.]+% less than by hand", shown)


def test_predict_tells_the_plan_by_hand_where_nothing_is_planned(meshtune, by_hand):
    """Without the key, `--plan` shows Megatron's plan; where a device has its layers to itself, that there is none."""
    shown = meshtune("predict", by_hand, "--config", "tp=2,dp=8", "--plan").out
    lone = meshtune("predict", by_hand, "--config", "dp=16", "--plan").out

    assert re.search(r"^Plan of llama3-8b of 2 layers on tp=2 \(megatron\): .* as by hand$", shown, re.M)
    assert "No sharding is planned" in lone
    assert "plan" not in meshtune("predict", by_hand, "--config", "tp=2,dp=8", "--json").json


def test_a_simulated_step_is_planned_too(meshtune, planned):
    """`simulate` runs the planned layers where the configuration names the plan, and its step is shorter."""
    done, plain = (
        meshtune("simulate", planned, "--config", f"up=2,dp=8{plan}", "--json") for plan in (",plan=descent", "")
    )

    assert done.json["step_time_s"] < plain.json["step_time_s"]
    assert done.json["predicted_step_time_s"] < plain.json["predicted_step_time_s"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_a_run_keeps_its_plans(meshtune, planned, tmp_path):
    """`run` plans, and stores the plans with the study and each trial; after that no command plans anything."""
    first = meshtune("run", planned, "--json")
    again = meshtune("run", planned, "--trials", "4", "--json")
    others = [meshtune(command, planned, "--json") for command in ("best", "rank", "report", "status", "trials")]

    assert first.status == 0, first.err
    assert PLANNED in first.err
    assert (first.json["trials"], again.json["trials"]) == (3, 4)
    assert "layer shapes" not in "".join(done.err for done in (again, *others))
    assert {done.status for done in (again, *others)} == {0}
    kept = stored(tmp_path)
    assert len(kept.user_attrs[LAYER_PLANS]["plans"]) == NUM_SHAPES
    trials = kept.get_trials()
    for trial in trials:
        planner = trial.user_attrs[PREDICTION].get("plan", {}).get("planner", "hand")
        assert trial.params["plan"] == planner
    assert len(trials) == 4
    best, *_, listed = (done.json for done in others)
    assert best["config"]["plan"] in ("hand", "descent")
    assert [row["config"]["plan"] for row in listed["trials"]] == [trial.params["plan"] for trial in trials]


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_a_wider_space_is_planned_where_it_is_new(meshtune, planned, tmp_path):
    """Run again with more degrees, a study plans the shapes that it lacks, and stores them with the others."""
    meshtune("run", planned, "--trials", "1")
    done = meshtune("run", planned, "--set", "space.tp=[1, 2, 4]", "--set", "space.up=[1]", "--trials", "2")

    assert done.status == 0, done.err
    assert "planned 1 of 1 layer shapes" in done.err
    assert len(stored(tmp_path).user_attrs[LAYER_PLANS]["plans"]) == NUM_SHAPES + 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("planner", ["{name: megatron}", "{name: recursive}"])
def test_another_planner_is_another_study(meshtune, planned, planner):
    """Trials under other plans would not mean the same: the study is refused by the key."""
    meshtune("run", planned, "--trials", "1")
    planned.write_text(planned_study_text(planner=planner), encoding="utf-8")
    done = meshtune("run", planned, "--trials", "2")

    assert done.status == 2
    assert "planner" in done.err
    assert "its trials would no longer mean the same" in done.err


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_a_study_by_hand_goes_on_with_plans(meshtune, by_hand, tmp_path):
    """A study from before there were plans, or of megatron, goes on with a planner: its trials are those by hand."""
    meshtune("run", by_hand, "--trials", "1")
    assert not any("planner" in str(value) for value in stored(tmp_path).user_attrs.values())
    assert "plan" not in stored(tmp_path).get_trials()[0].params

    by_hand.write_text(planned_study_text(), encoding="utf-8")
    done = meshtune("run", by_hand, "--trials", "6", "--json")
    listed = meshtune("trials", by_hand, "--json").json["trials"]

    assert (done.status, done.json["trials"]) == (0, 6), done.err
    configs = [tuple(row["config"].items()) for row in listed]
    assert listed[0]["config"]["plan"] == "hand"
    assert {row["config"]["plan"] for row in listed} == {"hand", "descent"}
    assert len(set(configs)) == 6


def test_unused_pins_are_noted(meshtune, tmp_path):
    """A pin on an axis that no candidate has is told on stderr; the ranking goes on without it."""
    path = tmp_path / "pinned.yaml"
    pin = "{op: '*.core', dim: kv_heads, axis: cp}"
    path.write_text(planned_study_text(f"{{name: recursive, pins: [{pin}]}}"), encoding="utf-8")
    done = meshtune("rank", path, "--json")

    assert done.status == 0
    assert "note: planner.pins[0]: no candidate has the devices for *.core kv_heads on cp" in done.err


UP = "op: '*.up', dim: ffn"
WRONG = {
    "name: descend": "planner.name = 'descend' | descent",
    "nam: descent": "planner | nam",
    "name: megatron, pins: [{op: x, dim: y, axis: tp}]": "planner.pins[0].op = 'x' | matches no operator",
    f"name: descent, pins: [{{{UP}, axis: model}}]": "planner.pins | axis = 'model' | tp",
    f"name: descent, pins: [{{{UP}}}]": "planner.pins[0] | names neither an axis nor ways",
    f"name: descent, pins: [{{{UP}, axis: tp, ways: 3}}]": (
        "planner.pins[0].ways = 3 | divides the devices along tp of no candidate, which are 2 | weight_s"
    ),
    "name: descent, pins: [{op: '*.mlp_up', dim: ffn, axis: tp}]": (
        "planner.pins[0].op = '*.mlp_up' | matches no operator | layers.*.dense_mlp.up"
    ),
    "name: descent, pins: [{op: '*.dense_mlp.up', dim: feet, axis: cp}]": (
        "planner.pins[0].dim = 'feet' | is no dim of layers.0.dense_mlp.up | ffn"
    ),
}


@pytest.mark.parametrize("planner", WRONG)
def test_mistakes_in_the_key_are_told(meshtune, tmp_path, planner):
    """Each ends with status 2 and one line with the file, the key, the value and what would do."""
    path = tmp_path / "planned.yaml"
    path.write_text(planned_study_text(f"{{{planner}}}"), encoding="utf-8")
    done = meshtune("rank", path)

    assert done.status == 2
    told = [line for line in done.err.splitlines() if line.startswith("meshtune: ")]
    assert len(told) == 1
    assert all(word in told[0] for word in ("planned.yaml", *WRONG[planner].split(" | "))), told[0]


@pytest.mark.parametrize("backend", ["replay", "torch"])
def test_trials_that_cannot_run_a_plan_refuse_it(meshtune, tmp_path, backend):
    """Measured rows and real training have Megatron's plan, and no other."""
    path = tmp_path / "refused.yaml"
    planner = "{name: descent}"
    if backend == "replay":
        (tmp_path / "rows.csv").write_text(rows({}), encoding="utf-8")
        path.write_text(study(REPLAY, planner=planner), encoding="utf-8")
    else:
        path.write_text(study(runtime="torch-reference", trial="{backend: torch}", planner=planner), encoding="utf-8")

    assert_users_mistake(
        meshtune("rank", path), "planner.name = 'descent'", "as Megatron does", "trial.backend: simulated or jax"
    )


def test_flags_say_what_they_leave_out(meshtune, planned):
    """Flags of a configuration whose layers are planned otherwise than by hand come with a note, and no others do."""
    told, plain = (
        meshtune("export", planned, "--to", "megatron", "--config", f"tp=1,up=2,dp=8,plan={plan}")
        for plan in ("descent", "hand")
    )

    assert re.search(r"operators differ.*; by hand the step is predicted to take [\d.]+ s, and [\d.]+ s as", told.err)
    assert "plan: Megatron-LM has no setting for it; descent is not exported" in told.out
    assert "operators differ" not in plain.err
