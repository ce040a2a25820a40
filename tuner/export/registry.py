"""Exporters by name, and the default exporter of each runtime."""

from __future__ import annotations

from costmodels.job.runtime import RuntimeProfile
from hardware.io.errors import ConfigError, did_you_mean
from tuner.export.bridge import export_bridge
from tuner.export.deepspeed import export_deepspeed
from tuner.export.exporter import Exporter
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


def find_exporter(name: str, key: str = "--to") -> Exporter:
    """Return the exporter with this name; `key` names the option in messages.

    Raises:
        ConfigError: no exporter has this name.
    """
    if name not in EXPORTERS:
        raise ConfigError("is not an export target", key=key, value=name, nearest=did_you_mean(name, EXPORTERS))
    return EXPORTERS[name]
