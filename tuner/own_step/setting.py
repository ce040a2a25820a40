"""Setting of a study of a user's own step: a cluster, and one refusal of all that needs a model of the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.own_step import OwnStep


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSetting:
    """Setting without a job and a runtime, in the place of `costmodels.job.setting.Setting`.

    Attributes:
        cluster: Cluster of the study.
        step: Step, for the refusal.
    """

    cluster: Cluster
    step: OwnStep

    @property
    def job(self) -> NoReturn:
        """Refuse to describe a job.

        Raises:
            ConfigError: Always.
        """
        raise refusal(self.step)

    @property
    def runtime(self) -> NoReturn:
        """Refuse to describe a framework.

        Raises:
            ConfigError: Always.
        """
        raise refusal(self.step)


def refusal(step: OwnStep, what: str = "this") -> ConfigError:
    """Return the refusal of what needs a model of the catalog and a framework."""
    return ConfigError(
        f"is a training step of your own, and {what} needs a model of the catalog",
        key=step.key,
        value=step.factory,
        nearest=f"space, rank, predict, run, status, trials, best, export --to {step.world} and report work with it",
    )
