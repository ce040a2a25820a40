"""Exporter for the sections of FlagScale's file for training that a configuration determines (YAML).

FlagScale passes each key to its Megatron-LM as a flag, whatever section it stands in. The sections here are those of
the project's examples.

Sources: FlagOpen/FlagScale flagscale/runner/utils.py (`flatten_dict_to_args`: underscores become dashes, true a switch,
a list several words), examples/*/conf/train; for the flags those of tuner/export/megatron.py.
"""

from __future__ import annotations

from typing import Any

import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue, fact_flags, read_flags
from tuner.export.megatron import export_megatron
from tuner.export.megatron_flags import GLOBAL, MEGATRON_FLAGS, MICRO, SEQUENCE, underscored
from tuner.export.parts import format_comments

VERSIONS = "FlagScale whose Megatron-LM is that of megatron-core 0.16 to 0.19; checked with 0.19.2"
"""Versions of the framework that take the export."""

_OF_MODEL = (SEQUENCE, MICRO, GLOBAL)
"""Flags of the section `model`; the others stand in `system`."""
_GROUPS = {"--recompute": "recompute", "--bf16": "precision", "--fp": "precision", "--ckpt": "checkpoint"}
"""Group within `system` by the beginning of a flag."""


def export_flagscale(setting: Setting, config: ParallelConfig) -> Export:
    """Return the sections `system` and `model` of the file, without the keys that no configuration determines."""
    exported = export_megatron(setting, config)
    values = read_flags(exported.arguments, MEGATRON_FLAGS | fact_flags("megatron"))
    system: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for flag, value in values.items():
        group = next((name for beginning, name in _GROUPS.items() if flag.startswith(beginning)), None)
        if flag in _OF_MODEL:
            section = model
        elif flag == "--optimizer":
            section = model.setdefault("optimizer", {})  # the section of that name holds the flag of that name
        else:
            section = system if group is None else system.setdefault(group, {})
        section[underscored(flag)] = _as_yaml(value)
    set_by_user = [
        f"experiment.envs: {name} must not be set" if value is None else f"experiment.envs: {name} must be {value}"
        for name, value in dict(exported.environment).items()
    ]
    notes = (*exported.notes, *set_by_user)
    text = yaml.safe_dump({"system": system, "model": model}, sort_keys=False)
    comments = format_comments((str(config), f"Versions: {VERSIONS}", *notes))
    return Export(target="flagscale", text="\n".join([*comments, text]), notes=notes)


def _as_yaml(value: FlagValue) -> Any:
    return list(value) if isinstance(value, tuple) else value
