"""Configuration that NeMo 1 prints when it starts: its YAML, under a head of stars.

Source: NeMo 1.23 examples/nlp/language_modeling/megatron_gpt_pretraining.py.
"""

from __future__ import annotations

import re

from tuner.imports.imported import Imported
from tuner.imports.log.block import AbstractYamlFinder
from tuner.imports.log.lines import Line
from tuner.imports.settings.nemo_container import import_nemo_1

_HEAD = "************** Experiment configuration"
_MESSAGE = "[NeMo "


class NemoConfig(AbstractYamlFinder):
    """Finder of the YAML below its head of stars."""

    VOCABULARY = re.compile(r"original vocab_size: ([0-9]{1,9})")

    def begins(self, line: Line) -> bool:
        """Return whether the line is the head of the configuration."""
        return _HEAD in line.text

    def first_lines(self, line: Line) -> list[str]:  # noqa: ARG002 # the contract's
        """Return none, because the YAML follows its head."""
        return []

    def read_on(self, line: Line) -> None:
        """Take a line of the YAML, which ends before the next message."""
        if _MESSAGE in line.text:
            self.is_open = not any(":" in text for text in self.lines)  # the message of the YAML itself comes first
        elif line.text.strip():
            self.lines.append(line.text)

    def imported(self) -> Imported | None:
        """Return what the configuration says."""
        if self.begun is None:
            return None
        loaded = self.loaded(self.begun, framework="NeMo", nearest="a log with all lines of it")
        return import_nemo_1(loaded, self.vocab_size)
