"""Settings of programs that run megatron-core, written as flags of Megatron-LM and read as those are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from costmodels.job.model_catalog import find_model
from tuner.export.megatron_flags import CP, EP, FLAGS, GLOBAL, GRANULARITY, MICRO, PP, SEQUENCE, TP, VPP, underscored
from tuner.imports import known_arguments
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flag, Flags
from tuner.imports.imported import Doubt, Imported, Unread

STATED_BY = {
    "pp": (PP,),
    "tp": (TP,),
    "cp": (CP,),
    "vpp": (VPP, "--pipeline-model-parallel-layout"),
    "ep": (EP,),
    "mbs": (MICRO,),
    "recompute": (GRANULARITY,),
    "sequence_parallel": ("--sequence-parallel",),
    "sequence_length": (SEQUENCE,),
    "global_batch_size": (GLOBAL,),
}
"""Flags that state each degree and key of the job which a recipe decides otherwise."""
_ASKED_ANYWAY = ("sequence_length", "global_batch_size")
"""Keys of the job that are asked for where they are absent."""


def flags_from(settings: Mapping[str, Any], flag_of: Mapping[str, str]) -> list[Flag]:
    """Return the flags that settings mean, by the flag of each key; other keys may be a flag's own name.

    A switch is there if its value is true. None leaves a flag out.
    """
    found = []
    for key, value in settings.items():
        flag = flag_of.get(key) or f"--{key.rpartition('.')[2].replace('_', '-')}"
        declared = FLAGS[flag].declared.kind if flag in FLAGS else ""
        if value is None or value is False or (declared == "switch" and not value):
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        found.append(Flag(name=flag, line=0, values=tuple(Argument(text=str(one), line=0) for one in values)))
    return found


def effects_of(
    settings: Mapping[str, Any], flag_of: Mapping[str, str], known: Iterable[str], job: Mapping[str, Any]
) -> tuple[list[Unread], list[Doubt]]:
    """Return what settings of a command change that no importer reads: what is told, and what is asked for.

    Args:
        settings: Values by key.
        flag_of: Flag of Megatron-LM for each key that is read.
        known: Keys that change nothing that a study has, or that are told elsewhere; a section may end with a dot.
        job: Keys of the job that were read.
    """
    flags = Flags(flags_from(settings, flag_of))
    keys = {flag_of.get(key) or f"--{key.rpartition('.')[2].replace('_', '-')}": key for key in settings}
    harmless = tuple(known)
    is_known = known_arguments.known_flags() | set(flag_of.values())
    told, doubts = known_arguments.unread_effects(flags, [name for name in keys if flags.has(name)], job, is_log=False)
    told = [replace(one, what=keys[one.what], line=None) for one in told]
    doubts = [replace(one, flag=keys[one.flag], line=None) for one in doubts]
    for name, key in keys.items():
        is_harmless = key in harmless or key.startswith(tuple(one for one in harmless if one.endswith(".")))
        if name in is_known or is_harmless or settings[key] in (None, False) or known_arguments.is_harmless(name):
            continue
        doubts.append(Doubt(flag=key, why="not read; the command keeps it"))
    return told, doubts


def with_open(imported: Imported, stated: Iterable[str], why: str, unknown: Mapping[str, str]) -> Imported:
    """Return an import that leaves open what no setting states, since a recipe that is not read decides it.

    Args:
        imported: What the flags mean, with Megatron-LM's defaults.
        stated: Flags that a setting states.
        why: Reason for all others.
        unknown: Reasons for flags whose values are unknown.
    """
    names = set(stated)
    is_dense = bool(imported.model_name) and not find_model(imported.model_name).is_moe
    is_open = {}
    for key, flags in STATED_BY.items():
        if names & set(flags) or (key == "ep" and is_dense):
            continue
        is_open[key] = next((unknown[flag] for flag in flags if flag in unknown), why)
    if imported.degrees.get("pp") == 1 and "pp" not in is_open:
        is_open.pop("vpp", None)
    if imported.degrees.get("tp") == 1 and "tp" not in is_open:
        is_open.pop("sequence_parallel", None)
    degrees = {name: size for name, size in imported.degrees.items() if name not in is_open}
    job = {name: value for name, value in imported.job.items() if name not in is_open}
    return replace(
        imported,
        degrees=degrees,
        job=job,
        micro_batches=None if "global_batch_size" in is_open else imported.micro_batches,
        open={key: reason for key, reason in is_open.items() if key not in _ASKED_ANYWAY},
        model={},
        missing={},
    )


def names_of(flags: Sequence[Flag]) -> set[str]:
    """Return the names of flags."""
    return {flag.name for flag in flags}


def own_names(*flags: str) -> dict[str, str]:
    """Return the flags by their own names with underscores."""
    return {underscored(flag): flag for flag in flags}
