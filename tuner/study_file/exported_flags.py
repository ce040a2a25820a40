"""Exporters of framework flags, in the form in which trials that run a user's command ask for them."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from trials.framework_flags import FlagExporter, Flags
from tuner.export import find_exporter

WITH_FLAGS = ("megatron", "mindspeed", "torchtitan")
"""Exporters that write flags."""

ENDS_COMMAND = ("torchtitan",)
"""Exporters whose flags end with a subcommand, after which the program takes no other flags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFlags:
    """Function that writes configurations as the flags of one framework; it pickles into workers.

    Attributes:
        setting: Job, cluster and runtime of the configurations.
        target: Name of the exporter.
    """

    setting: Setting
    target: str

    def __call__(self, config: ParallelConfig) -> Flags:
        """Return the flags of one configuration."""
        export = find_exporter(self.target)(self.setting, config)
        return Flags(arguments=export.arguments, environment=export.environment)


def flag_exporters(setting: Setting) -> dict[str, FlagExporter]:
    """Return the exporters of all frameworks that take flags, by name."""
    return {
        name: FlagExporter(write=ExportedFlags(setting=setting, target=name), ends_command=name in ENDS_COMMAND)
        for name in WITH_FLAGS
    }
