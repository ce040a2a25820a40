"""Recipes of torchtitan, read from their Python file without running it.

A recipe is a function of a `config_registry.py` that returns a `Trainer.Config`, or changes that of another function.
Its literals become the sections that a TOML file of older versions has.

Sources: torchtitan 0.3.0 and main of August 2026 models/*/config_registry.py (form), trainer.py (`Trainer.Config`),
distributed/activation_checkpoint.py (policies), config/configs.py.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from typing import Any

from hardware.io.errors import ConfigError, did_you_mean
from tuner.imports.settings.python_recipe import functions_of
from tuner.imports.settings.words import merged

_POLICIES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory-budget"}
_MOST_NESTED = 8


def sections_of(file: str, module: str, name: str) -> dict[str, Any]:
    """Return the sections of the file beside a command: TOML, or Python with the recipe that the command names.

    Args:
        file: Text of the file.
        module: Value of --module, which is the model's name.
        name: Value of --config, which is the recipe's function.

    Raises:
        ConfigError: The file is neither, or has no such function.
    """
    try:
        return tomllib.loads(file)
    except (ValueError, RecursionError) as error:
        functions = functions_of(file)
        if functions is None:
            raise ConfigError(f"the second file is neither TOML ({error}) nor Python with recipes") from None
    if name not in functions:
        raise ConfigError(
            "no such function in the file", key="--config", value=name, nearest=did_you_mean(name, functions)
        )
    sections = merged({}, _values(functions, name, 0))
    sections["model"] = {"name": module, **sections.get("model", {})}
    return sections


def _values(functions: Mapping[str, ast.FunctionDef], name: str, depth: int) -> dict[str, Any]:
    """Return the values that a function's configuration has, by dotted key."""
    found: dict[str, Any] = {}
    local: dict[str, ast.expr] = {}
    own = ""
    for node in functions[name].body:
        value = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and value is not None:
            key = ast.unparse(node.targets[0])
            if key.startswith(f"{own}."):
                found = _with(found, key.removeprefix(f"{own}."), value, local)
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and value is not None:
            local[node.targets[0].id] = value
        made = _class_of(value)
        if isinstance(value, ast.Call) and made in functions and depth < _MOST_NESTED:
            own = node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else own
            found = _values(functions, made, depth + 1)
        elif isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Trainer.Config"):
            own = node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else own
            for keyword in value.keywords:
                found = _with(found, keyword.arg or "", keyword.value, local)
                if keyword.arg == "optimizer":
                    found |= _optimizer(keyword.value, functions)
    return found


def _optimizer(value: ast.expr, functions: Mapping[str, ast.FunctionDef]) -> dict[str, str]:
    """Return the optimizer that groups of parameters name, that of matrices if another has the rest."""
    made = _class_of(value)
    named = [
        _literal(node.value)
        for source in (value, functions.get(made))
        for node in (ast.walk(source) if source is not None else ())
        if isinstance(node, ast.keyword) and node.arg == "optimizer_name"
    ]
    texts = sorted((text for text in named if isinstance(text, str)), key=lambda text: text.startswith("Adam"))
    return {"optimizer.name": texts[0]} if texts else {}


def _with(found: dict[str, Any], key: str, value: ast.expr, local: Mapping[str, ast.expr]) -> dict[str, Any]:
    """Return values with one more, which replaces all under its key."""
    if isinstance(value, ast.Name):
        value = local.get(value.id, value)
    kept = {name: old for name, old in found.items() if name != key and not name.startswith(f"{key}.")}
    made = _class_of(value)
    if key == "activation_checkpoint":
        return kept | {"activation_checkpoint.mode": _POLICIES.get(made, "none" if _literal(value) is None else made)}
    if key == "model_spec" and isinstance(value, ast.Call):
        flavor = next(
            (_literal(one) for one in [*value.args, *(k.value for k in value.keywords if k.arg == "flavor")]), ""
        )
        converters = [_class_of(one) for k in value.keywords if k.arg == "converters" for one in _items(k.value)]
        return kept | {"model.flavor": flavor or "", "model.converters": converters}
    if isinstance(value, ast.Call) and value.keywords:
        for keyword in value.keywords:
            kept = _with(kept, f"{key}.{keyword.arg}", keyword.value, local)
        return kept
    literal = _literal(value)
    return kept if literal is None else kept | {key: literal}


def _items(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, (ast.List, ast.Tuple)) else []


def _class_of(value: ast.expr | None) -> str:
    """Return the name of the class or function that a call makes something of: `FullAC` for `FullAC.Config()`."""
    if not isinstance(value, ast.Call):
        return ""
    *owner, last = ast.unparse(value.func).split(".")
    return owner[-1] if last == "Config" and owner else last


def _literal(value: ast.expr) -> Any:
    """Return a literal, also a product of whole numbers as recipes write tokens; None for all else."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        left, right = _literal(value.left), _literal(value.right)
        return left * right if type(left) is int and type(right) is int and abs(left * right) < 2**60 else None
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None
