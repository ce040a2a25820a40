"""Exported sections of FlagScale's file for training, turned into flags as FlagScale does.

Sources: FlagOpen/FlagScale flagscale/runner/utils.py (`flatten_dict_to_args`); the rules are those of its Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.oracles.frameworks.megatron import check_megatron
from tests.oracles.frameworks.published_rules import Facts, yaml_mapping
from tuner.export.flag_table import FlagValue


def check_flagscale(text: str, facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the flags that the file becomes.

    Raises:
        ConfigError: the text is not a YAML mapping, or its Megatron-LM would reject the flags.
    """
    return check_megatron(arguments_of(text), facts)


def arguments_of(text: str) -> list[str]:
    """Return the words that FlagScale passes to the training program.

    Raises:
        ConfigError: the text is not a YAML mapping.
    """
    return list(_words(yaml_mapping(text)))


def _words(section: Mapping[str, Any]) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _words(value)
        elif value is not None and value is not False:
            yield f"--{str(key).replace('_', '-')}"
            yield from map(str, value if isinstance(value, list) else [] if value is True else [value])
