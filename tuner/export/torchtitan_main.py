"""Exporter for torchtitan's main branch after 0.3, which writes a Python function that sets the fields of a recipe.

Its trainer takes no flags for a configuration any more, only `--module` and `--config`, which name a function that
returns one. It counts batches in tokens: those of one micro-batch, and those of all micro-batches of a step.

Sources: torchtitan config/loader.py (`ConfigLoader`: the command line), config/training.py and config/parallelism.py
(names, meanings, and that the two ways to split a pipeline exclude each other), config/validation.py (ep of at least
tp, the model's length), distributed/activation_checkpoint.py (policies), of 2026-11.
"""

from __future__ import annotations

import shlex

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue, Values, read_flags
from tuner.export.parts import closing_notes, format_comments, num_micro_batches, stated_facts
from tuner.export.torchtitan import NAMED, torchtitan_parts
from tuner.export.torchtitan_flags import (
    CONTEXT,
    GLOBAL,
    LENGTH,
    LOCAL,
    MAIN_MODULES,
    MICRO,
    MODULES,
    PER_STAGE,
    POLICY,
    ROUNDS,
    STEP_TOKENS,
    TOKENS,
    TORCHTITAN_FLAGS,
)

VERSIONS = "torchtitan's main branch of 2026-11, which takes no flags; no release has it yet"
"""Versions of the framework that take the function."""


def export_torchtitan_main(setting: Setting, config: ParallelConfig) -> Export:
    """Return a Python function that sets the fields of a recipe that the configuration determines."""
    parts = torchtitan_parts(setting, config)
    *words, policy = (word for part in parts for flag in part.flags for word in shlex.split(flag))
    values = read_flags(words, TORCHTITAN_FLAGS)
    length = setting.job.sequence_length
    fields: dict[str, FlagValue] = {
        TOKENS: config.mbs * length,
        STEP_TOKENS: setting.job.global_batch_size * length,
        CONTEXT: length,
        **{flag: value for flag, value in values.items() if flag not in (LOCAL, GLOBAL, LENGTH, MICRO, MODULES)},
        POLICY: policy.partition(":")[2],
    }
    if config.pp > 1:
        # a recipe may have either, and both together are refused
        fields |= {ROUNDS: num_micro_batches(setting, config), MAIN_MODULES: values.get(MODULES)}
        fields.setdefault(PER_STAGE, None)
    notes = (
        *(note for part in parts for note in part.notes),
        *_notes(setting, config),
        *stated_facts(setting, "torchtitan-main").notes,
        *closing_notes(setting, config, "torchtitan", rule_sets=("torchtitan",), named=NAMED),
    )
    head = (
        str(config),
        f"Versions: {VERSIONS}",
        f"Use: a function of yours that returns parallelise(RECIPE), with a model of max_context_length {length}, "
        "named by --module and --config",
        *notes,
    )
    text = "\n".join([*format_comments(head), *recipe_lines(fields)]) + "\n"
    return Export(target="torchtitan-main", text=text, notes=notes)


def recipe_lines(fields: Values) -> list[str]:
    """Return the lines of the function that sets the fields, given by their flags in 0.3's form, and the policy."""
    policy = fields[POLICY]
    name = f"{str(policy).capitalize()}AC"
    lines = ["from dataclasses import replace", ""]
    if policy != "none":
        lines += [f"from torchtitan.distributed.activation_checkpoint import {name}", ""]
    lines += [
        "",
        "def parallelise(config):",
        '    """Return a recipe\'s configuration with this layout."""',
        "    return replace(",
        "        config,",
    ]
    for section in ("training", "parallelism"):
        lines += [f"        {section}=replace(", f"            config.{section},"]
        prefix = f"--{section}."
        for flag, value in fields.items():
            if flag.startswith(prefix):
                lines += [f"            {line}" for line in _keyword_lines(flag.removeprefix(prefix), value)]
        lines.append("        ),")
    lines.append(f"        activation_checkpoint={'None' if policy == 'none' else f'{name}.Config()'},")
    return [*lines, "    )"]


def _keyword_lines(name: str, value: FlagValue) -> list[str]:
    """Return a field as a keyword of a call; `no_` switches it off, and the modules of each part are a list."""
    if value is True:
        return [f"{name.removeprefix('no_')}={not name.startswith('no_')},"]
    if isinstance(value, tuple):
        parts = ([module for module in str(part).split(",") if module] for part in value)
        return [f"{name}=[", *(f"    {part!r}," for part in parts), "],"]
    return [f"{name}={value!r},"]


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    """Return notes on what the main branch refuses and 0.3 does not."""
    notes = []
    model = setting.job.model
    if model.is_moe and config.ep < config.tp:
        notes.append(f"ep: this version requires ep of at least tp = {config.tp} for models with experts")
    if config.cp * config.up > 1:
        notes.append("cp: the recipe must select an attention for context parallelism (ContextParallelTransform)")
    return notes
