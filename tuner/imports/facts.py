"""Facts of a run (costmodels/job/facts.py) that a script, a configuration or a log says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from costmodels.job.fact_words import all_names, flat, names_of, read_facts
from costmodels.job.facts import FactValue, facts
from costmodels.job.model_spec import ModelSpec
from costmodels.job.runtime import RuntimeProfile
from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS
from tuner.imports.flags import Flags
from tuner.imports.imported import Unread

_MANY_BITS = ("bf16", "fp8", "nvfp4")
"""Precisions whose weights are in bf16."""


def facts_in_flags(
    flags: Flags, frameworks: Sequence[str], hidden: Iterable[str] = (), *, holds_more: bool = False
) -> tuple[dict[str, FactValue], list[Unread]]:
    """Return the facts that flags say, and the flags about facts that are not understood.

    Args:
        flags: Flags of a command.
        frameworks: Frameworks whose words they are; later ones add to earlier ones.
        hidden: Flags that unknown words of the command may hold.
        holds_more: Whether these words may hold any flag.
    """
    told: dict[str, FactValue] = {}
    unread: list[Unread] = []
    for framework in frameworks:
        own = {name: flags.words(name) for name in all_names(framework) if flags.has(name)}
        said, unclear = read_facts(framework, own)
        for name, value in said.items():
            names = names_of(facts()[name], framework)
            # what is absent may stand in words that are not known
            if any(one in own for one in names) or not (holds_more or set(names) & set(hidden)):
                told[name] = value
        unread += [_not_understood(name, words, flags.line(words.split()[0])) for name, words in unclear.items()]
    return told, unread


def facts_in_keys(framework: str, mapping: Mapping[str, Any]) -> tuple[dict[str, FactValue], list[Unread]]:
    """Return the facts that the keys of a nested configuration say, and those that are not understood."""
    said, unclear = read_facts(framework, flat(mapping))
    return said, [_not_understood(name, words, None) for name, words in unclear.items()]


def facts_in_environment(environment: Iterable[tuple[str, str]]) -> dict[str, FactValue]:
    """Return the facts that environment variables say."""
    return read_facts("environment", {name: (value,) for name, value in environment})[0]


def _not_understood(name: str, words: str, line: int | None) -> Unread:
    return Unread(what=words, why=f"not understood; `facts.{name}` stays as the runtime's profile has it", line=line)


def facts_beyond(
    told: Mapping[str, FactValue], profile: RuntimeProfile, job: Mapping[str, Any], model: ModelSpec
) -> dict[str, FactValue]:
    """Return the facts of a job that its runtime's profile does not say, in the order of the table."""
    has = {
        "": True,
        "experts": model.is_moe,
        "bf16": job.get("precision", "bf16") in _MANY_BITS,
        "fp8": job.get("precision") == "fp8",
        "offload": job.get("offload", "none") != "none",
        "muon": OPTIMIZERS[job.get("optimizer", DEFAULT_OPTIMIZER)].needs_matrices,
    }
    return {
        name: told[name]
        for name, fact in facts().items()
        if name in told and has[fact.needs] and not _is_in(profile, fact.fields_of(told[name]))
    }


def _is_in(profile: RuntimeProfile, fields: Mapping[str, Any]) -> bool:
    return all(getattr(profile, name) == value for name, value in fields.items())
