"""Importer for commands of the Hugging Face trainer and of DeepSpeed-Chat, which train with DeepSpeed.

Their flags state batch sizes, sequence length and precision, and fill in the values of `auto` in DeepSpeed's
configuration. They name a model by its weights, so that its sizes are asked for.

Sources: transformers training_args.py and integrations/deepspeed.py (names, defaults, `auto`), DeepSpeedExamples
applications/DeepSpeed-Chat/training/step1_supervised_finetuning/main.py (names and defaults).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tuner.imports.bash.script import read_script
from tuner.imports.deepspeed import import_deepspeed
from tuner.imports.flags import Flags, flags_among
from tuner.imports.imported import Imported
from tuner.imports.keys import Keys, json_mapping
from tuner.imports.megatron_refusals import refuse_other_models
from tuner.imports.optimizer_names import read_optimizer

SIGN = "--per-device-train-batch-size"
"""Flag that identifies such a command."""
_LENGTH = ("--max-seq-len", "--max-seq-length", "--block-size", "--model-max-length", "--cutoff-len")
_MODEL = ("--model-name-or-path", "--config-name", "--model-type")


def import_trainer(text: str, *, config: str | None) -> Imported:
    """Read the flags of a captured command together with DeepSpeed's configuration.

    Args:
        text: Text of a script with the command.
        config: Text of DeepSpeed's configuration; None if the program writes its own, as DeepSpeed-Chat does.

    Raises:
        ConfigError: a value is invalid, or the command trains something else than all weights of a decoder.
    """
    words = [word for command in read_script(text).commands for word in command.words]
    listed = flags_among(words, dashed=True)
    flags = Flags(listed)
    refuse_other_models(flags, tuple(flag.name for flag in listed), "")
    found = import_deepspeed(config or '{"train_micro_batch_size_per_gpu": "auto"}')
    stated = Keys(json_mapping(config or "{}"))
    mbs = found.degrees.get("mbs") or flags.count(SIGN)
    rounds = stated.value("gradient_accumulation_steps")
    given = flags.count("--gradient-accumulation-steps") or 1
    opened = dict(found.open)
    job: dict[str, Any] = {
        **found.job,
        "precision": _precision(flags, stated, is_chat=config is None),
        "recompute": "full" if _is_on(flags, "--gradient-checkpointing") else "none",
    }
    if stated.value("optimizer.type") is None and (name := flags.text("--optim")):
        optimizer, why = read_optimizer("transformers", name)
        if why:
            opened["optimizer"] = f"--optim: {why}"
        else:
            job["optimizer"] = optimizer
    if length := flags.count(*_LENGTH):
        job["sequence_length"] = length
    if config is None:
        job["zero_stage"] = flags.count("--zero-stage", minimum=0) or 0
        job |= {"offload": "optimizer"} if _is_on(flags, "--offload") and job["zero_stage"] else {}
    model = next((flags.text(name) for name in _MODEL if flags.has(name)), None)
    return replace(
        found,
        job=job,
        degrees={**found.degrees, **({"mbs": mbs} if mbs else {})},
        open={name: text for name, text in opened.items() if not mbs or name != "mbs"},
        micro_batches=None if "global_batch_size" in job else rounds if isinstance(rounds, int) else given,
        unread=(*found.unread, *flags.unread),
        notes=(
            *found.notes[1:],  # the flags say whether activations are recomputed
            *((f"the model is that of {model}: name it with --model",) if model else ()),
        ),
    )


def _is_on(flags: Flags, name: str) -> bool:
    """Return whether a switch is on; the trainer's switches may have a value."""
    return flags.has(name) and (flags.text(name) or "true").lower() != "false"


def _precision(flags: Flags, config: Keys, *, is_chat: bool) -> str:
    """Return the number format; flags decide where DeepSpeed's configuration says `auto`.

    DeepSpeed-Chat has --dtype, fp16 by default.
    """
    for name in ("bf16", "fp16"):
        enabled = config.value(f"{name}.enabled")
        if enabled is True or (enabled is not False and _is_on(flags, f"--{name}")):
            return name
    return (flags.text("--dtype") or "fp16") if is_chat else "fp32"
