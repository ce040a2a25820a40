"""Subject with a job, a cluster and the runtime of a framework: what models of the catalog and published rows share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from costmodels.job.described_model import describe_model
from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, HAND, ConfigGrid, ParallelConfig, Value
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.step_time import StepEstimate, estimate_step, model_flops_utilisation
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.knobs.knob import Knob, describe_knobs
from tuner.export import find_exporter
from tuner.export.exporter import Export
from tuner.export.knob_export import with_knobs
from tuner.own_step.answer import OWN_TARGETS
from tuner.plans.layer_planning import LayerPlanning
from tuner.space.enumeration import Space, SpaceOptions, broken_rules, build_space, launchable, rule_reasons
from tuner.space.fewer_hosts import setting_on_hosts
from tuner.space.remedies import remedy_in_words
from tuner.subject.contract import AbstractSubject, Forecast, OnProgress, Shardings
from tuner.subject.meaning import describe_cluster

if TYPE_CHECKING:  # surrogates load scipy, and only a search and predictions with errors need them
    from costmodels.surrogates.uncertainty import StepUncertainty
    from tuner.search.earlier_runs import Past
    from tuner.search.posterior import Posterior

NO_SHARDINGS = "is for studies of a training step of your own"
"""Reason why a framework's model has no shardings to hand out."""


def tokens_per_s_per_device(setting: Setting, step_time_s: float) -> float:
    """Return the throughput of one device at a step time [tokens/s]."""
    return setting.job.tokens_per_step / (step_time_s * setting.cluster.num_devices)


class AbstractModelSubject(AbstractSubject):
    """Subject that a framework trains and the cost model predicts; see the contract."""

    @property
    def cluster(self) -> Cluster:
        """Cluster of the study."""
        return self.setting.cluster

    @property
    def defaults(self) -> dict[str, Value]:
        """Values of the further dimensions that the job and the runtime fix, by name."""
        job, runtime = self.setting.job, self.setting.runtime
        return job.fixed_values(sequence_parallel=runtime.sequence_parallel) | {"assignment": ""}

    @property
    def memory_digits(self) -> int:
        """Number of decimals of memory in GiB."""
        return 1

    @abstractmethod
    def with_setting(self, setting: Setting) -> AbstractModelSubject:
        """Return the subject with another setting."""

    def on_cluster(self, cluster: Cluster) -> AbstractModelSubject:
        """Return the subject on another state of its cluster."""
        return self.with_setting(replace(self.setting, cluster=cluster))

    def current(self, stated: dict[str, Value] | None, options: SpaceOptions) -> ParallelConfig | None:
        """Return the configuration in use today, checked against the study."""
        if stated is None:
            return None
        known = [name for name in DEGREES + FURTHER_DIMENSIONS if name != "plan"]  # today layers are sharded by hand
        for name, value in stated.items():
            if name not in known:
                raise ConfigError(
                    "unknown key", key=f"current.{name}", value=value, nearest=f"valid: {', '.join(known)}"
                )
        fixed = self.defaults
        try:
            config = ParallelConfig(**(fixed | stated))  # type: ignore[arg-type] # checked by ParallelConfig
        except ConfigError as error:
            raise error.under("current") from None
        for name, value in stated.items():
            if name in FURTHER_DIMENSIONS and name not in options.opened and value != fixed[name]:
                raise ConfigError(
                    f"the study fixes {name} to {fixed[name]}",
                    key=f"current.{name}",
                    value=value,
                    nearest=f"leave it out, change job.{name}, or search it with space.{name}",
                )
        if not launchable(self.setting, config):
            reasons = broken_rules(self.setting, options, config)
            raise ConfigError(
                "cannot be launched: " + "; ".join(reasons.values()), key="current", value=str(config), nearest=None
            )
        return config

    def space(
        self, options: SpaceOptions, *, current: ParallelConfig | None, measured: ConfigGrid | None = None
    ) -> Space:
        """Return the configurations that obey every rule and may fit in memory, or those that were measured.

        Raises:
            ConfigError: No plan by hand holds a pin.
        """
        found = build_space(self.setting, options, current=current, measured=measured)
        if 0 < found.num_before_memory == found.removed.get("memory"):
            found = replace(found, warnings=(*found.warnings, remedy_in_words(self.setting, options)))
        if not options.pins or not len(found.grid):
            return found
        kept = self.holds_pins(options, found.grid, is_all=True)
        if current is not None:  # it stays, as it does beside broken rules
            kept[found.grid.positions()[tuple(current.values(found.grid.dimensions).values())]] = True
        removed = {} if kept.all() else {"pins": int((~kept).sum())}
        rows = np.flatnonzero(kept)
        return replace(
            found, grid=found.grid.take(rows), memory=found.memory.take(rows), removed=found.removed | removed
        )

    def holds_pins(self, options: SpaceOptions, grid: ConfigGrid, *, is_all: bool) -> NDArray[np.bool_]:
        """Return whether the plan by hand of each candidate holds the pins of the study [n]; see `held_by_hand`."""
        from tuner.plans.pins_by_hand import held_by_hand  # noqa: PLC0415 # see the imports above

        return held_by_hand(self.setting, grid, options.pins, is_all=is_all)

    def rule_reasons(self, options: SpaceOptions) -> dict[str, str]:
        """Return what each active rule demands, in words."""
        pins = {"pins": "the plan by hand must hold planner.pins"} if options.pins else {}
        return rule_reasons(self.setting, options) | pins

    def check_launchable(
        self,
        options: SpaceOptions,
        chosen: ParallelConfig,
        *,
        current: ParallelConfig | None,  # noqa: ARG002 # the contract's
        missing: str,
    ) -> tuple[str, ...]:
        """Return a note on each broken rule of a configuration whose degrees divide what they split."""
        broken = broken_rules(self.setting, options, chosen)
        if launchable(self.setting, chosen):
            return tuple(f"{name}: {reason}" for name, reason in broken.items())
        on_hosts = setting_on_hosts(self.setting, chosen)
        devices, rest = on_hosts.cluster.num_devices, chosen.num_devices // chosen.dp
        nearest = "`meshtune space --list` prints the configurations that can be launched"
        if chosen.num_devices != devices and devices % rest == 0:
            nearest = f"with dp={devices // rest} it would occupy the {devices} devices"
        raise ConfigError(
            "cannot be launched: "
            + ("; ".join(broken.values()) or "its degrees do not divide the job")
            + (f"; {missing}" if missing else ""),
            key="--config",
            value=str(chosen),
            nearest=nearest,
        )

    def forecast(self, grid: ConfigGrid, memory: MemoryEstimate | None = None) -> Forecast:
        """Return the closed-form predictions of configurations, whether they are candidates or not."""
        if memory is None:
            memory = estimate_memory(self.setting, grid)
        return Forecast(estimate=estimate_step(self.setting, grid, memory=memory), memory=memory)

    def features(self, grid: ConfigGrid, estimate: StepEstimate) -> FloatArray:
        """Return the features of `costmodels/surrogates/features.py` [n, d]."""
        from costmodels.surrogates.features import configuration_features  # noqa: PLC0415 # see the imports above

        return configuration_features(self.setting.job, self.cluster, grid, estimate)

    def uncertainty(self, grid: ConfigGrid, memory: MemoryEstimate | None = None) -> StepUncertainty | None:
        """Return the errors of predicted step times, from those of the profile's constants."""
        from costmodels.surrogates.uncertainty import step_uncertainty  # noqa: PLC0415 # see the imports above

        if memory is None:
            memory = estimate_memory(self.setting, grid)
        return step_uncertainty(self.setting, grid, memory=memory)

    def prior(self, grid: ConfigGrid, past: Past | None, *, on_progress: OnProgress = lambda _: None) -> Posterior:
        """Return the posterior before any trial, with the runtime's profile fitted to the history."""
        from tuner.search.prior import initial_posterior  # noqa: PLC0415 # see the imports above

        everywhere = np.arange(len(grid))
        return initial_posterior([(self.measured_setting, everywhere)], grid, past, on_progress=on_progress)

    def utilisation(self, step_time_s: float) -> float:
        """Return the model FLOPs utilisation at a step time."""
        return float(model_flops_utilisation(self.setting.job, self.cluster, np.array([step_time_s]))[0])

    def throughput(self, step_time_s: float) -> float:
        """Return the throughput of one device at a step time [tokens/s]."""
        return tokens_per_s_per_device(self.setting, step_time_s)

    def title(self, devices: str) -> str:
        """Return model, sequences, batch and framework in words."""
        job = self.setting.job
        return (
            f"{job.model.name}, {job.sequence_length:,} tokens per sequence, "
            f"{job.global_batch_size:,} sequences per step, {job.precision}, on {devices}, {self.setting.runtime.name}"
        )

    def part_lines(self, breakdown_s: Mapping[str, float], step_time_s: float) -> list[str]:
        """Return a line for each part of a step that takes time, with its share."""
        return [
            f"  {part:<12} {seconds:10.4f} s  {seconds / step_time_s:6.1%}"
            for part, seconds in breakdown_s.items()
            if seconds
        ]

    def columns(self, dimensions: Sequence[str]) -> tuple[str, ...]:
        """Return all dimensions of candidates."""
        return tuple(dimensions)

    def shardings(self, chosen: ParallelConfig, name: str) -> Shardings | None:
        """Return None, because the framework makes mesh and layouts."""

    def left_out(self) -> tuple[str, ...]:
        """Return nothing: meshes are left out by rules."""
        return ()

    def check_target(self, target: str) -> None:
        """Check that the target is a framework."""
        if target in OWN_TARGETS:
            raise ConfigError(
                NO_SHARDINGS,
                key="--to",
                value=target,
                nearest=f"`meshtune plan STUDY --export {target}` has the plan of a model of the catalog",
            )

    def export(
        self,
        chosen: ParallelConfig,
        target: str,
        *,
        knobs: Sequence[Knob],
        known: Callable[[], str],  # noqa: ARG002 # the contract's
        module: str,  # noqa: ARG002 # the contract's
    ) -> Export:
        """Return a configuration as flags or files of a framework."""
        return with_knobs(find_exporter(target)(self.setting, chosen), knobs, chosen)

    def meaning(self, options: SpaceOptions, planning: LayerPlanning, knobs: Sequence[Knob]) -> dict[str, Any]:
        """Return model, cluster, job, runtime, searched knobs and planner as JSON."""
        own, runtime = self.setting.job, asdict(self.setting.runtime)
        job = {
            field.name: getattr(own, field.name) for field in fields(own) if field.name not in ("model", "sequences")
        }
        job["sequences"] = None if own.sequences is None else asdict(own.sequences)
        del runtime["layer_changes"]  # they follow from the other values
        del runtime["offload_modes"]  # each trial says which of them it has
        del runtime["stated"]  # the fields of the profile say the same
        for name, usual in RuntimeProfile.later_fields().items():
            if runtime[name] == usual:
                del runtime[name]  # as in studies from before there was the field
        del job["plan"]  # each trial says which it has
        if job["offload"] == "none":
            del job["offload"]  # as in studies from before there was the key
        if not job["recompute_layers"]:
            del job["recompute_layers"]  # likewise
        if job["recompute_unit"] == 1:
            del job["recompute_unit"]  # likewise
        if self.setting.job.sequences is None:
            del job["sequences"]
            del runtime["splits_documents"]  # it changes nothing where sequences fill their rows
        return {
            "model": describe_model(own.model),
            "cluster": describe_cluster(self.cluster),
            "job": job,
            "runtime": runtime,
            "space": {"opened": list(options.opened)} | ({"knobs": describe_knobs(knobs)} if knobs else {}),
            **_describe_planner(planning),
        }

    def as_stored(self) -> dict[str, Any]:
        """Return nothing: a study stores its layer plans itself."""
        return {}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take over nothing."""


def _describe_planner(planning: LayerPlanning) -> dict[str, Any]:
    """Return the planner as a key of the study.

    The name tells that both plans are candidates: before, the planner's stood in place of the one by hand.
    """
    if planning.name == "megatron":
        return {}
    return {"planner": {"name": f"{HAND} or {planning.name}", "pins": [asdict(pin) for pin in planning.pins]}}
