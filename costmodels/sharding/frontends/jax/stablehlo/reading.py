"""A StableHLO module as a JAX function, which JAX traces like any other.

Functions that the module calls become `jax.jit` of their names, so that they are scopes of a plan. Names that a text
has for its operators (`as_text(debug_info=True)`) become scopes, too, and names of arguments their names.

A `while` that counts from a constant to another is a scan. What it reads or writes at the place of the counter, one
part in each iteration, is stacked by the scan, as in the program that JAX had lowered. Every other `while` stays one.
"""

from __future__ import annotations

import contextlib
import inspect
import keyword
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jaxlib.mlir import ir

from costmodels.sharding.frontends.jax.stablehlo.files import StableModule, attribute, read_module
from costmodels.sharding.frontends.jax.stablehlo.loops import (
    Counted,
    Counter,
    Part,
    Scanned,
    Stack,
    Unstackable,
    Written,
    count,
    counted_loop,
    part,
    plain,
    unstack,
    write,
)
from costmodels.sharding.frontends.jax.stablehlo.operators import ELEMENTWISE, Called, Spread, Unreadable, read_operator
from costmodels.sharding.frontends.jax.stablehlo.types import WIDE, aval_of
from hardware.io.errors import ConfigError

ENDS = frozenset({"func.return", "stablehlo.return", "sdy.return"})
"""Operators that end a function or a region."""

_NAMELESS = frozenset({"closed_call", "checkpoint", "remat", "None"})
"""Names of functions that nobody has named."""

Known = ChainMap[Any, Any]
"""Values of a block by where the module has them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadStep:
    """JAX function that a module computes.

    Attributes:
        function: Function of the module's arguments. Those with a common name are one tree.
        arguments: Abstract arguments.
        donated: Names of arguments whose memory the results take over.
        is_wide: Whether it has types that JAX has only with `jax_enable_x64`.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[str | int, ...]
    is_wide: bool

    @contextlib.contextmanager
    def types(self) -> Iterator[None]:
        """Give JAX the types that the module needs, for tracing and running it."""
        with jax.enable_x64(True) if self.is_wide else contextlib.nullcontext():
            yield


def read_stablehlo(path: Path) -> ReadStep:
    """Read a module from a file as a JAX function; nothing is computed.

    Operators are read when the function is traced, which raises a ConfigError for one that is not known.

    Raises:
        ConfigError: The file cannot be read, or its main function has arguments of unknown types.
    """
    module = read_module(path)
    main = module.find_main()
    try:
        leaves = [aval_of(argument.type) for argument in main.regions[0].blocks[0].arguments]
    except TypeError as error:
        raise module.refuse(main, f"has {error}, which Meshtune does not read") from None
    inputs = _tree_of([_path_of(name) for name in _argument_names(main)], "arg")
    outputs = _tree_of([_path_of(name) for name in _result_names(main)], "result")
    order, given_up = jax.tree_util.tree_leaves(inputs), _given_up(main)
    reader = _Reader(module=module)

    def function(*trees: Any) -> Any:
        given: list[Any] = [None] * len(leaves)
        for number, leaf in zip(order, jax.tree_util.tree_leaves(trees), strict=True):
            given[number] = leaf
        results = reader.run(main, given)
        found = jax.tree_util.tree_map(lambda number: results[number], outputs)
        return next(iter(found.values())) if len(found) == 1 else found

    function.__name__ = module.name
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined] # functions may have one
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]
    )
    return ReadStep(
        function=function,
        arguments=tuple(jax.tree_util.tree_map(lambda number: leaves[number], tree) for tree in inputs.values()),
        donated=tuple(name for name, tree in inputs.items() if given_up.intersection(jax.tree_util.tree_leaves(tree))),
        is_wide=module.has_types(WIDE),
    )


class Leaves(Mapping[str, Any]):
    """Parts of an argument or result by their names, in the module's order; a tree of JAX."""

    def __init__(self, parts: Mapping[str, Any] | None = None) -> None:
        """Keep the parts."""
        self.parts = dict(parts or {})

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def _flatten(tree: Leaves) -> tuple[list[tuple[Any, Any]], Any]:
    return [(jax.tree_util.DictKey(name), part) for name, part in tree.items()], tuple(tree)


jax.tree_util.register_pytree_with_keys(
    Leaves, _flatten, lambda names, parts: Leaves(dict(zip(names, parts, strict=True)))
)


def _tree_of(paths: Sequence[tuple[str, ...]], word: str) -> Leaves:
    """Return the tree of the numbers of paths; if these form none, one leaf for each, named by `word` and number."""
    root = Leaves()
    for number, (*above, last) in enumerate(paths):
        node = root
        for name in above:
            node = node.parts.setdefault(name, Leaves())
            if not isinstance(node, Leaves):
                break
        if not isinstance(node, Leaves) or last in node:
            return Leaves({f"{word}{other}": other for other in range(len(paths))})
        node.parts[last] = number
    return root


def _path_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name as JAX writes it, such as `params['layers'][0].w`; one part of any other name."""
    found = re.fullmatch(r"(\w+)((?:\[[^\]]*\]|\.\w+)*)", name)
    if found is None:
        return (name,)
    inner = re.findall(r"\['?([^\]']*)'?\]|\.(\w+)", found[2])
    return (found[1], *(one or other for one, other in inner))


def _argument_names(main: ir.Operation) -> list[str]:
    """Return the names of a function's arguments, from their locations where these are names."""
    found = []
    for number, argument in enumerate(main.regions[0].blocks[0].arguments):
        where = argument.location
        name = where.name_str if isinstance(where, ir.NameLoc) else ""
        root = _path_of(name)[0]
        found.append(name if root.isidentifier() and not keyword.iskeyword(root) else f"arg{number}")
    return found


def _result_names(main: ir.Operation) -> list[str]:
    """Return the names of a function's results: `jax.result_info` without the word `result`."""
    (end,) = (each.operation for each in main.regions[0].blocks[0].operations if each.operation.name in ENDS)
    names = [f"result{number}" for number in range(len(end.operands))]
    for number, each in enumerate(_attributes_of(main, "res_attrs")):
        if "jax.result_info" in each:
            parts = _path_of(ir.StringAttr(each["jax.result_info"]).value)[1:]
            names[number] = ".".join(parts) or names[number]
    return names


def _attributes_of(main: ir.Operation, name: str) -> Sequence[Any]:
    """Return the attributes of a function's arguments or results; empty if none has any."""
    return tuple(ir.ArrayAttr(main.attributes[name])) if name in main.attributes else ()


def _given_up(main: ir.Operation) -> set[int]:
    """Return the numbers of arguments whose memory the results may take over."""
    attributes = _attributes_of(main, "arg_attrs")
    return {
        number for number, each in enumerate(attributes) if "tf.aliasing_output" in each or "jax.buffer_donor" in each
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Reader:
    """Reader of a module's functions.

    Attributes:
        module: Module.
        jitted: Functions that have been called, by their names.
    """

    module: StableModule
    jitted: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def run(self, function: ir.Operation, given: Sequence[Any]) -> list[Any]:
        """Return the results of a function of the module."""
        return self._run_region(function.regions[0], given, ChainMap())

    def _run_region(self, region: ir.Region, given: Sequence[Any], outer: Known) -> list[Any]:
        """Return what a region of one block returns.

        Args:
            region: Region.
            given: Values of its arguments.
            outer: Values around it, which it may read.
        """
        if len(region.blocks) != 1:
            owner = region.owner.operation
            raise self.module.refuse(owner, f"has {len(region.blocks)} blocks, of which Meshtune reads one")
        (block,) = region.blocks
        known = outer.new_child(dict(zip(block.arguments, given, strict=True)))
        for each in block.operations:
            op = each.operation
            operands = [known[operand] for operand in op.operands]
            if op.name in ENDS:
                return operands
            known.update(zip(op.results, self._run(op, operands, known), strict=True))
        raise AssertionError("MLIR has checked that a block ends")

    def _run(self, op: ir.Operation, operands: list[Any], known: Known) -> Sequence[Any]:
        """Return the results of an operator."""
        scopes = _scopes_of(op)
        with jax.named_scope(scopes) if scopes else contextlib.nullcontext():
            try:
                return self._results_of(op, operands, known)
            except (ConfigError, Unstackable):
                raise
            except Unreadable as error:
                raise self.module.refuse(op, str(error)) from None
            except (TypeError, ValueError, NotImplementedError) as error:
                # how JAX's own functions refuse what a module may state and they may not
                said = str(error).strip().splitlines() or [type(error).__name__]
                raise self.module.refuse(op, f"is not read: {said[0]}") from None

    def _results_of(self, op: ir.Operation, operands: list[Any], known: Known) -> Sequence[Any]:
        if op.name in ("func.call", "stablehlo.composite"):
            return self._call(attribute(op, "callee" if op.name == "func.call" else "decomposition"), operands)
        if operands:
            # what a counted loop reads and writes at its counter
            for found in (count(op.name, operands), unstack(op, operands), write(op, operands), part(op, operands)):
                if found is not None:
                    return [found]
        values = [plain(operand) for operand in operands]
        if op.name == "stablehlo.while":
            return self._loop(op, values, known)
        is_narrow = op.name in ELEMENTWISE or op.name == "stablehlo.compare"
        called = Called(
            op=op,
            operands=values if is_narrow else [each.whole if isinstance(each, Spread) else each for each in values],
            results=[aval_of(result.type) for result in op.results],
            region=lambda number: lambda *given: self._values_of(op.regions[number], given, known),
        )
        return read_operator(called)

    def _values_of(self, region: ir.Region, given: Sequence[Any], known: Known) -> list[Any]:
        return [plain(value) for value in self._run_region(region, given, known)]

    def _call(self, name: str, operands: list[Any]) -> Sequence[Any]:
        """Return the results of a function of the module, as one call of a `jax.jit` of its name."""
        callee = self.module.functions[name]
        own_name = re.sub(r"_\d+$", "", name)  # MLIR numbers functions of one name
        in_loop = any(isinstance(operand, (Counter, Stack, Written, Part)) for operand in operands)
        if in_loop or own_name in _NAMELESS:
            return self.run(callee, operands)
        if name not in self.jitted:

            def called(*given: Any) -> list[Any]:
                return self.run(callee, given)

            called.__name__ = own_name
            self.jitted[name] = jax.jit(called)
        found: list[Any] = self.jitted[name](*operands)
        return found

    def _loop(self, op: ir.Operation, begins: list[Any], known: Known) -> Sequence[Any]:
        """Return what a `while` carries at its end."""
        condition, body = op.regions
        counted = counted_loop(op, begins, known)
        if counted is not None and not counted.length:
            return begins
        if counted is not None:
            return self._scan(body, begins, counted, known)
        found: tuple[Any, ...] = lax.while_loop(
            lambda carried: self._values_of(condition, carried, known)[0],
            lambda carried: tuple(self._values_of(body, carried, known)),
            tuple(begins),
        )
        return found

    def _scan(self, body: ir.Region, begins: list[Any], counted: Counted, known: Known) -> Sequence[Any]:
        """Return what a counted loop carries at its end."""
        block = body.blocks[0]
        ends = list(block.operations[len(block.operations) - 1].operation.operands)
        fixed = {number for number, end in enumerate(ends) if end == block.arguments[number]}
        stacks = {
            number
            for number, begin in enumerate(begins)
            if number != counted.number and begin.shape and begin.shape[0] == counted.length
        }

        def iterate(given: Sequence[Any]) -> list[Any]:
            return self._run_region(body, given, known)

        while True:
            scanned = Scanned(begins=begins, counted=counted, fixed=fixed, stacks=stacks, signs={})
            try:
                # the first look tells what stacks are and in which direction they are read
                jax.eval_shape(partial(scanned.iterate, iterate))
            except Unstackable as error:
                stacks = stacks - {error.number}
                continue
            falling = {number for number, sign in scanned.signs.items() if sign < 0}
            both_ways = falling if len(falling) < len(scanned.signs) else set()
            wrong = both_ways | (stacks - scanned.signs.keys())  # or stacks that are not read at all
            if not wrong:
                return scanned.run(iterate, reverse=bool(falling))
            stacks = stacks - wrong


_AROUND = re.compile(r"^jit\([^/]*\)(/|$)|.*/(while/(body|cond)|branch_\d+_fun)(/|$)|(while/(body|cond))(/|$)")
"""Beginning of a name that says in which function, and in which loop or branch, an operator stands."""


def _scopes_of(op: ir.Operation) -> str:
    """Return the scopes in which JAX has made an operator, inside of its function; empty if they are not known."""
    where = op.location
    if not isinstance(where, ir.NameLoc):
        return ""
    name = where.name_str
    while (found := _AROUND.match(name)) and found.end():
        name = name[found.end() :]
    return name.rpartition("/")[0]
