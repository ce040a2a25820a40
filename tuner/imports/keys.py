"""Checked access to the nested keys of a configuration file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from costmodels.job.decoder import check_count
from hardware.io.config_file import parse_json
from hardware.io.errors import ConfigError


class Keys:
    """Values of nested mappings by dotted names.

    Methods that take several names use the first one that the mapping contains.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = mapping

    def value(self, *names: str) -> Any:
        """Return the value under the first name that is present, or None if none is."""
        for name in names:
            found: Any = self.mapping
            for part in name.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        return None

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int | None:
        """Return the integer under the first name that is present, otherwise the default.

        Raises:
            ConfigError: the value is not an integer of at least `minimum`.
        """
        value = self.value(*names)
        if value is None:
            return default
        name = next(name for name in names if self.value(name) is not None)
        return check_count(value, key=name, minimum=minimum)

    def number(self, *names: str, default: int) -> int:
        """Return the positive integer under the first name that is present, otherwise the default."""
        found = self.count(*names, default=default)
        assert found is not None, "the default of number() is an integer"
        return found

    def text(self, *names: str, default: str = "") -> str:
        """Return the value under the first name that is present as text, otherwise the default."""
        value = self.value(*names)
        return default if value is None else str(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return the boolean under the first name that is present, otherwise the default.

        Raises:
            ConfigError: the value is not a boolean.
        """
        value = self.value(*names)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise ConfigError("must be true or false", key=names[0], value=value)


def json_mapping(text: str) -> dict[str, Any]:
    """Return the mapping of a JSON file.

    Raises:
        ConfigError: the top level of the file is not a mapping.
    """
    loaded = parse_json(text)
    if not isinstance(loaded, dict):
        raise ConfigError("must have a mapping at its top level", value=json.dumps(loaded)[:60])
    return loaded
