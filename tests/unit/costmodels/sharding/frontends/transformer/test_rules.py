"""The rules of a transformer's operators, and its backward pass, held to what the operators compute."""

import functools

import numpy as np
import pytest

from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from tests.support.graphs.small_models import SMALL, small_job
from tests.support.graphs.transformer_meaning import MEANINGS, first_values, run_graph, run_op

COMBINED = {"maximum": np.maximum}
"""How parts of a reduction are combined that is no sum."""


@functools.cache
def executed(name, optimizer="adam"):
    """The graph of a small model, and all its tensors after one step."""
    graph = transformer_graph(small_job(name), micro_batch_size=2, optimizer=optimizer, has_prediction=True)
    values = run_graph(graph, first_values(graph, np.random.default_rng(0)), top_k=SMALL[name].top_k)
    return graph, values


def sliced(array, dim, *, of, at):
    """One of so many equal parts of an array along a dim; all of it where there is none."""
    return array if dim is None else np.split(array, of, axis=dim)[at]


def put_together(parts, dim, primitive):
    """A result from what the devices have of it: side by side, or combined where each has a partial one."""
    if dim is not None:
        return np.concatenate(parts, axis=dim)
    return functools.reduce(COMBINED.get(primitive, np.add), parts)


@pytest.mark.parametrize("name", SMALL)
def test_an_operator_cut_in_two_computes_the_same(name):
    """Every factor that a rule lets an axis serve can be cut: the parts, put together, are the whole."""
    graph, values = executed(name)
    checked, wrong = 0, []
    for op in graph.ops:
        if op.is_source:
            continue
        operands = [values[tensor] for tensor in op.operands]
        for factor in op.rule.cuttable:
            assert op.rule.factors[factor].size % 2 == 0, f"{op.name} has an odd factor, which this test can't cut"
            parts = []
            for at in range(2):
                cut = [sliced(x, op.rule.operand_dims[i][factor], of=2, at=at) for i, x in enumerate(operands)]
                parts.append(run_op(graph, op, cut, top_k=SMALL[name].top_k, cut=factor, of=2, at=at))
            for slot, tensor in enumerate(op.results):
                both = [part[slot] for part in parts]
                whole = put_together(both, op.rule.result_dims[slot][factor], op.primitive)
                checked += 1
                if whole.shape != values[tensor].shape or not np.allclose(whole, values[tensor], atol=1e-9):
                    wrong.append(f"{op.name}: {op.rule.factors[factor].name}")

    assert wrong == []
    assert checked > len(graph.ops) / 2


def test_the_small_models_have_every_primitive():
    """Every meaning is held to a rule by some small model, or by plain gradient descent."""
    seen = {op.primitive for name in SMALL for op in executed(name)[0].ops if not op.is_source}
    seen |= {op.primitive for op in executed("grouped", "sgd")[0].ops if not op.is_source}

    assert seen == set(MEANINGS)


@pytest.mark.parametrize("name", SMALL)
def test_the_backward_pass_is_the_derivative_of_the_loss(name):
    """What reaches the optimizer as a parameter's gradient is the slope of the loss along the parameter.

    An indexer learns from a loss of its own, which is not that of the tokens.
    """
    graph, values = executed(name)
    rng = np.random.default_rng(1)
    sources = first_values(graph, np.random.default_rng(0))
    losses = [tensor for tensor, array in enumerate(graph.tensors) if array.name.endswith(".cross_entropy")]
    updates = [op for op in graph.ops if op.primitive == "adam"]

    def loss_at(parameter, change):
        moved = {**sources, parameter: sources[parameter] + change}
        found = run_graph(graph, moved, top_k=SMALL[name].top_k, until=graph.first_backward)
        return sum(found[loss][0] for loss in losses)

    for op in (op for op in updates if ".index_" not in op.name):
        parameter, gradient = op.operands[:2]
        direction = 1e-6 * rng.standard_normal(sources[parameter].shape)
        slope = (loss_at(parameter, direction) - loss_at(parameter, -direction)) / 2

        assert slope == pytest.approx((values[gradient] * direction).sum(), rel=1e-4, abs=1e-13), op.name
    assert len(updates) == sum(array.kind == "parameter" for array in graph.tensors) / 2
