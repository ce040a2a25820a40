"""Conversion of a launch script of Megatron-LM or MindSpeed-LLM into a study's `trial.command`.

Hosts and devices of the launcher become placeholders, and `{flags}` replaces all flags that depend on the
configuration. Flags with effects that a trial must not have are removed: writing or loading checkpoints, reporting to
TensorBoard or Weights & Biases, ramping up the batch, and profiling. Every step is logged.
"""

from __future__ import annotations

from tuner.imports.bash.script import Script
from tuner.imports.bash.texts import Argument
from tuner.imports.imported import LaunchCommand
from tuner.imports.torchrun import Launch, directory_of, environment_of, escape_braces

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
        "--log-interval",
    ]
)
"""Flags that `{flags}` sets for each configuration (tuner/export/megatron.py), or that contradict those of a trial."""

LEFT_OUT = frozenset(
    [
        "--save",
        "--load",
        "--pretrained-checkpoint",
        "--save-interval",
        "--async-save",
        "--ckpt-format",
        "--non-persistent-save-interval",
        "--non-persistent-ckpt-type",
        "--tensorboard-dir",
        "--wandb-project",
        "--wandb-entity",
        "--wandb-exp-name",
        "--wandb-save-dir",
        "--rampup-batch-size",
        "--profile",
        "--profile-step-start",
        "--profile-step-end",
        "--profile-ranks",
        "--exit-interval",
        "--no-gradient-accumulation-fusion",
    ]
)
"""Flags that a trial must not have. The exporter adds --no-gradient-accumulation-fusion itself for sharded weights."""

OF_MINDSPEED = frozenset(
    ["--num-layers", "--noop-layers", "--context-parallel-algo", "--ulysses-degree-in-cp", "--moe-tp-extend-ep"]
)
"""Further flags that `{flags}` sets for MindSpeed (tuner/export/mindspeed.py), or that would change their meaning."""


def command_of(launch: Launch, script: Script, *, is_mindspeed: bool) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words.

    MindSpeed's exports pad short stages with no-op layers, which changes --num-layers. Therefore `{flags}` follows
    --num-layers, and the last occurrence of a flag counts.
    """
    replaced = REPLACED | OF_MINDSPEED if is_mindspeed else REPLACED
    kept: list[Argument] = []
    left_out = []
    keeps = True
    for word in launch.training:
        if word.text.startswith("--"):
            name = word.text.partition("=")[0]
            keeps = name not in replaced | LEFT_OUT
            if name in LEFT_OUT:
                left_out.append(name)
        if keeps:
            kept.append(word)
    words = [escape_braces(word.text) for word in kept]
    own = ["--num-layers", "{num_layers}", *words, "{flags}"] if is_mindspeed else ["{flags}", *words]
    environment, not_copied = environment_of(script)
    directory, moves = directory_of(script, launch)
    return LaunchCommand(
        framework="mindspeed" if is_mindspeed else "megatron",
        arguments=(*launch.begin, *own, "--log-interval", "1"),
        environment=environment,
        unknown=launch.unknown(kept),
        left_out=tuple(dict.fromkeys(left_out)),
        not_copied=not_copied,
        directory=directory,
        moves=moves,
    )
