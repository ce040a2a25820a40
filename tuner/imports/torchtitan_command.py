"""Conversion of a launch script of torchtitan's trainer into a study's `trial.command`.

The words of the script stay. A trial exchanges the flags in which its configuration differs from today's, in place
(trials/command/own_words.py); what no flag of the script says stands in its recipe or its TOML file. Flags with effects
that a trial must not have are left out: writing or loading checkpoints, validating, profiling, and reporting to
TensorBoard or Weights & Biases. Every step is logged.

Sources: torchtitan 0.3.0 trainer.py (`Trainer.Config`: the sections) and config/manager.py (flags); config/manager.py
of 0.2.0 (--job.config_file).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from trials.command.placeholders import escape_braces
from trials.knobs.subcommands import subcommand_of
from tuner.export.torchtitan_flags import STEP_TOKENS, TOKENS
from tuner.imports.bash.script import Script
from tuner.imports.flags import flags_among
from tuner.imports.imported import LaunchCommand
from tuner.imports.torchrun import Launch
from tuner.imports.trial_words import keep_words, launch_command, with_value

FROM_FILE = "--job.config_file"
"""Flag that names the TOML file in versions before 0.3."""
OF_FILE = "torchtitan-toml"
"""Name of the flags of these versions."""
_LEFT_OUT = {
    **dict.fromkeys(
        ("checkpoint", "validator", "validation"), "a trial neither saves nor loads checkpoints, nor validates"
    ),
    **dict.fromkeys(("profiler", "profiling"), "a trial is timed without a profiler"),
}
"""Sections whose flags a trial must not have, with the reason."""
_REPORTING = ("--metrics.enable_tensorboard", "--metrics.enable_wandb", "--metrics.save_tb_folder")
_EVERY_STEP = "--metrics.log_freq"
_OLD = ("--experimental.", "--training.tensor_parallel_degree", "--training.data_parallel", "--training.batch_size")
"""Beginnings of flags that only versions before 0.1 have."""


def command_of(launch: Launch, script: Script) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words."""
    # the words from a subcommand on are its own
    before = list(takewhile(lambda word: not subcommand_of(word.text), launch.training))
    kept, left_out = keep_words(before, _why_left)
    kept = [*with_value(kept, _EVERY_STEP, "1"), *launch.training[len(before) :]]
    names = [_name_of(flag.name) for flag in flags_among(kept)]
    found = launch_command(
        launch,
        script,
        framework="torchtitan",
        arguments=[escape_braces(word.text) for word in kept],
        left_out=left_out,
        reasons={_EVERY_STEP: "each step of a trial is logged"},
        unknown=(*launch.unknown(kept), *_of_other_versions(names)),
    )
    return replace(found, flags=OF_FILE) if FROM_FILE in names else found


def _of_other_versions(names: list[str]) -> list[str]:
    """Return the reasons why the flags of a trial are not those of the script's version."""
    reasons = {
        "the script counts batches in tokens, and the flags of trials in sequences": {TOKENS, STEP_TOKENS} & {*names},
        "trials would need flags of torchtitan 0.1 or later, which the program of this script does not take": {
            name for name in names if name.startswith(_OLD)
        },
    }
    return [why for why, found in reasons.items() if found]


def _why_left(flag: str) -> str:
    """Return the reason why a trial must not have a flag, or an empty text."""
    name = _name_of(flag)
    if name in _REPORTING:
        return "a trial reports to no tracker"
    return _LEFT_OUT.get(name.removeprefix("--").partition(".")[0], "")


def _name_of(flag: str) -> str:
    """Return the name of a flag as torchtitan spells it, without the `no_` of a switch that is off."""
    return f"--{flag.removeprefix('--').replace('-', '_')}".replace(".no_", ".")
