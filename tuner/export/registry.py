"""Exporters by name, and the default exporter of each runtime."""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.plugins import load_plugin, plugins, refused
from tuner.export.bridge import export_bridge
from tuner.export.deepspeed import export_deepspeed
from tuner.export.exporter import Export, Exporter
from tuner.export.flagscale import export_flagscale
from tuner.export.gpt_neox import export_gpt_neox
from tuner.export.json_export import export_json
from tuner.export.maxtext import export_maxtext
from tuner.export.megatron import export_megatron
from tuner.export.mindspeed import export_mindspeed
from tuner.export.nanotron import export_nanotron
from tuner.export.nemo import export_nemo
from tuner.export.swift import export_swift
from tuner.export.torchtitan import export_torchtitan
from tuner.export.torchtitan_main import export_torchtitan_main
from tuner.export.verl import export_verl

EXPORTERS: dict[str, Exporter] = {
    "bridge": export_bridge,
    "deepspeed": export_deepspeed,
    "flagscale": export_flagscale,
    "gpt-neox": export_gpt_neox,
    "json": export_json,
    "maxtext": export_maxtext,
    "megatron": export_megatron,
    "mindspeed": export_mindspeed,
    "nanotron": export_nanotron,
    "nemo": export_nemo,
    "swift": export_swift,
    "torchtitan": export_torchtitan,
    "torchtitan-main": export_torchtitan_main,
    "verl": export_verl,
}

EXPORTER_OF_RULE_SET = {
    "maxtext": ("maxtext", "Settings for MaxText"),
    "megatron": ("megatron", "Flags for Megatron-LM"),
    "mindspeed": ("mindspeed", "Flags for MindSpeed-LLM"),
    "nanotron": ("nanotron", "Configuration for nanotron"),
    "torchtitan": ("torchtitan", "Flags for torchtitan"),
    "megatron-deepspeed": ("deepspeed", "Configuration for DeepSpeed"),
    "gpt-neox": ("gpt-neox", "Configuration for GPT-NeoX"),
}
"""Exporter of each framework and a title of its output, by the rule set of the runtime profile.

A profile that was fitted to a user's own steps keeps the rule set of its framework.
"""


def exporter_for(runtime: RuntimeProfile) -> tuple[Exporter, str]:
    """Return the exporter of the runtime's framework and a title of its output.

    Runtimes without an exporter of their own get the one of Megatron-LM.
    """
    target, title = EXPORTER_OF_RULE_SET.get(runtime.rule_set, EXPORTER_OF_RULE_SET["megatron"])
    return EXPORTERS[target], title


def exporter_names() -> tuple[str, ...]:
    """Return the names of all exporters, Meshtune's own first."""
    return tuple(dict.fromkeys((*EXPORTERS, *plugins("exporters"))))


def find_exporter(name: str, key: str = "--to") -> Exporter:
    """Return the exporter with this name, Meshtune's or an installed package's; `key` names the option in messages.

    Raises:
        ConfigError: no exporter has this name, or that of a package cannot be used.
    """
    if name in EXPORTERS:
        return EXPORTERS[name]
    if name not in plugins("exporters"):
        raise ConfigError("is not an export target", key=key, value=name, nearest=did_you_mean(name, exporter_names()))
    return _of_package(name)


def _of_package(name: str) -> Exporter:
    """Return the exporter of a package, whose results are checked."""
    function = load_plugin("exporters", name)
    if not callable(function):
        raise refused("exporters", name, "is no function")

    def export(setting: Setting, config: ParallelConfig) -> Export:
        exported = function(setting, config)
        if not isinstance(exported, Export):
            raise refused("exporters", name, "returned no tuner.export.Export")
        return exported

    return export
