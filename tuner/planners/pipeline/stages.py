"""The pipeline problem: which layers each stage holds, which kind of device serves it, and what it recomputes.

The layers of a model stand in a fixed order and are cut into consecutive stages. A stage on a slow kind of device
should hold fewer of them; one that holds many micro-batches in flight, or little memory, recomputes some.

Letters: L layers of T types, S stages, K kinds of devices.

Source of the objective: Narayanan et al. 2021, sections 2.2.1 and 2.2.2: m micro-batches pass the slowest stage one
after the other, and each of the others delays the first one once, a vpp-th of that with vpp chunks per stage. It is
m times the slowest stage plus `costmodels.step.schedules.bubble_s`, with the hand-overs between stages added.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hardware.arrays import FloatArray, IntArray
from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """A model's layers and the devices that may serve its stages.

    A device stands for all that work on one stage together. Times are forward and backward together, of one
    micro-batch.

    Attributes:
        layer_type: Of every layer, from 0 [L].
        layer_s: Time of a layer of each type on each kind [K, T].
        recompute_s: What recomputing it adds [K, T].
        first_s: What the first stage does besides: the embedding [K].
        last_s: What the last stage does besides: the head and the loss [K].
        stage_s: What every stage does besides [K].
        hop_s: Handing a micro-batch on from a stage of one kind to the next of another, and its gradient back [K, K].
        state_bytes: Weights, gradients and optimizer state of a layer of each type [T].
        kept_bytes: Its activations of one micro-batch in flight [T].
        recomputed_bytes: The same if the layer is recomputed; no more than `kept_bytes` [T].
        first_bytes: What the first stage holds besides.
        last_bytes: What the last stage holds besides.
        working_bytes: What every stage needs besides.
        capacity_bytes: Of each kind [K].
        supply: Stages that each kind can serve [K].
        in_flight: Micro-batches whose activations each stage holds at its peak [S].
        num_micro_batches: m.
        vpp: Chunks per stage, which divide the bubble.
        kinds: The kind of every stage where that is settled; None leaves it open.
    """

    layer_type: IntArray
    layer_s: FloatArray
    recompute_s: FloatArray
    first_s: FloatArray
    last_s: FloatArray
    stage_s: FloatArray
    hop_s: FloatArray
    state_bytes: FloatArray
    kept_bytes: FloatArray
    recomputed_bytes: FloatArray
    first_bytes: float
    last_bytes: float
    working_bytes: float
    capacity_bytes: FloatArray
    supply: IntArray
    in_flight: FloatArray
    num_micro_batches: int
    vpp: int = 1
    kinds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks what a user can get wrong, and the shapes.

        Raises:
            ConfigError: there are fewer layers than stages, or fewer devices.
        """
        num_kinds, num_types = self.layer_s.shape
        shapes = {
            (num_kinds,): (self.first_s, self.last_s, self.stage_s, self.capacity_bytes, self.supply),
            (num_types,): (self.state_bytes, self.kept_bytes, self.recomputed_bytes),
            (num_kinds, num_types): (self.recompute_s,),
            (num_kinds, num_kinds): (self.hop_s,),
        }
        for shape, arrays in shapes.items():
            assert all(array.shape == shape for array in arrays), f"an array does not have the shape {shape}"
        assert (self.recomputed_bytes <= self.kept_bytes).all(), "recomputing a layer never takes memory"
        if self.num_stages > self.num_layers:
            raise ConfigError(
                f"must be at most the number of layers, {self.num_layers}", key="pp", value=self.num_stages
            )
        if self.num_stages > self.supply.sum():
            raise ConfigError(
                f"must be at most the stages that the devices can serve, {self.supply.sum()}",
                key="pp",
                value=self.num_stages,
            )
        if self.kinds is not None and len(self.kinds) != self.num_stages:
            raise ConfigError(f"must name one kind per stage, {self.num_stages}", key="kinds", value=self.kinds)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layer_type)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.in_flight)

    @property
    def num_kinds(self) -> int:
        """K."""
        return len(self.layer_s)

    @property
    def num_types(self) -> int:
        """T."""
        return int(self.layer_s.shape[1])

    @property
    def weights(self) -> tuple[float, float]:
        """What the slowest stage's time counts in the step, and what the sum of all stages and hops counts."""
        return self.num_micro_batches - 1 / self.vpp, 1 / self.vpp

    def may_serve(self, kind: int, stage: int) -> bool:
        """Whether it is not settled that another kind serves the stage."""
        return self.kinds is None or self.kinds[stage] == kind

    def layers_before(self) -> IntArray:
        """Layers of each type before every boundary [L + 1, T]."""
        is_type = self.layer_type[:, None] == np.arange(self.num_types)
        return np.concatenate([np.zeros((1, self.num_types), dtype=np.int64), np.cumsum(is_type, axis=0)])

    def fixed_s(self, kind: int, stage: int) -> float:
        """Time of a stage beside its layers."""
        fixed = self.stage_s[kind]
        fixed += self.first_s[kind] if stage == 0 else 0.0
        fixed += self.last_s[kind] if stage == self.num_stages - 1 else 0.0
        return float(fixed)

    def fixed_bytes(self, stage: int) -> float:
        """Memory of a stage beside its layers."""
        fixed = self.working_bytes
        fixed += self.first_bytes if stage == 0 else 0.0
        fixed += self.last_bytes if stage == self.num_stages - 1 else 0.0
        return fixed

    def step_s(self, stage_s: Sequence[float], kinds: Sequence[int]) -> float:
        """Time of one step, from the time of each stage [S] and its kind [S]."""
        of_slowest, of_sum = self.weights
        hops_s = sum(float(self.hop_s[pair]) for pair in itertools.pairwise(kinds))
        return of_slowest * max(stage_s) + of_sum * (sum(stage_s) + hops_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a plan.

    Attributes:
        kind: Of the devices that serve it.
        first_layer: From 0.
        num_layers: From there on.
        recomputed: How many of each type are recomputed [T].
        time_s: Of one micro-batch, forward and backward.
        memory_bytes: At its peak.
    """

    kind: int
    first_layer: int
    num_layers: int
    recomputed: tuple[int, ...]
    time_s: float
    memory_bytes: float

    @property
    def num_recomputed(self) -> int:
        """Layers that are recomputed."""
        return sum(self.recomputed)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """A solution of the pipeline problem."""

    stages: tuple[Stage, ...]
    step_s: float


def plan_of(
    pipeline: Pipeline, kinds: Sequence[int], num_layers: Sequence[int], recomputed: Sequence[Sequence[int]]
) -> StagePlan:
    """The plan that these decisions make; whether it fits is not asked.

    Args:
        pipeline: The problem.
        kinds: Of each stage [S].
        num_layers: Of each stage [S].
        recomputed: Layers of each type that each stage recomputes [S, T].
    """
    before = pipeline.layers_before()
    bounds = [0, *itertools.accumulate(num_layers)]
    stages = []
    for stage, (kind, count) in enumerate(zip(kinds, num_layers, strict=True)):
        counts = before[bounds[stage + 1]] - before[bounds[stage]]
        again = np.array(recomputed[stage])
        time_s = pipeline.fixed_s(kind, stage) + counts @ pipeline.layer_s[kind] + again @ pipeline.recompute_s[kind]
        held = (counts - again) @ pipeline.kept_bytes + again @ pipeline.recomputed_bytes
        memory_bytes = pipeline.fixed_bytes(stage) + counts @ pipeline.state_bytes + pipeline.in_flight[stage] * held
        stages.append(
            Stage(
                kind=kind,
                first_layer=bounds[stage],
                num_layers=count,
                recomputed=tuple(int(number) for number in again),
                time_s=float(time_s),
                memory_bytes=float(memory_bytes),
            )
        )
    return StagePlan(stages=tuple(stages), step_s=pipeline.step_s([stage.time_s for stage in stages], list(kinds)))
