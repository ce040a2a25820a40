"""The contract of a fault.

Lifecycle: a schedule names it for a round that it `suits`; when its moment has come `strike` is called until it has
hit something; after a while `undo`; a driver that ends meanwhile may do so with 0 or with one of its `statuses`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from tests.chaos.scene import Scene


class AbstractFault(ABC):
    """One kind of fault.

    Attributes:
        name: What it does, and to what.
        statuses: What it excuses a driver to end with; none where it must go on.
        ends_driver: Whether it means the driver itself to end.
        may_be_early: Whether it can strike while the driver starts.
    """

    name: ClassVar[str]
    statuses: ClassVar[frozenset[int]] = frozenset()
    ends_driver: ClassVar[bool] = False
    may_be_early: ClassVar[bool] = False

    @abstractmethod
    def suits(self, storage: str, trials: str, ray: str) -> bool:
        """Whether a round of this kind has what it strikes."""

    @abstractmethod
    def strike(self, scene: Scene, pick: int) -> bool:
        """Strikes; False where there is nothing to hit at this moment.

        Args:
            scene: The round.
            pick: Which of several victims, by the remainder.
        """

    def undo(self, scene: Scene) -> None:  # noqa: B027 # most faults have nothing to undo
        """Puts right what does not come right by itself."""
