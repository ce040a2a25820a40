"""Contract of planners of whole training steps; the tuner brings them, for backends that run any sharding plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster

if TYPE_CHECKING:  # most backends run no plans
    from costmodels.sharding.plan import Plan


class StepPlanner(Protocol):
    """Planner of the training steps of a study's candidates; it pickles."""

    def plan(self, job: TrainingJob, cluster: Cluster, config: ParallelConfig, *, is_by_hand: bool) -> Plan:
        """Return the plan of one optimizer step of a candidate that has one pipeline stage.

        The graph is that of `transformer_graph` with all layers and one micro-batch of all replicas, whose operators
        run as often as there are micro-batches (`costmodels/sharding/micro_batches.py`); the mesh has all devices.

        Args:
            job: Training job of the candidate.
            cluster: Cluster of the candidate.
            config: Candidate, valid under the rules of its runtime.
            is_by_hand: Whether the plan is the one that frameworks write by hand, instead of the study's planner's.
        """

    def layers(self, job: TrainingJob, cluster: Cluster, config: ParallelConfig, *, is_by_hand: bool) -> Plan | None:
        """Return the plan of the layers of a candidate, by which it is predicted.

        The mesh has those of the axes `dp`, `cp`, `up` and `tp` that cut layers: of `dp` only what experts are dealt
        over. The graph has two layers, or the fewest that include every kind, each of which stands for all of its kind.

        Returns:
            None where no axis cuts layers, or where no plan by hand of these axes says what frameworks do, such as with
            fewer key heads than ranks.
        """
