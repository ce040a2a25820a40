"""Conversion of a launch script of torchtitan's trainer into a study's `trial.command`.

`{flags}` replaces all flags that depend on the configuration. It is the last word, because it ends with a subcommand.
Flags with effects that a trial must not have are removed: writing or loading checkpoints, validating, profiling, and
reporting to TensorBoard or Weights & Biases. Every step is logged.

Source: torchtitan 0.3.0 trainer.py (`Trainer.Config`: the sections) and config/manager.py (flags).
"""

from __future__ import annotations

from itertools import takewhile

from tuner.export.torchtitan_flags import POLICY, TORCHTITAN_FLAGS
from tuner.imports.bash.script import Script
from tuner.imports.imported import LaunchCommand
from tuner.imports.torchrun import Launch, escape_braces, sort_words, trial_command

FROM_FILE = "--job.config_file"
"""Flag that names the TOML file in versions before 0.3."""
_REPLACED = {name.replace(".no_", ".") for name in TORCHTITAN_FLAGS} | {"--parallelism.pipeline_parallel_schedule_csv"}
_LEFT_OUT = ("checkpoint", "validator", "profiler", "profiling")
"""Sections whose flags a trial must not have."""
_REPORTING = ("--metrics.enable_tensorboard", "--metrics.enable_wandb", "--metrics.save_tb_folder")
_EVERY_STEP = "--metrics.log_freq"


def command_of(launch: Launch, script: Script) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words."""
    # the words after a subcommand are its own
    words = takewhile(lambda word: not word.text.startswith(f"{POLICY}:"), launch.training)
    kept, left_out = sort_words(
        words,
        lambda word: word.partition("=")[0].replace("-", "_").replace("__", "--", 1).replace(".no_", "."),
        replaces=lambda name: name in (*_REPLACED, _EVERY_STEP),
        leaves=lambda name: name.removeprefix("--").partition(".")[0] in _LEFT_OUT or name in _REPORTING,
    )
    unknown = launch.unknown(kept)
    if any(word.text.partition("=")[0] == FROM_FILE for word in kept):
        unknown = (*unknown, f"{{flags}} contains flags of torchtitan 0.3, which has no {FROM_FILE}")
    own = (*(escape_braces(word.text) for word in kept), _EVERY_STEP, "1", "{flags}")
    return trial_command(launch, script, framework="torchtitan", own=own, unknown=unknown, left_out=left_out)
