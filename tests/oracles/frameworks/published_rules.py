"""Rules that frameworks publish for their flags and keys, and a function that checks values against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError
from tuner.export.flag_table import Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Sizes of the job and the model that rules need in addition to the flags.

    Attributes:
        num_devices: Number of ranks of the job.
        num_layers: Number of layers of the model.
        num_heads: Number of attention heads.
        num_kv_heads: Number of key-value heads.
        num_experts: Number of experts; 0 for a dense model.
        num_mtp_layers: Number of modules of multi-token prediction.
    """

    num_devices: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0
    num_mtp_layers: int = 0


def facts_of(setting: Setting) -> Facts:
    """Return the sizes of a setting that rules need."""
    model = setting.job.model
    return Facts(
        num_devices=setting.cluster.num_devices,
        num_layers=model.num_layers,
        num_heads=model.plain.num_heads,
        num_kv_heads=model.plain.num_kv_heads,
        num_experts=model.num_experts,
        num_mtp_layers=model.num_mtp_layers,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRule:
    """Condition that a framework asserts before it trains.

    Attributes:
        key: Flag or key that the error message names.
        rule: Condition in words, as the end of a sentence about the key.
        source: File of the framework, and the function in it.
        holds: Function that returns whether values meet the rule, given that all earlier rules hold.
    """

    key: str
    rule: str
    source: str
    holds: Callable[[Values, Facts], bool]


def check_rules(values: Values, facts: Facts, rules: Sequence[PublishedRule]) -> None:
    """Check that the values meet all rules.

    Raises:
        ConfigError: the values break a rule; the message cites its source.
    """
    for rule in rules:
        if not rule.holds(values, facts):
            raise ConfigError(f"{rule.rule} ({rule.source})", key=rule.key, value=values.get(rule.key))


def number(values: Values, key: str, default: int = 1) -> int:
    """Return an integer among the values, or `default` if the key is absent."""
    value = values.get(key)
    return default if value is None else int(value)  # type: ignore[arg-type] # tables check the kind of each key


def required(key: str, source: str) -> PublishedRule:
    """Return the rule that a key must be present."""
    return PublishedRule(
        key=key, rule="is required", source=source, holds=lambda values, _: values.get(key) is not None
    )


def at_least(least: int, key: str, source: str) -> PublishedRule:
    """Return the rule that a number must not be smaller than `least` if it is present."""
    return PublishedRule(
        key=key,
        rule=f"must be at least {least}",
        source=source,
        holds=lambda values, _: number(values, key, least) >= least,
    )


def yaml_mapping(text: str) -> Mapping[str, Any]:
    """Return the mapping that a YAML text holds.

    Raises:
        ConfigError: the text is not YAML, or no mapping.
    """
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError("is not YAML", value=text) from None
    if not isinstance(content, Mapping):
        raise ConfigError("must be a mapping", value=text)
    return content
