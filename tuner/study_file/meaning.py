"""Meaning of a study's trials: the resolved values that a resumed study must share with its recorded trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware.io.secret_texts import digest_words


def first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """Return the first key, in dotted form, at which two meanings differ, with both values; None if they agree."""
    for key in sorted({*before, *now}):
        path = f"{prefix}{key}"
        old, new = before.get(key), now.get(key)
        if path == "trial.command" and isinstance(old, list):
            old = digest_words(map(str, old))  # studies from before have the words as they are
        if isinstance(old, dict) and isinstance(new, dict):
            inner = first_difference(old, new, f"{path}.")
            if inner is not None:
                return inner
        elif old != new:
            return path, old, new
    return None
