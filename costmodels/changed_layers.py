"""What sharding plans change of layers, looked up by the shapes of configurations.

Letters: u rows of shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from costmodels.breakdown import EXPOSED_PARTS
from costmodels.layer_change import KEYS, LayerChange
from costmodels.operators import BLOCKS, Block, FloatArray, Phase
from costmodels.parallel import RECOMPUTE_MODES, ConfigGrid
from costmodels.runtime import RuntimeProfile

if TYPE_CHECKING:  # which applies these
    from costmodels.block_costs import BlockCosts

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


def with_changes(costs: BlockCosts, runtime: RuntimeProfile, shapes: ConfigGrid) -> BlockCosts:
    """The costs of shape rows [u] with what the runtime's plans change of some of them.

    What full recomputation runs again of a layer is its forward pass, and changed as that is.
    """
    known = {change.key: change for change in runtime.layer_changes}
    found = [(row, known[key]) for row, key in enumerate(shape_keys(shapes)) if key in known]
    if not found:
        return costs
    changed = {field.name: getattr(costs, field.name).copy() for field in fields(costs)}
    is_full = shapes.recompute == RECOMPUTE_MODES.index("full")
    in_layer = np.array([block in LAYER_BLOCKS for block in BLOCKS])
    for row, change in found:
        forward, backward = np.array(change.compute)
        again = in_layer * is_full[row]
        repeated = again * changed["compute"][:, 0, :, row]
        changed["compute"][:, 1, :, row] *= backward
        changed["compute"][:, 1, :, row] += (forward - backward) * repeated
        changed["compute"][:, 0, :, row] *= forward
        forward_s, backward_s = np.array(change.added_s) / runtime.network_efficiency
        changed["exposed"][..., row] *= np.array(change.exposed)
        changed["exposed"][..., row] += (1 + again) * forward_s + backward_s
        changed["once_s"][..., row] += np.array(change.once_s) / runtime.network_efficiency
    return replace(costs, **changed)


def nothing(shapes: ConfigGrid) -> FloatArray:
    """What weights take once a step beyond Megatron's plan, where nothing is changed [B, u]."""
    return np.zeros((len(BLOCKS), len(shapes)))
