"""Simple arithmetic of bash: whole numbers from 0 on, `+ - * / %` and brackets."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(text: str) -> int | None:
    """Evaluate an expression. Return None if it is not simple, or if a number of it is below 0.

    Below 0 the quotients of Python and of bash differ.
    """
    # The limit bounds the depth of the recursion.
    if len(text) > 200 or not re.fullmatch(r"[0-9\s()+*/%-]+", text):
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, ValueError):
        return None


def _value(node: ast.expr) -> int:
    """Return the value of a part of an expression; a ValueError if it has none here."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if found >= 0:
            return found
    raise ValueError("not a simple expression")
