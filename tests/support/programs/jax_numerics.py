"""Program that compares the gradients of a step's operators with those that JAX derives, and prints the errors as JSON.

The forward pass of the graph is itself a function in JAX, so that `jax.grad` gives its gradients without the graph's
backward operators.
"""

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from costmodels.sharding.graph import INPUT, STATE, TensorKind
from tests.support.programs.planned_steps import GPT, LLAMA, MOE, of_study, step_of
from trials.jax_training.model.initial import batch, initial_states
from trials.jax_training.model.operators import operators
from trials.training.numerics import LOSS


def run(graph, compute: Mapping, values: Mapping, stop: int) -> dict:
    """Compute all tensors up to an operator, from the sources' values by name."""
    tensors = {op.results[0]: values[op.name] for op in graph.ops if op.is_source}
    for op in graph.ops[:stop]:
        if not op.is_source:
            results = compute[op.primitive](op, *(tensors[tensor] for tensor in op.operands))
            tensors |= dict(zip(op.results, results, strict=True))
    return {graph.tensors[number].name: value for number, value in tensors.items()}


def errors(model) -> dict[str, float]:
    """Return the largest error of each parameter's gradient, over the largest gradient of all parameters."""
    plan = of_study(model)
    graph = plan.graph
    step, compute = step_of(plan), operators(top_k=model.top_k)
    states = initial_states(graph, 0, step.shardings(STATE))
    # larger weights than initial ones keep every term of the gradients alive
    states = {name: value * 10 if value.ndim > 1 else value + 0.1 for name, value in states.items()}
    inputs = batch(graph, 0, step.shardings(INPUT))
    updates = {op.operands[0]: op for op in graph.ops if op.primitive == "adam"}
    first_update = min(number for number, op in enumerate(graph.ops) if op.primitive == "adam")
    made = jax.jit(lambda values: run(graph, compute, values, first_update))(states | inputs)
    parameters = {
        op.name: states[op.name]
        for op in graph.ops
        if op.primitive == STATE and graph.tensors[op.results[0]].kind is TensorKind.PARAMETER
    }

    def loss(parameters):
        return run(graph, compute, states | inputs | parameters, graph.first_backward)[LOSS].reshape(())

    derived = jax.jit(jax.grad(loss))(parameters)
    scale = max(float(jnp.abs(gradient).max()) for gradient in derived.values())
    found = {}
    for number, op in updates.items():
        name, gradient = graph.tensors[number].name, graph.tensors[op.operands[1]].name
        found[name] = float(jnp.abs(made[gradient] - derived[name]).max()) / scale
    return found


if __name__ == "__main__":
    print(json.dumps({"gpt": errors(GPT), "llama": errors(LLAMA), "experts": errors(MOE.changed(mlp_bias=True))}))  # noqa: T201 # what the test reads
