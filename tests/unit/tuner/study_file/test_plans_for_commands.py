"""Sharding plans of a model of the catalog for commands of users: `{plan}` in `trial.command`."""

import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from trials.backend import TrialAbility
from tuner import load_plan, rank
from tuner.study_file.config import load_study

STUDY = """
name: plans
model: llama-7b
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 512, global_batch_size: 32}}
space: {{pp: [1], cp: [1], up: [1], vpp: [1], tp: [1, 4], mbs: [1]}}
trial:
  backend: command
  command: [python, train.py, {word}]
  log: {{pattern: ["took (?P<step_s>.*) s"]}}
"""


@pytest.fixture
def load(tmp_path):
    """The study whose command ends with a word, with changes."""

    def load_with(word, *overrides):
        file = tmp_path / "study.yaml"
        file.write_text(STUDY.format(word=word), encoding="utf-8")
        return load_study(file, overrides=overrides, storage="sqlite:///:memory:")

    return load_with


def plan_of(study, config, folder):
    """The plan that a trial's command gets."""
    ((name, file_name, text),) = study.trials.backend.plan(config, 0).files
    assert name == "plan"
    (folder / file_name).write_text(text, encoding="utf-8")
    return load_plan(folder / file_name)


def test_a_command_that_takes_no_plan_is_told_what_to_write(load):
    """A planner is refused where the command names no plan, and escaped braces name none."""
    for word in ("--fast", '"{{{{plan}}}}"'):
        with pytest.raises(ConfigError, match=r"planner.name = 'descent': needs trials.*\"\{plan\}\" in trial.command"):
            load(word, "planner.name=descent")


def test_each_candidate_has_its_plan(load, tmp_path):
    """By hand and as planned are candidates of one shape, and the file has the layouts of each by name."""
    study = load('"{plan}"', "planner.name=descent")
    by_hand = ParallelConfig(tp=4, dp=2, mbs=1)
    planned = ParallelConfig(tp=4, dp=2, mbs=1, plan="descent")
    hand, own = (plan_of(study, config, tmp_path) for config in (by_hand, planned))

    assert TrialAbility.PLANS in study.trials.backend.abilities
    assert {"hand", "descent"} == {row["plan"] for row in rank(study, top=100)}
    assert (hand.by_hand, own.by_hand) == (True, False)
    assert hand.mesh == own.mesh == {"tp": 4}
    assert hand.micro_batches == 16
    assert hand.parameters.keys() == own.parameters.keys()
    assert hand.activations != own.activations
    assert any("tp" in cut for axes in hand.parameters.values() for cut in axes)
    assert hand.own_way is None


def test_a_plan_without_axes_has_no_tensors(load, tmp_path):
    """Where nothing cuts layers, the file says so."""
    found = plan_of(load('"{plan}"'), ParallelConfig(tp=1, dp=8, mbs=1), tmp_path)

    assert (found.mesh, found.parameters, found.served) == ({}, {}, ())


def test_a_users_file_may_be_named_plan(load, tmp_path):
    """A study from before with a file of that name keeps it, and its trials run no plans."""
    (tmp_path / "mine.json").write_text("{}")
    study = load('"{plan}"', "trial.files={plan: mine.json}")

    assert TrialAbility.PLANS not in study.trials.backend.abilities
    assert study.trials.backend.plan(ParallelConfig(tp=1, dp=8, mbs=1), 0).files == (("plan", "mine.json", "{}"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "is no file of a plan"), ('{"format": "torch"}', "is no file of a plan"), ("{", "is not valid JSON")],
)
def test_other_files_are_no_plans(tmp_path, text, message):
    """A file that no trial has written is refused by its name."""
    (tmp_path / "other.json").write_text(text)

    with pytest.raises(ConfigError, match=message) as refused:
        load_plan(tmp_path / "other.json")
    assert "other.json" in str(refused.value)
