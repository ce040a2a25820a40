"""Planner of whole training steps, for backends that run plans; light to import, where `step_plans` loads planners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from tuner.plans.layer_planning import LayerPlanning

if TYPE_CHECKING:  # numpy tables of operators, which few studies need
    from costmodels.sharding.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class LayeredStepPlanner:
    """Planner that carries a study's plans of layers over to whole steps.

    Attributes:
        planning: How the study's layers are planned.
    """

    planning: LayerPlanning

    def plan(self, job: TrainingJob, cluster: Cluster, config: ParallelConfig, *, is_by_hand: bool) -> Plan:
        """Return the plan of one step of a candidate; see `trials/step_planner.py`."""
        from tuner.plans.step_plans import plan_step  # noqa: PLC0415

        assert is_by_hand or config.plan == self.planning.name, f"{config} is planned by {config.plan}"
        return plan_step(job, cluster, config, LayerPlanning() if is_by_hand else self.planning)

    def layers(self, job: TrainingJob, cluster: Cluster, config: ParallelConfig, *, is_by_hand: bool) -> Plan | None:
        """Return the plan of the layers of a candidate; see `trials/step_planner.py`."""
        from tuner.plans.layer_plans import plan_layer  # noqa: PLC0415 # see above
        from tuner.plans.layer_tasks import layer_tasks  # noqa: PLC0415 # see above

        grid = ConfigGrid.from_configs([config])
        tasks = layer_tasks(job, cluster, grid, LayerPlanning() if is_by_hand else self.planning)
        planned = [plan_layer(task) for task in tasks]
        return planned[0].found if planned and planned[0] is not None else None
