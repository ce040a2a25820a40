"""What a fit leaves unexplained of layers of one shape: a Gaussian process over their sizes, part of a profile.

Whole layers run faster or slower than the sum of their kernels for reasons that no constant holds (which kernel a
library picks, how launches of that size overlap), and the same for every pipeline, batch and depth that cuts a layer to
that size. So what calibration leaves of the runs is averaged per cell of equal layers (device, hidden size, tp, tokens,
sequence length) and smoothed: cells that differ by an octave tell little of each other, and where no run was measured
the residual is zero. What pipelines over unlike devices leave unexplained tells nothing of any one of these.

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
"""Distance in log2 of a size over which residuals are alike (assumed)."""
RUN_SPREAD = 0.1
CELL_SPREAD = 0.03
"""Noise of one run's log residual, and what equal layers of different models differ in (assumed)."""
MIN_RUNS = 3
"""A cell needs this many runs."""


Cell = tuple[str, int, int, int, int]
"""Device (or unlike ones, as `Cluster.device_names`), hidden size, tp, tokens and sequence length of equal layers."""


def cell_of(device: str, job: TrainingJob, config: ParallelConfig) -> Cell:
    """The cell that the layers of a configuration belong to."""
    tokens = config.mbs * job.sequence_length // (config.cp * config.up)
    return (device, job.model.hidden_size, config.tp, tokens, job.sequence_length)


def layer_residual(residuals: Sequence[LayerResidual], device: str, job: TrainingJob, shapes: ConfigGrid) -> FloatArray:
    """Mean of the log residual of each shape row [u]; zero far from all cells and on other devices."""
    own = [residual for residual in residuals if residual.device == device]
    if not own:
        return np.zeros(len(shapes))
    rows = np.stack(
        [
            np.full(len(shapes), np.log2(job.model.hidden_size)),
            np.log2(shapes.tp),
            np.log2(local_tokens(job, shapes)),
            np.full(len(shapes), np.log2(job.sequence_length)),
        ],
        axis=1,
    )
    cells = np.log2([[cell.hidden_size, cell.tp, cell.tokens, cell.sequence_length] for cell in own])
    return np.asarray(_kernel(rows, cells) @ np.array([residual.weight for residual in own]))


def fit_residuals(cells: Sequence[Cell], log_error: FloatArray) -> tuple[LayerResidual, ...]:
    """The cells that explain what is left of each run, log(measured / predicted) [n]; `cells` are the runs' layers."""
    by_cell: dict[Cell, list[float]] = defaultdict(list)
    for cell, error in zip(cells, log_error.tolist(), strict=True):
        by_cell[cell].append(error)
    kept = {cell: errors for cell, errors in by_cell.items() if len(errors) >= MIN_RUNS}
    fitted: list[LayerResidual] = []
    for device in sorted({cell[0] for cell in kept}):
        own = [cell for cell in kept if cell[0] == device]
        sizes = np.log2(np.array([cell[1:] for cell in own], dtype=np.float64))
        noise = np.array([RUN_SPREAD**2 / len(kept[cell]) + CELL_SPREAD**2 for cell in own])
        target = np.array([np.median(kept[cell]) for cell in own])
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
    """Squared-exponential kernel of log sizes [len(rows), len(cells)]."""
    distance = (rows[:, None, :] - cells[None, :, :]) / OCTAVES
    return np.asarray(LOG_SPREAD**2 * np.exp(-0.5 * np.sum(distance**2, axis=2)))
