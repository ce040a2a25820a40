"""Cost models of other projects: what each says of a measured run, and what none of them has words for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.setting import Setting
from hardware.host_group import HostGroup
from hardware.io.errors import ConfigError

Refusals = Mapping[str, Callable[[MeasuredRun, Setting], bool]]
"""What a model lacks, each with the test of a run that needs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignModel:
    """Cost model of another project, imported from the user's own copy.

    Attributes:
        name: Name in tables.
        refusals: What it lacks.
        nearly: What it has no words for, but comes near to.
        predict: Its step time [s] and memory peak [bytes] of a run that it can express. It raises ValueError with its
            own message where the other project refuses the run.
    """

    name: str
    refusals: Refusals
    nearly: Refusals
    predict: Callable[[MeasuredRun, Setting], tuple[float, float]]

    def inexpressible(self, run: MeasuredRun, setting: Setting) -> str | None:
        """Return what it lacks to express a run; None if it lacks nothing.

        Args:
            run: Measured run.
            setting: Its job, cluster and runtime.
        """
        return next((reason for reason, is_refused in self.refusals.items() if is_refused(run, setting)), None)

    def approximations(self, run: MeasuredRun, setting: Setting) -> tuple[str, ...]:
        """Return what it expresses only nearly in a run."""
        return tuple(name for name, is_so in self.nearly.items() if is_so(run, setting))


SHARED_REFUSALS: Refusals = {
    "no hosts of several kinds": lambda _, setting: len(setting.cluster.groups) != 1,
    "no hybrid models": lambda run, _: run.model.decoder is None,
    "no latent attention": lambda run, _: run.model.plain.uses_mla,
    "no multi-token prediction": lambda run, _: run.model.num_mtp_layers > 0,
    "no context parallelism": lambda run, _: run.config.cp * run.config.up > 1,
    "no uneven work": lambda run, _: bool(run.config.assignment),
    "no recomputation of some layers": lambda run, _: run.config.recompute_layers > 0,
    "no such offload": lambda run, _: run.config.offload != "none",
    "no recomputation of these modules": lambda run, setting: (
        run.config.recompute == "selective"
        and (setting.runtime.selective_products or setting.job.recompute_modules != ("core_attn",))
    ),
    "its type of 16 bits only": lambda _, setting: setting.job.precision not in ("bf16", "fp16"),
}
"""What none of the models has."""


def hosts_of(setting: Setting) -> HostGroup:
    """Return the hosts of a cluster of equal hosts."""
    (hosts,) = setting.cluster.groups
    return hosts


def import_from(folder: Path, *modules: str, repository: str) -> list[ModuleType]:
    """Import modules of another project from a copy of it.

    Raises:
        ConfigError: A library that it needs is missing.
    """
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise ConfigError(
            f"cannot be imported ({error})", key="--peers", value=str(folder), nearest=f"see {repository}"
        ) from error
    finally:
        sys.path.remove(str(folder))
