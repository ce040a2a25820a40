"""Answer of a study of a user's own step in JAX: its mesh, the PartitionSpecs, and a program that applies both."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template
from typing import Any

import jax
from jax.sharding import PartitionSpec

from costmodels.job.parallel_config import ParallelConfig
from costmodels.sharding.exports.jax_apply import specs_of
from costmodels.sharding.exports.jax_specs import jax_specs
from tuner.own_step.answer import LeafSpec, OwnAnswer, micro_batches_argument
from tuner.own_step.plans import OwnStepPlans

PROGRAM = Template('''"""Sharding of $factory over the mesh $axes, as Meshtune found it: $known.

    from $file import sharded_step
    step, shardings = sharded_step()
    $names = jax.device_put($tuple, shardings)  # then call step($given)

Run as a program, it takes one step with made-up values. On processors, it needs at least
XLA_FLAGS=--xla_force_host_platform_device_count=$count in the environment.
"""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from $module import $function as factory
from tuner import pin_layouts

MESH = $mesh

# one for each leaf of the arguments
IN_SPECS = [
$in_specs
]

# one for each leaf of the returned value
OUT_SPECS = [
$out_specs
]

# numbers of the arguments whose memory the outputs reuse
DONATED = $donated

# For each axis of the mesh, the dim of each operator that it cuts. In all, $changes layouts change inside the function.
# Without pin_layouts, the function computes the same, and XLA chooses these layouts anew.
SERVED = [
$served
]


@functools.cache
def program():
    """Return what the factory does, the same objects each time: JAX tells trees with other objects inside apart."""
    return factory($micro)


def sharded_step():
    """Return the jitted step, and the shardings of its arguments on JAX's first $count devices."""
    function, arguments, *_ = program()
    devices = np.array(jax.devices()[:$count]).reshape(tuple(MESH.values()))
    mesh = Mesh(devices, tuple(MESH))

    def on_mesh(tree, specs):
        found = [NamedSharding(mesh, spec) for spec in specs]
        return jax.tree.unflatten(jax.tree.structure(tree), found)

    shardings = on_mesh(tuple(arguments), IN_SPECS)
    step = jax.jit(
        pin_layouts(function, *arguments, mesh=MESH, served=SERVED, donated=DONATED),
        in_shardings=shardings,
        out_shardings=on_mesh(jax.eval_shape(function, *arguments), OUT_SPECS),
        donate_argnums=DONATED,
    )
    return step, shardings


def made_up(leaf):
    """Return small random numbers, keys, or zeros of a type that is no floating one."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    is_float = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    values = 0.02 * np.random.default_rng(0).random(leaf.shape) if is_float else np.zeros(leaf.shape)
    return jax.numpy.asarray(values, leaf.dtype)


if __name__ == "__main__":
    step, shardings = sharded_step()
    arguments = jax.tree.map(made_up, tuple(program()[1]))
    results = step(*jax.device_put(arguments, shardings))
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        print(jax.tree_util.keystr(path), jax.typeof(leaf), leaf.sharding.spec)
''')
"""Exported program."""


def answer_of(plans: OwnStepPlans, chosen: ParallelConfig) -> OwnAnswer:
    """Return the shardings of a candidate."""
    program, plan = plans.program(chosen), plans.plan(chosen)
    in_specs, out_specs = specs_of(program, plan)
    names, sizes = plan.mesh.names, plan.mesh.sizes
    return OwnAnswer(
        world="jax",
        spec_title="PartitionSpec",
        mesh=dict(zip(names, sizes, strict=True)),
        mesh_line=f"mesh = Mesh(np.array(jax.devices()[:{plan.mesh.num_devices}])"
        f".reshape({', '.join(map(str, sizes))}), {names!r})",
        groups={
            "arguments": _leaves([each.name for each in program.arguments], program.jaxpr.in_avals, in_specs),
            "outputs": _leaves(program.outputs, program.jaxpr.out_avals, out_specs),
        },
        served=tuple(map(tuple, plan.served.T.tolist())),
        kept=tuple(program.outputs[each.kept_by] for each in program.arguments if each.kept_by is not None),
        donated=program.donated,
        num_changes=len(jax_specs(plan).constraints),
    )


def usage_lines(plans: OwnStepPlans, file: str) -> tuple[str, str, str]:
    """Return three lines of Python that use the exported program of this module name."""
    names = _argument_names(plans)
    given = ", ".join(names)
    return (
        f"from {file} import sharded_step",
        "step, shardings = sharded_step()",
        f"{_tuple_of(names)[1:-1]} = jax.device_put({_tuple_of(names)}, shardings)  # then call step({given})",
    )


def program_text(plans: OwnStepPlans, chosen: ParallelConfig, *, known: str, file: str) -> str:
    """Return a Python module that shards the user's step as a candidate does.

    Args:
        plans: Plans of the user's step.
        chosen: Candidate.
        known: Step time with its source, in words.
        file: Name of the module.
    """
    answer = answer_of(plans, chosen)
    names = _argument_names(plans)
    module, _, function = plans.factory.partition(":")
    return PROGRAM.substitute(
        factory=plans.factory,
        axes=answer.axes_in_words,
        known=known,
        file=file,
        given=", ".join(names),
        names=_tuple_of(names)[1:-1],
        micro=micro_batches_argument(plans, chosen),
        tuple=_tuple_of(names),
        count=answer.num_devices,
        module=module,
        function=function,
        mesh=answer.mesh,
        in_specs=_listed(answer.groups["arguments"]),
        out_specs=_listed(answer.groups["outputs"]),
        donated=answer.donated,
        changes=answer.num_changes,
        served=answer.served_text,
    )


def _argument_names(plans: OwnStepPlans) -> tuple[str, ...]:
    """Return the names of the function's arguments."""
    return tuple(dict.fromkeys(each.name.partition(".")[0] for each in plans.program().arguments))


def _tuple_of(names: Sequence[str]) -> str:
    """Return a tuple of names as Python writes it."""
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _leaves(paths: Sequence[str], types: Sequence[Any], specs: Any) -> tuple[LeafSpec, ...]:
    flat = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return tuple(
        LeafSpec(path=path, type=aval.str_short(), spec=_written(spec))
        for path, aval, spec in zip(paths, types, flat, strict=True)
    )


def _written(spec: PartitionSpec) -> str:
    """Return a spec as Python writes it; an axis alone stands without its tuple."""
    dims = [dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim for dim in spec]
    return f"P({', '.join(map(repr, dims))})"


def _listed(leaves: Sequence[LeafSpec]) -> str:
    return "\n".join(f"    {leaf.spec},  # {leaf.path or 'returned'}: {leaf.type}" for leaf in leaves)
