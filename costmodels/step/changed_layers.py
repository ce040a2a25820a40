"""What sharding plans change of layers, block by block, and the shapes that they change.

Letters: u rows of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodels.job.layer_change import KEYS, LayerChange
from costmodels.job.parallel_config import ConfigGrid
from costmodels.operators.layer_operators import BLOCKS, Block, Phase
from costmodels.step.breakdown import EXPOSED_PARTS

LAYER_BLOCKS = (Block.ATTENTION, Block.DENSE_MLP, Block.MOE_MLP)
"""Those of layers, which full recomputation runs again."""


def compute_ratio(change: LayerChange, block: Block, phase: Phase) -> float:
    """Compute of one block and pass over that of Megatron's plan."""
    return change.compute[phase == Phase.BACKWARD][BLOCKS.index(block)]


def exposed_ratio(change: LayerChange, block: Block, part: str) -> float:
    """What one block communicates in one part of the breakdown, over that of Megatron's plan."""
    return change.exposed[EXPOSED_PARTS.index(part)][BLOCKS.index(block)]


def added_s(change: LayerChange, block: Block, phase: Phase) -> dict[str, float]:
    """What one block and pass adds to each part of the breakdown, at the links' full speed [s per micro-batch]."""
    of_phase = change.added_s[phase == Phase.BACKWARD]
    return {part: of_phase[number][BLOCKS.index(block)] for number, part in enumerate(EXPOSED_PARTS)}


def shape_keys(shapes: ConfigGrid) -> list[tuple[int, ...]]:
    """The values of KEYS of every row [u]."""
    columns = [getattr(shapes, name).astype(np.int64).tolist() for name in KEYS]
    return list(zip(*columns, strict=True))


def change_of(changes: Sequence[LayerChange], grid: ConfigGrid) -> LayerChange | None:
    """That of the one configuration in `grid`, if there is one."""
    (key,) = shape_keys(grid)
    return next((change for change in changes if change.key == key), None)
