"""Pipeline problem: the layers of each stage, the kind of device that serves it, and the layers that it recomputes.

The layers of a model stand in a fixed order and are cut into consecutive stages. A stage on a slow kind of device
should hold fewer of them. A stage with many micro-batches in flight, or little memory, recomputes some.

Letters: L layers of T types, S stages, K kinds of devices, m micro-batches.

Source of the objective: Narayanan et al. 2021, sections 2.2.1 and 2.2.2. The m micro-batches pass the slowest stage one
after the other. Each other stage delays the first micro-batch once, by its time over vpp with vpp chunks per stage. The
step is m times the slowest stage, one micro-batch through all others, and the transfers between stages.
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
    """Layers of a model, and the devices that may serve its stages.

    A device stands for all devices that work on one stage together. Times are those of one micro-batch, forward and
    backward together.

    Attributes:
        layer_type: Type of every layer, from 0 [L].
        layer_s: Time of a layer of each type on each kind [K, T].
        recompute_s: Time that recomputing the layer adds [K, T].
        first_s: Time of the embedding on the first stage [K].
        last_s: Time of the head and the loss on the last stage [K].
        stage_s: Time of every stage beside its layers [K].
        hop_s: Time of handing a micro-batch from a stage of one kind to the next stage of another, and its gradient
            back [K, K].
        state_bytes: Weights, gradients and optimizer state of a layer of each type [T].
        kept_bytes: Activations of a layer for one micro-batch in flight [T].
        recomputed_bytes: Activations of a recomputed layer for one micro-batch in flight; at most `kept_bytes` [T].
        first_bytes: Memory that the first stage needs besides [bytes].
        last_bytes: Memory that the last stage needs besides [bytes].
        working_bytes: Memory that every stage needs besides [bytes].
        capacity_bytes: Memory of a device of each kind [K].
        supply: Number of stages that each kind can serve [K].
        in_flight: Micro-batches whose activations each stage holds at its peak [S].
        num_micro_batches: Number of micro-batches of a step, m.
        vpp: Chunks per stage, which divide the bubble.
        kinds: Kind of every stage where that is fixed; None leaves it open.
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
        """Check the user's input and the shapes.

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
        # Searches rely on this: recomputation only ever frees memory.
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
        """Number of layers, L."""
        return len(self.layer_type)

    @property
    def num_stages(self) -> int:
        """Number of stages, S."""
        return len(self.in_flight)

    @property
    def num_kinds(self) -> int:
        """Number of kinds of devices, K."""
        return len(self.layer_s)

    @property
    def num_types(self) -> int:
        """Number of types of layers, T."""
        return int(self.layer_s.shape[1])

    @property
    def weights(self) -> tuple[float, float]:
        """Weights in the step time of the slowest stage, and of the sum of all stages and hops."""
        return self.num_micro_batches - 1 / self.vpp, 1 / self.vpp

    def may_serve(self, kind: int, stage: int) -> bool:
        """Return whether a kind may serve a stage: kinds are open, or fixed to this one."""
        return self.kinds is None or self.kinds[stage] == kind

    def layers_before(self) -> IntArray:
        """Count the layers of each type before every boundary [L + 1, T]."""
        # One column for each type, summed up along the layers.
        is_type = self.layer_type[:, None] == np.arange(self.num_types)
        return np.concatenate([np.zeros((1, self.num_types), dtype=np.int64), np.cumsum(is_type, axis=0)])

    def fixed_s(self, kind: int, stage: int) -> float:
        """Return the time of a stage beside its layers [s]."""
        fixed = self.stage_s[kind]
        fixed += self.first_s[kind] if stage == 0 else 0.0
        fixed += self.last_s[kind] if stage == self.num_stages - 1 else 0.0
        return float(fixed)

    def fixed_bytes(self, stage: int) -> float:
        """Return the memory of a stage beside its layers [bytes]."""
        fixed = self.working_bytes
        fixed += self.first_bytes if stage == 0 else 0.0
        fixed += self.last_bytes if stage == self.num_stages - 1 else 0.0
        return fixed

    def step_s(self, stage_s: Sequence[float], kinds: Sequence[int]) -> float:
        """Return the time of one step, from the time of each stage [S] and its kind [S]."""
        of_slowest, of_sum = self.weights
        hops_s = sum(float(self.hop_s[pair]) for pair in itertools.pairwise(kinds))
        return of_slowest * max(stage_s) + of_sum * (sum(stage_s) + hops_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a plan.

    Attributes:
        kind: Kind of the devices that serve the stage.
        num_layers: Number of layers.
        recomputed: Number of recomputed layers of each type [T].
        time_s: Time of one micro-batch, forward and backward [s].
        memory_bytes: Peak memory of a device of the stage [bytes].
    """

    kind: int
    num_layers: int
    recomputed: tuple[int, ...]
    time_s: float
    memory_bytes: float

    @property
    def num_recomputed(self) -> int:
        """Number of layers that are recomputed."""
        return sum(self.recomputed)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """A solution of the pipeline problem.

    Attributes:
        stages: Stages in their order.
        step_s: Time of one step [s].
    """

    stages: tuple[Stage, ...]
    step_s: float


def plan_of(
    pipeline: Pipeline, kinds: Sequence[int], num_layers: Sequence[int], recomputed: Sequence[Sequence[int]]
) -> StagePlan:
    """Build the plan of some decisions, without asking whether it fits.

    Args:
        pipeline: Pipeline problem.
        kinds: Kind of each stage [S].
        num_layers: Number of layers of each stage [S].
        recomputed: Number of layers of each type that each stage recomputes [S, T].
    """
    before = pipeline.layers_before()
    bounds = [0, *itertools.accumulate(num_layers)]
    stages = []
    for stage, (kind, count) in enumerate(zip(kinds, num_layers, strict=True)):
        counts = before[bounds[stage + 1]] - before[bounds[stage]]
        # Recomputation adds time and lowers the memory of activations, but not of states.
        again = np.array(recomputed[stage])
        time_s = pipeline.fixed_s(kind, stage) + counts @ pipeline.layer_s[kind] + again @ pipeline.recompute_s[kind]
        # Activations are held for every micro-batch in flight, states once.
        held = (counts - again) @ pipeline.kept_bytes + again @ pipeline.recomputed_bytes
        memory_bytes = pipeline.fixed_bytes(stage) + counts @ pipeline.state_bytes + pipeline.in_flight[stage] * held
        stages.append(
            Stage(
                kind=kind,
                num_layers=count,
                recomputed=tuple(int(number) for number in again),
                time_s=float(time_s),
                memory_bytes=float(memory_bytes),
            )
        )
    return StagePlan(stages=tuple(stages), step_s=pipeline.step_s([stage.time_s for stage in stages], list(kinds)))
