"""Graphs of JAX programs: what is inlined, left out, kept from step to step, and run several times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.zoo import FACTORIES, shape_of
from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.graph import CARRY, CONSTANT, INPUT, NEXT, STACK, STATE, UNSTACK, TensorKind
from costmodels.sharding.plan import NONE, Plan, cost_of, violations
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError

MATRIX = shape_of(4, 4, dtype=jnp.float32)


def primitives(graph, *but):
    """Return the primitives of a graph's operators, in order, without sources."""
    return [op.primitive for op in graph.ops if not op.is_source and op.primitive not in but]


def named(graph, name):
    """The operator of a name."""
    return next(op for op in graph.ops if op.name == name)


def total_flop(graph):
    """Return the FLOPs of a whole step."""
    return sum(op.flop * op.times for op in graph.ops)


@pytest.mark.parametrize("name", [name for name in FACTORIES if "small" in name] + ["gemma_2b_scan"])
def test_programs_of_the_zoo_are_known_whole(name):
    """Every primitive has a rule, every name is unique and the same each time, and what is donated is kept."""
    function, arguments, donated = FACTORIES[name]()
    graph = graph_of_jax(function, *arguments, donated=donated)
    again = graph_of_jax(function, *arguments, donated=donated)

    assert graph.unknown == ()
    assert [op.name for op in graph.ops] == [op.name for op in again.ops]
    assert len({op.name for op in graph.ops}) == len(graph.ops)
    states = [op for op in graph.ops if op.primitive == STATE]
    leaves = [len(jax.tree.leaves(argument)) for argument in arguments]
    assert len(states) == (leaves[1] if donated == ("cache",) else sum(leaves[:2]))
    assert all(op.operands for op in states)


def test_a_loop_has_the_work_of_its_iterations():
    """A scan over three layers counts as many FLOPs as the three layers one after the other."""
    looped, arguments, _ = FACTORIES["gemma_small_scan"]()

    def unrolled(params, optimizer, batch):
        with jax.disable_jit():
            return looped(params, optimizer, batch)

    once = graph_of_jax(unrolled, *arguments)
    graph = graph_of_jax(looped, *arguments)

    assert {op.times for op in graph.ops} == {1, 3}
    assert {op.times for op in once.ops} == {1}
    assert total_flop(graph) == total_flop(once) > 0


def test_calls_are_inlined():
    """Nothing is left of jit, of custom derivatives and of rematerialised functions but what they do."""

    @jax.custom_vjp
    def doubled(x):
        return x + x

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, grad: (grad + grad,))

    def loss(x):
        return jnp.sum(jax.checkpoint(jnp.sin)(jax.nn.relu(jax.jit(doubled)(x))))

    found = primitives(graph_of_jax(loss, MATRIX))

    assert found == ["add", "max", "sin", "reduce_sum"]
    assert "custom_vjp_call" not in primitives(graph_of_jax(jax.grad(loss), MATRIX))


def test_names_tell_scopes_and_direction():
    """Operators are named by the scopes of the program; those of the backward pass begin with `grad`."""

    def loss(w, x):
        with jax.named_scope("mlp"):
            return jnp.sum(x @ w)

    graph = graph_of_jax(jax.grad(loss), MATRIX, MATRIX)

    assert "grad.mlp.dot_general" in [op.name for op in graph.ops]
    assert graph.tensors[named(graph, "grad.mlp.dot_general").results[0]].kind == TensorKind.GRADIENT


def test_what_nobody_reads_is_left_out():
    """An operator without a reader is no work, in a loop as elsewhere."""

    def function(x):
        jnp.exp(x)
        total, _ = lax.scan(lambda carry, _: ((carry[0] + x, jnp.sin(carry[1])), jnp.cos(x)), (x, x), length=3)
        return total[0]

    assert primitives(graph_of_jax(function, MATRIX), CARRY, NEXT) == ["add"]


def test_what_depends_on_no_argument_is_a_constant():
    """A mask is one source, whatever made it, and a scalar of that kind isn't even an operand."""

    def function(x):
        return jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x * 2.0, 0.0)

    graph = graph_of_jax(function, MATRIX)

    assert primitives(graph) == ["mul", "select_n"]
    constants = [op for op in graph.ops if op.primitive == CONSTANT]
    assert [graph.tensors[op.results[0]].shape for op in constants][:1] == [(4, 4)]
    assert [len(op.operands) for op in graph.ops if op.primitive == "mul"] == [1]


def test_values_pass_through_loops():
    """A scan's carry, stacks read and stacks written go through operators that cost nothing; a counter is no value."""

    def function(x, rows):
        def body(carry, row):
            count, total = carry
            return (count + 1, total + row * count), total * 2

        return lax.scan(body, (0.0, x), rows)

    graph = graph_of_jax(function, shape_of(4, dtype=jnp.float32), shape_of(3, 4, dtype=jnp.float32))

    loop = {op.primitive: op for op in graph.ops}
    assert primitives(graph) == [CARRY, UNSTACK, "mul", "add", "mul", NEXT, STACK]
    assert (loop[CARRY].times, loop["add"].times, loop[NEXT].times, loop[STACK].times) == (1, 3, 3, 3)
    assert loop[UNSTACK].rule.factors[loop[UNSTACK].rule.operands[0][0][0]].kind == FactorKind.BLOCKED
    assert loop[NEXT].operands == loop["add"].results
    assert loop[CARRY].operands[1:] == loop[NEXT].results
    (use,) = graph.uses[loop[NEXT].results[0]]
    assert (use.times, use.is_back) == (3, True)
    assert graph.tensors[loop[STACK].results[0]].shape == (3, 4)


def test_loops_in_loops_multiply():
    """The body of a loop inside a loop runs as often as both say."""

    def inner(x):
        return lax.scan(lambda carry, _: (carry @ x, None), x, length=5)[0]

    graph = graph_of_jax(lambda x: lax.scan(lambda carry, _: (inner(carry), None), x, length=3)[0], MATRIX)

    assert named(graph, "dot_general").times == 15


def test_a_carry_that_changes_its_layout_is_moved_each_time():
    """A carry that leaves an iteration in another layout than it entered costs a collective for every iteration."""
    graph = graph_of_jax(lambda x: lax.scan(lambda carry, _: (carry.T, None), x, length=3)[0], MATRIX)
    mesh = DeviceMesh(names=("x",), sizes=(8,), cluster=find_cluster("dgx-a100"))
    served = np.zeros((len(graph.ops), 1), dtype=np.int64)

    cost = cost_of(Plan(graph=graph, mesh=mesh, served=served))

    assert [(each.move.kind, each.times) for each in cost.collectives] == [(OpKind.ALL_TO_ALL, 3)]
    assert cost_of(Plan(graph=graph, mesh=mesh, served=served + NONE)).collectives == ()


def test_a_batch_that_is_cut_sums_gradients_once():
    """With the batch of a linear model cut, all that is sent is the sum of the weights' gradient and of the loss."""

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(x @ w))(w)
        return w - 0.1 * grad, loss

    graph = graph_of_jax(step, shape_of(16, 32, dtype=jnp.float32), shape_of(8, 16, dtype=jnp.float32), donated=("w",))
    mesh = DeviceMesh(names=("x",), sizes=(8,), cluster=find_cluster("dgx-a100"))
    batch = {named(graph, "x").results[0]: 0}
    served = np.full((len(graph.ops), 1), NONE)
    for number, op in enumerate(graph.ops):
        for slot, tensor in enumerate(op.operands):
            if tensor in batch and op.primitive != STATE:
                served[number] = op.rule.operands[slot][batch[tensor]][0]
        for slot, tensor in enumerate(op.results):
            if op.primitive in (INPUT, CONSTANT) and graph.tensors[tensor].shape[:1] == (8,):
                served[number] = 0
            dim = op.rule.result_dims[slot][served[number, 0]] if served[number, 0] != NONE else None
            if dim is not None:
                batch[tensor] = dim
    plan = Plan(graph=graph, mesh=mesh, served=served)

    assert violations(plan) == ()
    found = [(each.move.kind, each.move.message_bytes) for each in cost_of(plan).collectives]
    assert sorted(found) == [(OpKind.ALL_REDUCE, 4.0), (OpKind.ALL_REDUCE, 16 * 32 * 4.0)]


def test_donated_arguments_are_kept_by_the_outputs_at_their_paths():
    """Two trees of the same shapes aren't mixed up, wherever they stand among the outputs."""

    def step(params, moments, x):
        moments = {"a": moments["a"] + x, "b": moments["b"] * x}
        return x, {"moments": moments, "params": {"b": params["b"] + moments["b"], "a": params["a"] - moments["a"]}}

    tree = {"a": MATRIX, "b": MATRIX}
    graph = graph_of_jax(step, tree, tree, MATRIX, donated=("params", 1))

    makers = {op.name: graph.ops[graph.maker[op.operands[0]][0]].primitive for op in graph.ops if op.primitive == STATE}
    assert makers == {"params.a": "sub", "params.b": "add", "moments.a": "add", "moments.b": "mul"}
    kinds = {op.name: graph.tensors[op.results[0]].kind for op in graph.ops if op.primitive in (STATE, INPUT)}
    assert kinds["params.a"] == TensorKind.PARAMETER
    assert kinds["moments.a"] == TensorKind.OPTIMIZER
    assert kinds["x"] == TensorKind.DATA


def test_a_donated_argument_without_an_output_is_data():
    """A donated argument that no output can replace isn't kept, though its memory is given away."""
    graph = graph_of_jax(lambda x: jnp.sum(x) + 1, MATRIX, donated=("x",))

    assert [op.primitive for op in graph.ops] == [INPUT, "reduce_sum", "add"]


@pytest.mark.parametrize("donated", ["weight", 2])
def test_donating_what_is_no_argument_is_refused(donated):
    """The message names what was asked for and what there is."""
    with pytest.raises(ConfigError, match="must be one of the function's arguments"):
        graph_of_jax(lambda weights, x: weights + x, MATRIX, MATRIX, donated=(donated,))


def test_unknown_primitives_are_blocked_and_counted():
    """A primitive without a rule is computed whole by every device, and the graph says so."""
    graph = graph_of_jax(lambda x: jax.random.gamma(jax.random.key(0), x), MATRIX)

    assert graph.unknown == (("random_gamma", 1),)
    assert next(op for op in graph.ops if op.primitive == "random_gamma").rule.cuttable == ()


def test_dropout_is_drawn_in_parts():
    """Random numbers can be cut as what they are for, though their key is whole."""

    def function(x, key):
        return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 1), 0.9, x.shape), x, 0.0)

    graph = graph_of_jax(function, MATRIX, jax.eval_shape(lambda: jax.random.key(0)))

    assert graph.unknown == ()
    assert len(next(op for op in graph.ops if op.primitive == "random_bits").rule.cuttable) == 2


def test_empty_arrays_are_no_work():
    """An array without elements is neither an operand nor a result."""

    def function(x, nothing):
        return jnp.concatenate([x, nothing + 1]) * 2

    graph = graph_of_jax(function, MATRIX, shape_of(0, 4, dtype=jnp.float32))

    assert "nothing" not in [op.name for op in graph.ops]
    assert primitives(graph)[-1] == "mul"


def test_a_training_state_names_its_parameters():
    """Of a state with fields, as flax's `TrainState`, `params` are parameters; mirrors of them in moments are not."""

    def step(state, batch):
        grads = jax.grad(lambda params: jnp.sum((batch @ params["w"]) ** 2))(state["params"])
        mean = jax.tree.map(lambda one, grad: 0.9 * one + grad, state["opt_state"]["params"], grads)
        params = jax.tree.map(lambda one, grad: one - grad, state["params"], mean)
        return {"params": params, "opt_state": {"params": mean}, "step": state["step"] + 1}

    weights = {"w": shape_of(16, 32, dtype=jnp.float32)}
    state = {"params": weights, "opt_state": {"params": weights}, "step": shape_of(dtype=jnp.int32)}
    graph = graph_of_jax(step, state, shape_of(8, 16, dtype=jnp.float32), donated=("state",))

    kinds = {tensor.name: tensor.kind for tensor in graph.tensors}
    assert kinds["state.params.w"] == TensorKind.PARAMETER
    assert kinds["state.opt_state.params.w"] == TensorKind.OPTIMIZER
    assert kinds["batch"] == TensorKind.DATA
