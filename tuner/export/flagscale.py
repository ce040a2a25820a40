"""Exporter for the sections of FlagScale's file for training that a configuration determines (YAML).

FlagScale passes each key to its Megatron-LM as a flag, whatever section it stands in. The sections here are those of
the project's examples.

Sources: FlagOpen/FlagScale flagscale/runner/utils.py (`flatten_dict_to_args`: underscores become dashes, true a switch,
a list several words), examples/*/conf/train; for the flags those of tuner/export/megatron.py. For meshes with tensor
degrees of their own: the section `hetero` of its examples, and the checks in `pre_validate_args` of its arguments.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.pipeline.stage_degrees import stage_variants, widest_variant
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue, read_flags
from tuner.export.megatron import environment, export_megatron
from tuner.export.megatron_flags import GLOBAL, LAYOUT, MEGATRON_FLAGS, MICRO, SEQUENCE, underscored
from tuner.export.parts import format_comments, layers_of_parts

VERSIONS = "FlagScale whose Megatron-LM is that of megatron-core 0.16 to 0.19; checked with 0.19.2"
"""Versions of the framework that take the export."""

_OF_MODEL = (SEQUENCE, MICRO, GLOBAL)
"""Flags of the section `model`; the others stand in `system`."""
_GROUPS = {"--recompute": "recompute", "--bf16": "precision", "--fp": "precision", "--ckpt": "checkpoint"}
"""Group within `system` by the beginning of a flag."""


def export_flagscale(setting: Setting, config: ParallelConfig) -> Export:
    """Return the sections `system` and `model` of the file, without the keys that no configuration determines."""
    exported = export_megatron(setting, config)
    # stages beyond the first may have tp where the first has none
    variables = environment(widest_variant(config), sharded=False) if config.assignment.stage_tp else ()
    values = read_flags(exported.arguments, MEGATRON_FLAGS)
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
    told = exported.notes
    if len(set(config.assignment.stage_tp)) > 1:
        system.pop(underscored(LAYOUT), None)  # meshes have a list of layers instead
        system["sequence_parallel"] = True  # as FlagScale demands; meshes with tp=1 switch it off by themselves
        system["hetero"], unlike = _meshes(setting, config)
        told = (*(note for note in told if not note.startswith(("stage_tp:", "pp: the layout"))), *unlike)
    set_by_user = [
        f"experiment.envs: {name} must not be set" if value is None else f"experiment.envs: {name} must be {value}"
        for name, value in dict((*exported.environment, *variables)).items()
    ]
    notes = (*told, *set_by_user)
    text = yaml.safe_dump({"system": system, "model": model}, sort_keys=False)
    comments = format_comments((str(config), f"Versions: {VERSIONS}", *notes))
    return Export(target="flagscale", text="\n".join([*comments, text]), notes=notes)


def _meshes(setting: Setting, config: ParallelConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the section `hetero` of a configuration whose stages have tensor degrees of their own, with its notes.

    A mesh is a run of stages with one tensor degree on one kind of devices: tp, cp, ep, dp and pp.
    """
    cluster = setting.cluster.reordered(config.assignment.hosts)
    first_rank = cluster.rank_device_index().reshape(config.pp, -1)[:, 0].tolist()
    variants = stage_variants(config)
    meshes: list[int] = []
    types: list[str] = []
    for (device, tp), run in groupby(zip(first_rank, config.assignment.stage_tp, strict=True)):
        own = variants[tp]
        meshes += [own.tp, own.cp * own.up, own.ep, own.dp, len(list(run))]
        types.append(cluster.devices[device].name)
    section = {
        "enable_hetero": True,
        "hetero_process_meshes": meshes,
        "hetero_pipeline_layer_split": list(layers_of_parts(setting, config)),
        "hetero_device_types": types,
        "hetero_current_device_type": types[0],
    }
    batches = ", ".join(f"{own.mbs} with tp={tp}" for tp, own in variants.items())
    notes = (
        "stage_tp: each mesh of hetero_process_meshes is tp, cp, ep, dp and pp of the stages on one kind of devices; "
        f"FlagScale derives the micro-batch of a mesh from its dp ({batches})",
        "hosts: give every node of the hostfile its type, one of hetero_device_types, and each node its own "
        "hetero_current_device_type; meshes take the nodes in the order of the types",
    )
    return section, notes


def _as_yaml(value: FlagValue) -> Any:
    return list(value) if isinstance(value, tuple) else value
