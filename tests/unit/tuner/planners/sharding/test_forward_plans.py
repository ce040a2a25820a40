"""What follows from a plan of the forward pass: the step that a hand-made plan of all operators is, too."""

from fnmatch import fnmatch

import pytest

from benchmarks.papers.symbolic_prices import READINGS, Volumes
from costmodels.sharding.graph import CONSTANT
from costmodels.sharding.plan import NONE, violations
from tests.support.graphs.named_plans import collectives, mesh_of, plan_by_names
from tests.unit.costmodels.sharding.frontends.transformer.test_plans import (
    EXPERT_OPS,
    LLAMA,
    PARAMETERS,
    SEQUENCE,
    TENSOR,
    graph_of,
    sharded_states,
)
from tuner.planners.sharding.forward_plans import forward_of, with_backward
from tuner.planners.sharding.recursive import ORDERS, recursive_plan, refine_mesh

MESH = mesh_of(axis=8)
MIXTRAL = graph_of("mixtral-8x7b", num_layers=1)


def followed(graph, *rules, zero_stage=0):
    """The step that follows from a plan of the forward pass by hand."""
    return with_backward(graph, plan_by_names(forward_of(graph), MESH, axis=list(rules)), zero_stage=zero_stage)


def test_the_forward_pass_is_all_before_the_turn():
    """It holds the operators up to the loss as they are, what they read, and parameters as constants."""
    forward = forward_of(LLAMA)

    body = [op for op in LLAMA.ops[: LLAMA.first_backward] if not op.is_source]
    assert [(op.name, op.rule) for op in forward.ops if not op.is_source] == [(op.name, op.rule) for op in body]
    assert {op.name for op in forward.ops if op.primitive == CONSTANT} == set(PARAMETERS)
    for op in forward.ops:
        shapes = [forward.tensors[tensor].shape for tensor in (*op.operands, *op.results)]
        places = [*map(op.rule.operand_shape, range(len(op.operands)))]
        assert shapes == [*places, *map(op.rule.result_shape, range(len(op.results)))]


HAND_MADE = {
    "data parallel": (LLAMA, [("*", ("batch",))]),
    "tensor parallel": (LLAMA, [("*", TENSOR)]),
    "context parallel": (LLAMA, [("*", SEQUENCE)]),
    "ulysses": (LLAMA, [("*.core*", ("kv_heads",)), ("*", SEQUENCE)]),
    "expert parallel": (MIXTRAL, [*((op, ("experts",)) for op in EXPERT_OPS), ("*", ("batch",))]),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_gradients_follow_as_by_hand(name):
    """What follows from the forward rules communicates what the same rules on all operators do."""
    graph, rules = HAND_MADE[name]

    assert collectives(followed(graph, *rules)) == collectives(plan_by_names(graph, MESH, axis=rules))


def test_sequence_parallelism_follows():
    """Norms and sums by the sequence in the forward pass make reduce-scatters in both."""
    forward = [*((each, ("sequence",)) for each in ("*norm", "*residual")), ("*", TENSOR)]
    by_hand = [*((each, ("sequence",)) for each in ("*norm*", "*residual*", "*gradient_sum")), ("*", TENSOR)]

    def of_layers(plan):
        return [each for each in collectives(plan) if fnmatch(each[1], "layers.*") and "norm.gradient." not in each[1]]

    assert of_layers(followed(LLAMA, *forward)) == of_layers(plan_by_names(LLAMA, MESH, axis=by_hand))


@pytest.mark.parametrize(("zero_stage", "parameters"), [(1, False), (3, True)])
def test_zero_shards_states(zero_stage, parameters):
    """Stage 1 scatters gradients and gathers what the update makes; stage 3 gathers parameters in both passes."""
    rules = [*sharded_states(parameters=parameters), ("*", ("batch",))]

    found = collectives(followed(LLAMA, ("*", ("batch",)), zero_stage=zero_stage))

    assert found == collectives(plan_by_names(LLAMA, MESH, axis=rules))


def test_a_gradient_that_its_operator_cannot_lead_goes_by_its_operands():
    """The loss has no vocabulary and its gradient has: it stays cut as the logits are."""
    plan = followed(LLAMA, ("*", TENSOR))

    number = next(at for at, op in enumerate(LLAMA.ops) if op.name == "head.cross_entropy.gradient")
    (factor,) = plan.served[number].tolist()
    assert factor != NONE
    assert LLAMA.ops[number].rule.factors[factor].name == "vocabulary"


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("graph", [LLAMA, MIXTRAL, graph_of("deepseek-v3", num_layers=4)], ids=lambda graph: graph.name)
def test_every_step_that_follows_can_run(graph, order, reading):
    """Whatever D-Rec plans for the forward pass, the whole step breaks no rule, with states sharded or not."""
    forward = forward_of(graph)
    plan = recursive_plan(forward, *refine_mesh(mesh_of(data=4, model=4)), order=order, prices=Volumes(reading=reading))

    for zero_stage in (0, 1, 3):
        assert violations(with_backward(graph, plan, zero_stage=zero_stage)) == ()
