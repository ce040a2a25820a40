"""Conversion of a launch script of Megatron-LM or MindSpeed-LLM into a study's `trial.command`.

Hosts and devices of the launcher become placeholders, and `{flags}` replaces all flags that depend on the
configuration. Flags with effects that a trial must not have are removed: writing or loading checkpoints, reporting to
TensorBoard or Weights & Biases, ramping up the batch, and profiling. Every step is logged.
"""

from __future__ import annotations

from tuner.export.megatron_flags import MEGATRON_FLAGS
from tuner.imports.bash.script import Script
from tuner.imports.flags import flag_name
from tuner.imports.imported import LaunchCommand
from tuner.imports.megatron_degrees import ACCOUNTED
from tuner.imports.torchrun import Launch, escape_braces, sort_words, trial_command

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

OF_DATA = frozenset(
    [
        "--sft",
        "--is-instruction-dataset",
        "--neat-pack",
        "--reset-attention-mask",
        "--attention-mask-type",
        "--variable-seq-lengths",
    ]
)
"""Flags of packed or padded data, which `{flags}` sets where a study has sequences of varying length.

A script's own stay in its command, since its data needs them also where the study has none.
"""

REPLACED = (MEGATRON_FLAGS.keys() - LEFT_OUT - OF_DATA) | {
    "--num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    *ACCOUNTED,
    "--use-custom-fsdp",
    "--use-torch-fsdp2",
    "--recompute-activations",
    "--fp8-hybrid",
    "--fp8-e4m3",
    "--log-interval",
}
"""Flags that `{flags}` sets for each configuration (tuner/export/megatron.py), or that contradict those of a trial."""

OF_MINDSPEED = frozenset(
    ["--num-layers", "--noop-layers", "--context-parallel-algo", "--ulysses-degree-in-cp", "--moe-tp-extend-ep"]
)
"""Further flags that `{flags}` sets for MindSpeed (tuner/export/mindspeed.py), or that would change their meaning."""


def command_of(launch: Launch, script: Script, *, runtime: str) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words.

    Programs of DeepSpeed, of old versions of Megatron-LM and of MindSpeed with FSDP take other flags than `{flags}`
    has, which is one reason.

    MindSpeed's exports pad short stages with no-op layers, which changes --num-layers. Therefore `{flags}` follows
    --num-layers, and the last occurrence of a flag counts.
    """
    is_mindspeed = runtime == "mindspeed"
    replaced = REPLACED | OF_MINDSPEED if is_mindspeed else REPLACED
    kept, left_out = sort_words(
        launch.training, flag_name, replaces=replaced.__contains__, leaves=LEFT_OUT.__contains__
    )
    words = [escape_braces(word.text) for word in kept]
    own = ["--num-layers", "{num_layers}", *words, "{flags}"] if is_mindspeed else ["{flags}", *words]
    return trial_command(
        launch,
        script,
        framework="mindspeed" if is_mindspeed else "megatron",
        own=(*own, "--log-interval", "1"),
        unknown=(*launch.unknown(kept), *_of_other_versions(runtime)),
        left_out=left_out,
    )


def _of_other_versions(runtime: str) -> tuple[str, ...]:
    """Return the reason why today's flags are not those of the script's program, if they are not."""
    if runtime in ("megatron-core", "mindspeed"):
        return ()
    return ("{flags} contains flags of today's Megatron-LM, which the program of this script does not take",)
