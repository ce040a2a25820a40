"""Conditionals and loops of unknown length are planned inside, and applied plans compute the same."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.graph import CARRY, MERGE, NEXT

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 32), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def switched(x, w, number):
    """Choose one of three functions."""
    return lax.switch(number, [lambda x: x @ w, lambda x: x * 2.0, jnp.zeros_like], x)


def repeated(x, w):
    """Multiply until the mean is small, from constants and arguments."""
    return lax.while_loop(
        lambda kept: (kept[0] < 5) & (kept[2] > 0.1),
        lambda kept: (kept[0] + 1, jnp.tanh(kept[1] @ w), kept[1].mean()),
        (0, x, 1.0),
    )


def test_each_branch_is_planned_and_its_results_are_merged():
    """A product in a branch has its rule and its FLOPs, and the merge reads all branches and the branch's number."""
    graph = graph_of_jax(switched, X, W, NUMBER)
    product = next(op for op in graph.ops if op.primitive == "dot_general")
    (merge,) = (op for op in graph.ops if op.primitive == MERGE)

    assert graph.unknown == ()
    assert product.flop == 2 * 64 * 32 * 32
    assert len(product.rule.cuttable) == 3
    assert len(merge.operands) == 4
    assert merge.is_free


def test_a_loop_of_unknown_length_is_planned_inside():
    """The body of a `while` counts for one iteration, and what it hands on depends on the condition."""
    graph = graph_of_jax(repeated, X, W)
    ends = [op for op in graph.ops if op.primitive == NEXT]
    condition = next(op.results[0] for op in graph.ops if op.primitive == "and")

    assert graph.unknown == ()
    assert sum(op.primitive == CARRY for op in graph.ops) == len(ends) == 3
    assert all(condition in op.operands for op in ends)
    assert sum(op.flop for op in graph.ops) == 2 * 64 * 32 * 32


def test_a_loop_may_begin_with_a_number():
    """A scan that adds up from 0.0 has a constant as the first operand of its carry."""
    graph = graph_of_jax(lambda x: lax.scan(lambda total, row: (total + row.sum(), row), 0.0, x), X)
    (carry,) = (op for op in graph.ops if op.primitive == CARRY)

    assert graph.tensors[carry.operands[0]].name == "constant.0"
    assert len(carry.operands) == 2


def test_xla_counts_the_flops_of_an_operator_without_a_rule():
    """An operator without a rule is named, and has the FLOPs of XLA's own count; a foreign one has none."""
    sampled = graph_of_jax(jax.random.gamma, jax.random.key(0), X)
    foreign = graph_of_jax(lambda x: jax.pure_callback(lambda x: x, X, x), X)

    assert dict(sampled.unknown) == {"random_gamma": 1}
    assert next(op.flop for op in sampled.ops if op.primitive == "random_gamma") > 64 * 32
    assert dict(foreign.unknown) == {"pure_callback": 1}


@pytest.fixture(scope="module")
def applied():
    """Errors and specs of programs that were planned for four virtual devices and run on them."""
    program = [sys.executable, "-m", "tests.support.graphs.jax_on_four"]
    found = subprocess.run(program, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["switched", "repeated", "added_up", "grouped", "solved", "transformed"])
def test_applied_plans_compute_the_same(applied, name):
    """Results on four devices are those of one, and an argument or a result is cut."""
    assert applied[name]["error"] < 1e-4
    assert applied[name]["cut"] > 0
