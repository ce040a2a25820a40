"""How a study's layers are to be planned; light to import, where `layer_plans` loads the planners themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.step.changed_layers import shape_keys

if TYPE_CHECKING:  # the planners' modules take a tenth of the time in which `meshtune rank` answers
    from tuner.planners.sharding.pins import Pin

LayerPlanner = Literal["megatron", "recursive", "descent", "toast"]
PlannerChoice = Literal["auto", "megatron", "recursive", "descent", "toast"]
"""Planner as a study names it."""

AUTO_PLANNER: LayerPlanner = "descent"
"""Planner that `auto` stands for where trials run plans: its plans are nearly as cheap as TOAST's, in a hundredth of
the time."""
AUTO_SHAPES = 8
"""Most shapes of layers that `auto` plans, those of the fastest predicted candidates: each takes a fraction of a
second, and a large study has hundreds of them, of which its trials see a few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlanning:
    """How a study's layers are planned: its `planner:` key.

    Attributes:
        name: `megatron` is the plan by hand, `recursive` D-Rec, `descent` goes on from both, axis by axis, and `toast`
            is a tree search over colours of dims with the same descent at its end.
        pins: What a user asks for.
        is_auto: Whether the study leaves the planner to us. Then only leading shapes are planned, and only once a study
            runs.
    """

    name: LayerPlanner = "megatron"
    pins: tuple[Pin, ...] = ()
    is_auto: bool = False


def shape_text(config: ParallelConfig) -> str:
    """Return the shape of a candidate's layers as the key of a JSON object."""
    (key,) = shape_keys(ConfigGrid.from_configs([config]))
    return ",".join(map(str, key))
