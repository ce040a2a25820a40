"""The exporters by name."""

from __future__ import annotations

from hardware.errors import ConfigError, did_you_mean
from tuner.export.exporter import Exporter
from tuner.export.json_export import export_json
from tuner.export.megatron import export_megatron

EXPORTERS: dict[str, Exporter] = {"json": export_json, "megatron": export_megatron}


def find_exporter(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in EXPORTERS:
        raise ConfigError("is no export target", key="--to", value=name, nearest=did_you_mean(name, EXPORTERS))
    return EXPORTERS[name]
