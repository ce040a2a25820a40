"""Recipes of Megatron-Bridge, read from their Python file without running it.

A recipe is a function that makes a configuration and sets its fields: `cfg.model.tensor_model_parallel_size = 4`. What
it sets to a literal is read, also by way of other functions of the same file. A field is open where anything else sets
it: a condition, a call that gets the configuration, a function of another file.

Sources: Megatron-Bridge 0.6 recipes/*/h100/*.py (form of a recipe), training/config.py (`ConfigContainer`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hardware.io.errors import ConfigError, did_you_mean

MOST_NESTED = 8
"""Limit on functions that a recipe is made from, one by another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a function says of the configuration that it returns.

    Attributes:
        values: Literal values by dotted key.
        unknown: Why a field that the function sets is unknown, by dotted key.
        weights: Names of the weights whose model it takes; empty if it names none.
        others: Functions of other files, or calls, that may set any further field.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    others: tuple[str, ...] = ()


def functions_of(text: str) -> dict[str, ast.FunctionDef] | None:
    """Return the functions of a Python file by name; None if the text is no Python file with any."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return found or None


def read_recipe(functions: Mapping[str, ast.FunctionDef], name: str, depth: int = 0) -> Recipe:
    """Read the recipe of that name.

    Raises:
        ConfigError: The file has no such function.
    """
    if name not in functions:
        raise ConfigError(
            "no such function in the file", key="recipe", value=name, nearest=did_you_mean(name, functions)
        )
    return _Reader(functions, depth).read(functions[name])


class _Reader:
    """Reader of one function: the name of its configuration, and what was found so far."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], depth: int) -> None:
        self.functions = functions
        self.depth = depth
        self.name = ""
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.weights = ""
        self.others: list[str] = []

    def read(self, function: ast.FunctionDef) -> Recipe:
        """Read the statements of a function."""
        for statement in function.body:
            self._statement(statement)
        return Recipe(
            values=dict(self.values), unknown=dict(self.unknown), weights=self.weights, others=tuple(self.others)
        )

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            self._begin(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._call(node.value)
        elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            self._forget_in(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Call) and not self.name:
                self.name = target.id
                self._begin(value)
            return
        key = self._key(target)
        if not key:
            return
        self._drop(key)
        if key == "model" and (weights := _weights_of(value)):
            self.weights = weights
            return
        try:
            self.values[key] = ast.literal_eval(value)
        except ValueError:
            self.unknown[key] = f"is set to `{ast.unparse(value)[:60]}` on line {value.lineno}"

    def _begin(self, call: ast.Call) -> None:
        """Take over what another function of the file sets, or note that it is one of another file."""
        made = _name_of(call)
        if made in self.functions and self.depth < MOST_NESTED and not call.keywords:
            inner = read_recipe(self.functions, made, self.depth + 1)
            self.values, self.unknown = dict(inner.values), dict(inner.unknown)
            self.weights, self.others = inner.weights, list(inner.others)
        elif made:
            self.others.append(made)

    def _call(self, call: ast.Call) -> None:
        """Note a function that gets the configuration, or a part of it, and may change it."""
        given = [*call.args, *(one.value for one in call.keywords)]
        if any(isinstance(one, ast.Name) and one.id == self.name for one in given):
            made = _name_of(call)
            if made in self.functions and self.depth < MOST_NESTED:
                self._forget_in(self.functions[made], of=_parameter(self.functions[made], call, self.name))
            else:
                self.others.append(made)

    def _forget_in(self, node: ast.AST, of: str = "") -> None:
        """Forget the fields that a block sets, which may run or not."""
        own, self.name = self.name, of or self.name
        for inner in ast.walk(node):
            for target in inner.targets if isinstance(inner, ast.Assign) else ():
                if key := self._key(target):
                    self._drop(key)
                    self.unknown[key] = f"is set under a condition on line {target.lineno}"
        self.name = own

    def _drop(self, key: str) -> None:
        """Forget a field and those inside it."""
        for kind in (self.values, self.unknown):
            for one in [one for one in kind if one == key or one.startswith(f"{key}.")]:
                del kind[one]

    def _key(self, target: ast.expr) -> str:
        """Return the dotted key of a field of the configuration; empty for any other target."""
        parts: list[str] = []
        while isinstance(target, ast.Attribute):
            parts.insert(0, target.attr)
            target = target.value
        return ".".join(parts) if parts and isinstance(target, ast.Name) and target.id == self.name else ""


def _weights_of(value: ast.expr) -> str:
    """Return the weights that a model is made from, as by `AutoBridge.from_hf_pretrained("...")`."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and _name_of(node).startswith("from_hf") and node.args:
            first: Sequence[ast.expr] = node.args
            if isinstance(first[0], ast.Constant) and isinstance(first[0].value, str):
                return first[0].value
    return ""


def _name_of(call: ast.Call) -> str:
    """Return the name of the function that is called, without its module."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _parameter(function: ast.FunctionDef, call: ast.Call, name: str) -> str:
    """Return the parameter under which a function gets the configuration."""
    at = next((at for at, one in enumerate(call.args) if isinstance(one, ast.Name) and one.id == name), None)
    if at is not None and at < len(function.args.args):
        return function.args.args[at].arg
    keyword = next((one.arg for one in call.keywords if isinstance(one.value, ast.Name) and one.value.id == name), None)
    return keyword or name


def merged_recipe(first: Recipe, values: Mapping[str, Any], unknown: Mapping[str, str]) -> Recipe:
    """Return a recipe with overrides over it."""
    stated = {**first.values, **values}
    left = {key: why for key, why in {**first.unknown, **unknown}.items() if key not in values}
    return replace(first, values={key: value for key, value in stated.items() if key not in left}, unknown=left)
