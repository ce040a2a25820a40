"""Arguments that GPT-NeoX's launcher prints when it starts: those of all files, merged and resolved.

Each line has the name of an argument, dots up to column 35, the value, dots up to column 64, and whether it is the
default. The names are the keys of the files, so that they are read as a file.

Sources: EleutherAI/gpt-neox megatron/neox_arguments/arguments.py (`print`, `calculate_derived`: the batch and the
number of GPUs are resolved), megatron/tokenizer/tokenizer.py (the padded vocabulary), megatron/logging.py (steps).
"""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import replace
from typing import Any

from hardware.io.errors import ConfigError
from tuner.imports.gpt_neox import import_gpt_neox
from tuner.imports.imported import Imported
from tuner.imports.log.block import MOST_LINES, AbstractFinder
from tuner.imports.log.lines import Line
from tuner.imports.log.megatron_arguments import BEGIN, END

_ARGUMENT = re.compile(r"^\s*([A-Za-z_]\w*) \.* (.*?)\.*(?:default|updated)$")
_VOCABULARY = re.compile(r"padded vocab \(size: [0-9]+\).*\(new size: ([0-9]{1,9})\)")
_DEVICES = "global_num_gpus"
_LEFT_OUT = {"config_files", "hostfile"}
"""Arguments that say nothing about the training: the texts of the files, and where the hosts are listed."""


class GptNeoxArguments(AbstractFinder):
    """Finder of the block of arguments, and of the line that says the vocabulary."""

    def __init__(self) -> None:
        self._arguments: dict[str, Any] = {}
        self._begun: Line | None = None
        self._is_open = False
        self._is_other = False
        self._vocab_size: int | None = None

    def begins(self, line: Line) -> bool:
        """Return whether the line is the head of a block of arguments, of GPT-NeoX or of Megatron-LM."""
        return BEGIN in line.text and line.text.strip().endswith("-")

    def take(self, line: Line) -> None:
        """Take a line of the log."""
        if self.begins(line):
            self.__init__()  # type: ignore[misc] # a new start replaces what was printed before
            self._begun, self._is_open = line, True
        elif self._begun is not None and (found := _VOCABULARY.search(line.text)) is not None:
            self._vocab_size = int(found[1])
        elif not self._is_open or self._begun is None:
            return
        elif END in line.text or line.number - self._begun.number > MOST_LINES:
            self._is_open = False
        elif (argument := _ARGUMENT.match(line.text)) is not None:
            self._arguments[argument[1]] = _value_of(argument[2])
        elif "..." in line.text:
            self._is_other = True  # Megatron-LM's lines end with the value

    def imported(self) -> Imported | None:
        """Return what the arguments say; None if they are not GPT-NeoX's."""
        if self._begun is None or self._is_other or not self._arguments:
            return None
        said = {name: value for name, value in self._arguments.items() if value is not None and name not in _LEFT_OUT}
        devices = said.get(_DEVICES)
        if self._is_open or not isinstance(devices, int):
            raise ConfigError(
                f"GPT-NeoX's arguments are cut off, or have no {_DEVICES}",
                key=f"line {self._begun.number}",
                value=self._begun.text.strip()[:80],
                nearest="a log with all lines up to `end of arguments`",
            )
        if self._vocab_size is not None:
            said["padded_vocab_size"] = self._vocab_size
        imported = import_gpt_neox(json.dumps(said, default=str))
        degrees = dict(imported.degrees)
        used = math.prod(degrees.get(name, 1) for name in ("pp", "tp", "cp"))
        if devices < 1 or devices % used:
            raise ConfigError(f"must be a multiple of pp * tp * cp = {used}", key=_DEVICES, value=devices)
        notes = () if self._vocab_size is not None else imported.notes  # which say how the vocabulary is padded
        return replace(imported, degrees=degrees | {"dp": devices // used}, notes=notes)


def _value_of(text: str) -> Any:
    """Return a printed value; text that is no Python literal stays as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
