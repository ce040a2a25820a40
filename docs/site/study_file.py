"""Tables of keys in docs/study-file.md, generated from the models that validate study files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from docs.site.study_schema import study_schema

STUDY = "StudyKeys"
"""Name of the table of the top-level keys of a study file."""

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "`true` or `false`",
    "object": "mapping",
    "null": "none",
    "keys": "keys, see below",
}
_EMPTY = {"array": "`[]`", "object": "`{}`"}


def key_tables() -> dict[str, str]:
    """Return the table of each kind of mapping in a study file, by the name of its model."""
    schema = study_schema()
    return {STUDY: table_of(schema)} | {name: table_of(model) for name, model in schema["$defs"].items()}


def table_of(model: Mapping[str, Any]) -> str:
    """Return the table of a model's keys: value, default and meaning.

    Args:
        model: JSON schema of the model, with its `properties`.
    """
    required = model.get("required", ())
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, entry in model["properties"].items():
        # A description may state its default in words, after "Default: "; these words win over the schema's value.
        meaning, _, default = " ".join(entry.get("description", "").split()).partition(" Default: ")
        default = "required" if key in required else default or _default(entry)
        lines.append("| " + " | ".join(_cell(text) for text in (f"`{key}`", _value(entry), default, meaning)) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return a text with the characters escaped that would end a table cell."""
    return text.replace("|", "\\|")


def _default(entry: Mapping[str, Any]) -> str:
    """Return the default of an optional key, in Markdown."""
    if "default" not in entry:  # pydantic leaves out defaults made by a factory, which are empty lists and mappings
        return _EMPTY[entry["type"]]
    # Texts stand without their JSON quotes; chr(34) is the double quote.
    return "none" if entry["default"] is None else f"`{json.dumps(entry['default']).strip(chr(34))}`"


def _value(entry: Mapping[str, Any]) -> str:
    """Return the allowed values of a key in words, for example "list of whole numbers, from 1"."""
    if "anyOf" in entry:
        alternatives = [_value(one) for one in entry["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(alternatives))
    if "enum" in entry:
        *others, last = (f"`{value}`" for value in entry["enum"])
        return f"{', '.join(others)} or {last}"
    if "const" in entry:
        return f"`{entry['const']}`"
    return _value_of_type(entry, entry.get("type", "keys"))


def _value_of_type(entry: Mapping[str, Any], kind: str) -> str:
    """Return the allowed values of a key of one JSON type, with their bounds."""
    if kind == "array":
        return f"list of {_plural(_value(entry['items']))}"
    return _TYPES[kind] + _bounds(entry)


def _plural(value: str) -> str:
    """Return the plural of a value in words, for the elements of a list."""
    return re.sub(r"^(whole number|number)", r"\1s", value).replace("keys, see below", "mappings, see below")


def _bounds(entry: Mapping[str, Any]) -> str:
    """Return the bounds of a number in words, after a comma; empty without bounds."""
    least, over = entry.get("minimum"), entry.get("exclusiveMinimum")
    most, under = entry.get("maximum"), entry.get("exclusiveMaximum")
    if least is not None and most is not None:
        return f", {least:,} to {most:,}"
    bounds = [
        words.format(bound)
        for bound, words in ((least, "from {:,}"), (over, "above {:,}"), (most, "at most {:,}"), (under, "below {:,}"))
        if bound is not None
    ]
    return f", {', '.join(bounds)}" if bounds else ""
