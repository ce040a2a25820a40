"""Plan that a trial of `backend: command` hands to its program: `{plan}` in the command is the path of its file.

    plan = load_plan(path)
    model = for_trainer(plan.parallelize(model, batch, loss=lambda model, batch: model(**batch).loss))

The program builds the module, or the JAX function, that the study's factory returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from costmodels.sharding.exports.plan_file import TensorLayout, read_plan

if TYPE_CHECKING:  # a program has one of both libraries
    from costmodels.sharding.exports.torch_modules import PlannedModule
    from costmodels.sharding.frontends.torch.program import Loss


Axes = tuple[tuple[str, ...], ...]
"""For each dim of a tensor, the axes of the mesh that cut it, major to minor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPlan:
    """Plan of one candidate.

    Attributes:
        by_hand: Whether it is a plan as frameworks write by hand, such as plain data parallelism, so that the program
            may go the framework's own way instead.
        micro_batches: Number of micro-batches before each update.
        mesh: Axes and their sizes, the slowest first.
        parameters: For each parameter by its name, and for each of its dims, the axes that cut it when a step begins,
            major to minor.
        states: The same for the optimizer's states.
        inputs: The same for inputs and buffers.
        activations: The same for what operators make.
        served: For each axis, the number of the factor that it serves at each operator, or -1.
    """

    by_hand: bool
    micro_batches: int
    mesh: dict[str, int]
    parameters: Mapping[str, Axes]
    states: Mapping[str, Axes]
    inputs: Mapping[str, Axes]
    activations: Mapping[str, Axes]
    served: tuple[tuple[int, ...], ...]

    @property
    def own_way(self) -> Literal["ddp", "fsdp"] | None:
        """Way in which frameworks train so without a plan: data parallelism, or FSDP; None for all other plans."""
        if not self.by_hand or [axis for axis, size in self.mesh.items() if size > 1] not in ([], ["data"]):
            return None
        return "fsdp" if any("data" in cut for axes in self.parameters.values() for cut in axes) else "ddp"

    def parallelize(
        self, module: Any, *inputs: Any, loss: Loss | None = None, device_mesh: Any = None
    ) -> PlannedModule:
        """Return a module of torch that trains as planned; to be called on all ranks.

        Args:
            module: Module of torch like that of the study's factory.
            inputs: Its inputs as those of the factory, of which only shapes and types are read.
            loss: Function that was planned, called as `loss(module, *inputs)`; None for `module(*inputs)`.
            device_mesh: Mesh of torch like the plan's; None for one of all ranks on the type of the parameters' device.

        Raises:
            ConfigError: The plan belongs to another module, to other shapes, or to a mesh of more or fewer ranks.
        """
        from tuner.planners.torch_plans import mesh_of_ranks  # noqa: PLC0415 # see above
        from tuner.planners.torch_served import parallelize_as  # noqa: PLC0415 # see above

        if device_mesh is None:
            device_mesh = mesh_of_ranks(self.mesh, next(module.parameters()).device.type)
        return parallelize_as(
            module, *inputs, loss=loss, mesh=device_mesh, served=self.served, micro_batches=self.micro_batches
        )

    def pin(
        self, function: Callable[..., Any], *arguments: Any, donated: Sequence[str | int] = ()
    ) -> Callable[..., Any]:
        """Return a JAX function that computes the same with every layout of the plan, to be passed to `jax.jit`.

        Args:
            function: Function of the study's factory.
            arguments: Its arguments, or their shapes, as those of the factory.
            donated: Names or numbers of the arguments whose memory the outputs take over.

        Raises:
            ConfigError: The plan belongs to another function, or to other shapes.
        """
        from tuner.planners.jax_pinned import pin_layouts  # noqa: PLC0415 # see above

        return pin_layouts(function, *arguments, mesh=self.mesh, served=self.served, donated=donated)


def load_plan(path: str | Path) -> LoadedPlan:
    """Read the plan of a trial.

    Args:
        path: Path that stands for `{plan}` in the command of a study.

    Raises:
        ConfigError: It cannot be read, or is no plan.
    """
    found = read_plan(Path(path))
    return LoadedPlan(
        by_hand=found.by_hand,
        micro_batches=found.micro_batches,
        mesh=found.mesh,
        parameters=_axes_of(found.parameters),
        states=_axes_of(found.states),
        inputs=_axes_of(found.inputs),
        activations=_axes_of(found.activations),
        served=tuple(map(tuple, found.served)),
    )


def _axes_of(layouts: Mapping[str, TensorLayout]) -> dict[str, Axes]:
    return {name: tuple(map(tuple, layout.axes)) for name, layout in layouts.items()}
