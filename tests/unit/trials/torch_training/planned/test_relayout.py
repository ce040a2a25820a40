"""Which collectives change a layout: those of the plan's list, unless a dim is too short for both layouts at once."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the step needs torch: pip install 'meshtune[torch]'")

from costmodels.blocks.operator import OpKind
from costmodels.sharding.exports.layout_changes import Step, change_steps
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.layouts import moves
from tests.support.programs.sharded_steps import GPT, LLAMA, job_of
from trials.torch_training.planned.digits import digits_of
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_plans import plan_step
from tuner.study_file.config import load_study

pytestmark = pytest.mark.slow  # torch is optional

DIRECT = "direct"
"""One exchange of all that ranks lack."""

STUDY = Path(__file__).resolve().parents[5] / "configs" / "studies" / "cpu-jax.yaml"


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_candidates_by_hand_need_no_other_collective(model):
    """No plan by hand of any candidate of a study has a dim that is too short."""
    study = load_study(
        STUDY,
        overrides=[
            "space={zero_stage: [0, 1], sequence_parallel: [true, false]}",
            "runtime=torch-planned",
            "trial={backend: torch}",
        ],
    )
    grid = study.problem.space().grid
    configs = [grid.config(number) for number in range(len(grid))]
    configs = [config for config in configs if model.plain.num_kv_heads % (config.tp * config.up) == 0]

    assert len(configs) > 40
    for config in configs:
        plan = plan_step(job_of(model), study.problem.setting.cluster, config, LayerPlanning())
        digits, sizes = digits_of(plan), plan.mesh.sizes
        for each in relayouts(plan):
            before, after = (digits.placement(each.tensor, layout) for layout in (each.before, each.after))
            shape = plan.graph.tensors[each.tensor].shape
            found = [step for step in change_steps(before, after, shape, sizes) if step.kind is not None]
            assert found == [Step(move.kind, move.axes) for move in moves(each.before, each.after, 1.0, sizes)], config


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # slices come first: each rank takes its part without a message
        ([(-1, 1), (-1, 1)], [(0, 1), (-1, 1)], [(None, (0,))]),
        # digits that do not overlap: slice by one axis, then gather along the other
        ([(0, 1), (-1, 1)], [(-1, 1), (0, 2)], [(None, (1,)), (OpKind.ALL_GATHER, (0,))]),
        # digits that overlap: no rank can hold what both layouts have in common
        ([(0, 1), (-1, 1)], [(-1, 1), (0, 1)], [DIRECT]),
        # another digit of the same axis is a permutation
        ([(0, 1), (0, 2)], [(0, 2), (0, 1)], [DIRECT]),
        # partial sums are scattered where digits do not overlap
        ([(0, 1), (-2, 1)], [(0, 1), (0, 2)], [(OpKind.REDUCE_SCATTER, (1,))]),
    ],
)
def test_digits_decide_the_order(before, after, expected):
    """On two axes of two, each change has these collectives in this order."""
    found = change_steps(tuple(before), tuple(after), (8,), (2, 2))

    assert [DIRECT if step.is_direct else (step.kind, step.axes) for step in found] == expected
