"""Nested keys of a configuration file, read with checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from costmodels.job.model_spec import check_count
from hardware.io.config_file import parse_json
from hardware.io.errors import ConfigError


class Keys:
    """Values of a mapping of mappings by dotted names; several names mean the first that stands there."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = mapping

    def value(self, *names: str) -> Any:
        """The value under the first name that is there; None where none is."""
        for name in names:
            found: Any = self.mapping
            for part in name.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        return None

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int | None:
        """The whole number there.

        Raises:
            ConfigError: there is a value, and it is none in its range.
        """
        value = self.value(*names)
        if value is None:
            return default
        name = next(name for name in names if self.value(name) is not None)
        return check_count(value, key=name, minimum=minimum)

    def number(self, *names: str, default: int) -> int:
        """The same where there is a default."""
        found = self.count(*names, default=default)
        assert found is not None, "there is a default"
        return found

    def text(self, *names: str, default: str = "") -> str:
        """The value as text."""
        value = self.value(*names)
        return default if value is None else str(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """The value as a truth.

        Raises:
            ConfigError: it is none.
        """
        value = self.value(*names)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise ConfigError("must be true or false", key=names[0], value=value)


def json_mapping(text: str) -> dict[str, Any]:
    """The mapping of a JSON file.

    Raises:
        ConfigError: it holds none.
    """
    loaded = parse_json(text)
    if not isinstance(loaded, dict):
        raise ConfigError("must hold a mapping at its top level", value=json.dumps(loaded)[:60])
    return loaded
