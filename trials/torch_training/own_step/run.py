"""A user's step as a rank runs it: the factory's module, parallelized by the candidate's plan, and its optimizer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed import device_mesh as torch_meshes
from torch.utils import _pytree as pytree

from costmodels.sharding.exports.served import plan_of_table
from costmodels.sharding.exports.torch_modules import case_of
from costmodels.sharding.exports.torch_parallel import parallel_module, tensors_of
from costmodels.sharding.frontends.factories import torch_step_of_factory
from costmodels.sharding.frontends.torch.graph import graph_of
from costmodels.sharding.frontends.torch.program import Program
from costmodels.sharding.frontends.torch.steps import TorchStep
from costmodels.sharding.plan import Plan
from trials.own_step import OwnStep
from trials.torch_training.own_step.values import value_of_state, values_of_inputs
from trials.training.numerics import LEARNING_RATE


def trace_own_step(own: OwnStep, plan: Plan, *, seed: int) -> TracedOwnStep:
    """Import a user's module, and trace its step; `seed` is that of torch in the factory, and of values that it lacks.

    Raises:
        ConfigError: The factory can't be imported here, or returns another module than it was planned with.
    """
    torch.manual_seed(seed)
    step = torch_step_of_factory(own.factory, option=own.key, folder=own.folder, micro_batches=own.micro_batches)
    program = step.trace()
    graph = graph_of(program, micro_batches=own.micro_batches)
    own_plan = plan_of_table(graph, plan.mesh, plan.served.T.tolist())
    return TracedOwnStep(step=step, program=program, plan=own_plan, seed=seed, micro_batches=own.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedOwnStep:
    """Step that a rank has traced.

    Attributes:
        step: Module and inputs as the factory returns them.
        program: Trace of the step.
        plan: Plan of the trace.
        seed: Seed of values.
        micro_batches: Number of passes over the inputs in each step.
    """

    step: TorchStep
    program: Program
    plan: Plan
    seed: int
    micro_batches: int

    @property
    def tensor_bytes(self) -> int:
        """Memory of the tensors that the factory has returned [bytes]."""
        inputs = (leaf for leaf in pytree.tree_leaves(self.step.inputs) if isinstance(leaf, torch.Tensor))
        tensors = itertools.chain(tensors_of(self.step.module).values(), inputs)
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors if not one.is_meta}
        return sum(storage.nbytes() for storage in storages.values())

    def begin(self) -> OwnTraining:
        """Parallelize the module, and make its optimizer; to be called on all ranks of the process group."""
        mesh, step = self.plan.mesh, self.step
        case = case_of(step.module, step.inputs)
        planned = parallel_module(
            step.module,
            torch_meshes.init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names),
            (self.program, self.plan),
            case,
            _refuse,
            value_of=lambda name, tensor: value_of_state(name, tensor, self.seed),
        )
        trained = [parameter for parameter in planned.parameters() if parameter.requires_grad]
        optimizer = (
            torch.optim.AdamW(trained, lr=LEARNING_RATE, foreach=True)
            if step.optimizer is None
            else step.optimizer(trained)
        )
        return OwnTraining(
            module=planned,
            inputs=values_of_inputs(step.inputs, self.seed),
            optimizer=optimizer,
            micro_batches=self.micro_batches,
        )


def _refuse(module: torch.nn.Module, inputs: tuple[Any, ...]) -> NoReturn:  # noqa: ARG001 # the contract's
    raise AssertionError("a trial calls the module with the inputs that it was traced with")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnTraining:
    """Module in training.

    Attributes:
        module: Planned module.
        inputs: Whole inputs, the same on every rank and in every step.
        optimizer: Optimizer of the module's parameters.
        micro_batches: Number of passes over the inputs in each step.
    """

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    optimizer: torch.optim.Optimizer
    micro_batches: int

    def step(self) -> float:
        """Train one step: forward and backward passes and the optimizer; return the mean loss before it."""
        total = 0.0
        for _ in range(self.micro_batches):
            loss: torch.Tensor = self.module(*self.inputs) / self.micro_batches
            loss.backward()  # type: ignore[no-untyped-call] # as torch has it
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total
