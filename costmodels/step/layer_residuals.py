"""Residuals of layers of one shape after a fit: a Gaussian process over their sizes, stored in a profile.

Whole layers run faster or slower than the sum of their kernels for reasons that no constant holds, such as the kernel
that a library picks or the overlap of launches of that size. The reasons are the same for every pipeline, batch and
depth that cuts a layer to that size. Therefore the errors that calibration leaves are averaged per cell of equal layers
(device, hidden size, tp, tokens, sequence length) and smoothed. Cells that differ by an octave tell little of each
other, and far from all measured cells the residual is zero. Errors of pipelines over unlike devices say nothing about
any single device.

Letters: u unique shape rows, e cells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import LayerResidual
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import local_tokens
from hardware.arrays import FloatArray

LOG_SPREAD = 0.1
"""Standard deviation of a cell's log residual before any run is seen (assumed)."""
OCTAVES = 0.5
"""Length scale: distance in log2 of a size over which residuals are alike (assumed)."""
RUN_SPREAD = 0.1
CELL_SPREAD = 0.03
"""Noise of one run's log residual (RUN_SPREAD), and spread between equal layers of different models (CELL_SPREAD); both
assumed."""
MIN_RUNS = 3
"""Least number of runs that a cell needs."""


Cell = tuple[str, int, int, int, int]
"""Device (unlike ones as in `Cluster.device_names`), hidden size, tp, tokens and sequence length of equal layers."""


def cell_of(device: str, job: TrainingJob, config: ParallelConfig) -> Cell:
    """Return the cell that the layers of a configuration belong to."""
    tokens = config.mbs * job.sequence_length // (config.cp * config.up)
    return (device, job.model.hidden_size, config.tp, tokens, job.sequence_length)


def layer_residual(residuals: Sequence[LayerResidual], device: str, job: TrainingJob, shapes: ConfigGrid) -> FloatArray:
    """Predict the mean log residual of each shape row [u]; it is zero far from all cells and on other devices."""
    own = [residual for residual in residuals if residual.device == device]
    if not own:
        return np.zeros(len(shapes))
    # Coordinates of the Gaussian process are octaves: logarithms of the sizes to base 2.
    rows = np.stack(
        [
            np.full(len(shapes), np.log2(job.model.hidden_size)),
            np.log2(shapes.tp),
            np.log2(local_tokens(job, shapes)),
            np.broadcast_to(np.log2(job.attended_length(shapes.mbs)), len(shapes)),
        ],
        axis=1,
    )
    cells = np.log2([[cell.hidden_size, cell.tp, cell.tokens, cell.sequence_length] for cell in own])
    return np.asarray(_kernel(rows, cells) @ np.array([residual.weight for residual in own]))


def fit_residuals(cells: Sequence[Cell], log_error: FloatArray) -> tuple[LayerResidual, ...]:
    """Fit the cells that explain the residual of each run.

    Args:
        cells: Cell of each run's layers [n].
        log_error: Residual of each run, log(measured / predicted) [n].
    """
    by_cell: dict[Cell, list[float]] = defaultdict(list)
    for cell, error in zip(cells, log_error.tolist(), strict=True):
        by_cell[cell].append(error)
    kept = {cell: errors for cell, errors in by_cell.items() if len(errors) >= MIN_RUNS}
    fitted: list[LayerResidual] = []
    # Devices are independent of each other: each has a Gaussian process of its own.
    for device in sorted({cell[0] for cell in kept}):
        own = [cell for cell in kept if cell[0] == device]
        sizes = np.log2(np.array([cell[1:] for cell in own], dtype=np.float64))
        noise = np.array([RUN_SPREAD**2 / len(kept[cell]) + CELL_SPREAD**2 for cell in own])
        target = np.array([np.median(kept[cell]) for cell in own])
        # Weights of the posterior mean: (K + noise)^-1 y (Rasmussen and Williams 2006, equation 2.25). The median of a
        # cell's runs ignores single outliers.
        weights = np.linalg.solve(_kernel(sizes, sizes) + np.diag(noise), target)
        fitted += [
            LayerResidual(
                device=device,
                hidden_size=cell[1],
                tp=cell[2],
                tokens=cell[3],
                sequence_length=cell[4],
                weight=round(float(weight), 5),
            )
            for cell, weight in zip(own, weights, strict=True)
        ]
    return tuple(fitted)


def _kernel(rows: FloatArray, cells: FloatArray) -> FloatArray:
    """Evaluate the squared-exponential kernel of log sizes [len(rows), len(cells)]."""
    distance = (rows[:, None, :] - cells[None, :, :]) / OCTAVES
    return np.asarray(LOG_SPREAD**2 * np.exp(-0.5 * np.sum(distance**2, axis=2)))
