"""Catalog of known knobs: one file for each framework in `catalog/`, with a source for every entry."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from costmodels.job.facts import parse_facts
from costmodels.job.training_job import TrainingJob
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.memory.peak import MEMORY_PARTS
from hardware.io.config_file import StrictModel, read_mapping, validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from tuner.knobs.known_knob import KnownKnob, KnownValue
from tuner.knobs.needs import NEEDS

CATALOG = Path(__file__).parent / "catalog"

FRAMEWORK_OF_RULE_SET = {
    "megatron": "megatron",
    "mindspeed": "mindspeed",
    "torchtitan": "torchtitan",
    "megatron-deepspeed": "deepspeed",
}
"""Framework whose knobs a study has, by the rule set of its runtime."""

FRAMEWORKS = ("megatron", "torchtitan", "deepspeed", "nemo", "mindspeed")
"""Frameworks that the catalog has knobs of, by the names of their files."""

BASES = ("assumed", "cost model")
"""Sources of effects that are no publication."""


class _Value(StrictModel):
    value: bool | int | float | str | None
    words: str | None = None
    removes: list[str] = Field(default_factory=list)
    keeps: bool = False
    facts: dict[str, Any] = Field(default_factory=dict)
    job: dict[str, Any] = Field(default_factory=dict)
    step: dict[str, Annotated[float, Field(gt=-1, lt=1000)]] = Field(default_factory=dict)
    memory: dict[str, Annotated[float, Field(ge=-1, lt=1000)]] = Field(default_factory=dict)


class _Entry(StrictModel):
    text: str
    source: str
    basis: str = ""
    values: list[_Value] = Field(default_factory=list)
    flag: str = ""
    environment: str = ""
    key: str = ""
    when: str = ""
    needs: list[str] = Field(default_factory=list)
    affects: list[str] = Field(default_factory=list)
    width: Annotated[float, Field(ge=0, le=1)] = 0.0
    alters_results: bool = False
    requires: str = ""
    dimension: str = ""
    starts_at_default: bool = False


class CatalogFile(StrictModel):
    """Grammar of a framework's file; `sources` says what the entries cite by name."""

    title: str
    sources: dict[str, str]
    knobs: dict[str, _Entry]


@cache
def catalog_file(framework: str) -> CatalogFile:
    """Read a framework's file.

    Raises:
        ConfigError: The file is not as the grammar says.
    """
    path = CATALOG / f"{framework}.yaml"
    return validate_mapping(CatalogFile, read_mapping(path), file=str(path))


@cache
def known_knobs(framework: str) -> dict[str, KnownKnob]:
    """Return the knobs of a framework by name, in the order of its file.

    Raises:
        ConfigError: An entry names what does not exist.
    """
    file = catalog_file(framework)
    found = {}
    for name, entry in file.knobs.items():
        try:
            found[name] = _known(framework, name, entry, file.sources)
        except ConfigError as error:
            raise error.under(f"knobs.{name}").in_file(str(CATALOG / f"{framework}.yaml")) from None
    return found


def find_known(framework: str, name: str) -> KnownKnob:
    """Return a knob of a framework.

    Raises:
        ConfigError: The framework has no such knob; the message says which has, or names the nearest.
    """
    known = known_knobs(framework)
    if name not in known:
        others = [other for other in FRAMEWORKS if other != framework and name in known_knobs(other)]
        if others:
            titles = " and ".join(catalog_file(other).title for other in others)
            rule = f"is a knob of {titles}, and this study's framework is {catalog_file(framework).title}"
            raise ConfigError(rule, value=name, nearest=did_you_mean(name, known))
        rule = f"is no known knob of {catalog_file(framework).title}"
        raise ConfigError(rule, value=name, nearest=f"{did_you_mean(name, known)}; or a mapping with name and values")
    return known[name]


def framework_of(rule_set: str, named: str | None) -> str | None:
    """Return the framework whose knobs a study has; None if the catalog has none for it.

    Args:
        rule_set: Rule set of the study's runtime.
        named: Framework that its trials name, which their runtime may only resemble; None if they name none.
    """
    if named is not None:
        return named if named in FRAMEWORKS else None
    return FRAMEWORK_OF_RULE_SET.get(rule_set)


def _known(framework: str, name: str, entry: _Entry, sources: dict[str, str]) -> KnownKnob:
    for key, cited in (("source", entry.source), ("basis", entry.basis)):
        if cited and cited not in sources and cited not in BASES:
            raise ConfigError("is no source of the file", key=key, value=cited, nearest=did_you_mean(cited, sources))
    for need in entry.needs:
        if need not in NEEDS:
            raise ConfigError("is no need", key="needs", value=need, nearest=did_you_mean(need, NEEDS))
    for value in entry.values:
        _check_value(value)
    basis = entry.basis or "assumed"
    return KnownKnob(
        name=name,
        framework=framework,
        text=" ".join(entry.text.split()),
        values=tuple(_known_value(value) for value in entry.values),
        source=sources.get(entry.source, entry.source),
        basis=sources.get(basis, basis),
        **{key: getattr(entry, key) for key in ("flag", "environment", "key", "when", "width", "alters_results")},
        **{key: getattr(entry, key) for key in ("requires", "dimension", "starts_at_default")},
        needs=tuple(entry.needs),
        affects=tuple(entry.affects),
    )


def _check_value(value: _Value) -> None:
    owned = {
        "job": (value.job, TrainingJob.__dataclass_fields__),
        "step": (value.step, BREAKDOWN),
        "memory": (value.memory, MEMORY_PARTS),
    }
    for key, (given, known) in owned.items():
        for name in given:
            if name not in known:
                raise ConfigError("does not exist", key=f"values.{key}", value=name, nearest=did_you_mean(name, known))


def _known_value(value: _Value) -> KnownValue:
    return KnownValue(
        value=value.value,
        words=value.words,
        removes=tuple(value.removes),
        keeps=value.keeps,
        facts=parse_facts(value.facts),
        job=tuple((name, _frozen(given)) for name, given in value.job.items()),
        step=tuple(value.step.items()),
        memory=tuple(value.memory.items()),
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
