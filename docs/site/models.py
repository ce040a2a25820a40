"""Tables of the kinds of blocks and of the model types that are read."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

from costmodels.blocks.registry import block_kinds
from costmodels.job.hugging_face.reader import READERS
from costmodels.job.listed_model import ENDS, OF_THE_MODEL


def model_tables() -> dict[str, str]:
    """Return the table of kinds of blocks with their keys, and the list of model types."""
    kinds = {name: kind for name, kind in block_kinds().items() if name not in ENDS}
    lines = ["| kind | what it is | keys |", "|---|---|---|"]
    lines += [f"| `{name}` | {_sentence(kind)} | {_keys(kind)} |" for name, kind in kinds.items()]
    return {"kinds": "\n".join(lines), "types": ", ".join(f"`{name}`" for name in sorted(READERS)) + "."}


def _sentence(kind: Any) -> str:
    """Return the first sentence of the docstring of a kind's file."""
    text = " ".join((inspect.getdoc(inspect.getmodule(kind)) or "").split("\n\n")[0].split())
    return text.replace("|", "\\|")


def _keys(kind: Any) -> str:
    """Return the keys of a kind with their meanings and defaults."""
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        said |= _attributes(base.__doc__ or "")
    found = []
    for field in fields(kind):
        if field.name in OF_THE_MODEL:
            continue
        is_mapping = field.default is MISSING and field.default_factory is not MISSING
        default = "" if field.default is MISSING else f" (`{str(field.default).lower()}`)"
        default = " (causal)" if is_mapping else default
        found.append(f"`{field.name}`{default}: {said[field.name]}")
    return "<br>".join(found).replace("|", "\\|")


def _attributes(docstring: str) -> dict[str, str]:
    """Return the entries of a docstring's section of attributes by name."""
    _, _, section = docstring.partition("Attributes:\n")
    entries = re.split(r"\n        (?=\w+: )", f"\n{section}")[1:]
    return {name: " ".join(text.split()) for name, _, text in (entry.partition(": ") for entry in entries)}
