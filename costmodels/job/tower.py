"""Tower of a multimodal model: blocks over the tokens of images, whose results stand among the tokens of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.blocks.tower_part import TowerPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """Tower that is trained or run beside a language model.

    Attributes:
        name: Word for the tower, for example `vision`.
        parts: Blocks in the order in which they run; those behind the tower's own give tokens the model's width.
    """

    name: str
    parts: tuple[TowerPart, ...]

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def flops_of_sequence(self) -> float:
        """Model FLOPs of both passes for the images of one sequence."""
        return sum(part.flops_of_sequence for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerWork:
    """Work of a tower in a job.

    Attributes:
        images: Mean number of images in one sequence of the job.
        patches: Patches of one image, before any are merged; None where the tower has one size of images.
        trained: Whether steps change the tower's weights.
    """

    images: float
    patches: int | None = None
    trained: bool
