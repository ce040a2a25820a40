"""Facts of a command of the Hugging Face trainer, or of DeepSpeed-Chat, on DeepSpeed.

Sources: transformers training_args.py and integrations/deepspeed.py (names, defaults, values of `auto`),
DeepSpeedExamples applications/DeepSpeed-Chat/training/*/main.py (names and defaults).
"""

from __future__ import annotations

from typing import Any

from benchmarks.launch_scripts.megatron_truth import deepspeed_file, other_kind
from benchmarks.launch_scripts.truth import Truth, contradiction
from benchmarks.launch_scripts.words import Command, command_of, world_of
from tuner.capture.record import Record

_LENGTH = ("--max-seq-len", "--max-seq-length", "--block-size", "--model-max-length", "--cutoff-len")


def trainer_truth(record: Record, script: str) -> Truth | None:
    """Return the truth of a recorded command, or None if it is no such trainer on DeepSpeed."""
    command = command_of(record.words)
    if command.has("--actor-zero-stage", "--actor-model-name-or-path"):
        return Truth(framework="deepspeed", other="preferences")
    if not command.has("--per-device-train-batch-size") or not command.has("--deepspeed", "--deepspeed-config"):
        return None
    if other := other_kind(command):
        return Truth(framework="deepspeed", other=other)
    world, config = world_of(record, command, script), deepspeed_file(record, command)
    facts = {name: value for name, value in _facts(command, world, config).items() if value is not None}
    return Truth(framework="deepspeed", facts=facts, impossible=contradiction(facts))


def _facts(command: Command, world: int | None, config: dict[str, Any]) -> dict[str, Any]:
    zero = config.get("zero_optimization", {})
    mbs = command.number("--per-device-train-batch-size")
    rounds = command.number("--gradient-accumulation-steps") or 1
    named = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), None)
    given = next((name for name in ("bf16", "fp16") if command.has(f"--{name}")), None)
    # DeepSpeed-Chat writes its own configuration, in which fp16 is the default of --dtype
    written = None if config else command.text("--dtype") or "fp16"
    return {
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "mbs": mbs,
        "world": world,
        "dp": world,
        "gbs": mbs * rounds * world if mbs and world else None,
        "sequence": command.number(*_LENGTH),
        "precision": named or given or written,
        "recompute": "full" if command.has("--gradient-checkpointing") else None if config else "none",
        "zero_stage": zero.get("stage") if config else command.number("--zero-stage") or 0,
        "offload": "optimizer" if _is_offloaded(command, zero) else "none",
    }


def _is_offloaded(command: Command, zero: dict[str, Any]) -> bool:
    return command.has("--offload") or zero.get("offload_optimizer", {}).get("device") == "cpu"
