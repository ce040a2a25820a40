"""Arithmetic expressions and comparisons of bash."""

from __future__ import annotations

import re


def compare(left: str, operator: str, right: str) -> bool | None:
    """Evaluate `[ left operator right ]`. Return None for other operators, and for numeric comparisons of text."""
    if operator in ("=", "=="):
        return left == right
    if operator == "!=":
        return left != right
    numbers = [int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else None for text in (left, right)]
    if numbers[0] is None or numbers[1] is None:
        return None
    first, second = numbers[0], numbers[1]
    answers = {
        "-eq": first == second,
        "-ne": first != second,
        "-lt": first < second,
        "-le": first <= second,
        "-gt": first > second,
        "-ge": first >= second,
    }
    return answers.get(operator)


def evaluate(values: list[str | int]) -> int | None:
    """Evaluate numbers and operators by recursive descent. Return None if they are not a valid expression.

    Division truncates toward zero and the remainder has the sign of the dividend, as in bash.
    """
    at = 0

    def atom() -> int | None:
        nonlocal at
        if at >= len(values):
            return None
        value = values[at]
        at += 1
        if isinstance(value, int):
            return value
        if value == "-":
            inner = atom()
            return None if inner is None else -inner
        if value != "(":
            return None
        inner = total()
        if at >= len(values) or values[at] != ")":
            return None
        at += 1
        return inner

    def product() -> int | None:
        nonlocal at
        result = atom()
        while result is not None and at < len(values) and values[at] in ("*", "/", "%"):
            sign = values[at]
            at += 1
            other = atom()
            if other is None or (sign != "*" and other == 0):
                return None
            # Python's // rounds down, so that the quotient is computed from absolute values.
            quotient = abs(result) // abs(other) * (1 if (result < 0) == (other < 0) else -1) if sign != "*" else 0
            result = result * other if sign == "*" else quotient if sign == "/" else result - quotient * other
        return result

    def total() -> int | None:
        nonlocal at
        result = product()
        while result is not None and at < len(values) and values[at] in ("+", "-"):
            sign = values[at]
            at += 1
            other = product()
            result = None if other is None else result + other if sign == "+" else result - other
        return result

    # The limit bounds the depth of the recursion.
    if len(values) > 200:
        return None
    found = total()
    return found if at == len(values) else None
