"""Write the text of a study file as a person would: one key per line, with a comment where it helps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from costmodels.job.decoder import Decoder
from costmodels.job.listed_model import listed_keys
from costmodels.job.model_spec import ModelSpec
from costmodels.job.runtime import RuntimeProfile, find_runtime
from tuner.imports import Imported, LaunchCommand, Present
from tuner.imports.log import Measured

WIDTH = 116
_PLAIN = re.compile(r"(--)?[A-Za-z][A-Za-z0-9_./-]*")
_TASKS = {"per_device": "srun starts it once for each device", "once": "the job starts it once, as mpirun asks"}
_NO_TEXT = ("true", "false", "null", "yes", "no", "on", "off")


def study_text(
    imported: Imported,
    present: Present,
    *,
    name: str,
    model: str,
    cluster: Mapping[str, Any],
    file: Path,
    measured: Measured | None = None,
    facts: Mapping[str, Any] | None = None,
    further: Sequence[str] = (),
) -> str:
    """Return the text of the study file; `file` is the framework's, for comments, and `further` lines end `trial:`."""
    modes = _modes(present, find_runtime(imported.runtime))
    uneven = re.findall(r"([a-z_]+)=", str(present.current.get("assignment", "")))
    lines = [
        *_head(imported, file, has_current=bool(present.current)),
        f"name: {scalar(name)}",
        f"model: {scalar(model)}",
        f"cluster: {_flow(cluster)}",
        f"job: {_flow(present.job)}",
        f"runtime: {scalar(imported.runtime)}",
        *([f"facts: {_flow(facts)}  # what it does otherwise than the runtime's profile"] if facts else []),
    ]
    if uneven:
        lines.append(f"space: {_flow({'assignment': uneven})}  # work may be uneven, as it is today")
    elif len(modes) > 1:
        lines.append(f"# space: {_flow({'recompute': modes})}  # searches a dimension that job: fixes")
    if present.current:
        lines.append(f"current: {_flow(present.current)}  # in use today: never pruned, and the first trial")
    if measured is not None:
        lines += _measured(measured, counts=imported.command is not None and not imported.command.unknown)
    lines += ["search: {max_trials: 40, seed: 0}", *_trial(imported, file, further)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _modes(present: Present, runtime: RuntimeProfile) -> list[str]:
    """Return the kinds of recomputation that the runtime offers and that are worth a search, with today's."""
    today = str(present.job.get("recompute", "none"))
    return [mode for mode in runtime.recompute_modes if mode in ("none", "full", today)]


def model_text(model: ModelSpec, file: Path) -> str:
    """Return the text of a model's file: the keys of its decoder that differ from their defaults, or its blocks."""
    head = f"# The model of {_comment(file.name)}, as its flags give it. Look it over once."
    if not model.is_plain:
        return f"{head}\n{yaml.safe_dump(listed_keys(model), sort_keys=False, width=120, default_flow_style=None)}"
    defaults = {field.name: field.default for field in fields(Decoder)}
    kept = {key: value for key, value in asdict(model.plain).items() if value != defaults[key] and key != "assumed"}
    lines = [head]
    lines += [f"{key}: {scalar(value)}" for key, value in kept.items()]
    return "\n".join(lines) + "\n"


def _head(imported: Imported, file: Path, *, has_current: bool) -> list[str]:
    what = "`current:` is what it runs today" if has_current else "it tells a model, and no configuration"
    lines = [f"# Written by `meshtune init` from `{_comment(str(file))}`: {what}."]
    if imported.unread:
        lines += ["# Not read, or not modelled:", *(f"#   {_comment(str(one))}" for one in imported.unread)]
    return [*lines, *(f"# {_comment(note)}" for note in imported.notes)]


def _measured(measured: Measured, *, counts: bool) -> list[str]:
    """Return the lines of `measured:`, which stand in a comment while trials are simulated."""
    values: dict[str, Any] = {"step_time_s": float(f"{measured.step_time_s:.6g}")}
    if measured.peak_memory_bytes is not None:
        values["peak_memory_gib"] = float(f"{measured.peak_memory_bytes / 2**30:.6g}")
    values["source"] = measured.source
    steps = "1 step" if measured.readings == 1 else f"the median of {measured.readings:,} steps"
    head, line = f"# {steps[0].upper()}{steps[1:]} in {_comment(measured.source)}", f"measured: {_flow(values)}"
    if counts:
        return [f"{head}; it counts as the first trial.", line]
    return [f"{head}; uncomment it once trials run your own command:", f"# {line}"]


def proxy_line(hosts: int, *, is_asked: bool) -> str:
    """Return the line of `trial:` for smaller jobs on so many hosts, which is a comment unless it is asked for."""
    on = f"{hosts} hosts" if hosts > 1 else "one host"
    if is_asked:
        return f"  proxy: {{hosts: {hosts}, full_trials: 0}}  # trials are smaller jobs on {on}; none takes all hosts"
    return f"  # proxy: {{hosts: {hosts}}}  # lets most trials run smaller jobs on {on}, in place of the whole cluster"


def _trial(imported: Imported, file: Path, further: Sequence[str]) -> list[str]:
    command = imported.command
    is_asked = any("#" not in line[:4] for line in further)
    simulated = ["trial:", "  backend: simulated", *further] if is_asked else ["trial: {backend: simulated}"]
    script = (command.script if command else "") or file.name
    if command is None:
        return [
            "# Trials are simulated. docs/own-command.md tells how a trial runs your own training command instead.",
            *simulated,
        ]
    if not command.unknown:
        return [
            f"# Each trial runs the command of {_comment(script)} with its own flags until enough steps are timed.",
            *_list_left_out(command),
            *_command(command, further),
        ]
    above = "lines" if is_asked else "line"
    return [
        *simulated,
        f"# To run the command of {_comment(script)} instead, put what is below in place of the {above} above, once",
        "# this is settled:",
        *(f"#   {_comment(why)}" for why in command.unknown),
        *_list_left_out(command),
        *(f"# {line}" for line in _command(command, further)),
    ]


def _list_left_out(command: LaunchCommand) -> list[str]:
    told = {
        "Left out, which a trial must not do": " ".join(command.left_out),
        "Secrets of the script, to be set in the environment of `meshtune run`": " ".join(command.variables),
        "Exported by the script and not copied; set in the environment of `meshtune run` what the training needs": (
            " ".join(command.not_copied)
        ),
        "The script goes elsewhere first, so look at `directory:`": command.moves,
    }
    return [f"# {what}: {_comment(names)}" for what, names in told.items() if names]


def _command(command: LaunchCommand, further: Sequence[str]) -> list[str]:
    environment = [f"  environment: {_flow(dict(command.environment))}"] if command.environment else []
    return [
        "trial:",
        "  backend: command",
        "  command: [",
        *(f"    {line}" for line in _wrap_words([scalar(one) for one in command.arguments])),
        "  ]",
        f"  flags: {command.flags or command.framework}",
        *(["  launch: once  # the command reaches the hosts by itself"] if command.launch == "once" else []),
        *_slurm(command),
        *environment,
        f"  directory: {scalar(command.directory)}  # where the command begins, relative to this file",
        f"  log: {command.framework}"
        if command.steps_per_line == 1
        else f"  log: {_flow({'format': command.framework, 'steps_per_line': command.steps_per_line})}",
        *further,
    ]


def _slurm(command: LaunchCommand) -> list[str]:
    """Return the keys of trials that are jobs of Slurm."""
    options, tasks = command.slurm, command.tasks
    if options is None:
        return []
    lines = ["  launch: slurm  # each trial is one job"]
    lines += [f"  tasks: {tasks}  # {_TASKS[tasks]}"] if tasks in _TASKS else []
    lines += [f"  sbatch: {scalar(options.sbatch)}"] if options.sbatch else []
    lines += [f"  srun: {scalar(options.srun)}"] if options.srun else []
    if options.time_limit:
        lines.append(f"  time_limit: {scalar(options.time_limit)}  # the script's; shorter jobs wait less")
    return lines


def _wrap_words(words: Sequence[str]) -> list[str]:
    """Join words with commas, as many on a line as fit; a flag stays with its values if possible."""
    # first group each flag with its values, as long as a group fits on a line; then fill lines with groups
    groups: list[list[str]] = []
    for number, word in enumerate(words):
        text = word + ("," if number < len(words) - 1 else "")
        if not groups or word.strip('"').startswith("--") or len(" ".join([*groups[-1], text])) > WIDTH:
            groups.append([])
        groups[-1].append(text)
    lines = [""]
    for group in groups:
        text = " ".join(group)
        if lines[-1] and len(lines[-1]) + len(text) + 1 > WIDTH:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines


def _flow(mapping: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{scalar(key)}: {scalar(value)}" for key, value in mapping.items()) + "}"


def scalar(value: Any) -> str:
    """Return a value as YAML, unquoted only if it is certain to be read back as the same value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(scalar, value))}]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT:
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', width=10**6, allow_unicode=False)
    return quoted.rstrip("\n")


def _comment(text: str) -> str:
    """Return text without characters that would end the line of its comment."""
    return "".join(char if char.isprintable() else " " for char in text)
