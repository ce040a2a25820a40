"""What sharding plans change of layers, applied: to the costs of shapes, and to one configuration for the simulator.

Letters: B blocks in the order of BLOCKS, u rows of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from costmodels.breakdown import EXPOSED_PARTS
from costmodels.layer_change import KEYS, LayerChange
from costmodels.operators import BLOCKS, Block, FloatArray, Phase
from costmodels.parallel import RECOMPUTE_MODES, ConfigGrid

if TYPE_CHECKING:  # which applies these
    from costmodels.block_costs import BlockCosts


def compute_ratio(change: LayerChange, block: Block, phase: Phase) -> float:
    """Compute of one block and pass over that of Megatron's plan."""
    return change.compute[phase == Phase.BACKWARD][BLOCKS.index(block)]


def exposed_ratio(change: LayerChange, block: Block, part: str) -> float:
    """What one block communicates in one part of the breakdown, over that of Megatron's plan."""
    return change.exposed[EXPOSED_PARTS.index(part)][BLOCKS.index(block)]


def added_s(change: LayerChange, block: Block, phase: Phase) -> dict[str, float]:
    """What one block and pass adds to each part of the breakdown [s per micro-batch]."""
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


def with_changes(costs: BlockCosts, changes: Sequence[LayerChange], shapes: ConfigGrid) -> BlockCosts:
    """The costs of shape rows [u] with what plans change of some of them."""
    known = {change.key: change for change in changes}
    found = [(row, known[key]) for row, key in enumerate(shape_keys(shapes)) if key in known]
    if not found:
        return costs
    changed = {field.name: getattr(costs, field.name).copy() for field in fields(costs)}
    is_full = shapes.recompute == RECOMPUTE_MODES.index("full")
    for row, change in found:
        changed["compute"][..., row] *= np.array(change.compute)
        forward_s, backward_s = np.array(change.added_s)
        changed["exposed"][..., row] *= np.array(change.exposed)
        changed["exposed"][..., row] += (1 + is_full[row]) * forward_s + backward_s
        changed["once_s"][..., row] += np.array(change.once_s)
    return replace(costs, **changed)


def nothing(shapes: ConfigGrid) -> FloatArray:
    """What weights take once a step beyond Megatron's plan, where nothing is changed [B, u]."""
    return np.zeros((len(BLOCKS), len(shapes)))
