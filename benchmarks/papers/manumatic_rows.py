"""Rows of ManuMatic's tables: the assumptions of each table, the plans that each row may take, and the best step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.papers.layer_figures import LayerFigures, layer_figures
from benchmarks.papers.layer_pipelines import PipelineScore, pipeline_of_figures, with_best_stages, with_equal_shares
from benchmarks.papers.symbolic_prices import Reading, Volumes
from benchmarks.papers.vocabulary import EXPERTS, SEQUENCE, restricted
from costmodels.job.model_catalog import find_model
from costmodels.job.model_spec import ModelSpec
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import Graph
from costmodels.sharding.named_plans import ByName, plan_by_names
from costmodels.sharding.plan import Plan, cost_of, violations
from hardware.cluster import Cluster
from hardware.cluster_file import find_cluster
from tuner.planners.engine.outcome import Limits
from tuner.planners.pipeline.stages import Pipeline
from tuner.planners.sharding.forward_plans import forward_of, with_backward
from tuner.planners.sharding.pins import Pin, resolve_pins
from tuner.planners.sharding.recursive import Level, Order, recursive_plan, refine_mesh

PLANNED_LAYERS = 3
"""Number of planned layers: a first, a last, and one between them that stands for all others."""
NPUS = 8
"""Number of devices of a host."""
PROOF = Limits(nodes=20_000)
"""Limit on the search for the best stages, in nodes so that the result is the same on every machine."""
STACKED = frozenset({"gates"})
"""Factors that MindSpore cannot cut: the two inputs of a gated MLP are one product here but two products there."""

BATCH, HEADS = ("batch",), ("kv_heads", "heads")
TENSOR = (*HEADS, "ffn", "expert_ffn", "vocabulary")
ALONG = ("sequence", "queries", "chunks")
EXPERT_OPS = tuple(f"*.moe_mlp.{role}" for role in ("up", "down", "activation"))
BETWEEN = ("*norm", "*residual")
"""Operators that sequence parallelism cuts beside tensor parallelism (Korthikanti et al. 2022)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Assumptions of a table.

    Attributes:
        table: Number of the paper's table.
        model: Model of the table.
        layers: Number of layers that are trained.
        sequence_length: Number of tokens of a sequence.
        sequences: Number of sequences of a step.
        hosts: Number of hosts with eight devices.
        stages: Numbers of pipeline stages that a row may take.
        order: Order of D-Rec's visits.
        reading: Interpretation of D-Rec's volumes between operators.
        missing: Factors that D-Rec's vocabulary lacks.
        pinned_ops: Operators that the user pins.
        pinned_dim: Dim of these operators that is pinned.
        pinned_ways: Number of parts of the pinned dim.
        pinned_axis: Axis of D-Rec's mesh that cuts it, `host` or `npu`; None for whichever comes first.
        flop_share: Share of the peak that products reach.
        micro_batch: Sequences of one micro-batch over all replicas; None leaves it to each row.
        overlaps: Whether collectives that run once a step hide behind a micro-batch.
        link_share: Bandwidth inside a host over half of 392 GB/s.
        core_flop_per_s: Speed of a processor core in fp32 that stands for a device [FLOP/s]; None for devices as they
            are. Bandwidths shrink with it, so that communication keeps its share of a step.
        width_share: Width of the model over that of the table's model.
        precision: Precision of the model.
        planned_layers: Number of planned layers.
    """

    table: int
    model: ModelSpec
    layers: int
    sequence_length: int
    sequences: int
    hosts: int = 1
    stages: tuple[int, ...] = (1,)
    order: Order = "price"
    reading: Reading = "by_coefficient"
    missing: frozenset[str]
    pinned_ops: tuple[str, ...]
    pinned_dim: str
    pinned_ways: int = NPUS
    pinned_axis: str | None = None
    flop_share: float = 1.0
    micro_batch: int | None = None
    overlaps: bool = False
    link_share: float = 1.0
    core_flop_per_s: float | None = None
    width_share: float = 1.0
    precision: str = "bf16"
    planned_layers: int = PLANNED_LAYERS

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins of the user."""
        return tuple(
            Pin(op=op, dim=self.pinned_dim, ways=self.pinned_ways, axis=self.pinned_axis) for op in self.pinned_ops
        )

    @property
    def cluster(self) -> Cluster:
        """Hosts of eight 910B: 392 GB/s to seven peers, both directions together, and 25 GB/s to other hosts."""
        cluster = find_cluster("ascend-910b", hosts=self.hosts)
        (group,) = cluster.groups
        # A sweep changes these two assumptions; the factor 1 leaves the catalog's figures.
        peak = group.device.peak_flop_per_s("bf16") * self.flop_share
        # An element has two bytes in bf16 and four in the fp32 of a core; a narrower model has fewer FLOPs per element.
        slower = 1.0 if self.core_flop_per_s is None else 2 * self.core_flop_per_s / peak / self.width_share
        (link,) = group.intra_links
        link = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * self.link_share * slower)
        device = replace(
            group.device,
            bf16_flop_per_s=peak,
            fp16_flop_per_s=peak,
            fp32_flop_per_s=self.core_flop_per_s or group.device.fp32_flop_per_s,
            memory_bandwidth_bytes_per_s=group.device.memory_bandwidth_bytes_per_s * slower,
            scale_up=link,
        )
        return replace(cluster, groups=(replace(group, device=device, intra_links=(link,)),))


MATMULS = ("*.attention.qkv", "*.attention.out", "*.dense_mlp.up", "*.dense_mlp.down")
BMMS = ("*.moe_mlp.up", "*.moe_mlp.down")
SCENARIOS = {
    1: Scenario(
        table=1,
        model=find_model("mixtral-8x7b"),
        layers=16,
        sequence_length=4096,
        sequences=8,
        missing=EXPERTS,
        pinned_ops=BMMS,
        pinned_dim="experts",
    ),
    2: Scenario(
        table=2,
        model=find_model("llama3-8b"),
        layers=32,
        sequence_length=8192,
        sequences=4,
        missing=SEQUENCE,
        pinned_ops=MATMULS,
        pinned_dim="sequence",
    ),
    3: Scenario(
        table=3,
        model=find_model("qwen2.5-72b"),
        layers=80,
        sequence_length=32768,
        sequences=16,
        hosts=8,
        stages=(2, 4, 8),
        missing=SEQUENCE,
        pinned_ops=MATMULS,
        pinned_dim="sequence",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """One plan of a row.

    Attributes:
        plan: Plan of a training step of PLANNED_LAYERS layers.
        in_words: Degrees of a plan by hand, or the planner's mesh.
        zero_stage: Stage of ZeRO; None if the planner has placed the states itself.
    """

    plan: Plan
    in_words: str
    zero_stage: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Best step of a row.

    Attributes:
        score: Step time and memory of all layers.
        in_words: Degrees of a plan by hand, or the planner's mesh.
        pp: Number of pipeline stages.
        micro_batch: Sequences of one micro-batch over all replicas.
        zero_stage: Stage of ZeRO; None if the planner has placed the states itself.
        tokens_per_s: Throughput of all devices [tokens/s].
    """

    score: PipelineScore
    in_words: str
    pp: int
    micro_batch: int
    zero_stage: int | None
    tokens_per_s: float


MEGATRON, EXPERT, WIDE = "megatron", "expert", "expert, wide"
D_REC, FULL, IN_SECONDS, PIN = "d-rec", "d-rec, full vocabulary", "d-rec, full, in seconds", "pin"
ROWS = (MEGATRON, D_REC, FULL, IN_SECONDS, PIN, EXPERT, WIDE)
PLANNED_STAGES = " + bmpipe"


def rows_of(scenario: Scenario) -> dict[str, Scored]:
    """Compute the best step of every row; with several hosts, some rows also with planned stages."""
    found = {row: best_of(scenario, row) for row in ROWS}
    if scenario.hosts > 1:
        for row in (D_REC, FULL, PIN):
            found[row + PLANNED_STAGES] = best_of(scenario, row, plans_stages=True)
    return found


def best_of(scenario: Scenario, row: str, *, plans_stages: bool = False) -> Scored:
    """Return the fastest fitting step over stages, micro-batches and ZeRO's stages, or the fastest if none fits."""
    scored = _all_scored(scenario, row, plans_stages=plans_stages)
    return min(scored, key=lambda each: (not each.score.fits, each.score.step_s))


def _all_scored(scenario: Scenario, row: str, *, plans_stages: bool) -> Iterator[Scored]:
    # The paper states no micro-batch, so each row takes the best of all that divide the batch.
    sizes = _divisors(scenario.sequences) if scenario.micro_batch is None else [scenario.micro_batch]
    for pp, micro_batch in itertools.product(scenario.stages, sizes):
        num_micro_batches = scenario.sequences // micro_batch
        for candidate in candidates(scenario, row, pp, micro_batch):
            # The figures of one layer extend to all layers and stages without planning again.
            figures = _figures(candidate.plan)
            for score in _scores(scenario, figures, pp, num_micro_batches, plans_stages=plans_stages):
                yield Scored(
                    score=score,
                    in_words=candidate.in_words,
                    pp=pp,
                    micro_batch=micro_batch,
                    zero_stage=candidate.zero_stage,
                    tokens_per_s=scenario.sequences * scenario.sequence_length / score.step_s,
                )


def candidates(scenario: Scenario, row: str, pp: int, micro_batch: int) -> Iterator[Candidate]:
    """Yield the plans of a row for a number of stages and of sequences in a micro-batch."""
    step = step_of(scenario, micro_batch)
    if row == IN_SECONDS:
        mesh, fine, levels = _refine_stage_mesh(scenario, pp)
        plan = recursive_plan(restricted(step, STACKED), fine, levels, order=scenario.order)
        yield Candidate(plan=plan, in_words=mesh.in_words, zero_stage=None)
        return
    forward = forward_of(step)
    for in_words, plan in forward_plans(scenario, row, forward, pp):
        for zero_stage in (1, 3):
            followed = with_backward(step, plan, zero_stage=zero_stage)
            assert violations(followed) == (), f"{row} can run"
            yield Candidate(plan=followed, in_words=in_words, zero_stage=zero_stage)


def forward_plans(scenario: Scenario, row: str, forward: Graph, pp: int) -> Iterator[tuple[str, Plan]]:
    """Yield plans of the forward pass on the devices of one stage, found in the row's way."""
    if row in (MEGATRON, EXPERT, WIDE):
        yield from _plans_by_hand(scenario, row, forward, pp)
        return
    pins = scenario.pins if row == PIN else ()
    graph = restricted(forward, STACKED if row == FULL else STACKED | scenario.missing, pins)
    mesh, fine, levels = _refine_stage_mesh(scenario, pp)
    found = resolve_pins(pins, graph, mesh, levels)
    prices = Volumes(reading=scenario.reading)
    plan = recursive_plan(graph, fine, levels, order=scenario.order, closed=found.closed, prices=prices)
    yield mesh.in_words, plan


def _refine_stage_mesh(scenario: Scenario, pp: int) -> tuple[DeviceMesh, DeviceMesh, tuple[Level, ...]]:
    """Return the mesh of one stage's devices, the refined mesh, and the levels into which D-Rec cuts it."""
    devices = scenario.hosts * NPUS // pp
    # A stage within one host has a single axis of NPUs.
    axes = {"host": devices // NPUS, "npu": NPUS} if devices > NPUS else {"npu": devices}
    mesh = DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=scenario.cluster)
    return mesh, *refine_mesh(mesh)


def _plans_by_hand(scenario: Scenario, row: str, forward: Graph, pp: int) -> Iterator[tuple[str, Plan]]:
    """Yield every split of a stage's devices into data, context or expert, and tensor parallelism.

    Megatron has data and tensor parallelism only. The row `expert` is the paper's hand-tuned plan: it adds expert
    parallelism over the data parallel devices, or sequence parallelism beside tensor parallelism. The wide row adds
    context parallelism, and experts over the tensor parallel devices.
    """
    devices = scenario.hosts * NPUS // pp
    batch = _size_of(forward, "batch")
    for dp, cp in itertools.product(_divisors(devices), _divisors(devices)):
        # All devices of the stage are used; the remaining degree follows.
        tp = devices // (dp * cp)
        if devices % (dp * cp) or batch % dp or (cp > 1 and row != WIDE):
            continue
        mesh = DeviceMesh(names=("dp", "cp", "tp"), sizes=(dp, cp, tp), cluster=scenario.cluster)
        for in_words, axes in _axes(scenario, row):
            plan = plan_by_names(forward, mesh, axes)
            if _uses_all(plan):
                yield f"{mesh.in_words}{in_words}", plan


def _axes(scenario: Scenario, row: str) -> Iterator[tuple[str, Mapping[str, ByName]]]:
    """Yield the factors that each axis cuts, with a suffix for the plan's name."""
    everything = "*"
    data, along, tensor = [(everything, BATCH)], [(everything, ALONG)], [(everything, TENSOR)]
    between = [(op, ALONG) for op in BETWEEN]
    # The first rule that matches an operator applies, so special rules stand before general ones.
    experts = [(op, ("experts",)) for op in EXPERT_OPS]
    if row == MEGATRON:
        yield "", {"dp": data, "cp": along, "tp": tensor}
    elif scenario.table == 1:
        yield ",ep", {"dp": [*experts, *data], "cp": [*experts, *along], "tp": tensor}
        if row == WIDE:
            wide = [*experts, *between, *tensor]
            yield ",ep,sp", {"dp": [*experts, *data], "cp": [*experts, *along], "tp": wide}
    else:
        yield ",sp", {"dp": data, "cp": along, "tp": [*between, *tensor]}


def _uses_all(plan: Plan) -> bool:
    """Return whether every axis cuts every product of the layers; degrees that a model cannot take give no plan."""
    sizes = plan.mesh.sizes
    products = [
        number
        for number, op in enumerate(plan.graph.ops)
        if op.precision and op.name.endswith((".qkv", ".up", ".down"))
    ]
    # A negative entry marks an axis that serves no factor of the operator, which would leave devices idle.
    return all(plan.served[number, axis] >= 0 for number in products for axis, size in enumerate(sizes) if size > 1)


def _scores(
    scenario: Scenario, figures: LayerFigures, pp: int, num_micro_batches: int, *, plans_stages: bool
) -> Iterator[PipelineScore]:
    """Yield the scores of equal stages that recompute nothing or everything, and of the best stages if asked for."""
    (device,) = scenario.cluster.devices

    def pipeline(*, may_recompute: bool) -> Pipeline:
        return pipeline_of_figures(
            figures,
            num_layers=scenario.layers,
            pp=pp,
            num_micro_batches=num_micro_batches,
            capacity_bytes=float(device.memory_bytes),
            may_recompute=may_recompute,
        )

    overlaps = scenario.overlaps
    for recomputes in (False, True):
        problem = pipeline(may_recompute=recomputes)
        yield with_equal_shares(problem, figures, recomputes=recomputes, overlaps=overlaps)
        if plans_stages:
            best = with_best_stages(problem, figures, limits=PROOF, overlaps=overlaps)
            if best is not None:
                yield best


@cache
def step_of(scenario: Scenario, micro_batch: int) -> Graph:
    """Build the graph of a training step of the planned layers."""
    job = TrainingJob(
        model=scenario.model,
        sequence_length=scenario.sequence_length,
        global_batch_size=micro_batch,
        precision=scenario.precision,
    )
    return transformer_graph(job, micro_batch_size=micro_batch, num_layers=scenario.planned_layers)


def _figures(plan: Plan) -> LayerFigures:
    return layer_figures(plan, cost_of(plan), num_layers=PLANNED_LAYERS)


def _size_of(graph: Graph, name: str) -> int:
    """Return the size of the factor of that name."""
    return next(factor.size for op in graph.ops for factor in op.rule.factors if factor.name == name)


def _divisors(number: int) -> Sequence[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
