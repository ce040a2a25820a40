"""Plans of whole steps: by hand for every candidate of the rules, and carried over from plans of layers."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.sharding.block_figures import is_synced
from costmodels.sharding.graph import STATE, TensorKind
from costmodels.sharding.layouts import local_share
from costmodels.sharding.micro_batches import count_micro_batches
from costmodels.sharding.plan import cost_of, violations
from tuner.forecast.planned_candidates import prepare
from tuner.planners.sharding.pins import Pin
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_plans import plan_step
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

STUDY = Path(__file__).resolve().parents[4] / "configs" / "studies" / "cpu-jax.yaml"
MIXTRAL = STUDY.parent.parent / "models" / "mixtral-small.yaml"
CONFIG = ParallelConfig(dp=2, tp=4, mbs=4)
PINS = (Pin(op="layers.*.dense_mlp.up", dim="hidden", axis="tp"),)


@pytest.fixture(scope="module")
def study():
    """The shipped study, with all degrees open."""
    return load_study(STUDY, overrides=["space={zero_stage: [0, 1], sequence_parallel: [true, false]}"])


@pytest.fixture(scope="module")
def step_of(study):
    """Plans one step of the study's model with some number of layers."""

    def plan(config, planning=LayerPlanning(), num_layers=2):  # noqa: B008 # it is frozen
        job = study.problem.setting.job
        deep = replace(job, model=job.model.changed(num_layers=num_layers))
        return plan_step(deep, study.problem.setting.cluster, config, planning)

    return plan


def test_every_candidate_has_a_plan_by_hand(study, step_of):
    """What the rules of jax-reference leave can be planned by hand on all devices, and the plan can run."""
    grid = study.problem.space().grid

    assert len(grid) > 50
    for position in range(len(grid)):
        plan = step_of(grid.config(position), num_layers=1)
        assert violations(plan) == (), grid.config(position)
        assert plan.mesh.num_devices == 8


def test_every_candidate_with_experts_has_a_plan_by_hand():
    """So can those of a model with experts, and every degree of ep distributes them over as many devices."""
    study = load_study(
        STUDY, overrides=[f"model={MIXTRAL}", "space={ep: [1, 2, 4, 8], sequence_parallel: [true, false]}"]
    )
    grid = study.problem.space().grid
    one_layer = replace(study.problem.setting.job, model=study.problem.setting.job.model.changed(num_layers=1))

    assert set(grid.ep.tolist()) == {1, 2, 4, 8}
    for position in range(len(grid)):
        config = grid.config(position)
        plan = plan_step(one_layer, study.problem.setting.cluster, config, LayerPlanning())
        assert violations(plan) == (), config
        number = next(number for number, op in enumerate(plan.graph.ops) if op.name == "layers.0.moe_mlp.up")
        names = [plan.graph.ops[number].rule.factors[cut].name for cut in plan.served[number].tolist() if cut >= 0]
        ways = zip(
            names,
            (size for size, cut in zip(plan.mesh.sizes, plan.served[number], strict=True) if cut >= 0),
            strict=True,
        )
        assert math.prod(size for name, size in ways if name == "experts") == config.ep, config


def test_planned_experts_are_carried_over_to_all_layers():
    """A planned layer with experts over a part of dp keeps its rows in the step, beside the rest of dp."""
    study = load_study(STUDY, overrides=[f"model={MIXTRAL}"])
    config = ParallelConfig(dp=4, tp=2, ep=2, mbs=2)
    plan = plan_step(study.problem.setting.job, study.problem.setting.cluster, config, LayerPlanning(name="descent"))

    assert plan.mesh.in_words == "dp=2,dp_experts=2,tp=2"
    assert violations(plan) == ()


def test_one_device_holds_all(step_of):
    """Without a degree above one nothing is cut."""
    plan = step_of(ParallelConfig(mbs=8))

    assert (plan.served < 0).all()


def test_zero_cuts_the_moments(step_of):
    """ZeRO 1 cuts the moments over dp as well, and without ZeRO they lie as their parameters."""

    def moments_bytes(zero_stage):
        plan = step_of(replace(CONFIG, zero_stage=zero_stage))
        graph = plan.graph
        return sum(
            array.num_bytes * local_share(plan.layout(number), plan.mesh.sizes)
            for number, array in enumerate(graph.tensors)
            if array.kind is TensorKind.OPTIMIZER and graph.ops[graph.maker[number][0]].primitive == STATE
        )

    assert moments_bytes(1) < 0.6 * moments_bytes(0)


def test_a_plan_of_two_layers_is_carried_over_to_all(step_of):
    """Every further layer has the rows of the second, the pin holds in each, and dp cuts the batch."""
    plan = step_of(CONFIG, LayerPlanning(name="descent", pins=PINS), num_layers=4)
    rows = {op.name: plan.served[number].tolist() for number, op in enumerate(plan.graph.ops)}
    rules = {op.name: op.rule for op in plan.graph.ops}

    assert violations(plan) == ()
    for number in (2, 3):
        for name, row in rows.items():
            if name.startswith(f"layers.{number}."):
                assert row == rows[name.replace(f"layers.{number}.", "layers.1.")], name
    for number in range(4):
        name = f"layers.{number}.dense_mlp.up"
        cut = [rules[name].factors[factor].name for factor in rows[name]]
        assert cut == ["batch", "hidden"]


def test_trials_run_the_plan_that_their_candidate_names(study):
    """The backend of a planned study runs a candidate as planned where it says so, and its twin by hand."""
    planning = LayerPlanning(name="descent", pins=PINS)
    unplanned = replace(study, problem=replace(study.problem, planning=planning))
    planned = prepare(unplanned, StoredStudies(study.storage), CONFIG)
    backend = replace(planned.backend, planner=replace(planned.backend.planner, planning=planned.problem.planning))
    named = replace(CONFIG, plan="descent")

    def is_by_hand(config):
        by_hand = plan_step(study.problem.setting.job, study.problem.setting.cluster, config, LayerPlanning())
        return bool((backend.work(config).plan.served == by_hand.served).all())

    assert not is_by_hand(named)
    assert not backend.work(named).is_by_hand
    assert is_by_hand(CONFIG)
    assert backend.work(CONFIG).is_by_hand
    assert len(planned.problem.layer_plans) == len(ConfigGrid.from_configs([CONFIG]))


@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", "adam"), ("fp32", "sgd"), ("bf16", "sgd")])
def test_every_state_of_an_optimizer_is_carried_over(study, precision, optimizer):
    """The states that planned layers lack, copies in float32 and another optimizer's, lie as the update reads them."""
    job = replace(study.problem.setting.job, precision=precision, optimizer=optimizer)
    plan = plan_step(job, study.problem.setting.cluster, CONFIG, LayerPlanning(name="descent", pins=PINS))
    graph = plan.graph
    states = [op for op in graph.ops if op.primitive == STATE]

    assert violations(plan) == ()
    assert any(op.name.endswith(".master") for op in states) == (precision == "bf16")
    for op in states:
        tensor = op.results[0]
        if graph.tensors[tensor].kind is TensorKind.OPTIMIZER:
            (use,) = graph.uses[tensor]
            assert plan.layout(tensor) == plan.wanted(use.op, use.operand), op.name


def test_a_step_of_several_micro_batches_adds_up_gradients_once(step_of):
    """Every collective of a gradient of a parameter or of the update runs once, all others once per micro-batch; also
    where a parameter has two readers, as the table that embeds tokens and gives the logits.
    """
    plan = step_of(replace(CONFIG, mbs=1))
    graph = plan.graph
    names = {graph.ops[each.op].name: each.times for each in cost_of(plan).collectives}

    assert count_micro_batches(graph) == 4
    assert names["embedding.lookup.gradient"] == names["head.logits.weight_gradient"] == 1
    assert names["layers.1.dense_mlp.up"] == names["layers.0.attention.qkv.data_gradient"] == 4
    for each in cost_of(plan).collectives:
        assert each.times == (1 if is_synced(graph, each) else 4), graph.ops[each.op].name
