"""Times of the operators of several configurations, priced together: one vectorised call costs as much as hundreds.

Operators depend on few dimensions of a configuration (SHAPE_DIMENSIONS). Configurations that agree in these share all
prices.

Letters: u unique shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from costmodels.blocks.operator import Operator
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import KernelTime, execution_s, kernel_s
from costmodels.operators.layer_operators import SHAPE_DIMENSIONS, recomputed_share, step_operators
from costmodels.step.communication import issued_collectives
from costmodels.step.launches import launches_of
from hardware.arrays import FloatArray
from hardware.device import Device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Batch:
    """Shapes that have the same operators.

    Attributes:
        shapes: Grid of the shapes [u].
        operators: Operators of all shapes.
        recomputed: Share of each operator that the backward pass runs again, by its name [u].
        launches: Kernels and collectives that the host launches for one micro-batch of each block [2, B, u].
        seconds: Time of each operator by its name [s], [u], on each device that has been asked for.
    """

    shapes: ConfigGrid
    operators: tuple[Operator, ...]
    recomputed: Mapping[str, FloatArray]
    launches: FloatArray
    seconds: dict[Device, Mapping[str, FloatArray]] = field(default_factory=dict)


class OperatorPrices:
    """Prices of the operators of some configurations.

    Args:
        job: Training job.
        runtime: Runtime profile.
        configs: Configurations whose prices will be asked for.
        kernel_time: Model of a kernel's time.
    """

    def __init__(
        self,
        job: TrainingJob,
        runtime: RuntimeProfile,
        configs: Iterable[ParallelConfig],
        kernel_time: KernelTime = kernel_s,
    ) -> None:
        self._job, self._runtime, self._kernel_time = job, runtime, kernel_time
        shapes = {_shape_of(config): config for config in configs}
        self._place: dict[tuple[object, ...], tuple[_Batch, int]] = {}
        # Where some have rings of cp, all have the operators that merge partial results.
        for has_rings in (False, True):
            own = {shape: config for shape, config in shapes.items() if (config.cp > 1) == has_rings}
            if own:
                batch = self._batch(ConfigGrid.from_configs(list(own.values())))
                self._place |= {shape: (batch, row) for row, shape in enumerate(own)}

    def _batch(self, shapes: ConfigGrid) -> _Batch:
        operators = step_operators(self._job, self._runtime, shapes)
        recomputed = {op.name: recomputed_share(self._job, self._runtime, op, shapes) for op in operators}
        # A recomputed kernel is launched twice.
        place = {name: at for at, name in enumerate(self._job.model.block_names)}
        kernels = np.zeros((len(place), len(shapes)))
        for op in operators:
            kernels[place[op.block]] += launches_of(self._runtime, op) * (1.0 + recomputed[op.name])
        issued = issued_collectives(self._job, self._runtime, shapes)
        return _Batch(shapes=shapes, operators=operators, recomputed=recomputed, launches=np.stack([kernels, issued]))

    def operators(self, config: ParallelConfig) -> tuple[Operator, ...]:
        """Return the operators of a configuration and of others; their arrays are those of all."""
        return self._place[_shape_of(config)][0].operators

    def seconds(self, config: ParallelConfig, device: Device) -> dict[str, float]:
        """Return the time of each operator on a device by its name [s]."""
        batch, row = self._place[_shape_of(config)]
        if device not in batch.seconds:
            batch.seconds[device] = {
                op.name: execution_s(op, device, self._job, self._runtime, batch.shapes, self._kernel_time)
                for op in batch.operators
            }
        return {name: float(seconds[row]) for name, seconds in batch.seconds[device].items()}

    def recomputed(self, config: ParallelConfig) -> dict[str, float]:
        """Return the share of each operator that the backward pass runs again, by its name, if it is more than 0."""
        batch, row = self._place[_shape_of(config)]
        return {name: float(share[row]) for name, share in batch.recomputed.items() if share[row] > 0}

    def launches(self, config: ParallelConfig) -> FloatArray:
        """Count the kernels and collectives that a micro-batch of each block launches, both passes [2, B]."""
        batch, row = self._place[_shape_of(config)]
        return np.asarray(batch.launches[..., row])


def _shape_of(config: ParallelConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in SHAPE_DIMENSIONS)
