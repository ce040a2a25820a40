"""Pins where a framework shards layers by hand: they hold, or not, by the degrees and flags of a candidate.

A pin on an axis applies to the candidates whose mesh has it, as everywhere; of these only those are left whose plan by
hand holds it. So a pin of the sequence along `tp` leaves sequence parallelism. One that no flag says is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError
from tuner.planners.sharding.pins import Pin
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.layer_plans import plan_layer
from tuner.plans.layer_tasks import layer_tasks


def held_by_hand(setting: Setting, grid: ConfigGrid, pins: Sequence[Pin], *, is_all: bool) -> NDArray[np.bool_]:
    """Return whether each candidate's plan by hand holds all hard pins that its axes allow [n].

    Args:
        setting: Job, cluster and runtime.
        grid: Candidates.
        pins: Pins of the study.
        is_all: Whether these are all candidates, so that a pin which none with its axis holds is refused.

    Raises:
        ConfigError: A pin matches no operator or dim of the layers, or is refused.
    """
    hard = tuple(pin for pin in pins if pin.is_hard)
    keys = _keys(grid)
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    held: dict[tuple[int, ...], bool] = {}
    allowed: dict[Pin, bool] = {}
    planning = LayerPlanning(name="megatron", pins=hard)
    for key, row in first.items():
        tasks = layer_tasks(setting.job, setting.cluster, grid.take(np.array([row])), planning)
        try:
            planned = [found for task in tasks if (found := plan_layer(task)) is not None]
        except ConfigError as error:
            raise error.under("planner") from None
        counts = [count for found in planned for count in found.pins]
        for pin, num_ops, num_held, _ in counts:
            allowed[pin] = allowed.get(pin, False) or num_ops == num_held
        held[key] = all(num_ops == num_held for _, num_ops, num_held, _ in counts)
    for number, pin in enumerate(pins):
        if is_all and not allowed.get(pin, True):
            raise ConfigError(
                "holds in no plan by hand, which is all that the framework's flags can say",
                key=f"planner.pins[{number}]",
                value=pin.in_words,
                nearest="the cuts of tp, cp, up and ep; with space: {sequence_parallel: [true]}, the sequence along tp",
            )
    return np.array([held[key] for key in keys], dtype=np.bool_)


def _keys(grid: ConfigGrid) -> list[tuple[int, ...]]:
    """Return what the plan by hand of each candidate's layers follows from [n]: its shape without the micro-batch."""
    names = ("tp", "cp", "up", "ep", "expert_tp", "sequence_parallel")
    columns = [getattr(grid, name).astype(np.int64).tolist() for name in names]
    return list(zip(*columns, strict=True))
