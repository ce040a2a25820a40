"""A JAX program as it was traced: its jaxpr, what its arguments are called, and which of them live on.

Arguments that the caller donates are states, if some output can take their place: a tree of the same paths and shapes,
at best one below the argument's name; where there is none, for each leaf the first output of its shape and type. Large
trees choose first: an optimizer's holds others of the parameters' paths. Other arguments are data of the step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from costmodels.sharding.graph import TensorKind
from hardware.io.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """A leaf of a program's arguments.

    Attributes:
        name: Its path, for example `params.layers.0.w`.
        kind: What it is for.
        kept_by: The output that takes its place in the next step; None for data of one step.
    """

    name: str
    kind: TensorKind
    kept_by: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A traced function.

    Attributes:
        name: What it is called.
        jaxpr: Its trace.
        arguments: Of each variable that it takes.
        outputs: The paths of what it returns, empty for a function that returns one array.
        in_tree: The tree of the arguments.
        out_tree: The tree of what it returns.
        donated: Numbers of the arguments, whole trees, that the outputs take the place of.
    """

    name: str
    jaxpr: ClosedJaxpr
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    in_tree: jax.tree_util.PyTreeDef
    out_tree: jax.tree_util.PyTreeDef
    donated: tuple[int, ...]


def traced(fn: Callable[..., Any], *arguments: Any, donated: Sequence[str | int] = ()) -> Program:
    """A function's trace, with the names of its arguments and what becomes of them; see `graph_of_jax`.

    Raises:
        ConfigError: `donated` names no argument.
    """
    names = _argument_names(fn, len(arguments))
    given = _numbers(donated, names)
    jaxpr, out_tree = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    outputs = _leaves(out_tree)
    leaves = [_leaves(tree) for tree in arguments]
    free = dict.fromkeys(range(len(outputs)))
    kept: dict[int, list[int | None]] = {}
    for number in sorted(given, key=lambda one: (-len(leaves[one]), one)):
        kept[number] = _kept(names[number], leaves[number], outputs, free)
    found = [
        Argument(name=".".join((name, *path)), kind=_kind_of(name, output is not None), kept_by=output)
        for number, name in enumerate(names)
        for (path, _), output in zip(leaves[number], kept.get(number, [None] * len(leaves[number])), strict=True)
    ]
    return Program(
        name=getattr(fn, "__name__", "program"),
        jaxpr=jaxpr,
        arguments=tuple(found),
        outputs=tuple(".".join(path) for path, _ in outputs),
        in_tree=jax.tree_util.tree_structure(arguments),
        out_tree=jax.tree_util.tree_structure(out_tree),
        donated=tuple(sorted(given)),
    )


Leaf = tuple[tuple[str, ...], Any]
"""The path and the shape of a leaf of a tree."""


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """What a function calls its first arguments."""
    names: list[str] = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{number}" for number in range(count - len(names))]
        else:
            names.append(parameter.name)
    return names[:count]


def _numbers(donated: Sequence[str | int], names: Sequence[str]) -> set[int]:
    """The positions of donated arguments."""
    found = set()
    for one in donated:
        number = names.index(one) if one in names else one
        if isinstance(number, str) or not 0 <= number < len(names):
            raise ConfigError(
                "must be one of the function's arguments",
                key="donated",
                value=one,
                nearest=did_you_mean(str(one), names),
            )
        found.add(number)
    return found


def _leaves(tree: Any) -> list[Leaf]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in found]


def _kept(name: str, leaves: Sequence[Leaf], outputs: Sequence[Leaf], free: dict[int, None]) -> list[int | None]:
    """Of each leaf of a donated argument the output that takes its place, which is free no longer."""

    def is_alike(leaf: Leaf, output: int) -> bool:
        one, other = leaf[1], outputs[output][1]
        return output in free and one.shape == other.shape and one.dtype == other.dtype

    def is_tree(first: int) -> bool:
        above = _above(leaves, outputs[first])
        return all(
            is_alike(leaf, first + number) and outputs[first + number][0] == (*above, *leaf[0])
            for number, leaf in enumerate(leaves)
        )

    found: list[int | None] = []
    trees = [first for first in range(len(outputs) - len(leaves) + 1) if is_tree(first)] if leaves else []
    if trees:
        first = next((one for one in trees if name in _above(leaves, outputs[one])), trees[0])
        found += range(first, first + len(leaves))
    else:
        taken: set[int] = set()
        for leaf in leaves:
            output = next((one for one in free if one not in taken and is_alike(leaf, one)), None)
            taken.update(() if output is None else (output,))
            found.append(output)
    for output in found:
        if output is not None:
            del free[output]
    return found


def _above(leaves: Sequence[Leaf], output: Leaf) -> tuple[str, ...]:
    """The path down to a tree among the outputs, whose first leaf is this output."""
    return output[0][: max(len(output[0]) - len(leaves[0][0]), 0)]


def _kind_of(name: str, is_kept: bool) -> TensorKind:
    """What an argument is for, by its name: parameters are called so, and what else lives on is the optimizer's."""
    if re.match(r"(?i)param|weight|model", name):
        return TensorKind.PARAMETER
    is_optimizer = is_kept and not re.search(r"(?i)cache", name)
    return TensorKind.OPTIMIZER if is_optimizer else TensorKind.DATA
