"""What numbers and comparisons of a script come to."""

from __future__ import annotations

import re


def compared(left: str, operator: str, right: str) -> bool | None:
    """The truth of `[ left operator right ]`; None where it is none of these."""
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


def calculated(values: list[str | int]) -> int | None:
    """Recursive descent over numbers and signs; None where they are no expression."""
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

    if len(values) > 200:
        return None
    found = total()
    return found if at == len(values) else None
