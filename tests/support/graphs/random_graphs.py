"""Hypothesis strategies for small graphs, meshes and plans that cover all features of the array IR."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Factor, FactorKind, Rule
from costmodels.sharding.graph import CONSTANT, INPUT, STATE, FusionKind, Graph, GraphBuilder, Op, TensorKind
from costmodels.sharding.plan import NONE, Plan
from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping

SIZES = (1, 2, 3, 4, 6, 8, 12)
SHAPES = ((), (8,), (12,), (1, 12), (4, 6), (8, 12), (24, 4), (2, 3, 8))
BYTES = (2, 4, 3e5, 1e7)
AXES = ("data", "model", "expert")
MESHES = tuple(
    sizes
    for count in (1, 2, 3)
    for sizes in itertools.product((1, 2, 3, 4, 6), repeat=count)
    if math.prod(sizes) in {2, 3, 4, 6, 8, 12}
)


def cluster_of(num_devices: int, devices_per_host: int | None = None) -> Cluster:
    """Build a cluster of this number of devices, on one host by default."""
    per_host = devices_per_host or num_devices
    hosts = num_devices // per_host
    keys = {"hosts": hosts, "devices_per_host": per_host, "hosts_per_domain": 1}
    return cluster_from_mapping({"name": "gb200-nvl72"} | keys, Path())


def mesh_of(*sizes: int, devices_per_host: int | None = None) -> DeviceMesh:
    """Build a mesh with this number of devices along each axis."""
    return DeviceMesh(names=AXES[: len(sizes)], sizes=sizes, cluster=cluster_of(math.prod(sizes), devices_per_host))


@st.composite
def meshes(draw, max_axes: int = 3) -> DeviceMesh:
    """Draw a mesh of up to `max_axes` axes, on one host or several."""
    sizes = draw(st.sampled_from([sizes for sizes in MESHES if len(sizes) <= max_axes]))
    count = math.prod(sizes)
    per_host = draw(st.sampled_from([size for size in range(1, count + 1) if count % size == 0]))
    return mesh_of(*sizes, devices_per_host=per_host)


@st.composite
def graphs(draw, min_ops: int = 1, max_ops: int = 6) -> Graph:
    """Draw a step of up to `max_ops` operators beside its sources; some have a backward pass or persistent states."""
    graph = GraphBuilder(name="random")
    known: list[int] = []
    states = []
    for number in range(draw(st.integers(1, 3))):
        primitive = draw(st.sampled_from((STATE, INPUT, CONSTANT)))
        shape, element_bytes = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(BYTES))
        known.append(graph.source(primitive, f"source.{number}", shape, element_bytes, TensorKind.DATA))
        if primitive == STATE:
            states.append(known[-1])
    num_ops = draw(st.integers(min_ops, max_ops))
    turn = draw(st.integers(0, num_ops))
    is_fused = draw(st.booleans())
    for number in range(num_ops):
        if number == turn:
            graph.begin_backward()
        operands = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        rule = draw(rules([graph.tensors[tensor].shape for tensor in operands]))
        results = [
            graph.tensor(
                f"{number}.{slot}", rule.result_shape(slot), draw(st.sampled_from(BYTES)), TensorKind.ACTIVATION
            )
            for slot in range(len(rule.results))
        ]
        kinds = [kind for kind in FusionKind if kind is not FusionKind.VIEW or len(operands) == len(results) == 1]
        graph.op(
            f"op.{number}",
            "any",
            operands,
            results,
            rule,
            flop=draw(st.sampled_from((0.0, 1e9, 1e12))),
            times=draw(st.sampled_from((1, 1, 1, 3))),
            precision=draw(st.sampled_from(("", "bf16"))),
            fusion=draw(st.sampled_from(kinds)) if is_fused else FusionKind.NONE,
        )
        known += results
    for state in states:
        alike = [tensor for tensor in known if graph.tensors[tensor].shape == graph.tensors[state].shape]
        if draw(st.booleans()):
            graph.keep(state, draw(st.sampled_from(alike)))
    return graph.done()


@st.composite
def rules(draw, shapes) -> Rule:
    """Draw a rule with operands of these shapes and one or two results."""
    sizes: list[int] = []

    def factor_of(size, taken):
        alike = [number for number, known in enumerate(sizes) if known == size and number not in taken]
        if alike and draw(st.integers(0, 3)):
            return draw(st.sampled_from(alike))
        sizes.append(size)
        return len(sizes) - 1

    def place_of(shape):
        place: list[tuple[int, ...]] = []
        taken: set[int] = set()
        for size in shape:
            outer = draw(st.sampled_from([part for part in SIZES if size % part == 0])) if size > 1 else size
            parts = (outer, size // outer) if 1 < outer < size and not draw(st.integers(0, 3)) else (size,)
            dim = []
            for part in parts if size > 1 or draw(st.booleans()) else ():
                dim.append(factor_of(part, taken))
                taken.add(dim[-1])
            place.append(tuple(dim))
        return tuple(place)

    operands = tuple(place_of(shape) for shape in shapes)
    results = tuple(
        result for _ in range(draw(st.sampled_from((1, 1, 1, 2)))) for result in [draw(_result(len(sizes)))]
    )
    written = {factor for place in results for dim in place for factor in dim}
    kinds = [FactorKind.MAP if number in written else FactorKind.REDUCTION for number in range(len(sizes))]
    for number in range(len(sizes)):
        if not draw(st.integers(0, 7)):
            kinds[number] = draw(st.sampled_from((FactorKind.BLOCKED, FactorKind.PERMUTATION)))
    factors = tuple(
        Factor(size=size, kind=kind, name=f"f{number}")
        for number, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    )
    return Rule(factors=factors, operands=operands, results=results)


@st.composite
def _result(draw, count):
    """Draw at most three factors in any order, sometimes two of them in one dim."""
    order = draw(st.permutations(range(count)))[: draw(st.integers(0, min(count, 3)))]
    if len(order) > 1 and not draw(st.integers(0, 3)):
        return ((order[0], order[1]), *((factor,) for factor in order[2:]))
    return tuple((factor,) for factor in order)


def choices(op: Op, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List all factors that axes of these sizes can shard in an operator [axes]; an axis of one device shards none."""
    rows = itertools.product(*((NONE, *(op.rule.cuttable if size > 1 else ())) for size in sizes))
    return [row for row in rows if _divides(op, row, sizes)]


def _divides(op: Op, row: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    ways = [1] * len(op.rule.factors)
    for factor, size in zip(row, sizes, strict=True):
        if factor != NONE:
            ways[factor] *= size
    return all(factor.size % count == 0 for factor, count in zip(op.rule.factors, ways, strict=True))


def all_plans(graph: Graph, mesh: DeviceMesh):
    """Enumerate all plans of a graph on a mesh."""
    for rows in itertools.product(*(choices(op, mesh.sizes) for op in graph.ops)):
        yield plan_of(graph, mesh, rows)


def num_plans(graph: Graph, mesh: DeviceMesh) -> int:
    """Count all plans of a graph on a mesh."""
    return math.prod(len(choices(op, mesh.sizes)) for op in graph.ops)


def plan_of(graph: Graph, mesh: DeviceMesh, rows) -> Plan:
    """Build a plan from the factors of each operator."""
    served = np.array(rows, dtype=np.int64).reshape(len(graph.ops), len(mesh.sizes))
    return Plan(graph=graph, mesh=mesh, served=served)


@st.composite
def plans(draw, max_ops: int = 6) -> Plan:
    """Draw any runnable plan of a random graph on a random mesh."""
    graph, mesh = draw(graphs(max_ops=max_ops)), draw(meshes())
    return plan_of(graph, mesh, [draw(st.sampled_from(choices(op, mesh.sizes))) for op in graph.ops])
