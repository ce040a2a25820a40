"""Functions of a JAX user with all arguments by position, and without those that are no arrays."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from costmodels.sharding.frontends.jax.program import find_numbers, name_arguments
from hardware.io.errors import ConfigError, did_you_mean

Function = Callable[..., Any]


def by_position(function: Function, count: int, keywords: tuple[str, ...]) -> Function:
    """Return a function that takes `count` arguments as they are, and then those of some keywords by position.

    Raises:
        ConfigError: The function has no argument of such a name.
    """
    own = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in own.values())
    for keyword in keywords:
        if keyword not in own and not takes_any:
            raise ConfigError(
                "must be arguments of the function",
                key="keywords",
                value=keyword,
                nearest=did_you_mean(keyword, list(own)),
            )

    @functools.wraps(function)
    def positional(*given: Any) -> Any:
        return function(*given[:count], **dict(zip(keywords, given[count:], strict=True)))

    _sign(positional, [*[name for name in own if name not in keywords][:count], *keywords])
    return positional


def fixed_of(function: Function, arguments: Sequence[Any], static: Sequence[str | int]) -> dict[int, Any]:
    """Return the static arguments of a call by their positions.

    Raises:
        ConfigError: `static` names no argument, or one that JAX can't take as static because it has no hash.
    """
    names = name_arguments(function, len(arguments))
    fixed = {number: arguments[number] for number in sorted(find_numbers(static, names, key="static"))}
    for number, value in fixed.items():
        try:
            hash(value)
        except TypeError:
            raise ConfigError(
                "must have a hash, as jax.jit needs it",
                key="static",
                value=names[number],
                nearest="a tuple in place of a list, a frozen dataclass in place of a dictionary",
            ) from None
    return fixed


def without_fixed(function: Function, count: int, fixed: Mapping[int, Any]) -> Function:
    """Return a function of the arguments that are not fixed, out of `count`."""
    if not fixed:
        return function

    @functools.wraps(function)
    def dynamic(*given: Any) -> Any:
        rest = iter(given)
        return function(*(fixed[number] if number in fixed else next(rest) for number in range(count)))

    names = name_arguments(function, count)
    _sign(dynamic, [name for number, name in enumerate(names) if number not in fixed])
    return dynamic


def with_fixed(
    function: Function, fixed: Mapping[int, Any], planned_for: Callable[[Mapping[int, Any]], Function]
) -> Function:
    """Return a planned function that takes the static arguments, too.

    Args:
        function: The user's function.
        fixed: Static arguments of the first plan.
        planned_for: Function that plans it with other static arguments; it is asked once for each.
    """
    known = {tuple(fixed.values()): planned_for(fixed)}
    first = tuple(fixed.values())

    @functools.wraps(function)  # lets callers donate arguments by name
    def planned(*given: Any, **named: Any) -> Any:
        if named:
            given = inspect.signature(function).bind(*given, **named).args
        values = tuple(given[number] for number in fixed)
        if values not in known:
            name = getattr(function, "__name__", "the function")
            warnings.warn(f"{name} is planned again: with static {values}; it was planned with {first}", stacklevel=2)
            known[values] = planned_for(dict(zip(fixed, values, strict=True)))
        return known[values](*(value for number, value in enumerate(given) if number not in fixed))

    return planned


def _sign(function: Function, names: Sequence[str]) -> None:
    """Give a function a signature with these names."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it
