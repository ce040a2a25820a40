"""A JAX function sharded over a mesh, for who wrote it: specs, constraints, and the function with both applied.

    plan = plan_jax(train_step, params, optimizer, batch, mesh=mesh, donated=("params", "optimizer"))
    step = jax.jit(
        plan.function,
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
        donate_argnums=plan.donate_argnums,
    )

Nothing is computed and no device is needed until `in_shardings` are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from costmodels.sharding.device_mesh import DeviceMesh, mesh_from
from costmodels.sharding.exports.jax_apply import apply_plan, jax_mesh, on_mesh, outputs_of, partition_spec, specs_of
from costmodels.sharding.exports.jax_shardy import annotated_stablehlo
from costmodels.sharding.exports.jax_specs import jax_specs
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import Program, traced
from hardware.cluster import Cluster
from tuner.planners.planning import Planned, PlannerOptions, planned

WHOLE_AXES = PlannerOptions(whole_axes=True)
"""Specs name the caller's own axes. Otherwise the plan's mesh has an axis for each prime factor, as `model.0`."""

At = Literal["written", "read"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConstraint:
    """Where a tensor changes its layout.

    Attributes:
        op: An operator of the function, by its scopes and primitive.
        at: `written` where it leaves partial sums, which are added up into `spec`; `read` where it reads the tensor
            otherwise than it lies.
        slot: Which of its results, or operands.
        tensor: What changes: the name of an argument, or of the operator that makes it.
        spec: What it becomes.
    """

    op: str
    at: At
    slot: int
    tensor: str
    spec: PartitionSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JaxPlan:
    """A function with a plan.

    Attributes:
        planned: The plan, what a step costs with it, and how it was found.
        function: Computes what the function does, with each layout of the plan pinned; for `jax.jit`.
        in_specs: A tree of PartitionSpecs for each argument.
        out_specs: A tree of them like what is returned.
        constraints: Where layouts change, in the order of the operators. What changes nowhere is pinned, too.
        donate_argnums: The arguments whose memory the outputs take over, as `jax.jit` counts them.
        more_sent: Tensors and operators between which JAX moves more than the plan says; see
            `costmodels.sharding.exports.axis_order`.
    """

    planned: Planned
    function: Callable[..., Any]
    in_specs: tuple[Any, ...]
    out_specs: Any
    constraints: tuple[LayoutConstraint, ...]
    donate_argnums: tuple[int, ...]
    more_sent: tuple[tuple[str, str], ...]
    _original: Callable[..., Any]
    _program: Program
    _devices: tuple[Any, ...] | None

    @property
    def mesh(self) -> Mesh:
        """The plan's mesh: of the devices of the caller's, or of JAX's first ones.

        Its axes have the type `Auto`, whatever the caller's have: constraints mean nothing on others.

        Raises:
            ConfigError: there are fewer devices than the plan needs.
        """
        return jax_mesh(self.planned.plan, self._devices)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """The specs of the arguments on `mesh`, which may raise."""
        found: tuple[Any, ...] = on_mesh(self.mesh, self.in_specs)
        return found

    @property
    def out_shardings(self) -> Any:
        """The specs of what is returned on `mesh`, which may raise."""
        return on_mesh(self.mesh, self.out_specs)

    def shardy(self, *, platform: str | None = None) -> str:
        """The function as StableHLO with Shardy's annotations; needs no devices.

        Args:
            platform: What it is lowered for (`cpu`, `cuda`, `tpu`); None for JAX's default backend.

        Raises:
            ConfigError: JAX is told to do without Shardy.
        """
        return annotated_stablehlo(self._original, self._program, self.planned.plan, platform=platform)


def plan_jax(
    function: Callable[..., Any],
    *abstract_arguments: Any,
    mesh: Mesh | AbstractMesh | DeviceMesh | Mapping[str, int] | str,
    cluster: Cluster | str = "dgx-a100",
    donated: Sequence[str | int] = (),
    options: PlannerOptions = WHOLE_AXES,
) -> JaxPlan:
    """Shards a function of arrays over a mesh; nothing is computed.

    Args:
        function: Typically one training step, of which `jax.value_and_grad` and the optimizer are part.
        abstract_arguments: Trees of `jax.ShapeDtypeStruct`s or arrays, of which shapes and types are read.
        mesh: JAX's, or axes with their sizes, the slowest first, also as `data=4,model=2`. A dim that an axis can't
            divide is whole along it.
        cluster: What the mesh's devices are, from the first host on in the order of the mesh: a cluster, or a name of
            the catalog for as few hosts as the mesh can fill. A `DeviceMesh` stands on its own.
        donated: Names or numbers of the arguments whose memory the outputs take over, as parameters and moments are.
        options: How it is planned.

    Raises:
        ConfigError: the mesh can't be formed, `donated` names no argument, or no plan is found that fits.
    """
    own_mesh = mesh_from(dict(mesh.shape) if isinstance(mesh, (Mesh, AbstractMesh)) else mesh, cluster)
    program = traced(function, *abstract_arguments, donated=donated)
    found = planned(graph_of(program), own_mesh, options)
    specs = jax_specs(found.plan, outputs_of(program))
    in_specs, out_specs = specs_of(program, found.plan)
    return JaxPlan(
        planned=found,
        function=apply_plan(function, found.plan),
        in_specs=in_specs,
        out_specs=out_specs,
        constraints=tuple(
            LayoutConstraint(
                op=each.op,
                at="written" if each.at == "def" else "read",
                slot=each.slot,
                tensor=each.tensor,
                spec=partition_spec(each.spec),
            )
            for each in specs.constraints
        ),
        donate_argnums=program.donated,
        more_sent=specs.broken,
        _original=function,
        _program=program,
        _devices=tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None,
    )
