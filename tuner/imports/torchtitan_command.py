"""How a launch script starts torchtitan's trainer, as a study's `trial.command` starts it for each trial.

The flags that a configuration decides become `{flags}`, which stands last, since it ends with a subcommand. What a
trial must not do (write or load checkpoints, validate, profile, report to TensorBoard or Weights & Biases) is left out.
Every step is logged.

Source: torchtitan 0.3.0 trainer.py (`Trainer.Config`: the sections) and config/manager.py (flags).
"""

from __future__ import annotations

from tuner.export.torchtitan_flags import POLICY, TORCHTITAN_FLAGS
from tuner.imports.bash.script import Script
from tuner.imports.bash.texts import Argument
from tuner.imports.imported import LaunchCommand
from tuner.imports.torchrun import Launch, braced, directory_of, environment_of

FROM_FILE = "--job.config_file"
"""Names the TOML file of versions before 0.3."""
_REPLACED = {name.replace(".no_", ".") for name in TORCHTITAN_FLAGS} | {"--parallelism.pipeline_parallel_schedule_csv"}
_LEFT_OUT = ("checkpoint", "validator", "profiler", "profiling")
"""Sections whose flags a trial must not have."""
_REPORTING = ("--metrics.enable_tensorboard", "--metrics.enable_wandb", "--metrics.save_tb_folder")
_EVERY_STEP = "--metrics.log_freq"


def command_of(launch: Launch, script: Script) -> LaunchCommand:
    """The command of a trial, and why it is not whole where it isn't."""
    kept: list[Argument] = []
    left_out = []
    keeps = True
    for word in launch.training:
        if word.text.startswith(f"{POLICY}:"):
            break  # a subcommand, and what follows is its own
        if word.text.startswith("--"):
            name = word.text.partition("=")[0].replace("-", "_").replace("__", "--", 1).replace(".no_", ".")
            leaves = name.removeprefix("--").partition(".")[0] in _LEFT_OUT or name in _REPORTING
            keeps = not leaves and name not in (*_REPLACED, _EVERY_STEP)
            if leaves:
                left_out.append(name)
        if keeps:
            kept.append(word)
    unknown = launch.unknown(kept)
    if any(word.text.partition("=")[0] == FROM_FILE for word in kept):
        unknown = (*unknown, f"{{flags}} writes flags of torchtitan 0.3, which has no {FROM_FILE}")
    environment, not_copied = environment_of(script)
    directory, moves = directory_of(script, launch)
    return LaunchCommand(
        framework="torchtitan",
        arguments=(*launch.begin, *(braced(word.text) for word in kept), _EVERY_STEP, "1", "{flags}"),
        environment=environment,
        unknown=unknown,
        left_out=tuple(dict.fromkeys(left_out)),
        not_copied=not_copied,
        directory=directory,
        moves=moves,
    )
