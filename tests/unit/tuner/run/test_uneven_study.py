"""Studies on unlike hosts: uneven work is a dimension of their candidates, from the space to the trial and back."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from optuna.distributions import IntDistribution

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from hardware.io.errors import ConfigError
from tests.support.studies.in_process_executor import run_here
from trials.backend import Status
from tuner.run.loop import run_study
from tuner.search.parameters import ASSIGNMENT, distribution_of, params_of
from tuner.space.enumeration import assignment_error
from tuner.storage.history import past_of
from tuner.study_file.config import load_study

MIXED = """\
name: mixed
model: llama3-8b
cluster: {groups: [{name: dgx-h100, hosts: 1}, {name: dgx-a100, hosts: 1}]}
job: {sequence_length: 4096, global_batch_size: 64}
runtime: megatron-core
space: {tp: [4, 8], cp: [1], up: [1], vpp: [1]}
search: {max_trials: 4, confidence: 1, seed: 1}
"""


@pytest.fixture
def study(tmp_path):
    """A function that writes a study of two unlike hosts, with some text replaced, and loads it."""

    def load(*replaced: tuple[str, str]):
        text = MIXED
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "study.yaml"
        path.write_text(text + f"storage: sqlite:///{tmp_path / 'study.db'}\n")
        return load_study(path)

    return load


def test_unlike_hosts_open_the_assignment(study):
    """Beside every even candidate whose work can be divided better stands an uneven one, faster and told in words."""
    config = study()
    grid = config.problem.space().grid
    uneven = [grid.config(at) for at in range(len(grid)) if grid.assignment[at]]

    assert config.problem.dimensions[-1] == "assignment"
    assert uneven
    assert all(not (one.assignment.micro_batches or one.assignment.recomputed) for one in uneven)
    assert any(one.assignment.layers for one in uneven)
    assert len(grid.positions()) == len(grid)


def test_a_study_says_what_may_be_uneven(study):
    """Nothing, where it says so; only what its runtime can be told."""
    closed = study(("vpp: [1]}", "vpp: [1], assignment: []}"))
    assert "assignment" not in closed.problem.dimensions
    assert closed.problem.space().grid.is_even

    with pytest.raises(ConfigError, match=r"space\.assignment = 'micro_batches': is not supported by the runtime"):
        study(("vpp: [1]}", "vpp: [1], assignment: [micro_batches]}"))


def test_like_hosts_open_layers_alone(study):
    """On hosts of one kind layers may be unequal, and nothing else unless the study asks for it."""
    like = ("{groups: [{name: dgx-h100, hosts: 1}, {name: dgx-a100, hosts: 1}]}", "{name: dgx-h100, hosts: 2}")
    asked = study(like, ("vpp: [1]}", "vpp: [1], assignment: [layers]}"))

    found = study(like).problem
    assert "assignment" in found.dimensions
    assert not any(one.hosts or one.micro_batches or one.recomputed for one in found.space().grid.assignments)
    assert any(one.layers for one in asked.problem.space().grid.assignments)


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        (Assignment(layers=(20, 11)), "layers must add up to the model's 32, but give 31"),
        (Assignment(layers=(32,)), "layers must name 2 numbers, one per virtual stage"),
        (Assignment(recomputed=(17, 0)), None),
        (Assignment(layers=(16, 16), recomputed=(17, 0)), "recomputed must not exceed the layers of a virtual stage"),
        (Assignment(micro_batches=(32, 32)), "micro_batches must name 1 numbers, one per replica"),
        (Assignment(micro_batches=(63,)), "micro_batches must add up to the step's 64, but give 63"),
        (Assignment(hosts=(0, 2)), "hosts must name some of the 2 hosts, from 0 on"),
    ],
)
def test_an_assignment_that_is_none_of_this_job_is_told(study, assignment, told):
    """Which field is wrong, what it must be, and what it is."""
    config = ParallelConfig(pp=2, tp=8, assignment=assignment)

    assert assignment_error(study().problem.setting, config) == told


@pytest.mark.slow
def test_parameters_are_numbers_that_stay_the_same(study):
    """Optuna holds a number per text, whatever else is a candidate; 0 is even work."""
    grid = study().problem.space().grid
    even, uneven = ({"pp": 2, ASSIGNMENT: text} for text in ("", "layers=20/12"))

    assert isinstance(distribution_of(ASSIGNMENT, grid), IntDistribution)
    assert distribution_of(ASSIGNMENT, grid) == distribution_of(ASSIGNMENT, grid.take(grid.assignment == 0))
    assert params_of(even) == {"pp": 2, ASSIGNMENT: 0}
    assert 0 < params_of(uneven)[ASSIGNMENT] <= 2**31 - 1
    assert params_of(params_of(uneven)) == params_of(uneven)


@pytest.mark.slow
def test_trials_of_uneven_work_are_run_kept_and_found_again(study):
    """A study runs uneven candidates on Ray, tells them in words, resumes, and hands them to later studies."""
    config = study()
    result = run_study(config, on_progress=lambda _: None)
    records = result.records
    uneven = [record for record in records if record.params[ASSIGNMENT]]

    assert uneven
    assert {record.status for record in records} == {Status.OK}
    assert all(
        config.problem.config_of(record.params).values(config.problem.dimensions) == record.params for record in records
    )
    config = study(("max_trials: 4", "max_trials: 5"))
    again, _ = run_here(config)
    assert len(again.records) == 5
    assert [record.params for record in again.records[:4]] == [record.params for record in records]

    later = study(("name: mixed", f"name: later\nhistory: ['{config.storage}']"))
    past = past_of(later)
    assert {str(run.config.assignment) for run in past.runs} >= {record.params[ASSIGNMENT] for record in uneven}


@pytest.mark.slow
def test_the_command_line_takes_uneven_work(study):
    """`predict` prices what `--config` assigns, and refuses what is no assignment of this job."""
    command = [sys.executable, "-m", "tuner", "predict", study().file, "--config"]
    good = subprocess.run([*command, "pp=2,tp=8,layers=22/10", "--json"], check=True, capture_output=True, text=True)
    bad = subprocess.run([*command, "pp=2,tp=8,layers=22/9"], check=False, capture_output=True, text=True)

    assert json.loads(good.stdout)["step_time_s"] > 0
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "layers must add up to the model's 32, but give 31" in bad.stderr


@pytest.mark.slow
def test_why_tells_what_is_planned_instead(study):
    """A division that nobody planned is no candidate, and the one that was is named."""
    config = study()
    space = config.problem.space()
    planned = next(one for one in map(space.grid.config, range(len(space.grid))) if one.assignment.layers)
    most = 32 - (planned.pp - 1)
    other = replace(planned, assignment=Assignment(layers=(most, *(1,) * (planned.pp - 1))))

    assert config.problem.subject.reasons_against(config.problem.options, planned, space) == {}
    told = config.problem.subject.reasons_against(config.problem.options, other, space)["assignment"]
    assert told == f"is not what is planned for these degrees: {planned.assignment}"
