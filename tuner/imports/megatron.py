"""Importer for launch scripts of Megatron-LM, Megatron-DeepSpeed and MindSpeed-LLM, and for lists of their flags.

Sources: Megatron-LM megatron/training/arguments.py; torchrun's documentation for the launcher.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hardware.io.errors import ConfigError
from tuner.export.megatron_flags import PATTERN
from tuner.imports import known_arguments, vocabulary
from tuner.imports.bash.script import Script, read_script
from tuner.imports.bash.texts import Argument
from tuner.imports.facts import facts_in_environment, facts_in_flags
from tuner.imports.flags import Flag, Flags, flag_name, flags_among
from tuner.imports.imported import Imported, Unread
from tuner.imports.megatron_blocks import blocks_of
from tuner.imports.megatron_command import command_of
from tuner.imports.megatron_degrees import degrees_of
from tuner.imports.megatron_hidden import Found, Hidden, agreed_words, hidden_by_rivals, hidden_words
from tuner.imports.megatron_hybrid import OLD_PATTERN, PROGRAMS, RATIOS, hybrid_of
from tuner.imports.megatron_job import job_of, offload_of
from tuner.imports.megatron_model import hidden_sizes, model_of
from tuner.imports.megatron_refusals import refuse_other_models
from tuner.imports.megatron_runtime import runtime_of
from tuner.imports.torchrun import ALL_DEVICES, Launch, launch_of

SIGNS = {
    "--num-layers",
    "--hidden-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--micro-batch-size",
    "--seq-length",
}
"""Flags that identify a command of Megatron-LM."""
OF_OLD_PATTERN = (
    f"{OLD_PATTERN} and ratios are those of Megatron-LM before core 0.17: a trial whose stages differ from today's has "
    f"{PATTERN} in their place, which that version has not; fix pp and vpp in `space:` if yours is older"
)
MAX_NAMES = 12
"""Limit on the names in a note."""


def import_megatron(text: str, *, is_log: bool = False) -> Imported:
    """Read a launch script without running any part of it.

    Args:
        text: Text of the script, or a list of flags.
        is_log: Whether the flags are those that a log prints, with the defaults of all others.

    Raises:
        ConfigError: the script has no flag of Megatron-LM, the value of a flag is invalid, or the model is of a kind
            that is not modelled.
    """
    script = read_script(text)
    words, launch, hidden = _training_words(script)
    listed = flags_among(words, dashed=True)
    if not SIGNS & {flag.name for flag in listed}:
        raise ConfigError(
            "has no flags of Megatron-LM, such as --tensor-model-parallel-size, or they stand in a script that it runs",
            nearest="`meshtune init --capture -- bash SCRIPT` finds the command that it starts",
        )
    name = launch.name if launch else ""
    described = import_flags(listed, program=name, beside=text, hidden=hidden, is_log=is_log)
    unread: list[Unread] = []
    hosts, devices_per_host = launched_devices(text, launch, unread)
    command = None if launch is None else command_of(launch, script, runtime=described.runtime)
    return replace(
        described,
        hosts=hosts,
        devices_per_host=devices_per_host,
        command=command,
        facts={**described.facts, **facts_in_environment(command.environment if command else ())},
        unread=(*described.unread, *unread, *(one.word for one in hidden), *_sourced(script)),
        notes=(*_defaulted(script), *described.notes),
    )


def import_flags(
    listed: Sequence[Flag],
    *,
    program: str = "",
    beside: str = "",
    hidden: tuple[Hidden, ...] = (),
    is_log: bool = False,
) -> Imported:
    """Read the flags of one command, whose names have dashes.

    Args:
        listed: Flags in their order; of a flag that is given several times the last occurrence counts.
        program: Name of the program's file; empty if unknown.
        beside: Further text of the script, where DeepSpeed's configuration may stand.
        hidden: Words of the command that may hold further flags.
        is_log: Whether the flags are those that a log prints, with the defaults of all others.

    Raises:
        ConfigError: the value of a flag is invalid, or the flags describe a model that Meshtune does not model.
    """
    flags = Flags(listed)
    refuse_other_models(flags, tuple(flag.name for flag in listed), program)
    hybrid = hybrid_of(flags, program, is_log=is_log)
    found = Found(flags=flags, hidden=hidden, segments=hybrid.segments if hybrid else ())
    model, missing = model_of(flags)
    blocks = blocks_of(flags, hybrid)
    if model:
        missing |= hidden_sizes(flags, flags.asked, hidden)
    else:
        found.needed("model", "--num-layers", "--hidden-size", "--num-attention-heads")
    degrees = degrees_of(found)
    job = job_of(found, beside)
    found.needed("sequence_length", "--seq-length", "--decoder-seq-length", "--encoder-seq-length")
    unread = {*found.open} - {"zero_stage"} | (
        {"zero_stage"} if found.may_hold("--use-distributed-optimizer") else set()
    )
    runtime, why = runtime_of(flags, degrees, job, unread)
    job |= offload_of(found, beside, is_mindspeed=runtime == "mindspeed")
    names = tuple(flag.name for flag in listed)
    unknown, further = known_arguments.unknown_flags(flags, () if is_log else names)
    told, doubts = known_arguments.unread_effects(flags, names, job, is_log=is_log)
    frameworks = ("megatron", "mindspeed") if runtime == "mindspeed" else ("megatron",)
    hidden_flags = {flag for one in hidden for flag in one.flags}
    # on DeepSpeed, and in old versions, the absence of a flag says nothing
    holds_more = runtime not in ("megatron-core", "mindspeed") or any(one.may_hold_more for one in hidden)
    facts, unclear = facts_in_flags(flags, frameworks, hidden_flags, holds_more=holds_more)
    micro_batches = None if flags.has("--global-batch-size") else flags.count("--gas") or 1
    if micro_batches and found.absent("global_batch_size", 1, "--global-batch-size", "--gas") is None:
        micro_batches = None
    return Imported(
        framework="megatron",
        runtime=runtime,
        model=model,
        blocks=blocks if model else None,
        missing=missing,
        job=job,
        degrees=degrees,
        open=found.open,
        origins=found.origins,
        micro_batches=micro_batches,
        layers=found.layers,
        copies=flags.count("--num-distributed-optimizer-instances") or 1,
        facts=facts,
        unread=(*dict.fromkeys((*flags.unread, *unclear)), *told),
        doubts=(*dict.fromkeys(flags.doubts), *doubts, *further),
        notes=(
            *_notes(flags, model, program),
            *([OF_OLD_PATTERN] if hybrid and flags.has(OLD_PATTERN, *RATIOS) and not is_log else []),
            *([why] if why else []),
            *([known_arguments.note(unknown)] if unknown else []),
        ),
    )


def _training_words(script: Script) -> tuple[tuple[Argument, ...], Launch | None, tuple[Hidden, ...]]:
    """Return the words of the training program, its launch command if the script has one, and what they hide.

    Of several commands the one with the most flags of Megatron-LM is used. Where others start the same program with
    other flags or values, these are unknown.
    """

    def signs(words: Sequence[Argument]) -> int:
        return len(SIGNS & {flag_name(word.text) for word in words})

    launches = [launch for command in script.commands if signs(command.words) and (launch := launch_of(command))]
    if launches:
        best = max(launches, key=lambda launch: signs(launch.training))
        rivals = [one for one in launches if one.name == best.name and one.training != best.training]
        words = agreed_words(best.training, rivals)
        return words, best, (*hidden_words(words, script), *hidden_by_rivals(words, rivals))
    # A list of flags without a launch command: take them from arrays, strings and plain lines.
    plain = [word for command in script.commands if signs(command.words) for word in command.words]
    held = [word for words in script.variables.values() if _holds_flags(words) for word in words]
    return (*held, *plain), None, hidden_words((*held, *plain), script)


def _holds_flags(words: Sequence[Argument]) -> bool:
    """Return whether a variable holds flags of a training program, and not those of srun or another launcher."""
    names = {flag_name(word.text) for word in words if word.text.startswith("--")}
    known = known_arguments.known_flags() - known_arguments.launcher_flags()
    return bool(words) and words[0].text.startswith("--") and not names.isdisjoint(known)


def launched_devices(text: str, launch: Launch | None, unread: list[Unread]) -> tuple[int | None, int | None]:
    """Return the number of hosts and of devices per host, each None if unknown.

    The flags of torchrun take precedence over the `#SBATCH` lines of a Slurm script.
    """
    launcher = Flags(launch.launcher_flags if launch else [])
    slurm = dict(re.findall(r"^#SBATCH[ \t]+--([a-z-]+)[= ](?:[a-z0-9]+:)?([0-9]{1,6})[ \t]*(?:#.*)?$", text, re.M))
    found: list[int | None] = []
    in_slurm = {"--nnodes": ("nodes",), "--nproc-per-node": ("gpus-per-node", "gres", "ntasks-per-node")}
    in_deepspeed = {"--nnodes": "--num-nodes", "--nproc-per-node": "--num-gpus"}
    for name, keys in in_slurm.items():
        flag = in_deepspeed[name] if launcher.has(in_deepspeed[name]) else name
        value = launcher.text(flag)
        number = int(value) if value and re.fullmatch(r"[1-9][0-9]{0,5}", value) else None
        if value is not None and number is None and value not in ALL_DEVICES:
            launcher.leave(flag, f"{value} is not a number of hosts or devices")
        by_slurm = next((int(slurm[key]) for key in keys if key in slurm), None)
        if flag == "--nnodes" and not launcher.has(flag) and launcher.has("--nproc-per-node"):
            by_slurm = by_slurm or 1  # torchrun's default
        found.append(number if number is not None else by_slurm)
        unread += [one for one in launcher.unread if one.what == flag and found[-1] is None]
    return found[0], found[1]


def _sourced(script: Script) -> tuple[Unread, ...]:
    """Return the other scripts that the script sources, none of which is read."""
    return tuple(
        Unread(
            what=f"source {one.text}",
            why="sourced scripts are not read; source it in the shell that runs the trials",
            line=one.line,
        )
        for one in script.sourced
    )


def _defaulted(script: Script) -> tuple[str, ...]:
    """Return a note on the variables that were read with the script's defaults."""
    if not script.defaulted:
        return ()
    further = ", ..." if len(script.defaulted) > MAX_NAMES else ""
    names = ", ".join(script.defaulted[:MAX_NAMES])
    return (f"read with the defaults in the script, as if the environment did not set them: {names}{further}",)


def _notes(flags: Flags, model: dict[str, Any], program: str) -> tuple[str, ...]:
    notes = []
    stated = flags.has("--padded-vocab-size", "--pad-vocab-size-to", "--vocab-size")
    if "vocab_size" in model and not stated and (proposed := vocabulary.propose(flags)) is not None:
        notes.append(vocabulary.note(proposed, model["vocab_size"]))
    if "vocab_size" in model and not flags.has("--padded-vocab-size"):
        notes.append(
            "Megatron-LM pads the vocabulary to a multiple of 128 times tp; the imported model ignores the factor tp"
        )
    if program not in ("", "pretrain_gpt.py", *(f"{name}.py" for name in PROGRAMS)):
        notes.append(f"{program} may set values that are not among its flags: check the model")
    return tuple(notes)
