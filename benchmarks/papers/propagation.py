"""Propagate argument shardings through a JAX program with Shardy, and read the result back tensor by tensor.

The program is lowered from its jaxpr with every call inlined and each equation in a scope of its own, so that the
location of an operator identifies the tensor of the graph that it makes. Nothing else is added. The module is imported
into Shardy once. Each evaluation copies that module, shards arguments (their dims stay open), runs
`sdy-user-priority-propagate`, and reads the sharding of every operator. Programs with loops are refused.

Requires JAX 0.10 with its MLIR bindings. Source: Shardy's docs/propagation.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy
from jaxlib.mlir.passmanager import PassManager

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.flat_program import Step
from costmodels.sharding.frontends.jax.flat import INLINED, called_by, shape_of
from costmodels.sharding.frontends.jax.graph import flatten_trace
from costmodels.sharding.frontends.jax.program import Program
from costmodels.sharding.graph import Graph
from costmodels.sharding.layouts import REPLICATED, Layout
from hardware.io.errors import ConfigError

SHARDING = "sdy.sharding"
IMPORT = "builtin.module(sdy-import-pipeline)"
PROPAGATE = "builtin.module(sdy-user-priority-propagate)"
WHOLE = "builtin.module(sdy-propagation-pipeline)"
"""Import, propagation and export as XLA runs them; the part `IMPORT` is the same every time."""

MESH = "mesh"


@dataclass(frozen=True, kw_only=True, slots=True)
class Propagated:
    """Result of a propagation.

    Attributes:
        layouts: Layout of each tensor of the graph; None for tensors that no operator of the program makes, such as
            constants.
        propagation_s: CPU time of the copy, the shardings of its arguments and the pass [s].
        reading_s: CPU time of reading the shardings back [s].
    """

    layouts: list[Layout | None]
    propagation_s: float
    reading_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Origin of a tensor: a result of an operator of the module."""

    tensor: int
    op: int
    result: int


class Propagation:
    """Program through which shardings are propagated many times.

    Attributes:
        graph: Graph of the program.
        mesh: Mesh with the same axes as Shardy's.
        import_s: CPU time of lowering and importing the program [s].
    """

    def __init__(self, program: Program, graph: Graph, mesh: DeviceMesh) -> None:
        """Lower the program.

        Args:
            program: A traced function.
            graph: Graph of the program, as made by `frontends.jax.graph.graph_of`.
            mesh: Mesh over which it is sharded.

        Raises:
            ConfigError: The program has a loop.
        """
        self.graph, self.mesh = graph, mesh
        began_s = time.process_time()
        self._inlined = _Inlined(program)
        lowered = jax.jit(self._inlined, keep_unused=True).trace(*self._inlined.shapes).lower()
        self._module = lowered.compiler_ir()
        with self._module.context, ir.Location.unknown():
            # The mesh must be declared in the module before shardings can name its axes.
            axes = [sdy.MeshAxisAttr.get(name, size) for name, size in zip(mesh.names, mesh.sizes, strict=True)]
            with ir.InsertionPoint.at_block_begin(self._module.body):
                sdy.MeshOp(MESH, sdy.MeshAttr.get(axes))
            self._plain = self._module.operation.clone()
            PassManager.parse(IMPORT).run(self._module.operation)
            self._pass = PassManager.parse(PROPAGATE)
            self._pass.run(self._module.operation)  # nothing is sharded yet; this removes operators that nobody reads
            self.import_s = time.process_time() - began_s
            self._num_ops, self._made, self._same = self._locate_tensors()
        self._known: dict[Any, tuple[Layout, ...]] = {}
        tensors = {tensor.name: number for number, tensor in enumerate(graph.tensors)}
        flat = self._inlined.flat
        self._arguments = [tensors.get(flat.values[number].name) for number in self._inlined.arguments]

    def layouts(self, arguments: Mapping[int, Layout]) -> Propagated:
        """Propagate the layouts of some arguments, given by tensor; the other arguments are open."""
        began_s = time.process_time()
        with self._module.context, ir.Location.unknown():
            module = self._module.operation.clone()
            main = self._shard_arguments(module, arguments)
            self._pass.run(module)
            propagated_s = time.process_time()
            found = self._read(main)
        done_s = time.process_time()
        return Propagated(layouts=found, propagation_s=propagated_s - began_s, reading_s=done_s - propagated_s)

    def pipeline_s(self, arguments: Mapping[int, Layout]) -> float:
        """Measure the CPU time of XLA's whole pipeline on the plain module [s]."""
        with self._module.context, ir.Location.unknown():
            module = self._plain.clone()
            self._shard_arguments(module, arguments)
            began_s = time.process_time()
            PassManager.parse(WHOLE).run(module)
            return time.process_time() - began_s

    def _shard_arguments(self, module: Any, arguments: Mapping[int, Layout]) -> Any:
        """Set the shardings of a module's arguments, and return its main function."""
        main = _main(module)
        attributes = []
        for tensor in self._arguments:
            layout = None if tensor is None else arguments.get(tensor)
            if layout is None:
                attributes.append(ir.DictAttr.get({}))
                continue
            assert tensor is not None, "it has a layout"
            dims = [
                sdy.DimensionShardingAttr.get(
                    [
                        sdy.AxisRefAttr.get(name)
                        for name, cut in zip(self.mesh.names, layout, strict=True)
                        if cut == dim
                    ],
                    is_closed=False,
                )
                for dim in range(len(self.graph.tensors[tensor].shape))
            ]
            attributes.append(ir.DictAttr.get({SHARDING: sdy.TensorShardingAttr.get(MESH, dims)}))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
        return main

    def _read(self, main: Any) -> list[Layout | None]:
        # The pass changes attributes only, so the operators are still in the order in which they were located.
        ops = list(main.regions[0].blocks[0].operations)
        assert len(ops) == self._num_ops, "propagation makes no operators"
        found: list[Layout | None] = [None] * len(self.graph.tensors)
        whole = (REPLICATED,) * len(self.mesh.sizes)
        for tensor, given in zip(self._arguments, main.attributes["arg_attrs"], strict=True):
            if tensor is not None:
                attributes = ir.DictAttr(given)
                found[tensor] = self._parse_sharding(attributes[SHARDING])[0] if SHARDING in attributes else whole
        for each in self._made:
            attributes = ops[each.op].operation.attributes
            found[each.tensor] = (
                self._parse_sharding(attributes[SHARDING])[each.result] if SHARDING in attributes else whole
            )
        # Tensors that only rename another one were lowered to no operator and share its layout.
        for tensor, source in self._same:
            found[tensor] = found[source]
        return found

    def _parse_sharding(self, attribute: Any) -> tuple[Layout, ...]:
        """Return the layouts in an attribute, of one tensor or of each result; sub-axes count as no cut."""
        if attribute not in self._known:
            if sdy.TensorShardingPerValueAttr.isinstance(attribute):
                several = [sdy.TensorShardingAttr(each) for each in sdy.TensorShardingPerValueAttr(attribute).shardings]
            else:
                several = [sdy.TensorShardingAttr(attribute)]
            self._known[attribute] = tuple(self._layout(each) for each in several)
        return self._known[attribute]

    def _layout(self, sharding: Any) -> Layout:
        # Shardy lists axes by dim, our layouts list the cut dim by axis.
        found = [REPLICATED] * len(self.mesh.names)
        for dim, each in enumerate(sharding.dimension_shardings):
            for axis in sdy.DimensionShardingAttr(each).axes:
                reference = sdy.AxisRefAttr(axis)
                if reference.sub_axis_info is None:
                    found[self.mesh.names.index(reference.name)] = dim
        return tuple(found)

    def _locate_tensors(self) -> tuple[int, list[_Made], list[tuple[int, int]]]:
        """Locate the tensors of the graph in the module.

        Returns:
            The number of operators of the module, the origin of each tensor, and pairs of a tensor and another one that
            it renames.
        """
        flat = self._inlined.flat
        ops = list(_main(self._module.operation).regions[0].blocks[0].operations)
        # A step may lower to several operators. Its tensors are matched from the last operator on, by their shapes.
        results: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
        for number, op in enumerate(ops):
            step = re.search(r"/step_(\d+)/", str(op.location))
            if step:
                own = results.setdefault(int(step[1]), [])
                own += [(number, slot, _shape(result)) for slot, result in enumerate(op.results)]
        tensors = {tensor.name: number for number, tensor in enumerate(self.graph.tensors)}
        made: list[_Made] = []
        same: list[tuple[int, int]] = []
        for number, step in enumerate(flat.steps):
            own = list(results.get(number, []))
            for value in reversed(step.results):
                array = flat.values[value]
                tensor = tensors.get(array.name)
                while own and own[-1][2] != array.shape:
                    own.pop()
                if own:
                    op, slot, _ = own.pop()
                    if tensor is not None:
                        made.append(_Made(tensor=tensor, op=op, result=slot))
                elif tensor is not None:
                    same += self._source(step, array.shape, tensor, tensors)
        return len(ops), made, same

    def _source(
        self, step: Step, shape: tuple[int, ...], tensor: int, tensors: Mapping[str, int]
    ) -> list[tuple[int, int]]:
        """Return the operand that a step without a lowered operator passes on, if it has the same shape."""
        flat = self._inlined.flat
        sources = [flat.values[operand] for operand in step.operands]
        named = [tensors[each.name] for each in sources if each.name in tensors and each.shape == shape]
        return [(tensor, named[0])] if named else []


class _Inlined:
    """Function of a program with its calls inlined, and each step of the flat program in a scope with its number.

    Attributes:
        flat: Flat program.
        arguments: Numbers of the arguments' values in the flat program.
        shapes: Shapes of the arguments.
    """

    def __init__(self, program: Program) -> None:
        self.flat, self.arguments, _ = flatten_trace(program)
        self._jaxpr = program.jaxpr
        self.shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in program.jaxpr.jaxpr.invars]
        self._position = 0

    def __call__(self, *leaves: Any) -> list[Any]:
        self._position = 0
        given = [(leaf, self.flat.values[number].varies) for leaf, number in zip(leaves, self.arguments, strict=True)]
        return [value for value, _ in self._run(self._jaxpr, given)]

    def _run(self, jaxpr: Jaxpr | ClosedJaxpr, arguments: Sequence[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
        """Evaluate a jaxpr; return its values, and for each whether it depends on an argument."""
        closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, [])
        consts = [(const, False) for const in closed.consts]
        known: dict[Var, tuple[Any, bool]] = dict(
            zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*consts, *arguments), strict=True)
        )

        def read(atom: Any) -> tuple[Any, bool]:
            return (atom.val, False) if isinstance(atom, Literal) else known[atom]

        for equation in closed.jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            known.update(zip(equation.outvars, self._equation(equation, operands), strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, operands: Sequence[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
        name = equation.primitive.name
        values = [value for value, _ in operands]
        is_empty = all(0 in shape_of(var.aval) for var in equation.outvars)
        if is_empty or not any(varies for _, varies in operands):
            return [(value, False) for value in _evaluate(equation, values)]
        if name in INLINED:
            return self._run(*called_by(equation, operands))
        if name == "scan":
            raise ConfigError(
                "has a loop, through which shardings are not read back",
                key="program",
                value=name,
                nearest="a program whose layers stand one after the other",
            )
        step = self.flat.steps[self._position]
        assert step.primitive == name, f"{step.name!r} stands where the jaxpr has {name}"
        with jax.named_scope(f"step_{self._position}"):
            found = _evaluate(equation, values)
        self._position += 1
        return [(value, True) for value in found]


def _evaluate(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    given = equation.primitive.get_bind_params(equation.params)  # type: ignore[no-untyped-call] # JAX has no types there
    functions, params = given if isinstance(given, tuple) else ((), given)  # older versions of JAX tell both
    found = equation.primitive.bind(*functions, *operands, **params)  # type: ignore[no-untyped-call] # JAX has no types there
    return list(found) if equation.primitive.multiple_results else [found]


def _main(module: Any) -> Any:
    ops = module.regions[0].blocks[0].operations
    return next(op for op in ops if isinstance(op, func.FuncOp) and op.name.value == "main")


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)
