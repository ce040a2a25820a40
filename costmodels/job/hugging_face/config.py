"""Mapping of a config.json, read key by key with checks, and the keys that nothing read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from costmodels.job.decoder import check_count
from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError

OTHERWISE: Final = "`model: {transformers: FILE}` has transformers build it"
"""Way out where a file is not read."""

_REQUIRED: Final = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Keys of a config.json; null counts as missing, as in transformers.

    Attributes:
        mapping: Keys and values.
        read: Keys that were asked for.
    """

    mapping: Mapping[str, object]
    read: set[str] = field(default_factory=set)

    def value(self, key: str, default: object = _REQUIRED) -> object:
        """Return the value of a key, or its default.

        Raises:
            ConfigError: the key is missing and has no default.
        """
        self.read.add(key)
        found = self.mapping.get(key)
        if found is not None:
            return found
        if default is _REQUIRED:
            raise ConfigError("must not be null" if key in self.mapping else "is required and missing", key=key)
        return default

    def has(self, key: str) -> bool:
        """Return whether a key is there and not null."""
        self.read.add(key)
        return self.mapping.get(key) is not None

    def count(self, key: str, default: object = _REQUIRED, *, minimum: int = 1) -> int:
        """Return a whole number of at least `minimum`."""
        return check_count(self.value(key, default), key=key, minimum=minimum)

    def first_count(self, *keys: str, default: object = _REQUIRED, minimum: int = 1) -> int:
        """Return the number of the first key that is there."""
        found = next((key for key in keys if self.has(key)), keys[0])
        return self.count(found, default, minimum=minimum)

    def flag(self, key: str, default: object = _REQUIRED) -> bool:
        """Return a value that is true or false."""
        value = self.value(key, default)
        if isinstance(value, bool):
            return value
        raise ConfigError("must be true or false", key=key, value=value)

    def words(self, key: str, known: Iterable[str]) -> list[str] | None:
        """Return a list of known words, or None if the key is missing."""
        value = self.value(key, default=None)
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            raise ConfigError("must be a list", key=key, value=value)
        for word in value:
            if word not in known:
                raise ConfigError(f"holds an unknown kind; known: {', '.join(known)}", key=key, value=word)
        return value

    def numbers(self, key: str, default: list[int]) -> list[int]:
        """Return a list of whole numbers, or the default if the key is missing."""
        value = self.value(key, default=default)
        if isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            return value
        raise ConfigError("must be a list of whole numbers", key=key, value=value)

    def under(self, key: str) -> Config:
        """Return the keys of a mapping inside this one.

        Raises:
            ConfigError: the key is missing or holds no mapping.
        """
        value = self.value(key)
        if not isinstance(value, Mapping):
            raise ConfigError("must be a mapping", key=key, value=value)
        return Config(mapping=value)

    def check_off(self, key: str) -> None:
        """Refuse a key that turns on what is not read.

        Raises:
            ConfigError: the key is there and turns something on.
        """
        if value := self.value(key, default=None):
            rule = "is not read: such layers are no row of known blocks"
            raise ConfigError(rule, key=key, value=value, nearest=OTHERWISE)

    def check_rest(self) -> None:
        """Refuse a key that nothing read and that may change a size, a FLOP or a byte.

        The catalog's harmless keys do not, and values that turn something off do not.

        Raises:
            ConfigError: there is such a key.
        """
        for key, value in self.mapping.items():
            if key in self.read or key in harmless_keys() or key.endswith(_HARMLESS_ENDINGS):
                continue
            if value is None or value is False or value in (0, 1.0, [], {}) or isinstance(value, str | float):
                continue
            rule = "may change the model, and is not understood; leave it out if it does not"
            raise ConfigError(rule, key=key, value=value, nearest=OTHERWISE)


@cache
def harmless_keys() -> frozenset[str]:
    """Return the keys that change no size, no FLOP and no byte (costmodels/catalog/config_json.yaml)."""
    found = read_mapping(Path(__file__).parents[2] / "catalog" / "config_json.yaml")
    return frozenset(found["harmless"])


_HARMLESS_ENDINGS = ("_token_id", "_token_ids", "_dropout", "_dropout_prob", "_eps", "_epsilon", "_std", "_coef")
