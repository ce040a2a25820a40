"""Plans of a user's own step on every mesh of its devices.

A mesh has the axes `data` and `model`, which the degrees `dp` and `tp` of a candidate count; the last axis is the
fastest, so that `model` stays inside hosts as far as it fits. On each mesh there are up to three candidates:

    plan=hand, zero_stage=0    the cheapest plan by hand that cuts the batch by `data` and keeps parameters whole along
                               it: plain data parallelism, with Megatron's cuts by `model`
    plan=hand, zero_stage=3    the cheapest plan by hand that also cuts parameters by `data`: FSDP
    plan=descent               what the study's planner finds, if it is none of these

A factory that takes `micro_batches` has them for each size of micro-batch of the study, `mbs`.

Plans by hand are those of `tuner/planners/toast/by_hand.py`, from the roles of the graph's dims. The step time and the
peak memory of each are the planner's own (`costmodels/sharding/plan.py`): nothing overlaps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.own_step import OwnStep
from tuner.own_step.tracing import traced
from tuner.space.dimensions import divisors

if TYPE_CHECKING:  # they load planners, which most studies do without
    from costmodels.sharding.device_mesh import DeviceMesh
    from costmodels.sharding.graph import Graph
    from costmodels.sharding.plan import Plan

OwnPlanner = Literal["megatron", "recursive", "descent", "toast"]
"""Planner beside the plans by hand; `megatron` is none."""

DATA, MODEL = "data", "model"
"""Axes of the meshes, which `dp` and `tp` count."""

WHOLE, SHARDED = 0, 3
"""ZeRO stages of plans that keep parameters whole along `data`, and of those that cut them."""

MOST_BY_HAND = 64
"""Most plans by hand that are looked at on a mesh, the cheapest first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnCandidate:
    """One plan on one mesh.

    Attributes:
        config: Candidate with this plan.
        plan: Plan of the step.
        compute_s: Predicted time of compute [s].
        data_s: Predicted time of collectives along `data` alone [s].
        model_s: Predicted time of all other collectives [s].
        weights_bytes: Parameters that a device keeps [bytes].
        optimizer_bytes: Other states that a device keeps [bytes].
        peak_bytes: Predicted peak memory of a device [bytes].
    """

    config: ParallelConfig
    plan: Plan
    compute_s: float
    data_s: float
    model_s: float
    weights_bytes: float
    optimizer_bytes: float
    peak_bytes: float

    @property
    def step_time_s(self) -> float:
        """Predicted step time, without overlap [s]."""
        return self.compute_s + self.data_s + self.model_s

    @property
    def in_words(self) -> str:
        """Candidate as `--config` takes it."""
        return words_of(self.config)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnMesh:
    """One mesh with its candidates.

    Attributes:
        candidates: Candidates; empty if the mesh is left out.
        rule: Name of the rule that leaves it out, `data` or `model`; empty if none does.
        reason: Why the mesh is left out; empty if it is not.
    """

    candidates: tuple[OwnCandidate, ...]
    rule: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnStepPlans:
    """Plans of the step that a factory returns, made when they are first asked for; see `trials/own_step.py`.

    Attributes:
        step: Step with its factory.
        cluster: Cluster of the study.
        planner: Planner beside the plans by hand.
        mbs: Sizes of micro-batches that are candidates, in rows of each device along `data`; empty if the whole batch
            is one.
    """

    step: OwnStep
    cluster: Cluster
    planner: OwnPlanner = "descent"
    mbs: tuple[int, ...] = ()
    _meshes: dict[int, OwnMesh] = field(default_factory=dict)

    @property
    def factory(self) -> str:
        """Factory of the step, as `module:factory`."""
        return self.step.factory

    @property
    def degrees(self) -> list[int]:
        """All values of `tp`: the divisors of the number of devices."""
        return divisors(self.cluster.num_devices)

    def on(self, tp: int) -> OwnMesh:
        """Return the mesh with `tp` devices along `model`, with its candidates.

        Raises:
            ConfigError: The step cannot be imported or traced.
        """
        if tp not in self._meshes:
            self._meshes[tp] = self._plan_mesh(tp)
        return self._meshes[tp]

    def find(self, config: ParallelConfig) -> OwnCandidate | None:
        """Return the candidate of a configuration; None if there is none."""
        if self.cluster.num_devices % config.tp or config.dp * config.tp != self.cluster.num_devices:
            return None
        return next((each for each in self.on(config.tp).candidates if each.config == config), None)

    def plan(self, config: ParallelConfig) -> Plan:
        """Return the plan of a candidate."""
        return self._known(config).plan

    def step_time_s(self, config: ParallelConfig) -> tuple[float, float]:
        """Return the predicted time of compute and that of all collectives of a candidate [s]."""
        found = self._known(config)
        return found.compute_s, found.data_s + found.model_s

    def peak_memory_bytes(self, config: ParallelConfig) -> float:
        """Return the predicted peak memory of a device of a candidate [bytes]."""
        return self._known(config).peak_bytes

    def step_of(self, config: ParallelConfig) -> OwnStep:
        """Return the step of a candidate, with its number of micro-batches."""
        count = self.rows // (config.dp * config.mbs) if self.mbs else 1
        return replace(self.step, micro_batches=count)

    @property
    def rows(self) -> int:
        """Rows of the batch: the first dim of the first input of a step with one micro-batch; 0 without inputs."""
        return next(iter(self._batch_shape()), 0)

    @property
    def tokens(self) -> int:
        """Number of elements of the first input: tokens, if it holds their ids; 0 without inputs."""
        shape = self._batch_shape()
        return math.prod(shape) if shape else 0

    def _batch_shape(self) -> tuple[int, ...]:
        graph = self.graph()
        return next((shape for each in _batches(graph) if (shape := graph.tensors[each].shape)), ())

    def program(self, config: ParallelConfig | None = None) -> Any:
        """Return the trace of a candidate's step, or of one micro-batch: a `Program` of the library's frontend."""
        return traced(self.step if config is None else self.step_of(config)).program

    def graph(self) -> Graph:
        """Return the graph of the user's step with one micro-batch."""
        return traced(self.step).graph

    def fingerprint(self) -> str:
        """Return a text that changes with the user's program: a hash of its operators and shapes."""
        graph = self.graph()
        told = [(op.name, op.primitive, [graph.tensors[one].shape for one in op.results]) for op in graph.ops]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Return all plans that are made, for `restore`."""
        return {
            str(tp): {
                "rule": mesh.rule,
                "reason": mesh.reason,
                "candidates": [
                    {
                        "zero_stage": each.config.zero_stage,
                        "plan": each.config.plan,
                        "mbs": each.config.mbs,
                        "served": each.plan.served.T.tolist(),
                    }
                    for each in mesh.candidates
                ],
            }
            for tp, mesh in self._meshes.items()
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take the plans that `as_json` returned for the same program, in place of planning again.

        So what trials ran is what is handed out, also by a version of Meshtune that would plan otherwise. A mesh whose
        plans do not fit the program's graph is planned again.
        """
        from costmodels.sharding.plan import Plan, violations  # noqa: PLC0415 # see the imports above

        for name, kept in stored.items():
            if (
                not (name.isascii() and name.isdigit() and len(name) < 10)
                or int(name) not in self.degrees
                or int(name) in self._meshes
            ):
                continue
            mesh = self._mesh(int(name))
            dp, tp = mesh.sizes
            entries = kept["candidates"]
            if {each.get("mbs", 1) for each in entries} - {*self._sizes(dp)}:
                continue
            configs = [
                ParallelConfig(dp=dp, tp=tp, mbs=each.get("mbs", 1), zero_stage=each["zero_stage"], plan=each["plan"])
                for each in entries
            ]
            graphs = [traced(self.step_of(config)).graph for config in configs]
            tables = [np.array(each["served"], dtype=np.int64).T for each in entries]
            if any(table.shape != (len(graph.ops), 2) for graph, table in zip(graphs, tables, strict=True)):
                continue
            plans = [Plan(graph=graph, mesh=mesh, served=table) for graph, table in zip(graphs, tables, strict=True)]
            if any(violations(plan) for plan in plans):
                continue
            found = [_candidate(plan, config) for plan, config in zip(plans, configs, strict=True)]
            self._meshes[tp] = OwnMesh(candidates=tuple(found), rule=kept["rule"], reason=kept["reason"])

    def _mesh(self, tp: int) -> DeviceMesh:
        from costmodels.sharding.device_mesh import DeviceMesh  # noqa: PLC0415 # see the imports above

        return DeviceMesh(names=(DATA, MODEL), sizes=(self.cluster.num_devices // tp, tp), cluster=self.cluster)

    def _known(self, config: ParallelConfig) -> OwnCandidate:
        found = self.find(config)
        assert found is not None, f"{config} is no candidate of {self.factory}"
        return found

    def _sizes(self, dp: int) -> list[int]:
        """Return the sizes of micro-batches of which the batch is a multiple on `dp` devices along `data`."""
        return [size for size in self.mbs if self.rows and self.rows % (dp * size) == 0] if self.mbs else [1]

    def _plan_mesh(self, tp: int) -> OwnMesh:
        mesh = self._mesh(tp)
        dp = mesh.sizes[0]
        found: list[OwnCandidate] = []
        for size in self._sizes(dp):
            found += self._plan_step(mesh, ParallelConfig(dp=dp, tp=tp, mbs=size, zero_stage=WHOLE))
        if found:
            return OwnMesh(candidates=tuple(found))
        if not self._sizes(dp):
            sizes = ", ".join(map(str, self.mbs))
            reason = f"the batch of {self.rows} rows is no multiple of data={dp} times any of mbs={sizes}"
            return OwnMesh(candidates=(), rule="space.mbs", reason=reason)
        rule, reason = _why_left_out(self.graph(), mesh)
        return OwnMesh(candidates=(), rule=rule, reason=reason)

    def _plan_step(self, mesh: DeviceMesh, base: ParallelConfig) -> list[OwnCandidate]:
        """Return the candidates on a mesh with a size of micro-batches; none without plans by hand."""
        step = self.step_of(base)
        graph = traced(step).graph
        by_hand = self._by_hand(graph, mesh)
        found = [_candidate(plan, replace(base, zero_stage=stage)) for stage, plan in sorted(by_hand.items())]
        if by_hand and self.planner != "megatron":
            planned = _planned(graph, mesh, self.planner)
            if not self._is_known(planned, [*by_hand.values()], step):
                stage = SHARDED if _cuts_parameters(planned) else WHOLE
                found.append(_candidate(planned, replace(base, zero_stage=stage, plan=self.planner)))
        return found

    def _is_known(self, planned: Plan, by_hand: list[Plan], step: OwnStep) -> bool:
        """Return whether a plan is one by hand, or on one axis the plan that the mesh of the other axis has."""
        others = [plan.served for plan in by_hand]
        if planned.mesh.sizes[0] == 1 and planned.mesh.sizes[1] > 1:
            alike = [each for each in self.on(1).candidates if self.step_of(each.config) == step]
            others += [each.plan.served[:, ::-1] for each in alike]
        return any(np.array_equal(planned.served, served) for served in others)

    def _by_hand(self, graph: Graph, mesh: DeviceMesh) -> dict[int, Plan]:
        """Return the cheapest plans by hand that use both axes, by their ZeRO stage."""
        from tuner.planners.toast.by_hand import plans_by_hand  # noqa: PLC0415 # see the imports above

        memory_bytes = float(min(device.memory_bytes for device in self.cluster.devices))
        found: dict[int, Plan] = {}
        for plan in plans_by_hand(graph, mesh, memory_bytes=memory_bytes, most=MOST_BY_HAND):
            if _uses_axes(plan):
                found.setdefault(SHARDED if _cuts_parameters(plan) else WHOLE, plan)
        return found


def words_of(config: ParallelConfig) -> str:
    """Return a candidate as `--config` takes it, without the degrees that such studies lack."""
    mbs = f",mbs={config.mbs}" if config.mbs > 1 else ""
    return f"dp={config.dp},tp={config.tp}{mbs},zero_stage={config.zero_stage},plan={config.plan}"


def _planned(graph: Graph, mesh: DeviceMesh, planner: Any) -> Plan:
    """Return the planner's plan, within the memory of a device if it finds such a one."""
    from costmodels.sharding.overlap import overlaps  # noqa: PLC0415 # see above
    from tuner.planners.planning import ASSIGNED, EFFORT, MANY_OPS, PlannerOptions, plan_graph  # noqa: PLC0415 # see above

    is_small = len(graph.ops) <= MANY_OPS
    effort = EFFORT if is_small and overlaps(graph, mesh) else 0
    options = PlannerOptions(planner=planner, whole_axes=True, assigned=ASSIGNED if is_small else 0, effort=effort)
    capacity_bytes = float(min(device.memory_bytes for device in mesh.cluster.devices))
    found = plan_graph(graph, mesh, options)
    if found.cost.peak_memory_bytes <= capacity_bytes or planner == "recursive":
        return found.plan
    limited = replace(options, memory_bytes=capacity_bytes)
    try:
        return plan_graph(graph, mesh, limited).plan
    except ConfigError:  # nothing fits, and the space says so of this plan
        return found.plan


def _sources(plan: Plan, kinds: tuple[str, ...]) -> list[int]:
    """Return the tensors of some kinds with which a step begins."""
    from costmodels.sharding.graph import INPUT, STATE  # noqa: PLC0415 # see the imports above

    graph = plan.graph
    found = [op.results[0] for op in graph.ops if op.primitive in (INPUT, STATE)]
    return [tensor for tensor in found if graph.tensors[tensor].kind.value in kinds]


def _batches(graph: Graph) -> list[int]:
    """Return the tensors of data with which a step begins: those that it does not replace, if there are any."""
    from costmodels.sharding.graph import INPUT, STATE, TensorKind  # noqa: PLC0415 # see the imports above

    for primitive in (INPUT, STATE):
        found = [op.results[0] for op in graph.ops if op.primitive == primitive]
        data = [tensor for tensor in found if graph.tensors[tensor].kind is TensorKind.DATA]
        if data:
            return data
    return []


def _cuts_parameters(plan: Plan) -> bool:
    """Return whether some parameter is cut by `data`."""
    return any(DATA in axes for tensor in _sources(plan, ("parameter",)) for axes in plan.dims_of(tensor))


def _uses_axes(plan: Plan) -> bool:
    """Return whether `data` cuts the first dim of an input, as its batch, and `model` cuts something else.

    Otherwise another mesh has the same plan, or an axis' devices repeat each other's work.
    """
    data, model = plan.mesh.sizes
    first = [axes[0] for tensor in _batches(plan.graph) if (axes := plan.dims_of(tensor))]
    if data > 1 and not any(DATA in axes for axes in first):
        return False
    return model == 1 or (bool((plan.served[:, 1] >= 0).any()) and not any(MODEL in axes for axes in first))


def _why_left_out(graph: Graph, mesh: DeviceMesh) -> tuple[str, str]:
    """Return the rule that leaves a mesh without plans by hand out, and the reason in words."""
    data, model = mesh.sizes
    batches = sorted({shape[0] for tensor in _batches(graph) if (shape := graph.tensors[tensor].shape)})
    if data > 1 and not any(size % data == 0 for size in batches):
        sizes = ", ".join(map(str, batches)) or "none"
        return DATA, f"data={data} divides the first dim of no input, its batch (sizes: {sizes})"
    return MODEL, f"model={model} divides no dim of a layer that a plan by hand could cut"


def _candidate(plan: Plan, config: ParallelConfig) -> OwnCandidate:
    from costmodels.sharding.layouts import local_share  # noqa: PLC0415 # see the imports above
    from costmodels.sharding.overlap import overlaps, timeline_of  # noqa: PLC0415 # see the imports above
    from costmodels.sharding.plan import cost_of  # noqa: PLC0415 # see the imports above

    cost = cost_of(plan)
    shown = np.ones(len(plan.graph.tensors))
    if overlaps(plan.graph, plan.mesh):
        timeline = timeline_of(plan, cost)
        np.divide(timeline.exposed_s, timeline.moved_s, out=shown, where=timeline.moved_s > 0)
    along = {True: 0.0, False: 0.0}
    for each in cost.collectives:
        along[each.move.axes == (0,)] += each.seconds * each.times * float(shown[each.tensor])

    def held_bytes(kind: str) -> float:
        tensors = plan.graph.tensors
        return sum(
            tensors[one].num_bytes * local_share(plan.layout(one), plan.mesh.sizes) for one in _sources(plan, (kind,))
        )

    return OwnCandidate(
        config=config,
        plan=plan,
        compute_s=float(cost.compute_s.sum()),
        data_s=along[True],
        model_s=along[False],
        weights_bytes=held_bytes("parameter"),
        optimizer_bytes=held_bytes("optimizer"),
        peak_bytes=cost.peak_memory_bytes,
    )
