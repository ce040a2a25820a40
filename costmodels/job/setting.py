"""Setting of a prediction: one training job on one cluster under one runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Bundle of all that a prediction needs beside the configuration: a job, a cluster and a runtime.

    The cost model, the rules of the search space and the planners take it as their first argument.

    Attributes:
        job: Training job: the model, its sequences and its global batch.
        cluster: Cluster on which the job runs. A configuration occupies all of its devices.
        runtime: Profile of the training framework: its constants, its habits and its rule set.
    """

    job: TrainingJob
    cluster: Cluster
    runtime: RuntimeProfile

    @property
    def padded_layers(self) -> int:
        """Number of layers, the no-op layers that the runtime adds included."""
        multiple = self.runtime.layer_padding
        return -(-self.job.model.num_layers // multiple) * multiple

    def predicted_by(self, profile: RuntimeProfile) -> Setting:
        """Return the setting under another profile, whose facts and constants may be nearer to the truth.

        How layers are cut and planned stays the study's choice.
        """
        own = self.runtime
        runtime = replace(
            profile,
            rule_set=own.rule_set,
            layer_split=own.layer_split,
            layer_padding=own.layer_padding,
            layer_changes=own.layer_changes,
            uneven=own.uneven,
        )
        return replace(self, runtime=runtime)
