"""Step of the user's own, which a factory returns: its candidates are meshes times plans of the traced step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, Value
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.step_time import StepEstimate
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.knobs.knob import Knob
from tuner.export.exporter import Export
from tuner.own_step import predictions
from tuner.own_step.answer import OWN_TARGETS, module_name
from tuner.own_step.plans import OwnStepPlans, words_of
from tuner.own_step.programs import answer_of, program_text, usage_lines
from tuner.plans.layer_planning import LayerPlanning
from tuner.space.enumeration import Space, SpaceOptions
from tuner.subject.ability import Ability
from tuner.subject.contract import AbstractSubject, Forecast, OnProgress, Shardings
from tuner.subject.meaning import describe_cluster

if TYPE_CHECKING:  # surrogates load scipy, and only a search and predictions with errors need them
    from costmodels.surrogates.uncertainty import StepUncertainty
    from tuner.search.earlier_runs import Past
    from tuner.search.posterior import Posterior

OF_CATALOG = "is a training step of your own, and this needs a model of the catalog"
"""Reason against all that needs a job and a framework."""

REFUSALS = {
    Ability.FLAGS: OF_CATALOG,
    Ability.LAYERS: OF_CATALOG,
    Ability.SIZES: OF_CATALOG,
    Ability.TOKENS: "needs a model of the catalog or a file, because a step of your own has no known tokens",
    Ability.KNOBS: "are known of frameworks, and this is a step of your own",
    Ability.HISTORY: "cannot inform other studies: they learn from models of the catalog only",
    Ability.FEWER_HOSTS: OF_CATALOG,
    Ability.WATCH: "is of a training step of your own, and only layouts of a model of the catalog can be watched",
}

PARTS = {"compute": "compute", "dp": "data", "tp": "model"}
"""Axis of the mesh that each part of a predicted step is told by."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnStepSubject(AbstractSubject):
    """Step of the user's own.

    Attributes:
        cluster: Cluster of the study.
        plans: Plans of the step, on the cluster without changes by a trace.
    """

    cluster: Cluster
    plans: OwnStepPlans

    @property
    def measured_setting(self) -> MeasuredSetting:
        """Refuse to describe a job and a framework.

        Raises:
            ConfigError: Always.
        """
        raise self._refused()

    @property
    def defaults(self) -> dict[str, Value]:
        """Values of plain data parallelism, sharded by hand."""
        return predictions.DEFAULTS

    @property
    def rows(self) -> tuple[MeasuredRun, ...]:
        """No rows: trials run."""
        return ()

    @property
    def memory_digits(self) -> int:
        """Number of decimals of memory in GiB; such steps may be small."""
        return 3

    def refusal(self, ability: Ability) -> str | None:
        """Refuse what needs a model of the catalog."""
        return REFUSALS.get(ability)

    def on_cluster(self, cluster: Cluster) -> OwnStepSubject:
        """Return the step on another state of its cluster; its plans stay."""
        return replace(self, cluster=cluster)

    def with_setting(self, setting: Setting) -> AbstractSubject:  # noqa: ARG002 # the contract's
        """Refuse to take a job and a framework.

        Raises:
            ConfigError: Always.
        """
        raise self._refused()

    def current(self, stated: dict[str, Value] | None, options: SpaceOptions) -> ParallelConfig | None:  # noqa: ARG002 # the contract's
        """Return the configuration in use today; `space` checks that it is a candidate."""
        if stated is None:
            return None
        for name, value in stated.items():
            if name not in predictions.SEARCHED:
                raise ConfigError(
                    "unknown key",
                    key=f"current.{name}",
                    value=value,
                    nearest=f"valid: {', '.join(predictions.SEARCHED)}",
                )
        try:
            return ParallelConfig(**(predictions.DEFAULTS | stated))  # type: ignore[arg-type] # checked by ParallelConfig
        except ConfigError as error:
            raise error.under("current") from None

    def space(
        self,
        options: SpaceOptions,
        *,
        current: ParallelConfig | None,
        measured: ConfigGrid | None = None,  # noqa: ARG002 # the contract's; every plan can be measured
    ) -> Space:
        """Return the meshes times plans that may fit in memory."""
        return predictions.space_of(self.plans, options, current)

    def reasons_against(self, options: SpaceOptions, chosen: ParallelConfig, space: Space) -> dict[str, str]:
        """Return the reasons against a configuration."""
        return predictions.reasons_against(self.plans, options, chosen, space)

    def rule_reasons(self, options: SpaceOptions) -> dict[str, str]:
        """Return what meshes must divide, in words."""
        return predictions.rule_reasons(options)

    def check_launchable(
        self,
        options: SpaceOptions,
        chosen: ParallelConfig,
        *,
        current: ParallelConfig | None,
        missing: str,  # noqa: ARG002 # the contract's
    ) -> tuple[str, ...]:
        """Check that there is a plan of the configuration."""
        if self.plans.find(chosen) is not None:
            return ()
        space = self.space(options, current=current)
        raise ConfigError(
            "; ".join(self.reasons_against(options, chosen, space).values()),
            key="--config",
            value=words_of(chosen),
            nearest="`meshtune rank` prints the candidates",
        )

    def forecast(self, grid: ConfigGrid, memory: MemoryEstimate | None = None) -> Forecast:
        """Return the planners' costs of candidates."""
        if memory is None:
            memory = predictions.memory_of(self.plans, grid)
        return Forecast(estimate=predictions.estimate_of(self.plans, grid), memory=memory)

    def features(self, grid: ConfigGrid, estimate: StepEstimate) -> FloatArray:
        """Return the features of meshes and plans [n, 5]."""
        return predictions.features_of(grid, estimate)

    def uncertainty(self, grid: ConfigGrid, memory: MemoryEstimate | None = None) -> StepUncertainty | None:
        """Return None: the errors of planners' costs are not known."""

    def prior(
        self,
        grid: ConfigGrid,
        past: Past | None,  # noqa: ARG002 # the contract's; no history is known of such a step
        *,
        on_progress: OnProgress = lambda _: None,  # noqa: ARG002 # the contract's
    ) -> Posterior:
        """Return the posterior before any trial, with wide errors of the planners' costs."""
        return predictions.posterior_before_trials(self.plans, grid)

    def utilisation(self, step_time_s: float) -> float:
        """Return the FLOPs of the step's operators per second over the peak of all devices."""
        return predictions.flops_utilisation(self.plans, step_time_s)

    def throughput(self, step_time_s: float) -> float | None:
        """Return None: a step of the user's own has no known tokens."""

    def title(self, devices: str) -> str:
        """Return the factory in words."""
        return f"{self.plans.factory}, a training step of your own, on {devices}"

    def space_lines(self, options: SpaceOptions, space: Space) -> list[str]:
        """Count the candidates, and the meshes and plans that each rule removed."""
        lines = [
            f"{len(self.plans.degrees):,} meshes of data x model; {space.num_before_memory:,} plans on them, "
            f"{space.num_before_memory - space.removed.get('memory', 0):,} of them may fit in memory."
        ]
        reasons = self.rule_reasons(options) | {
            "memory": "plans are predicted to need more than a device's memory minus the headroom"
        }
        lines += [
            f"  {name:<20} {count:>9,}  {reasons.get(name, '')}".rstrip() for name, count in space.removed.items()
        ]
        return lines

    def part_lines(self, breakdown_s: Mapping[str, float], step_time_s: float) -> list[str]:
        """Return a line for compute and for the collectives of each axis of the mesh."""
        return [
            f"  {name:<12} {breakdown_s[part]:10.3g} s  {breakdown_s[part] / step_time_s:6.1%}"
            for part, name in PARTS.items()
        ]

    def columns(self, dimensions: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002 # the contract's
        """Return the axes of the mesh, the size of micro-batches if there are several, and the plan."""
        return ("dp", "tp", *(("mbs",) if self.plans.mbs else ()), *predictions.OPENED)

    def shardings(self, chosen: ParallelConfig, name: str) -> Shardings | None:
        """Return the mesh and the layouts of a candidate."""
        module = module_name(name)
        usage = usage_lines(self.plans, module)
        return Shardings(answer=answer_of(self.plans, chosen), module=module, usage=usage)

    def left_out(self) -> tuple[str, ...]:
        """Return why meshes have no candidate."""
        return tuple(
            f"data={self.plans.cluster.num_devices // tp}, model={tp}: {self.plans.on(tp).reason}"
            for tp in self.plans.degrees
            if not self.plans.on(tp).candidates
        )

    def check_target(self, target: str) -> None:
        """Check that the target is the step's own library."""
        if target not in OWN_TARGETS:
            raise self._refused()
        world = self.plans.step.world
        if target != world:
            raise ConfigError(
                f"is not the library of {self.plans.factory}", key="--to", value=target, nearest=f"--to {world}"
            )

    def export(
        self,
        chosen: ParallelConfig,
        target: str,
        *,
        knobs: Sequence[Knob],  # noqa: ARG002 # the contract's
        known: Callable[[], str],
        module: str,
    ) -> Export:
        """Return a Python module that shards the step as a candidate does."""
        return Export(target=target, text=program_text(self.plans, chosen, known=known(), file=module))

    def meaning(
        self,
        options: SpaceOptions,  # noqa: ARG002 # the contract's
        planning: LayerPlanning,  # noqa: ARG002 # the contract's
        knobs: Sequence[Knob],  # noqa: ARG002 # the contract's
    ) -> dict[str, Any]:
        """Return factory, program, cluster and planner as JSON."""
        return {
            "model": {self.plans.step.world: self.plans.factory, "program": self.plans.fingerprint()},
            "space": {"opened": list(predictions.OPENED)},
            "planner": {"name": self.plans.planner},
            "cluster": describe_cluster(self.cluster),
        }

    def as_stored(self) -> dict[str, Any]:
        """Return all plans that are made."""
        return self.plans.as_json()

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take the plans of earlier runs in place of planning again."""
        self.plans.restore(stored)

    def _refused(self) -> ConfigError:
        step = self.plans.step
        return ConfigError(
            OF_CATALOG,
            key=step.key,
            value=step.factory,
            nearest=f"space, rank, predict, run, status, trials, best, export --to {step.world} and report work with "
            "it",
        )
