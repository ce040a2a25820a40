"""How a study's layers are to be planned; light to import, where `layer_plans` loads the planners themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.step.changed_layers import shape_keys

if TYPE_CHECKING:  # the planners' modules take a tenth of the time in which `meshtune rank` answers
    from tuner.planners.sharding.pins import Pin

LayerPlanner = Literal["megatron", "recursive", "descent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlanning:
    """How a study's layers are planned: its `planner:` key.

    Attributes:
        name: `megatron` is the plan by hand, `recursive` D-Rec, and `descent` goes on from both, axis by axis.
        pins: What a user asks for.
    """

    name: LayerPlanner = "megatron"
    pins: tuple[Pin, ...] = ()


def shape_text(config: ParallelConfig) -> str:
    """Return the shape of a candidate's layers as the key of a JSON object."""
    (key,) = shape_keys(ConfigGrid.from_configs([config]))
    return ",".join(map(str, key))
