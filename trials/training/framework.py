"""Library with which trials train: what the shared part of its backends and of its watch asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardware.cluster import Cluster
from trials.backend import OperatorSample
from trials.ranks.contract import RankSetup
from trials.training.messages import Finished, StepTaken
from trials.training.work import AbstractWork, DeviceKind

VirtualStep = Callable[[Sequence[StepTaken], Cluster], float]
"""Function that returns the time of a step by the virtual clock [s], from the messages of all ranks in their order."""

Compare = Callable[[AbstractWork, Cluster, Sequence[Finished]], tuple[tuple[OperatorSample, ...], list[str]]]
"""Function that returns operator times of a trial that ended well, and sentences on differences from predictions."""


def compare_nothing(
    work: AbstractWork,  # noqa: ARG001 # the contract's
    cluster: Cluster,  # noqa: ARG001 # the contract's
    finished: Sequence[Finished],  # noqa: ARG001 # the contract's
) -> tuple[tuple[OperatorSample, ...], list[str]]:
    """Return no operator times and no differences."""
    return (), []


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Library with which trials train.

    Attributes:
        name: Name of its backend, its module and its extra of Meshtune.
        title: Name of the library in messages.
        ranks: Modules and variables that ranks find ready.
        program: Function that ranks run, as `module:function`.
        lost_peer: Words in the errors of ranks that have only lost another one.
        virtual_step: Function of the virtual clock.
        compare: Function that compares a trial with predictions.
        devices: Kinds of device that ranks compute on.
        has_rank_per_host: Whether one rank has all devices of a host; else every device has a rank.
        limits_memory: Whether ranks of planned steps are started with a limit of their memory.
        accumulates: Whether planned steps of the catalog may have several micro-batches.
    """

    name: str
    title: str
    ranks: RankSetup
    program: str
    lost_peer: tuple[str, ...]
    virtual_step: VirtualStep
    compare: Compare
    devices: tuple[DeviceKind, ...]
    has_rank_per_host: bool
    limits_memory: bool
    accumulates: bool
