"""Pause of Python's collector of cyclic garbage in functions that make many objects and no cycles.

The collector looks at all objects again and again while their number grows. A planner beside JAX, which has millions,
would spend a third of its time so. What is no longer referred to is freed at once all the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def without_collector(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return the function with the collector paused while it runs."""

    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run
