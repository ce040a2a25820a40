"""Keys of the towers of a multimodal model, `job.towers`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from costmodels.job.decoder import MAX_COUNT
from costmodels.job.tower import TowerWork
from hardware.io.config_file import DocumentedModel


class TowerKeys(DocumentedModel):
    """`job.towers.vision`."""

    images: Annotated[float, Field(gt=0, le=1e6)]
    """Mean number of images in a sequence of `sequence_length` tokens, their own tokens included; below 1 where some
    sequences have none. A frame of a video that attends to itself alone is an image.
    """

    patches: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Patches of one image, before any are merged.

    Default: those of the tower's size of images; required where images have any size
    """

    trained: bool
    """Whether steps change the tower. Of one that is frozen the forward pass and the weights count; the projection
    behind it is trained in either case.
    """


class TowersKeys(DocumentedModel):
    """`job.towers`."""

    vision: TowerKeys
    """Work of the vision tower, keys below."""


def read_towers(keys: TowersKeys) -> dict[str, TowerWork]:
    """Return the work of each tower by its name."""
    vision = keys.vision
    return {"vision": TowerWork(images=vision.images, patches=vision.patches, trained=vision.trained)}
