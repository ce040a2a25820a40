"""Answer of a study of a user's own step in torch: its mesh, DTensor placements, and a program that applies both."""

from __future__ import annotations

from string import Template

from torch.distributed.tensor import Shard

from costmodels.job.parallel_config import ParallelConfig
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.exports.torch_parallel import Placements, planned_placements, trained_placements
from costmodels.sharding.frontends.torch.program import Program
from costmodels.sharding.graph import TensorKind
from trials.rank_backend import is_cpu_cluster
from tuner.own_step.answer import LeafSpec, OwnAnswer, micro_batches_argument
from tuner.own_step.plans import OwnStepPlans

PROGRAM = Template('''"""Sharding of $factory over the mesh $axes, as Meshtune found it: $known.

    from $file import sharded_module
    module, inputs = sharded_module()  # on each of $count ranks, in torch's process group
    $call  # the loss; module.parameters() are DTensors, for any optimizer of torch

Run as a program, it trains three steps:

    torchrun --nproc-per-node $count $file.py
"""

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from $module import $function as factory
from tuner import parallelize_as

MESH = $mesh

# where the module's parameters and buffers lie, with one placement for each axis of the mesh
PLACEMENTS = {
$placements
}

# For each axis of the mesh, the dim of each operator that it cuts. In all, $changes layouts change inside the step.
SERVED = [
$served
]


def sharded_module(device_type="$device"):
    """Return the module, which trains sharded, and the inputs of the factory; to be called on all ranks."""
    module, inputs, *others = factory($micro)
    mesh = init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    loss = others[0] if others else None
    return parallelize_as(module, *inputs, loss=loss, mesh=mesh, served=SERVED$argument), inputs


def with_values(tensor):
    """Return a tensor with made-up values, if it is on the device meta."""
    if not tensor.is_meta:
        return tensor
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return made.normal_(std=0.02) if made.is_floating_point() else made


if __name__ == "__main__":
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if device_type == "cuda" else "gloo")
    torch.manual_seed(0)  # all ranks draw the same inputs
    module, inputs = sharded_module(device_type)
    if any(tensor.is_meta for tensor in module.parameters()):
        module.to_empty(device=device_type)
        for tensor in (*module.parameters(), *module.buffers()):
            torch.nn.init.normal_(tensor, std=0.02) if tensor.is_floating_point() else tensor.detach().zero_()
    inputs = torch.utils._pytree.tree_map_only(torch.Tensor, with_values, inputs)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for number in range(3):
$passes
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {number}: loss {loss.item():.6g}")
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        assert tuple(tensor.placements) == PLACEMENTS[name], name
    torch.distributed.destroy_process_group()
''')
"""Exported program."""


def answer_of(plans: OwnStepPlans, chosen: ParallelConfig) -> OwnAnswer:
    """Return the shardings of a candidate."""
    program, plan = plans.program(chosen), plans.plan(chosen)
    names, sizes = plan.mesh.names, plan.mesh.sizes
    types = _types_of(program)
    inputs = [each.name for each in program.arguments if each.kind is TensorKind.DATA and each.after is None]
    states = [each.name for each in program.arguments if each.name not in set(inputs)]
    return OwnAnswer(
        world="torch",
        spec_title="placements",
        mesh=dict(zip(names, sizes, strict=True)),
        mesh_line=f'mesh = init_device_mesh("{_device_type(plans)}", {sizes!r}, mesh_dim_names={names!r})',
        groups={
            "parameters": _leaves(types, trained_placements(plan, states)),
            "inputs": _leaves(types, planned_placements(plan, inputs)),
        },
        served=tuple(map(tuple, plan.served.T.tolist())),
        num_changes=len(relayouts(plan)),
    )


def _device_type(plans: OwnStepPlans) -> str:
    """Return torch's name for the devices of the plans' cluster."""
    return "cpu" if is_cpu_cluster(plans.cluster) else "cuda"


def usage_lines(file: str) -> tuple[str, str, str]:
    """Return three lines of Python that use the exported program of this module name."""
    return (
        f"from {file} import sharded_module",
        "module, inputs = sharded_module()  # on each rank, in torch's process group",
        "module(*inputs).backward()  # the loss; module.parameters() are DTensors, for any optimizer of torch",
    )


def program_text(plans: OwnStepPlans, chosen: ParallelConfig, *, known: str, file: str) -> str:
    """Return a Python module that trains the user's module as a candidate does; see `programs.py`."""
    answer = answer_of(plans, chosen)
    micro, count = micro_batches_argument(plans, chosen), plans.step_of(chosen).micro_batches
    module, _, function = plans.factory.partition(":")
    return PROGRAM.substitute(
        factory=plans.factory,
        device=_device_type(plans),
        axes=answer.axes_in_words,
        known=known,
        file=file,
        count=answer.num_devices,
        module=module,
        function=function,
        micro=micro,
        argument=f", {micro}" if count > 1 else "",
        call=f"(module(*inputs) / {count}).backward()" if count > 1 else "module(*inputs).backward()",
        passes=f"""        for _ in range({count}):  # in training, each with inputs of its own
            loss = module(*inputs)
            (loss / {count}).backward()"""
        if count > 1
        else """        loss = module(*inputs)
        loss.backward()""",
        mesh=answer.mesh,
        placements="\n".join(f"    {leaf.path!r}: {leaf.spec},  # {leaf.type}" for leaf in answer.groups["parameters"]),
        changes=answer.num_changes,
        served=answer.served_text,
    )


def _types_of(program: Program) -> dict[str, str]:
    """Return types and shapes of the arguments of a trace, by name."""
    nodes = program.trace.graph.find_nodes(op="placeholder")
    found = {}
    for node, argument in zip(nodes, program.arguments, strict=True):
        array = node.meta["val"]
        sizes = ",".join(map(str, array.shape))
        found[argument.name] = f"{str(array.dtype).removeprefix('torch.')}[{sizes}]"
    return found


def _leaves(types: dict[str, str], placements: dict[str, Placements]) -> tuple[LeafSpec, ...]:
    return tuple(LeafSpec(path=name, type=types[name], spec=_written(spec)) for name, spec in placements.items())


def _written(placements: Placements) -> str:
    """Return placements as Python writes them."""
    return f"({', '.join(f'Shard({each.dim})' if isinstance(each, Shard) else 'Replicate()' for each in placements)})"
