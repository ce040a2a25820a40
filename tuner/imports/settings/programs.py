"""Programs by their commands: whose importer reads the words of a command, if it takes settings over a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BY_WORD = (
    ("maxtext", re.compile(r"(max[Tt]ext|MaxText)\..*train\w*|.*/?(maxtext|MaxText)/(.*/)?train\.py")),
    ("verl", re.compile(r"verl\.\w[\w.]*|[+~]{0,2}actor_rollout_ref\.actor\..*")),
    ("bridge", re.compile(r"(.*/)?(run_recipe|setup_experiment|run_script)\.py")),
    ("nemo", re.compile(r"(.*/)?megatron_gpt_pretraining\.py|[+~]{0,2}trainer\.strategy\..*=.*")),
    ("bridge", re.compile(r"[+~]{0,2}(model|train|ddp)\.[a-z_]+=.*")),
)
"""Word that tells a program; of several the first row counts."""


def program_of(words: Sequence[str]) -> str:
    """Return the name of the importer for a command; empty if it takes no settings over a recipe."""
    names = [word.rpartition("/")[2] for word in words]
    for first, name in (("megatron", "swift"), ("nemo", "nemo")):
        if first in names[:2]:
            return name
    return next((name for name, sign in _BY_WORD if any(sign.fullmatch(word) for word in words)), "")
