"""The exporters by name."""

from __future__ import annotations

from costmodels.job.runtime import RuntimeProfile
from hardware.io.errors import ConfigError, did_you_mean
from tuner.export.deepspeed import export_deepspeed
from tuner.export.exporter import Exporter
from tuner.export.json_export import export_json
from tuner.export.megatron import export_megatron
from tuner.export.mindspeed import export_mindspeed
from tuner.export.nanotron import export_nanotron
from tuner.export.nemo import export_nemo
from tuner.export.torchtitan import export_torchtitan

EXPORTERS: dict[str, Exporter] = {
    "deepspeed": export_deepspeed,
    "json": export_json,
    "megatron": export_megatron,
    "mindspeed": export_mindspeed,
    "nanotron": export_nanotron,
    "nemo": export_nemo,
    "torchtitan": export_torchtitan,
}


FRAMEWORKS = {
    "megatron": ("megatron", "Flags for Megatron-LM"),
    "mindspeed": ("mindspeed", "Flags for MindSpeed-LLM"),
    "nanotron": ("nanotron", "Configuration for nanotron"),
    "torchtitan": ("torchtitan", "Flags for torchtitan"),
    "megatron-deepspeed": ("deepspeed", "Configuration for DeepSpeed"),
    "gpt-neox": ("deepspeed", "Configuration for DeepSpeed"),
}
"""The exporter of each framework and what it writes, by the rule set of its runtime profile, which a profile that was
fitted to own steps has too."""


def exporter_for(runtime: RuntimeProfile) -> tuple[Exporter, str]:
    """The exporter of the runtime's own framework, and what it writes; Megatron-LM's where it has none."""
    target, what = FRAMEWORKS.get(runtime.rule_set, FRAMEWORKS["megatron"])
    return EXPORTERS[target], what


def find_exporter(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in EXPORTERS:
        raise ConfigError("is no export target", key="--to", value=name, nearest=did_you_mean(name, EXPORTERS))
    return EXPORTERS[name]
