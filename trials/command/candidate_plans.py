"""Sharding plans of a study's candidates, of which each trial's command gets its own as a file.

The file has the format of `costmodels/sharding/exports/plan_file.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from costmodels.job.parallel_config import HAND, ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from trials.own_step import OwnStepPlans
from trials.step_planner import StepPlanner

FILE_NAME = "plan.json"


class CandidatePlans(Protocol):
    """Plans of a study's candidates; it pickles."""

    def text(self, config: ParallelConfig) -> str:
        """Return the text of the file of a candidate's plan."""

    def values(self, config: ParallelConfig) -> dict[str, str]:
        """Return the values of placeholders that the plan of a candidate has."""

    def reduced(self, to: Reduction) -> Self:
        """Return the plans of the proxy job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnPlans:
    """Plans of a step of the user's own, which the program can run by.

    Attributes:
        steps: Plans of the step.
    """

    steps: OwnStepPlans

    def text(self, config: ParallelConfig) -> str:
        """Return the text of the file of a candidate's plan; see `CandidatePlans`."""
        from costmodels.sharding.exports.plan_file import plan_text  # noqa: PLC0415 # few studies have plans

        micro_batches = self.steps.step_of(config).micro_batches
        return plan_text(self.steps.plan(config), by_hand=config.plan == HAND, micro_batches=micro_batches)

    def values(self, config: ParallelConfig) -> dict[str, str]:
        """Return the number of micro-batches, and of rows of all together."""
        count = self.steps.step_of(config).micro_batches
        return {"num_micro_batches": str(count), "global_batch_size": str(self.steps.rows)}

    def reduced(self, to: Reduction) -> Self:
        """Refuse: a study of a step of the user's own has no smaller jobs."""
        raise AssertionError(f"no study of an own step has proxy jobs such as {to}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlans:
    """Plans of the layers of a model of the catalog, whose layouts the program can read.

    Attributes:
        job: Training job of the trials.
        cluster: Cluster of the trials.
        planner: Planner of the layers.
    """

    job: TrainingJob
    cluster: Cluster
    planner: StepPlanner

    def text(self, config: ParallelConfig) -> str:
        """Return the text of the file of a candidate's plan; see `CandidatePlans`."""
        from costmodels.sharding.exports.plan_file import plan_text  # noqa: PLC0415 # few studies have plans

        by_hand = config.plan == HAND
        plan = self.planner.layers(self.job, self.cluster, config, is_by_hand=by_hand)
        return plan_text(plan, by_hand=by_hand, micro_batches=self.job.global_batch_size // (config.dp * config.mbs))

    def values(self, config: ParallelConfig) -> dict[str, str]:  # noqa: ARG002 # the contract's
        """Return nothing: the job says all."""
        return {}

    def reduced(self, to: Reduction) -> Self:
        """Return the plans of the proxy job."""
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster))
