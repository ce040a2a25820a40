"""Unequal layers on like hosts, which are candidates where they gain although nobody asks for them."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.uneven_work import EVEN
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from tuner.space.gainful_layers import LEAST_GAIN, MOST_PLANNED
from tuner.study_file.config import load_study

STUDY = """\
name: like
model: llama3-70b
cluster: {name: dgx-h100, hosts: 8}
job: {sequence_length: 4096, global_batch_size: 128}
runtime: megatron-core
space: {tp: [8], cp: [1], up: [1], mbs: [1]}
trial: {backend: simulated}
"""
COMMAND = "trial: {backend: command, command: [train, %s], log: megatron}"


@pytest.fixture
def study(tmp_path):
    """A function that writes the study of like hosts, with some text replaced, and loads it."""

    def load(*replaced: tuple[str, str]):
        text = STUDY
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "study.yaml"
        path.write_text(text)
        return load_study(path)

    return load


def cut_ones(problem):
    """The grid of a study, and the positions of its candidates with layers of their own."""
    grid = problem.space().grid
    return grid, np.flatnonzero(grid.assignment)


def test_unequal_layers_are_candidates_where_they_gain(study):
    """A few leaders are there a second time with fewer layers at the ends; they fit, and their step is shorter."""
    problem = study().problem
    grid, cut = cut_ones(problem)
    seconds = estimate_step(problem.setting, grid, memory=estimate_memory(problem.setting, grid)).step_time_s
    position = {grid.config(at): at for at in range(len(grid))}

    assert 0 < len(cut) <= MOST_PLANNED
    assert estimate_memory(problem.setting, grid).fits(0.08)[cut].all()
    for at in cut.tolist():
        config = grid.config(at)
        even = position[replace(config, assignment=EVEN)]
        layers = np.array(config.assignment.layers).reshape(config.vpp, config.pp).sum(axis=0)
        assert seconds[at] < (1 - LEAST_GAIN) * seconds[even]
        assert layers[-1] == layers.min()


@pytest.mark.parametrize(
    "replaced",
    [
        ("mbs: [1]}", "mbs: [1], assignment: []}"),
        ("mbs: [1]}", "mbs: [1], rules: flexparallel}"),
        ("megatron-core", "nanotron"),
        ("trial: {backend: simulated}", COMMAND % "'--pp={pp}', '--vpp={vpp}'"),
    ],
)
def test_nothing_is_opened_where_it_is_not_wanted_or_not_told(study, replaced):
    """A study that says so, another framework's rules, a framework without them, and a command that gets no layers."""
    problem = study(replaced).problem

    assert "assignment" not in problem.dimensions
    assert problem.space().grid.is_even


@pytest.mark.parametrize("told", ["'{flags}'], flags: megatron, x: [", "'--layers={assignment}'"])
def test_a_command_that_is_told_its_layers_gets_unequal_ones(study, told):
    """By the flags of a framework, or by a placeholder."""
    command = (COMMAND % told).replace(", x: []", "")

    assert "assignment" in study(("trial: {backend: simulated}", command)).problem.dimensions


def test_a_command_that_gets_no_layers_has_equal_chunks(study):
    """Its chunks divide the layers, and `--why` tells what would allow others."""
    problem = study(("trial: {backend: simulated}", COMMAND % "'--pp={pp}', '--vpp={vpp}'")).problem
    grid = problem.space().grid
    command = (COMMAND % "'{flags}'], flags: megatron, x: [").replace(", x: []", "")
    told = study(("trial: {backend: simulated}", command))

    assert (80 % (grid.pp * grid.vpp)[grid.vpp > 1] == 0).all()
    grid = told.problem.space().grid
    assert (80 % (grid.pp * grid.vpp)[grid.vpp > 1] > 0).any()
