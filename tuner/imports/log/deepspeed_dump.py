"""Configuration that DeepSpeed's engine prints when it is built.

The engine prints its attributes, name, dots up to column 29 and value, and then the user's configuration as JSON, in
which the Hugging Face trainer has replaced every `auto`.

Source: DeepSpeed 0.19.8 runtime/config.py, `DeepSpeedConfig.print` and `print_user_config`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from hardware.io.errors import ConfigError
from tuner.imports.deepspeed import import_deepspeed
from tuner.imports.imported import Imported
from tuner.imports.log.block import MOST_LINES, AbstractFinder, indent_of, parse_mapping
from tuner.imports.log.lines import Line

_BEGIN = "DeepSpeedEngine configuration:"
_JSON = re.compile(r"^\s*json = (\{.*)$")
_ATTRIBUTE = re.compile(r"^\s*(\w+) \.* ?([0-9]{1,9})$")
_STAGE = re.compile(r"\bSTAGE=[0-9]+ LAYERS=[0-9]+")
"""Message of the pipeline engine (runtime/pipe/engine.py); the number of stages is not in the configuration."""
_RESOLVED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class DeepSpeedDump(AbstractFinder):
    """Finder of the engine's configuration."""

    def __init__(self) -> None:
        self._begun: Line | None = None
        self._attributes: dict[str, int] = {}
        self._json: list[str] | None = None
        self._configs: list[dict[str, Any]] = []
        self._pipeline_line: int | None = None

    def begins(self, line: Line) -> bool:
        """Return whether the line is the head of the configuration.

        A program may build several engines, so that this does not mean a new start.
        """
        return _BEGIN in line.text

    def take(self, line: Line) -> None:
        """Take a line of the log."""
        if self.begins(line):
            self._begun, self._json, self._attributes = line, None, {}
        elif self._json is not None and self._begun is not None:
            if line.number - self._begun.number > MOST_LINES:
                self._raise_cut_off()
            if line.rank == self._begun.rank:
                self._json.append(line.text)
                self._close()
        elif self._begun is not None:
            message = line.message
            if (found := _JSON.match(message)) is not None:
                self._json = [found[1]]
                self._close()
            elif (found := _ATTRIBUTE.match(message)) is not None:
                self._attributes[found[1]] = int(found[2])
        elif self._pipeline_line is None and "STAGE=" in line.text and _STAGE.search(line.text):
            self._pipeline_line = line.number

    def _close(self) -> None:
        """Keep the configuration if its JSON is complete."""
        assert self._json is not None, "the JSON has begun"
        found = parse_mapping(self._json, 0 if self._begun is None else indent_of(self._begun.text))
        if found is None:
            return
        resolved = {name: self._attributes[name] for name in _RESOLVED if name in self._attributes}
        config = found | resolved | {"world_size": self._attributes.get("world_size")}
        if config not in self._configs:
            self._configs.append(config)
        self._begun = self._json = None

    def _raise_cut_off(self) -> None:
        assert self._begun is not None, "the configuration has begun"
        raise ConfigError(
            "DeepSpeed's configuration is cut off",
            key=f"line {self._begun.number}",
            value=self._begun.text.strip()[-80:],
            nearest="a log with all lines of `json = {...}`",
        )

    def imported(self) -> Imported | None:
        """Return what the configuration says; the data parallel degree is the engine's world size."""
        if self._begun is not None:
            self._raise_cut_off()
        if not self._configs:
            return None
        if len(self._configs) > 1:
            raise ConfigError(
                f"the log holds {len(self._configs)} different DeepSpeed configurations",
                nearest="the part of the log that belongs to one engine",
            )
        config = dict(self._configs[0])
        replicas = config.pop("world_size")
        imported = import_deepspeed(json.dumps(config))
        degrees, open_keys = dict(imported.degrees), dict(imported.open)
        if replicas is not None:
            degrees["dp"] = replicas
        if self._pipeline_line is not None:
            del degrees["pp"]
            open_keys["pp"] = f"the program builds a pipeline, see line {self._pipeline_line}"
        return replace(imported, degrees=degrees, open=open_keys)
