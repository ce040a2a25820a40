"""The exporters by name."""

from __future__ import annotations

from hardware.errors import ConfigError, did_you_mean
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


def find_exporter(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in EXPORTERS:
        raise ConfigError("is no export target", key="--to", value=name, nearest=did_you_mean(name, EXPORTERS))
    return EXPORTERS[name]
