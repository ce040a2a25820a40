"""Trace of a JAX program: its jaxpr, the names of its arguments, and the arguments that live on to the next step.

Donated arguments are states if some output can replace them. The best match is a tree of outputs with the same paths
and shapes, preferably below a node with the argument's name. Without such a tree, each leaf gets the first output of
its shape and dtype. Large trees choose first, because an optimizer's tree contains the parameters' paths. All other
arguments are data of the step.
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
        name: Path of the leaf, for example `params.layers.0.w`.
        kind: Purpose of the tensor.
        kept_by: Number of the output that replaces it in the next step; None for data of one step.
    """

    name: str
    kind: TensorKind
    kept_by: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A traced function.

    Attributes:
        name: Name of the function.
        jaxpr: Trace of the function.
        arguments: Leaves of all arguments, in the order of the jaxpr's variables.
        outputs: Paths of the outputs; a function that returns a single array has one empty path.
        in_tree: Tree structure of the arguments.
        out_tree: Tree structure of the outputs.
        donated: Numbers of the donated arguments, each a whole tree.
    """

    name: str
    jaxpr: ClosedJaxpr
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    in_tree: jax.tree_util.PyTreeDef
    out_tree: jax.tree_util.PyTreeDef
    donated: tuple[int, ...]


def trace_function(fn: Callable[..., Any], *arguments: Any, donated: Sequence[str | int] = ()) -> Program:
    """Return a function's trace with the names and states of its arguments; see `graph_of_jax`.

    Raises:
        ConfigError: `donated` names no argument of the function.
    """
    names = name_arguments(fn, len(arguments))
    given = find_numbers(donated, names, key="donated")
    jaxpr, out_tree = jax.make_jaxpr(fn, return_shape=True)(*jax.tree_util.tree_map(_without_sharding, arguments))
    outputs = _list_leaves(out_tree)
    leaves = [_list_leaves(tree) for tree in arguments]
    # Outputs that no argument has taken yet; a dict keeps their order.
    free = dict.fromkeys(range(len(outputs)))
    kept: dict[int, list[int | None]] = {}
    for number in sorted(given, key=lambda one: (-len(leaves[one]), one)):
        kept[number] = _match_outputs(names[number], leaves[number], outputs, free)
    has_fields = [
        not _PARAMETERS.match(name) and _is_train_state(tree) for name, tree in zip(names, leaves, strict=True)
    ]
    found = [
        Argument(
            name=".".join((name, *path)),
            kind=_guess_kind(path[0] if has_fields[number] else name, output is not None),
            kept_by=output,
        )
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


def _without_sharding(leaf: Any) -> Any:
    """Return the shape and type of an array.

    Arrays on a mesh have types that name it, and libraries may do more with these: one function would have two traces.
    """
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    # Keys of `jax.random` have no weak types.
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


_PARAMETERS = re.compile(r"(?i)param|weight|model")
"""Beginning of the names of parameters."""

Leaf = tuple[tuple[str, ...], Any]
"""Path and abstract value of a leaf of a tree."""


def name_arguments(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a function's first arguments."""
    names: list[str] = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{number}" for number in range(count - len(names))]
        else:
            names.append(parameter.name)
    return names[:count]


def find_numbers(given: Sequence[str | int], names: Sequence[str], *, key: str) -> set[int]:
    """Return the positions of arguments that are given by name or position.

    Raises:
        ConfigError: One of them is no argument.
    """
    found = set()
    for one in given:
        # JAX allows both names and positions, and so does this option.
        number = names.index(one) if one in names else one
        if isinstance(number, str) or not 0 <= number < len(names):
            raise ConfigError(
                "must be one of the function's arguments", key=key, value=one, nearest=did_you_mean(str(one), names)
            )
        found.add(number)
    return found


def _list_leaves(tree: Any) -> list[Leaf]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in found]


def _match_outputs(
    name: str, leaves: Sequence[Leaf], outputs: Sequence[Leaf], free: dict[int, None]
) -> list[int | None]:
    """Return the output that replaces each leaf of a donated argument, and remove these outputs from `free`."""

    def is_alike(leaf: Leaf, output: int) -> bool:
        one, other = leaf[1], outputs[output][1]
        return output in free and one.shape == other.shape and one.dtype == other.dtype

    def is_tree(first: int) -> bool:
        above = _find_prefix(leaves, outputs[first])
        return all(
            is_alike(leaf, first + number) and outputs[first + number][0] == (*above, *leaf[0])
            for number, leaf in enumerate(leaves)
        )

    found: list[int | None] = []
    trees = [first for first in range(len(outputs) - len(leaves) + 1) if is_tree(first)] if leaves else []
    # Prefer a tree below a node with the argument's own name.
    if trees:
        first = next((one for one in trees if name in _find_prefix(leaves, outputs[one])), trees[0])
        found += range(first, first + len(leaves))
    else:
        # No tree of outputs fits: match leaf by leaf.
        taken: set[int] = set()
        for leaf in leaves:
            output = next((one for one in free if one not in taken and is_alike(leaf, one)), None)
            taken.update(() if output is None else (output,))
            found.append(output)
    # An output can replace one argument only.
    for output in found:
        if output is not None:
            del free[output]
    return found


def _find_prefix(leaves: Sequence[Leaf], output: Leaf) -> tuple[str, ...]:
    """Return the path of the tree among the outputs that has this output as its first leaf."""
    return output[0][: max(len(output[0]) - len(leaves[0][0]), 0)]


def _is_train_state(leaves: Sequence[Leaf]) -> bool:
    """Return whether an argument is a whole training state, whose fields say what they are, as flax's `TrainState`.

    It has parameters in a field `params` or `model`, and other fields beside it. A tree of moments mirrors parameters,
    and has nothing beside them.
    """
    fields = {path[0] if path else "" for path, _ in leaves}
    return len(fields) > 1 and "" not in fields and bool(fields & {"params", "model"})


def _guess_kind(name: str, is_kept: bool) -> TensorKind:
    """Return the purpose of an argument, or of a field of a training state, from its name and whether it is kept.

    Names like "params" mean parameters. Other arguments that are kept belong to the optimizer, except caches.
    """
    if _PARAMETERS.match(name):
        return TensorKind.PARAMETER
    is_optimizer = is_kept and not re.search(r"(?i)cache", name)
    return TensorKind.OPTIMIZER if is_optimizer else TensorKind.DATA
