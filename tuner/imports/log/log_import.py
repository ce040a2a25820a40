"""Read a log: find what the framework printed about itself, and the steps that followed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TextIO

from hardware.io.errors import ConfigError
from tuner.imports.imported import Imported
from tuner.imports.log.block import AbstractFinder
from tuner.imports.log.bridge_config import BridgeConfig
from tuner.imports.log.deepspeed_dump import DeepSpeedDump
from tuner.imports.log.gpt_neox_arguments import GptNeoxArguments
from tuner.imports.log.lines import Line, lines_of
from tuner.imports.log.megatron_arguments import MegatronArguments
from tuner.imports.log.nanotron_config import NanotronConfig
from tuner.imports.log.nemo_config import NemoConfig
from tuner.imports.log.steps import MOST_STEPS, LogSteps, may_be_step
from tuner.imports.log.torchtitan_lines import TorchtitanLines

MOST_CHARACTERS = 512 * 2**20
"""Number of characters that are read of a log: half a minute. The configuration and a thousand steps come before."""

_PATTERN_OF = {"gpt-neox": "megatron", "bridge": "megatron"}
"""Log pattern of the frameworks that print steps as Megatron-LM does."""

_LOOKED_FOR = (
    "`---- arguments ----` of Megatron-LM, MindSpeed-LLM, Megatron-DeepSpeed and GPT-NeoX, `_target_: "
    "...ConfigContainer` of Megatron-Bridge, `DeepSpeedEngine configuration:` of "
    "DeepSpeed, `Config(general=...)` of nanotron, `Building ... device mesh` of torchtitan or `Experiment "
    "configuration` of NeMo"
)


class NoConfigurationError(ConfigError):
    """A log, or the rest of one, in which no framework prints its configuration."""


def import_log(stream: TextIO | Iterable[str], *, source: str) -> Imported:
    """Read the log of a training; `source` is its name.

    Of several starts in one log the first one with steps counts, and reading ends before the next one.

    Raises:
        ConfigError: The log holds no configuration, only a part of it, or that of a model that Meshtune does not know.
    """
    finders: dict[str, AbstractFinder] = {
        "megatron": MegatronArguments(),
        "gpt-neox": GptNeoxArguments(),  # before DeepSpeed, whose engine it starts
        "bridge": BridgeConfig(),
        "deepspeed": DeepSpeedDump(),
        "nanotron": NanotronConfig(),
        "torchtitan": TorchtitanLines(),
        "nemo": NemoConfig(),
    }
    kept: list[Line] = []
    first_step = number = 0
    for line in lines_of(stream, most_characters=MOST_CHARACTERS):
        number = line.number
        if kept and any(finder.begins(line) for finder in finders.values()):
            if _has_begun(finders):
                break
            kept.clear()  # steps whose configuration is not in the log
        if may_be_step(line.text):
            first_step = first_step or number
            kept.append(line)
            if len(kept) >= MOST_STEPS:
                break
        for finder in finders.values():
            finder.take(line)
    found = {name: imported for name, finder in finders.items() if (imported := finder.imported()) is not None}
    if not found:
        raise _none_found(number, first_step)
    name = next(iter(found))
    imported = found[name]
    if name == "megatron" and "deepspeed" in found:
        imported = _with_engine(imported, found["deepspeed"])
    pattern = "mindspeed" if imported.runtime == "mindspeed" else _PATTERN_OF.get(name, name)
    steps = LogSteps(framework=pattern, source=source, lines=tuple(kept))
    return replace(imported, framework="log", command=None, steps=steps)


def _has_begun(finders: dict[str, AbstractFinder]) -> bool:
    try:
        return any(finder.imported() is not None for finder in finders.values())
    except ConfigError:
        return True


def _with_engine(imported: Imported, engine: Imported) -> Imported:
    """Return the arguments of Megatron-DeepSpeed with what its engine decides: ZeRO, offloading and precision."""
    decided = {"offload": "none"} | {
        name: engine.job[name] for name in ("zero_stage", "precision", "offload") if name in engine.job
    }
    job = {**imported.job, **decided}
    still_open = {name: why for name, why in imported.open.items() if name not in job}
    return replace(imported, job=job, open=still_open, unread=(*imported.unread, *engine.unread))


def _none_found(number: int, first_step: int) -> NoConfigurationError:
    if not number:
        return NoConfigurationError("is empty", nearest="what the training printed, from its start")
    if first_step:
        return NoConfigurationError(
            f"begins after the configuration was printed: line {first_step} is already that of a step",
            nearest=f"the log from the start of the training, with {_LOOKED_FOR}",
        )
    return NoConfigurationError(
        f"has no configuration among its first {number:,} lines", nearest=f"a log with {_LOOKED_FOR}"
    )
