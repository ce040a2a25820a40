"""Conversion of a launch script of torchtitan's trainer into a study's `trial.command`.

`{flags}` replaces all flags that depend on the configuration. It is the last word, because it ends with a subcommand.
Flags with effects that a trial must not have are removed: writing or loading checkpoints, validating, profiling, and
reporting to TensorBoard or Weights & Biases. Every step is logged.

Source: torchtitan 0.3.0 trainer.py (`Trainer.Config`: the sections) and config/manager.py (flags).
"""

from __future__ import annotations

from itertools import takewhile

from trials.command.placeholders import escape_braces
from tuner.export.torchtitan_flags import POLICY, TORCHTITAN_FLAGS
from tuner.imports.bash.script import Script
from tuner.imports.imported import LaunchCommand
from tuner.imports.torchrun import Launch
from tuner.imports.trial_words import keep_words, launch_command

FROM_FILE = "--job.config_file"
"""Flag that names the TOML file in versions before 0.3."""
_REPLACED = {name.replace(".no_", ".") for name in TORCHTITAN_FLAGS} | {"--parallelism.pipeline_parallel_schedule_csv"}
_LEFT_OUT = ("checkpoint", "validator", "profiler", "profiling")
"""Sections whose flags a trial must not have."""
_REPORTING = ("--metrics.enable_tensorboard", "--metrics.enable_wandb", "--metrics.save_tb_folder")
_EVERY_STEP = "--metrics.log_freq"
_BY_FLAGS = "the flags of each configuration say it"


def command_of(launch: Launch, script: Script) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words."""
    # the words after a subcommand are its own
    words = takewhile(lambda word: not word.text.startswith(f"{POLICY}:"), launch.training)
    kept, replaced = keep_words(words, lambda flag: _BY_FLAGS if _name_of(flag) in (*_REPLACED, _EVERY_STEP) else "")
    kept, left_out = keep_words(kept, _why_left)
    unknown = launch.unknown(kept)
    if any(word.text.partition("=")[0] == FROM_FILE for word in kept):
        unknown = (*unknown, f"{{flags}} contains flags of torchtitan 0.3, which has no {FROM_FILE}")
    return launch_command(
        launch,
        script,
        framework="torchtitan",
        arguments=(*(escape_braces(word.text) for word in kept), _EVERY_STEP, "1", "{flags}"),
        left_out=left_out,
        reasons=replaced,
        unknown=unknown,
    )


def _why_left(flag: str) -> str:
    """Return the reason why a trial must not have a flag, or an empty text."""
    name = _name_of(flag)
    is_left_out = name.removeprefix("--").partition(".")[0] in _LEFT_OUT or name in _REPORTING
    return "a trial saves, validates, profiles and reports nothing" if is_left_out else ""


def _name_of(flag: str) -> str:
    """Return the name of a flag as torchtitan spells it, without the `no_` of a switch that is off."""
    return f"--{flag.removeprefix('--').replace('-', '_')}".replace(".no_", ".")
