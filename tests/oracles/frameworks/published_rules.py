"""Rules that frameworks publish for their flags and keys, and how values are held to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError
from tuner.export.flag_table import Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What rules need to know beside the flags.

    Attributes:
        num_devices: Ranks of the job.
        num_layers: Layers of the model.
        num_heads: Attention heads.
        num_kv_heads: Key-value heads.
        num_experts: Experts; 0 for a dense model.
    """

    num_devices: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0


def facts_of(setting: Setting) -> Facts:
    """The facts of a setting."""
    model = setting.job.model
    return Facts(
        num_devices=setting.cluster.num_devices,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        num_experts=model.num_experts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRule:
    """One condition that a framework asserts before it trains.

    Attributes:
        key: The flag or key that a breach is told under.
        rule: The condition in words.
        source: The framework's file, and the function there.
        holds: Whether values meet it; rules before it hold already.
    """

    key: str
    rule: str
    source: str
    holds: Callable[[Values, Facts], bool]


def hold_to(values: Values, facts: Facts, rules: Sequence[PublishedRule]) -> None:
    """Looks whether the values meet all rules.

    Raises:
        ConfigError: they break one; it cites the rule's source.
    """
    for rule in rules:
        if not rule.holds(values, facts):
            raise ConfigError(f"{rule.rule} ({rule.source})", key=rule.key, value=values.get(rule.key))


def number(values: Values, key: str, default: int = 1) -> int:
    """A whole number among the values; `default` where it was not said."""
    value = values.get(key)
    return default if value is None else int(value)  # type: ignore[arg-type] # tables hold keys to their kinds


def required(key: str, source: str) -> PublishedRule:
    """That a key is said."""
    return PublishedRule(
        key=key, rule="is required", source=source, holds=lambda values, _: values.get(key) is not None
    )


def at_least(least: int, key: str, source: str) -> PublishedRule:
    """That a number, where it is said, is not smaller than `least`."""
    return PublishedRule(
        key=key,
        rule=f"must be at least {least}",
        source=source,
        holds=lambda values, _: number(values, key, least) >= least,
    )
