"""Configuration that scripts of Megatron-Bridge print when they start: its `ConfigContainer` as YAML.

It does not say the number of devices.

Source: megatron-core 0.19.2 training/config/container.py (`print_yaml`).
"""

from __future__ import annotations

import re

from tuner.imports.imported import Imported
from tuner.imports.log.block import AbstractYamlFinder
from tuner.imports.log.lines import Line
from tuner.imports.log.megatron_arguments import VOCABULARY
from tuner.imports.settings.bridge_container import import_container

_HEAD = re.compile(r"_target_: megatron\.[\w.]*ConfigContainer$")


class BridgeConfig(AbstractYamlFinder):
    """Finder of the YAML that begins with the name of its class and ends with an empty line."""

    VOCABULARY = VOCABULARY

    def begins(self, line: Line) -> bool:
        """Return whether the line names the class of the configuration."""
        return "ConfigContainer" in line.text and _HEAD.match(line.message.rstrip()) is not None

    def first_lines(self, line: Line) -> list[str]:
        """Return the line itself."""
        return [line.message]

    def read_on(self, line: Line) -> None:
        """Take a line of the YAML."""
        if line.text.strip():
            self.lines.append(line.text)
        else:
            self.is_open = False

    def imported(self) -> Imported | None:
        """Return what the configuration says."""
        if self.begun is None:
            return None
        nearest = "a log with all lines of it, up to an empty one"
        loaded = self.loaded(self.begun, framework="Megatron-Bridge", nearest=nearest, is_whole=not self.is_open)
        return import_container(loaded, self.vocab_size)
