"""How a launch script starts Megatron-LM, as a study's `trial.command` starts it for each trial.

The launcher's hosts and devices become placeholders, the flags that a configuration decides become `{flags}`, and what
a trial must not do (write or load checkpoints, ramp the batch up, profile) is left out. Every step is logged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuner.imports.bash_script import Command, Script
from tuner.imports.bash_texts import Argument
from tuner.imports.flags import Flag, flags_among
from tuner.imports.imported import LaunchCommand

TORCHRUN = (
    "--nnodes={num_hosts}",
    "--nproc-per-node={devices_per_host}",
    "--node-rank={host_rank}",
    "--master-addr={master_address}",
    "--master-port={master_port}",
)

REPLACED = frozenset(
    [
        "--tensor-model-parallel-size",
        "--sequence-parallel",
        "--pipeline-model-parallel-size",
        "--pipeline-model-parallel-layout",
        "--num-virtual-stages-per-pipeline-rank",
        "--num-layers-per-virtual-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--context-parallel-size",
        "--cp-comm-type",
        "--hierarchical-context-parallel-sizes",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--moe-token-dispatcher-type",
        "--moe-grouped-gemm",
        "--micro-batch-size",
        "--global-batch-size",
        "--seq-length",
        "--use-distributed-optimizer",
        "--num-distributed-optimizer-instances",
        "--use-megatron-fsdp",
        "--use-custom-fsdp",
        "--use-torch-fsdp2",
        "--data-parallel-sharding-strategy",
        "--outer-dp-sharding-strategy",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
        "--recompute-modules",
        "--recompute-activations",
        "--bf16",
        "--fp16",
        "--fp8-format",
        "--fp8-hybrid",
        "--fp8-e4m3",
        "--fp4-format",
        "--fp4-recipe",
        "--optimizer",
    ]
)
"""Flags that `{flags}` writes anew for each configuration (tuner/export/megatron.py), or that would contradict them."""

LEFT_OUT = frozenset(
    [
        "--save",
        "--load",
        "--save-interval",
        "--ckpt-format",
        "--rampup-batch-size",
        "--log-interval",
        "--profile",
        "--profile-step-start",
        "--profile-step-end",
        "--profile-ranks",
        "--exit-interval",
        "--no-gradient-accumulation-fusion",
    ]
)
"""Flags that a trial must not have; --no-gradient-accumulation-fusion is what sharded weights need beside them."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.I)
_OURS = ("CUDA_DEVICE_MAX_CONNECTIONS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One command cut into its parts.

    Attributes:
        launcher: The words before the launcher's flags.
        launcher_flags: Its flags, with dashes in their names.
        program: The Python file.
        training: The words behind it.
    """

    launcher: tuple[Argument, ...]
    launcher_flags: list[Flag]
    program: Argument
    training: tuple[Argument, ...]


def launch_of(command: Command) -> Launch | None:
    """The parts of a command that starts a Python file; None for any other."""
    words = command.words
    at = next((number for number, word in enumerate(words) if word.text.endswith(".py")), None)
    if at is None:
        return None
    before = words[:at]
    first = next((number for number, word in enumerate(before) if _begins_launcher(word.text)), 0)
    flag = next((number for number in range(first, at) if before[number].text.startswith("--")), at)
    flags = [
        Flag(name=one.name.replace("_", "-"), line=one.line, values=one.values) for one in flags_among(before[flag:])
    ]
    return Launch(launcher=before[first:flag], launcher_flags=flags, program=words[at], training=words[at + 1 :])


def _begins_launcher(text: str) -> bool:
    name = text.rsplit("/", 1)[-1]
    return name == "torchrun" or re.fullmatch(r"python[0-9.]*", name) is not None


def command_of(launch: Launch, script: Script, *, is_mindspeed: bool) -> LaunchCommand:
    """The command of a trial, and why it is not whole where it isn't.

    Args:
        launch: The script's own command.
        script: What else was read of it.
        is_mindspeed: Whether its flags are MindSpeed's, which `{flags}` can't write.
    """
    kept: list[Argument] = []
    left_out = []
    taken: frozenset[str] = REPLACED | LEFT_OUT
    keeps = True
    for word in launch.training:
        if word.text.startswith("--"):
            name = word.text.partition("=")[0]
            keeps = name not in taken
            if name in LEFT_OUT:
                left_out.append(name)
        if keeps:
            kept.append(word)
    texts = [word.text for word in launch.launcher]
    is_torchrun = texts[-1:] == ["torchrun"] or texts[-2:] in [["-m", module] for module in _LAUNCHERS]
    words = [*launch.launcher, launch.program, *kept]
    unknown = [] if is_torchrun else [f"{' '.join(texts) or 'the launcher'} is not torchrun"]
    unknown += [word.unknown for word in words if word.unknown]
    if is_mindspeed:
        unknown.append("{flags} writes flags of Megatron-LM, not of MindSpeed")
    return LaunchCommand(
        arguments=(
            *map(_braced, texts),
            *TORCHRUN,
            _braced(launch.program.text),
            "{flags}",
            *(_braced(word.text) for word in kept),
            "--log-interval",
            "1",
        ),
        environment=_environment(script),
        unknown=tuple(dict.fromkeys(unknown)),
        left_out=tuple(dict.fromkeys(left_out)),
    )


def _braced(text: str) -> str:
    """A text in which no placeholder stands."""
    return text.replace("{", "{{").replace("}", "}}")


def _environment(script: Script) -> tuple[tuple[str, str], ...]:
    """What the script exports; secrets stay out of the study file, and so does what `{flags}` brings along."""
    found = []
    for name in script.exported:
        words = script.variables.get(name, ())
        if words and not any(word.unknown for word in words) and not _SECRET.search(name) and name not in _OURS:
            found.append((name, _braced(" ".join(word.text for word in words))))
    return tuple(found)
