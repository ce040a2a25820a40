"""Checks by export target: read an export back and compare it with the published rules of its framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.oracles.frameworks.deepspeed import check_deepspeed, said_by_deepspeed
from tests.oracles.frameworks.flagscale import check_flagscale
from tests.oracles.frameworks.gpt_neox import check_gpt_neox, said_by_gpt_neox
from tests.oracles.frameworks.maxtext import check_maxtext, said_by_maxtext
from tests.oracles.frameworks.megatron import check_megatron, said_by_megatron
from tests.oracles.frameworks.mindspeed import check_mindspeed, said_by_mindspeed
from tests.oracles.frameworks.nanotron import check_nanotron, said_by_nanotron
from tests.oracles.frameworks.nemo import check_nemo, said_by_nemo
from tests.oracles.frameworks.published_rules import Facts
from tests.oracles.frameworks.renamed import check_renamed, said_by_renamed
from tests.oracles.frameworks.torchtitan import (
    check_torchtitan,
    check_torchtitan_main,
    said_by_torchtitan,
    said_by_torchtitan_main,
)
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue, Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Reader and rules of one framework.

    Attributes:
        read: Function that returns the values of an export by flag or key; raises ConfigError for a broken rule.
        said: Function that converts such values to dimensions of a configuration.
    """

    read: Callable[[Export, Facts], dict[str, FlagValue]]
    said: Callable[[Values, Facts], dict[str, FlagValue]]


def _renamed(program: str) -> Check:
    """Return the check of a program that runs megatron-core with keys of its own."""
    return Check(read=lambda export, facts: check_renamed(program, export.arguments, facts), said=said_by_renamed)


CHECKS: dict[str, Check] = {
    "bridge": _renamed("bridge"),
    "deepspeed": Check(read=lambda export, facts: check_deepspeed(export.text, facts), said=said_by_deepspeed),
    "flagscale": Check(read=lambda export, facts: check_flagscale(export.text, facts), said=said_by_megatron),
    "gpt-neox": Check(read=lambda export, facts: check_gpt_neox(export.text, facts), said=said_by_gpt_neox),
    "maxtext": Check(read=lambda export, facts: check_maxtext(export.arguments, facts), said=said_by_maxtext),
    "megatron": Check(read=lambda export, facts: check_megatron(export.arguments, facts), said=said_by_megatron),
    "mindspeed": Check(read=lambda export, facts: check_mindspeed(export.arguments, facts), said=said_by_mindspeed),
    "nanotron": Check(read=lambda export, facts: check_nanotron(export.text, facts), said=said_by_nanotron),
    "nemo": Check(read=lambda export, facts: check_nemo(export.text, facts), said=said_by_nemo),
    "swift": _renamed("swift"),
    "torchtitan": Check(read=lambda export, facts: check_torchtitan(export.arguments, facts), said=said_by_torchtitan),
    "torchtitan-main": Check(
        read=lambda export, facts: check_torchtitan_main(export.text, facts), said=said_by_torchtitan_main
    ),
    "verl": _renamed("verl"),
}
"""Checks of all exports that a framework reads."""
