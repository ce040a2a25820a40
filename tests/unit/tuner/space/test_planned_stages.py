"""Stages and recomputation of candidates whose layers are sharded otherwise than by hand."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.layer_change import PLANNED_BLOCKS
from costmodels.job.uneven_work import EVEN, Assignment
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from tests.support.graphs.layer_changes import change_for
from tuner.planners.pipeline.stage_problem import best_stages
from tuner.study_file.config import load_study

STUDY = """\
name: staged
model: llama3-70b
cluster: {name: ascend-910b, hosts: 8}
job: {sequence_length: 32768, global_batch_size: 16}
runtime: mindformers
space: {pp: [4], tp: [8], dp: [2], cp: [1], up: [1], vpp: [1], mbs: [1], assignment: [layers, recomputed]}
trial: {backend: simulated}
"""


@pytest.fixture
def setting_and_options(tmp_path):
    """Setting and space options of a study of one layout that must recompute a part of its layers."""
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    problem = load_study(path).problem
    return problem.setting, replace(problem.options, opened=(*problem.options.opened, "plan"))


def space_under(setting, options, **values):
    """Return the space of the study where a plan changes layers by some values, and its prediction."""
    from tuner.space.enumeration import build_space, enumerate_space

    (config,) = (enumerate_space(setting, options)[0].config(at) for at in range(1))
    change = replace(change_for(replace(config, plan="descent"), **values), kept=values.get("kept", ()))
    setting = replace(setting, runtime=replace(setting.runtime, layer_changes=(change,)))
    grid = build_space(setting, options, current=None).grid
    return setting, [grid.config(at) for at in range(len(grid))], grid


def of_plan(configs, plan):
    """Return the configurations of a plan, that with even work first."""
    own = [config for config in configs if config.plan == plan]
    return sorted(own, key=lambda config: config.assignment != EVEN)


def test_a_plan_that_keeps_less_recomputes_less(setting_and_options):
    """The pinned plan's own memory decides which layers its stages recompute, and predictions count it."""
    setting, options = setting_and_options
    kept = tuple(0.5 if name in ("attention", "dense_mlp") else 1.0 for name in PLANNED_BLOCKS)
    setting, configs, grid = space_under(setting, options, kept=kept)
    by_hand, planned = of_plan(configs, "hand")[-1], of_plan(configs, "descent")[-1]
    memory = dict(zip(configs, estimate_memory(setting, grid).peak_bytes.tolist(), strict=True))
    as_by_hand = replace(planned, assignment=by_hand.assignment)

    assert 0 < sum(planned.assignment.recomputed) < sum(by_hand.assignment.recomputed)
    assert memory[planned] <= (1 - options.memory_headroom) * 64 * 2**30
    alike = type(grid).from_configs([as_by_hand, replace(by_hand, plan="hand")], grid.opened)
    less, more = estimate_memory(setting, alike).peak_bytes.tolist()
    assert less < more


def test_a_plan_has_the_best_stages_for_its_own_layers(setting_and_options):
    """Stages of a plan with a slow head are those that branch and bound finds for it, not those of the plan by hand."""
    setting, options = setting_and_options
    slow_head = np.ones((2, len(PLANNED_BLOCKS)))
    slow_head[:, PLANNED_BLOCKS.index("head")] = 12.0
    setting, configs, grid = space_under(setting, options, compute=slow_head, kept=(1.0,) * len(PLANNED_BLOCKS))
    by_hand, planned = of_plan(configs, "hand")[-1], of_plan(configs, "descent")[-1]
    best, _ = best_stages(
        setting, replace(planned, assignment=EVEN), memory_headroom=options.memory_headroom, may_reorder=False
    )

    def step_s(*assignments: Assignment):
        own = [replace(planned, assignment=assignment) for assignment in assignments]
        return estimate_step(setting, type(grid).from_configs(own, grid.opened)).step_time_s.tolist()

    own_s, as_by_hand_s, best_s = step_s(planned.assignment, by_hand.assignment, best.assignment)
    assert planned.assignment.layers[-1] < by_hand.assignment.layers[-1]
    assert own_s < as_by_hand_s
    assert own_s <= best_s * (1 + 1e-9)
