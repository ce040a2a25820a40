"""Configuration that nanotron prints when it starts: its dataclasses, as Python's `pprint` writes them.

Source: nanotron 0.4 trainer.py (`pformat(self.config)`), and the same of its main branch, where it is a message of its
own.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from hardware.io.errors import ConfigError
from tuner.imports.imported import Imported
from tuner.imports.log.block import MOST_LINES, AbstractFinder
from tuner.imports.log.lines import Line
from tuner.imports.nanotron import import_nanotron

_BEGIN = re.compile(r"^\s*Config\(general=")
_OBJECT = re.compile(r"<[\w.]+?(?: object at 0x[0-9a-f]+|: [^<>]*)>")
"""Objects that Python writes without a literal: pipeline engines and values of enumerations."""
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|" + _OBJECT.pattern)
_ENGINES = {"OneForwardOneBackwardPipelineEngine": "1f1b", "AllForwardAllBackwardPipelineEngine": "afab"}
_MODELS = {"LlamaConfig": "is_llama_config", "Qwen2Config": "is_qwen2_config"}
"""Key that marks a model's section in YAML, by the name of its class."""


class NanotronConfig(AbstractFinder):
    """Finder of the printed configuration."""

    def __init__(self) -> None:
        self._begun: Line | None = None
        self._lines: list[str] = []
        self._mapping: dict[str, Any] | None = None

    def begins(self, line: Line) -> bool:
        """Return whether the printed configuration begins on this line."""
        return "Config(general=" in line.text and _BEGIN.match(line.message) is not None

    def take(self, line: Line) -> None:
        """Take a line of the log."""
        if self.begins(line):
            self._begun, self._lines, self._mapping = line, [line.message], None
        elif self._begun is not None and self._mapping is None and line.rank == self._begun.rank:
            if len(self._lines) > MOST_LINES:
                self._raise_cut_off()
            self._lines.append(line.message)
        else:
            return
        if self._lines[-1].rstrip().endswith(")"):
            self._mapping = _parse("\n".join(self._lines))

    def _raise_cut_off(self) -> None:
        assert self._begun is not None, "the configuration has begun"
        raise ConfigError(
            "nanotron's configuration is cut off",
            key=f"line {self._begun.number}",
            value=self._begun.message[:80],
            nearest="a log with all lines of `Config(...)`",
        )

    def imported(self) -> Imported | None:
        """Return what the configuration says."""
        if self._begun is None:
            return None
        if self._mapping is None:
            self._raise_cut_off()
        return import_nanotron(json.dumps(self._mapping))


def _parse(text: str) -> dict[str, Any] | None:
    """Return the printed dataclasses as nested mappings; None as long as the text is incomplete."""
    try:
        tree = ast.parse(_TOKEN.sub(_quote, text), mode="eval")
        found = _value_of(tree.body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _quote(found: re.Match[str]) -> str:
    """Return a text as it is, and any other object as a text."""
    return repr(found[0]) if found[0].startswith("<") else found[0]


def _value_of(node: ast.expr) -> Any:
    """Return the value of a printed literal or object; a dataclass becomes a mapping of its fields.

    Raises:
        ValueError: The text is not that of a printed object.
    """
    if isinstance(node, ast.Call):
        name = _name_of(node.func)
        if not node.keywords:  # a path, or a number such as float('inf')
            return str(_value_of(node.args[0])) if node.args else {}
        fields = {each.arg: _value_of(each.value) for each in node.keywords if each.arg is not None}
        return {_MODELS[name]: True, **fields} if name in _MODELS else fields
    if isinstance(node, (ast.Attribute, ast.Name)):
        return _name_of(node)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value_of(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value_of(key)): _value_of(each) for key, each in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    return _short(value) if isinstance(value, str) and value.startswith("<") else value


def _short(text: str) -> str:
    """Return the name by which YAML calls an engine or the value of an enumeration."""
    name = text.strip("<>").partition(":")[0].partition(" object at ")[0].rpartition(".")[2]
    return _ENGINES.get(name, name)


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a name")
