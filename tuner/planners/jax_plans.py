"""Sharding of a JAX function over a mesh: PartitionSpecs, constraints, and the function with both applied.

    plan = plan_jax(train_step, params, optimizer, batch, mesh=mesh, donated=("params", "optimizer"))
    step = jax.jit(
        plan.function,
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
        donate_argnums=plan.donate_argnums,
    )

Nothing is computed, and no device is needed before `in_shardings` is read.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from costmodels.sharding.device_mesh import DeviceMesh, mesh_from
from costmodels.sharding.exports.jax_apply import apply_plan, on_mesh, outputs_of, specs_of
from costmodels.sharding.exports.jax_layouts import jax_mesh, partition_spec
from costmodels.sharding.exports.jax_shardy import annotate_stablehlo
from costmodels.sharding.exports.jax_specs import jax_specs
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import Program, find_numbers, name_arguments, trace_function
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from tuner.planners.doubts import check_known, warn_of_useless
from tuner.planners.jax_calls import by_position, fixed_of, with_fixed, without_fixed
from tuner.planners.jax_judge import Judge, Step, judge_of
from tuner.planners.jax_pins import pins_of_arguments, pins_of_constraints, pins_of_shard_maps
from tuner.planners.judged import KEY, Candidate, Verdict, candidates_of, choose, find_judge, leaves_layouts
from tuner.planners.planning import WHOLE_AXES, Planned, PlannerOptions, plan_graph
from tuner.planners.sharding.pins import Pin

At = Literal["written", "read"]
"""Side of an operator: its results or its operands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConstraint:
    """Change of a tensor's layout.

    Attributes:
        op: Operator of the function, by its scopes and primitive.
        at: Side of the operator: `written` where it leaves partial sums, which are added up into `spec`; `read` where
            it reads the tensor in another layout.
        slot: Index of the result or operand.
        tensor: Name of the tensor: that of an argument, or of the operator that makes it.
        spec: New layout of the tensor.
    """

    op: str
    at: At
    slot: int
    tensor: str
    spec: PartitionSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JaxPlan:
    """Plan of a JAX function, in JAX's own terms.

    Attributes:
        planned: Plan with its cost, and the way it was found.
        function: Function with each layout of the plan pinned, to be passed to `jax.jit`. Arguments of other shapes are
            planned when it is traced with them, with a warning: shapes are static, as in JAX. If `is_propagated`, it is
            the caller's own function.
        in_specs: Tree of PartitionSpecs for each argument.
        out_specs: Tree of PartitionSpecs for the returned value.
        constraints: Changes of layouts, in the order of the operators. Tensors that never change are pinned, too.
        donate_argnums: Arguments whose memory the outputs take over, for `jax.jit`.
        static_argnums: Arguments that are no arrays, for `jax.jit`; specs and shardings leave them out, as it wants it.
        more_sent: Pairs of a tensor and an operator between which JAX sends more than the plan says; see
            `costmodels.sharding.exports.axis_order`.
        judged: What the compiler makes of each candidate; empty without a judge.
    """

    planned: Planned
    function: Callable[..., Any]
    in_specs: tuple[Any, ...]
    out_specs: Any
    constraints: tuple[LayoutConstraint, ...]
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    more_sent: tuple[tuple[str, str], ...]
    judged: tuple[Verdict, ...]
    _original: Callable[..., Any]
    _program: Program
    _devices: tuple[Any, ...] | None

    @property
    def is_propagated(self) -> bool:
        """Whether XLA lays out everything between the arguments and the outputs, by the judge's choice."""
        return leaves_layouts(self.judged)

    @property
    def mesh(self) -> Mesh:
        """Mesh of the plan, on the devices of the caller's mesh or on JAX's first ones.

        Its axes have the type `Auto`, whatever type the caller's axes have, because constraints only work on such axes.

        Raises:
            ConfigError: there are fewer devices than the plan needs.
        """
        return jax_mesh(self.planned.plan, self._devices)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Shardings of the arguments on `mesh`, with the same errors."""
        found: tuple[Any, ...] = on_mesh(self.mesh, self.in_specs)
        return found

    @property
    def out_shardings(self) -> Any:
        """Shardings of the returned value on `mesh`, with the same errors."""
        return on_mesh(self.mesh, self.out_specs)

    def shardy(self, *, platform: str | None = None) -> str:
        """Return the function as StableHLO with Shardy's annotations; this needs no devices.

        Args:
            platform: Platform to lower for (`cpu`, `cuda`, `tpu`); None for JAX's default backend.

        Raises:
            ConfigError: JAX is configured to run without Shardy.
        """
        return annotate_stablehlo(
            self._original, self._program, self.planned.plan, platform=platform, is_propagated=self.is_propagated
        )


def plan_jax(
    function: Callable[..., Any],
    *abstract_arguments: Any,
    mesh: Mesh | AbstractMesh | DeviceMesh | Mapping[str, int] | str,
    cluster: Cluster | str | None = None,
    donated: Sequence[str | int] = (),
    static: Sequence[str | int] = (),
    keywords: Mapping[str, Any] | None = None,
    in_shardings: Any = None,
    options: PlannerOptions = WHOLE_AXES,
    strict: bool = False,
    judge: str | None = None,
) -> JaxPlan:
    """Shard a function of arrays over a mesh, without computing anything.

    Args:
        function: Function to shard, typically one training step with `jax.value_and_grad` and the optimizer.
        abstract_arguments: Trees of `jax.ShapeDtypeStruct`s or arrays, of which only shapes and types are read.
        mesh: Mesh of JAX, or axes with their sizes, the slowest first, also as `data=4,model=2`. An axis that does not
            divide a dim leaves it whole.
        cluster: Cluster of the mesh's devices, from its first host on in the order of the mesh, or a name of the
            catalog for as few hosts as the mesh can fill; by default hosts of the judge's device, or else `dgx-a100`.
            A `DeviceMesh` brings its own cluster.
        donated: Names or numbers of the arguments whose memory the outputs take over, such as parameters and moments.
        static: Names or numbers of the arguments that are no arrays, such as a configuration. They must have a hash.
            With another value, the function is planned again when it is traced, with a warning.
        keywords: Arguments that the function takes by keyword, by their names. They follow the others in `in_specs`,
            and `JaxPlan.function` takes them by position, too, as `jax.jit` needs it with shardings.
        in_shardings: Shardings or PartitionSpecs that arguments must have, as for `jax.jit`: one for each argument, or
            for a part of its tree, and None where the planner chooses. The dims that they name are cut by the axes that
            they name; others may be cut, too, and the plan orders several axes on one dim. Constraints inside the
            function (`jax.lax.with_sharding_constraint`) are held in the same way.
        options: Planner and its options.
        strict: Whether to refuse a function with operators that have no sharding rule.
        judge: Device of the cluster (`h100`) for which XLA's compiler, which needs none, compiles the last candidates.
            The answer is the one with the fastest schedule that fits; `judged` has all. Where XLA propagates the
            layouts inside, as in plain data parallelism, the answer's function is yours.

    Raises:
        ConfigError: the mesh can't be formed, `donated` names no argument, no plan is found that fits, an operator
            has no rule and `strict` is set, or the judge is not installed or compiles no candidate.

    Warns:
        UserWarning: an operator has no rule, or an axis of the mesh divides no dim that can be cut.
    """
    # JAX is asked only to trace the function. The plan is made on the traced graph.
    axes = dict(mesh.shape) if isinstance(mesh, (Mesh, AbstractMesh)) else mesh
    own_mesh = mesh_from(axes, cluster or (find_judge(judge).name if judge is not None else "dgx-a100"))
    if keywords:
        function = by_position(function, len(abstract_arguments), tuple(keywords))
        abstract_arguments = (*abstract_arguments, *keywords.values())
    compiler = None if judge is None else judge_of(judge, own_mesh)
    count, whole, given = len(abstract_arguments), function, abstract_arguments
    fixed = fixed_of(function, abstract_arguments, static)
    names = name_arguments(function, count)
    positions = [number for number in range(count) if number not in fixed]
    function = without_fixed(function, count, fixed)
    abstract_arguments = tuple(abstract_arguments[number] for number in positions)
    # names, because positions among the arguments that are arrays are others
    taken = [names[number] for number in find_numbers(donated, names, key="donated")]
    program = trace_function(function, *abstract_arguments, donated=taken)
    graph = graph_of(program)
    check_known(graph, strict=strict)
    may_propagate = not options.pins and in_shardings is None
    options = replace(options, pins=(*options.pins, *_pins_of(program, graph, in_shardings, own_mesh)))
    found = plan_graph(graph, own_mesh, options)
    warn_of_useless(graph, found.plan.mesh)
    donate_argnums, static_argnums = tuple(positions[number] for number in program.donated), tuple(fixed)
    verdicts: tuple[Verdict, ...] = ()
    answer = Candidate(name=options.planner, planned=found)

    def planned_for(values: Mapping[int, Any], candidate: Candidate) -> Callable[..., Any]:
        own, plan = without_fixed(whole, count, values), candidate.planned.plan
        if values != fixed:
            plan = plan_graph(graph_of(trace_function(own, *abstract_arguments, donated=taken)), own_mesh, options).plan
        return _planned_function(own, abstract_arguments, plan, own_mesh, options)

    def step_of(candidate: Candidate) -> Step:
        in_specs, out_specs = specs_of(program, candidate.planned.plan)
        return Step(
            function=whole
            if candidate.is_propagated
            else with_fixed(whole, fixed, lambda values: planned_for(values, candidate))
            if fixed
            else planned_for({}, candidate),
            arguments=given,
            in_specs=in_specs,
            out_specs=out_specs,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )

    if compiler is not None:
        candidates = candidates_of(found, graph, own_mesh, options, may_propagate=may_propagate)
        steps = list(map(step_of, candidates))
        number, verdicts = choose(_verdicts(compiler, candidates, steps, options))
        answer, step = candidates[number], steps[number]
    else:
        step = step_of(answer)
    specs = jax_specs(answer.planned.plan, outputs_of(program))
    return JaxPlan(
        planned=answer.planned,
        function=step.function,
        in_specs=step.in_specs,
        out_specs=step.out_specs,
        constraints=()
        if answer.is_propagated
        else tuple(
            LayoutConstraint(
                op=each.op,
                at="written" if each.at == "def" else "read",
                slot=each.slot,
                tensor=each.tensor,
                spec=partition_spec(each.spec),
            )
            for each in specs.constraints
        ),
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        more_sent=() if answer.is_propagated else specs.broken,
        judged=verdicts,
        _original=function,
        _program=program,
        _devices=tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None,
    )


def _verdicts(
    judge: Judge, candidates: Sequence[Candidate], steps: Sequence[Step], options: PlannerOptions
) -> list[Verdict]:
    """Compile the candidates one after the other.

    Raises:
        ConfigError: none can be compiled.
    """
    limit_bytes = judge.device.memory_bytes if options.memory_bytes is None else options.memory_bytes
    found = []
    for each, step in zip(candidates, steps, strict=True):
        verdict = Verdict(
            name=each.name,
            planned_s=each.planned.step_time_s,
            planned_bytes=each.planned.cost.peak_memory_bytes,
            is_propagated=each.is_propagated,
        )
        try:
            made = judge.compile(step, each.planned.plan.mesh)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # XLA's refusals are of these two
            verdict = replace(verdict, refusal=str(error).strip().partition("\n")[0][:300])
        else:
            verdict = replace(
                verdict,
                scheduled_s=made.replayed.step_time_s,
                compute_s=made.replayed.compute_s,
                comm_s=made.replayed.comm_s,
                compiled_bytes=made.memory_bytes,
                fits=made.memory_bytes <= limit_bytes,
                compile_s=made.compile_s,
            )
        found.append(verdict)
    if all(each.scheduled_s is None for each in found):
        raise ConfigError(
            f"compiles no candidate: {found[0].refusal}",
            key=KEY,
            value=judge.device.name,
            nearest="a shard_map or a sharding in the function must name an AbstractMesh, for its devices are others",
        )
    return found


def _pins_of(program: Program, graph: Graph, in_shardings: Any, mesh: DeviceMesh) -> tuple[Pin, ...]:
    """Return pins for what the user says of arguments, and inside of the function where an output needs it."""
    names = {op.name for op in graph.ops}
    said = (*pins_of_constraints(program, mesh), *pins_of_shard_maps(program, mesh))
    inside = [pin for pin in said if pin.op in names]
    return (*(() if in_shardings is None else pins_of_arguments(program, in_shardings, mesh)), *inside)


def _planned_function(
    function: Callable[..., Any], arguments: Sequence[Any], plan: Plan, mesh: DeviceMesh, options: PlannerOptions
) -> Callable[..., Any]:
    """Return a function with the layouts of a plan pinned, which plans again for arguments of other shapes.

    Args:
        function: Function that was planned.
        arguments: Arguments that it was planned with, or their shapes.
        plan: Plan of the function.
        mesh: Mesh with the axes that pins name.
        options: Planner and its options, for other shapes.
    """
    first = _shapes_of(arguments)
    known = {first: apply_plan(function, plan)}

    @functools.wraps(function)  # lets callers donate arguments by name
    def planned(*given: Any, **named: Any) -> Any:
        if named:
            given = inspect.signature(function).bind(*given, **named).args
        shapes = _shapes_of(given)
        if shapes not in known:
            own, other = next(
                (pair for pair in zip(first, shapes, strict=False) if pair[0] != pair[1]), ("fewer", "more")
            )
            name = plan.graph.name
            warnings.warn(f"{name} is planned again: with {other}; it was planned with {own}", stacklevel=2)
            graph = graph_of(trace_function(function, *given))
            known[shapes] = apply_plan(function, plan_graph(graph, mesh, options).plan)
        return known[shapes](*given)

    return planned


def _shapes_of(arguments: Sequence[Any]) -> tuple[str, ...]:
    """Return the path, type and shape of each leaf of the arguments, such as `[0]['x']: float32[8, 16]`."""
    leaves = jax.tree_util.tree_flatten_with_path(tuple(arguments))[0]
    return tuple(f"{jax.tree_util.keystr(path)}: {jax.typeof(leaf).str_short()}" for path, leaf in leaves)
