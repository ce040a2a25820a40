"""Calls of ATen operators: their names and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from costmodels.sharding.frontends.rule_parts import Call


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among an operator's parameters, by its index among the operands."""

    slot: int


def bound(
    op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_tensor: Callable[[Any], bool]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the parameters of a call by name, and the tensors among them in order."""
    # Tensors may stand in nested lists, as those of `cat`.
    tensors: list[Any] = []

    def of(value: Any) -> Any:
        if is_tensor(value):
            tensors.append(value)
            return Operand(len(tensors) - 1)
        return [of(one) for one in value] if isinstance(value, (list, tuple)) else value

    params: dict[str, Any] = {}
    # Fill in the schema's defaults, so that rules find every parameter by name.
    for number, argument in enumerate(op._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        params[argument.name] = of(args[number] if number < len(args) else kwargs.get(argument.name, default))
    return params, tensors


def name_of(op: OpOverload[..., Any]) -> str:
    """Return the name of an operator without its overload; operators outside of ATen keep their namespace."""
    return op._schema.name.removeprefix("aten::").replace("::", ".")


def dims_of(call: Call, key: str = "dim", *, rank: int | None = None) -> tuple[int, ...]:
    """Return the non-negative dims that a parameter names; all dims if it names none."""
    count = len(call.operands[0]) if rank is None else rank
    named = call.params.get(key)
    if named is None or named == []:
        return tuple(range(count))
    return tuple(one % count for one in (named if isinstance(named, (list, tuple)) else [named])) if count else ()
