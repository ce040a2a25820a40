"""Operators on the parts of single ranks, which together compute what the operator computes on whole tensors."""

import itertools

import pytest

pytest.importorskip("torch", reason="the step needs torch: pip install 'meshtune[torch]'")

import torch

from costmodels.sharding.graph import INPUT, STATE, TensorKind
from tests.support.programs.sharded_steps import GPT, LLAMA, MIXTRAL, ONE_KEY, by_chance, unsharded
from trials.torch_training.optimizers import UPDATES, adam, sgd
from trials.torch_training.planned.digits import digits_of
from trials.torch_training.planned.local_op import LocalOp
from trials.torch_training.planned.operators import OPERATORS
from trials.torch_training.planned.step import missing_operators
from trials.training.numerics import LOSS, initial_state, whole_batch

pytestmark = pytest.mark.slow  # torch is optional

MODELS = {model.name: model for model in (GPT, LLAMA, ONE_KEY, MIXTRAL)}
SEEDS = (1, 2, 3)


def states_and_data(graph):
    """Return values of all sources by tensor, with weights that keep every term of the gradients alive."""
    data = whole_batch(graph, 0)
    found = {}
    for op in graph.ops:
        if op.primitive == STATE:
            value = torch.from_numpy(initial_state(graph, op, 0)).double()
            found[op.results[0]] = value * 10 if value.ndim > 1 else value + 0.1
        elif op.primitive == INPUT:
            found[op.results[0]] = torch.from_numpy(data[op.name].copy())
    return found


def compute(plan, values, number, place=(0,)):
    """Compute an operator of a plan on some operands."""
    op = plan.graph.ops[number]
    local = LocalOp(digits=digits_of(plan), number=number, place=place, top_k=MIXTRAL.top_k)
    return OPERATORS[op.primitive](local, *values)


def run(plan, values, stop):
    """Compute the operators before a number on one device, in place."""
    for number, op in enumerate(plan.graph.ops[:stop]):
        if not op.is_source:
            operands = [values[tensor] for tensor in op.operands]
            values.update(zip(op.results, compute(plan, operands, number), strict=True))
    return values


def first_update(graph):
    """Return the number of the first operator of the update."""
    return min(number for number, op in enumerate(graph.ops) if op.primitive in UPDATES)


@pytest.fixture(scope="module", params=MODELS)
def whole(request):
    """A model, and all tensors of its step before the update, whole."""
    plan = unsharded(MODELS[request.param])
    with torch.no_grad():
        return MODELS[request.param], run(plan, states_and_data(plan.graph), first_update(plan.graph))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_parts_of_all_ranks_make_up_the_results(whole, seed):
    """Whatever factors the axes serve, results are the ranks' parts, or sums or maxima over the axes of reductions."""
    model, values = whole
    plan = by_chance(model, seed)
    graph, digits = plan.graph, digits_of(plan)
    places = list(itertools.product(*map(range, plan.mesh.sizes)))

    def part(tensor, layout, place):
        value = values[tensor]
        for dim in range(value.ndim):
            value = value.index_select(dim, torch.from_numpy(digits.indices(tensor, dim, layout, place)))
        return value

    for number, op in enumerate(graph.ops[: first_update(graph)]):
        if op.is_source:
            continue
        total = [torch.zeros_like(values[tensor]) for tensor in op.results]
        if op.primitive == "maximum":
            total[0] -= torch.inf
        for place in places:
            operands = [part(tensor, plan.wanted(number, slot), place) for slot, tensor in enumerate(op.operands)]
            local = LocalOp(digits=digits, number=number, place=place, top_k=MIXTRAL.top_k)
            for slot, result in enumerate(OPERATORS[op.primitive](local, *operands)):
                layout = plan.written(number, slot)
                if any(cut == -1 and at for cut, at in zip(layout, place, strict=True)):
                    continue  # a copy of the part of another rank
                tensor = op.results[slot]
                index = torch.meshgrid(
                    *(torch.from_numpy(digits.indices(tensor, dim, layout, place)) for dim in range(result.ndim)),
                    indexing="ij",
                )
                if op.primitive == "maximum":
                    total[slot][index] = torch.maximum(total[slot][index], result)
                else:
                    total[slot].index_put_(index, result, accumulate=True)
        for tensor, found in zip(op.results, total, strict=True):
            torch.testing.assert_close(found, values[tensor], rtol=1e-9, atol=1e-9, msg=op.name)


def test_the_backward_operators_give_the_gradients_of_the_forward_pass(whole):
    """Every parameter's gradient equals the one that autograd derives from the forward operators."""
    model, values = whole
    plan = unsharded(model)
    graph = plan.graph
    sources = states_and_data(graph)
    parameters = {
        op.results[0]: sources[op.results[0]].requires_grad_()
        for op in graph.ops
        if op.primitive == STATE and graph.tensors[op.results[0]].kind is TensorKind.PARAMETER
    }
    loss_tensor = [tensor.name for tensor in graph.tensors].index(LOSS)

    made = run(plan, dict(sources), graph.first_backward)
    derived = torch.autograd.grad(made[loss_tensor].sum(), list(parameters.values()))

    of_updates = {op.operands[0]: op.operands[1] for op in graph.ops if op.primitive == "adam"}
    for parameter, expected in zip(parameters, derived, strict=True):
        found = values[of_updates[parameter]]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=graph.tensors[parameter].name)


def test_every_operator_is_computed(whole):
    """Nothing is missing for these models, and what is missing for others is named."""
    model, _ = whole

    assert missing_operators(unsharded(model).graph) == ()


def test_updates_are_those_of_torch():
    """AdamW and SGD with momentum give the parameters of torch's own after three steps."""
    gradients = torch.randn(3, 5, 7, dtype=torch.float64)
    for update, optimizer, moments in (
        (adam, lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1), 2),
        (sgd, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), 1),
    ):
        parameter = torch.nn.Parameter(torch.ones(5, 7, dtype=torch.float64))
        states = (parameter.detach().clone(), *torch.zeros(moments, 5, 7, dtype=torch.float64))
        theirs = optimizer([parameter])
        for step, gradient in enumerate(gradients, 1):
            parameter.grad = gradient
            theirs.step()
            states = update(states[0], gradient, *states[1:], step=step)
        torch.testing.assert_close(states[0], parameter.detach())
