"""Conversion of a launch script of Megatron-LM or MindSpeed-LLM into a study's `trial.command`.

The words of the script stay. A trial exchanges the flags in which its configuration differs from them, in place
(trials/command/own_words.py). Flags with effects that a trial must not have are left out, and every step is logged.
"""

from __future__ import annotations

from collections.abc import Mapping

from trials.command.placeholders import escape_braces
from tuner.imports.bash.script import Script
from tuner.imports.flags import Flags, flags_among
from tuner.imports.imported import LaunchCommand
from tuner.imports.torchrun import Launch
from tuner.imports.trial_words import keep_words, launch_command, with_value

LEFT_OUT: Mapping[str, str] = {
    flag: why
    for why, flags in {
        "a trial neither saves nor loads checkpoints": "--save --load --pretrained-checkpoint --save-interval"
        " --save-retain-interval --async-save --non-persistent-save-interval --non-persistent-ckpt-type"
        " --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir --use-checkpoint-args"
        " --exit-on-missing-checkpoint",
        "a trial reports to no tracker": "--tensorboard-dir --wandb-project --wandb-entity --wandb-exp-name"
        " --wandb-save-dir --enable-one-logger",
        "a trial has its full batch from the first step on": "--rampup-batch-size --step-batch-size-schedule",
        "a trial is timed without a profiler": "--profile --profile-step-start --profile-step-end --profile-ranks"
        " --use-pytorch-profiler --record-memory-history",
        "a trial ends when its steps are timed": "--exit-interval",
    }.items()
    for flag in flags.split()
}
"""Flags that a trial must not have, with the reasons."""

_SWITCHES = frozenset(
    {
        *("--async-save", "--use-checkpoint-args", "--exit-on-missing-checkpoint", "--enable-one-logger"),
        *("--profile", "--use-pytorch-profiler", "--record-memory-history"),
    }
)
"""Flags of these without a value."""

LOG, FORMAT = "--log-interval", "--ckpt-format"
EVERY_STEP = "each step of a trial is logged"


def command_of(launch: Launch, script: Script, *, runtime: str) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words.

    Programs of DeepSpeed, of old versions of Megatron-LM and of MindSpeed with FSDP take other flags than exports have,
    which is one reason.
    """
    kept, left_out = keep_words(launch.training, lambda flag: LEFT_OUT.get(flag, ""), switches=_SWITCHES)
    kept = with_value(kept, LOG, "1")
    reasons = {LOG: EVERY_STEP}
    if Flags(flags_among(kept, dashed=True)).text_if_known(FORMAT) == "torch_dcp":
        kept = with_value(kept, FORMAT, "torch_dist")
        reasons[FORMAT] = "a trial saves no checkpoint, and torch_dcp excludes layouts with tp"
    return launch_command(
        launch,
        script,
        framework="mindspeed" if runtime == "mindspeed" else "megatron",
        arguments=[escape_braces(word.text) for word in kept],
        left_out=left_out,
        reasons=reasons,
        unknown=(*launch.unknown(kept), *_of_other_versions(runtime)),
    )


def _of_other_versions(runtime: str) -> tuple[str, ...]:
    """Return the reason why today's flags are not those of the script's program, if they are not."""
    if runtime in ("megatron-core", "mindspeed"):
        return ()
    return ("trials would need flags of today's Megatron-LM, which the program of this script does not take",)
