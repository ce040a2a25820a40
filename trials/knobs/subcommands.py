"""Words of a command that are no flags and end it: programs that tyro parses have subcommands."""

from __future__ import annotations

SUBCOMMANDS = ("activation-checkpoint",)
"""Subcommands that end a command, each with its choice behind a colon: torchtitan's policy of recomputation."""


def subcommand_of(word: str) -> str:
    """Return the subcommand that a word begins, such as `activation-checkpoint:full`; empty if it begins none."""
    name, colon, _ = word.partition(":")
    return name if colon and name in SUBCOMMANDS else ""
