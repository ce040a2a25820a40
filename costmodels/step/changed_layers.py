"""Effects of sharding plans on layers, block by block, and the shapes that they apply to.

Letters: u rows of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodels.blocks.operator import Phase
from costmodels.job.layer_change import KEYS, SHAPE, LayerChange
from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.breakdown import EXPOSED_PARTS
from hardware.arrays import FloatArray


def of_blocks(change: LayerChange, values: object, names: Sequence[str], *, other: float) -> FloatArray:
    """Return numbers of a change for the blocks of a model [..., B]; blocks that no plan shards get `other`."""
    known = np.asarray(values, dtype=np.float64)
    known = np.concatenate([known, np.full((*known.shape[:-1], 1), other)], axis=-1)
    columns = [change.blocks.index(name) if name in change.blocks else len(change.blocks) for name in names]
    return known[..., columns]


def compute_ratio(change: LayerChange, block: str, phase: Phase) -> float:
    """Return the compute of one block and pass relative to Megatron's plan."""
    return float(of_blocks(change, change.compute[phase == Phase.BACKWARD], (block,), other=1.0)[0])


def exposed_ratio(change: LayerChange, block: str, part: str) -> float:
    """Return the communication of one block in one part of the breakdown relative to Megatron's plan."""
    return float(of_blocks(change, change.exposed[EXPOSED_PARTS.index(part)], (block,), other=1.0)[0])


def added_s(change: LayerChange, block: str, phase: Phase) -> dict[str, float]:
    """Return the time that one block and pass adds to each part, at the links' full speed [s per micro-batch]."""
    of_phase = of_blocks(change, change.added_s[phase == Phase.BACKWARD], (block,), other=0.0)
    return dict(zip(EXPOSED_PARTS, of_phase[:, 0].tolist(), strict=True))


def kept_ratios(
    changes: Sequence[LayerChange], shapes: ConfigGrid, names: Sequence[str]
) -> tuple[FloatArray, FloatArray]:
    """Return the activations that blocks keep relative to Megatron's plan [B, u], and the input of a layer [u]."""
    blocks, entry = np.ones((len(names), len(shapes))), np.ones(len(shapes))
    known = {change.key: change for change in changes if change.kept}
    for row, key in enumerate(change_keys(shapes) if known else ()):
        if key in known:
            blocks[:, row] = of_blocks(known[key], known[key].kept, names, other=1.0)
            entry[row] = known[key].entry
    return blocks, entry


def shape_keys(grid: ConfigGrid) -> list[tuple[int, ...]]:
    """Return the shape of the layers of every row [n]: the values of SHAPE."""
    return _rows(grid, SHAPE)


def change_keys(grid: ConfigGrid) -> list[tuple[int, ...]]:
    """Return the key of the change that applies to every row [n]: the values of KEYS."""
    return _rows(grid, KEYS)


def _rows(grid: ConfigGrid, names: Sequence[str]) -> list[tuple[int, ...]]:
    columns = [getattr(grid, name).astype(np.int64).tolist() for name in names]
    return list(zip(*columns, strict=True))


def change_of(changes: Sequence[LayerChange], grid: ConfigGrid) -> LayerChange | None:
    """Return the change of the one configuration in `grid`, or None if its layers are sharded by hand."""
    (key,) = change_keys(grid)
    return next((change for change in changes if change.key == key), None)
