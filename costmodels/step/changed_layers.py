"""Effects of sharding plans on layers, block by block, and the shapes that they apply to.

Letters: u rows of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodels.job.layer_change import KEYS, SHAPE, LayerChange
from costmodels.job.parallel_config import ConfigGrid
from costmodels.operators.layer_operators import BLOCKS, Block, Phase
from costmodels.step.breakdown import EXPOSED_PARTS

LAYER_BLOCKS = (Block.ATTENTION, Block.DENSE_MLP, Block.MOE_MLP)
"""Blocks that belong to layers. Full recomputation runs them again."""


def compute_ratio(change: LayerChange, block: Block, phase: Phase) -> float:
    """Return the compute of one block and pass relative to Megatron's plan."""
    return change.compute[phase == Phase.BACKWARD][BLOCKS.index(block)]


def exposed_ratio(change: LayerChange, block: Block, part: str) -> float:
    """Return the communication of one block in one part of the breakdown relative to Megatron's plan."""
    return change.exposed[EXPOSED_PARTS.index(part)][BLOCKS.index(block)]


def added_s(change: LayerChange, block: Block, phase: Phase) -> dict[str, float]:
    """Return the time that one block and pass adds to each part, at the links' full speed [s per micro-batch]."""
    of_phase = change.added_s[phase == Phase.BACKWARD]
    return {part: of_phase[number][BLOCKS.index(block)] for number, part in enumerate(EXPOSED_PARTS)}


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
