"""Texts under the keys of a mapping that users write: docstrings of attributes, as the reference and editors show them.

They are read from the source when a schema is asked for. Pydantic can do so whenever a class is defined, which takes a
quarter of a second of every command.
"""

from __future__ import annotations

import ast
import inspect
import textwrap


def attribute_docstrings(model: type) -> dict[str, str]:
    """Return the docstrings of the annotated attributes of a class and of those that it inherits, by name."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if inspect.get_annotations(each) and each.__module__.partition(".")[0] not in ("pydantic", "builtins"):
            found |= _of_class(each)
    return found


def _of_class(model: type) -> dict[str, str]:
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(parsed, ast.ClassDef), "the source of a class is one"
    found = {}
    for statement, behind in zip(parsed.body, parsed.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _is_text(behind):
            found[statement.target.id] = inspect.cleandoc(behind.value.value)  # type: ignore[attr-defined] # a text
    return found


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
