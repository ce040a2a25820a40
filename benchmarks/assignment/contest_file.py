"""Reading and writing of strategy assignments in the JSON of the ASPLOS 2025 contest, plain or compressed.

Files may hold tens of millions of numbers. Each kind of number is therefore checked at once, and only a list that fails
is searched for its first bad entry.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hardware.arrays import FloatArray, IntArray
from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.input_file import read_input, unpack
from tuner.planners.assignment.problem import AssignmentProblem
from tuner.planners.sharding.messages import starts_of

MAX_FILE_BYTES = 1_000_000_000
"""Most bytes of a file, packed or not: tens of millions of numbers as text."""
_KEYS = ("name", "nodes", "edges", "usage_limit")
"""Keys of a problem in the file."""


def read_problem(path: Path) -> AssignmentProblem:
    """Read the problem of a file.

    Args:
        path: JSON file, possibly compressed by gzip.

    Raises:
        ConfigError: the file cannot be read, or is no problem of the contest's form.
    """
    try:
        return _problem(_json_of(path))
    except ConfigError as error:
        raise error.in_file(str(path)) from None


def write_problem(problem: AssignmentProblem, path: Path) -> None:
    """Write a problem, compressed if the file's name ends in `.gz`.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = {
        "problem": {
            "name": problem.name,
            "nodes": {
                "intervals": problem.intervals.tolist(),
                "costs": _nest(problem.costs, problem.starts),
                "usages": _nest(problem.usages, problem.starts),
            },
            "edges": {"nodes": problem.edges.tolist(), "costs": _nest(problem.edge_costs, problem.edge_starts)},
            "usage_limit": _plain(problem.limit),
        }
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(path)) from None


def _json_of(path: Path) -> Any:
    """Parse the JSON of a file."""
    content = read_input(path, most_bytes=MAX_FILE_BYTES)
    try:
        return json.loads(unpack(content, most_bytes=MAX_FILE_BYTES, path=path))
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON: {error.msg}", key=f"line {error.lineno}") from None
    except RecursionError:
        raise ConfigError("is nested too deep") from None
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}") from None


def _problem(content: Any) -> AssignmentProblem:
    """Convert parsed JSON to a problem."""
    problem = _mapping(content, "problem")
    for key in problem:
        if key not in _KEYS:
            raise ConfigError("is not known", key=f"problem.{key}", nearest=did_you_mean(key, _KEYS))
    nodes, edges = _mapping(problem, "nodes", "problem."), _mapping(problem, "edges", "problem.")
    name = problem.get("name", "assignment")
    if not isinstance(name, str):
        raise ConfigError("must be text", key="problem.name", value=name)
    limit = _numbers([_value(problem, "usage_limit", "problem.")], lambda _: "problem.usage_limit")[0]
    intervals = _pairs(nodes, "intervals", "problem.nodes.")
    costs, starts = _ragged(nodes, "costs", "problem.nodes.")
    usages, usage_starts = _ragged(nodes, "usages", "problem.nodes.", least=0.0)
    ends = _pairs(edges, "nodes", "problem.edges.")
    edge_costs, edge_starts = _ragged(edges, "costs", "problem.edges.")
    for key, found, wanted in (
        ("nodes.costs", len(starts) - 1, len(intervals)),
        ("nodes.usages", len(usage_starts) - 1, len(intervals)),
        ("edges.costs", len(edge_starts) - 1, len(ends)),
    ):
        if found != wanted:
            raise ConfigError(f"must hold {wanted} lists, but holds {found}", key=f"problem.{key}")
    # The first start that differs stands behind the node at fault.
    if (differs := starts != usage_starts).any():
        node = int(differs.argmax()) - 1
        raise ConfigError("must hold as many as the node's costs", key=f"problem.nodes.usages.{node}")
    try:
        return AssignmentProblem(
            name=name,
            intervals=intervals,
            starts=starts,
            costs=costs,
            usages=usages,
            edges=ends,
            edge_starts=edge_starts,
            edge_costs=edge_costs,
            limit=float(limit),
        )
    except ConfigError as error:
        raise error.under("problem") from None


def _value(mapping: Mapping[str, Any], key: str, above: str = "") -> Any:
    """Return a required entry of a mapping."""
    if key not in mapping:
        raise ConfigError("is required and missing", key=f"{above}{key}")
    return mapping[key]


def _mapping(content: Any, key: str, above: str = "") -> Mapping[str, Any]:
    """Return a required mapping inside a mapping."""
    if not isinstance(content, dict):
        raise ConfigError("must be a mapping", key=above.rstrip(".") or None, value=content)
    value = _value(content, key, above)
    if not isinstance(value, dict):
        raise ConfigError("must be a mapping", key=f"{above}{key}", value=value)
    return value


def _lists(mapping: Mapping[str, Any], key: str, above: str) -> list[list[Any]]:
    """Return a required list of lists inside a mapping."""
    value = _value(mapping, key, above)
    if not isinstance(value, list):
        raise ConfigError("must be a list", key=f"{above}{key}", value=value)
    for place, own in enumerate(value):
        if not isinstance(own, list):
            raise ConfigError("must be a list", key=f"{above}{key}.{place}", value=own)
    return value


def _ragged(mapping: Mapping[str, Any], key: str, above: str, *, least: float = -np.inf) -> tuple[FloatArray, IntArray]:
    """Return the numbers of a list of lists in one array, and the start of each list."""
    lists = _lists(mapping, key, above)
    starts = starts_of([len(own) for own in lists])

    def where(place: int) -> str:
        """Return the key of a number in the flat array."""
        own = int(np.searchsorted(starts, place, side="right")) - 1
        return f"{above}{key}.{own}.{place - int(starts[own])}"

    return _numbers(list(chain.from_iterable(lists)), where, least=least), starts


def _pairs(mapping: Mapping[str, Any], key: str, above: str) -> IntArray:
    """Return a list of pairs of whole numbers as an array [pairs, 2]."""
    lists = _lists(mapping, key, above)
    for place, own in enumerate(lists):
        if len(own) != 2 or not all(type(number) is int and 0 <= number < 2**62 for number in own):
            raise ConfigError("must be two whole numbers from 0 on", key=f"{above}{key}.{place}", value=own)
    return np.array(lists, dtype=np.int64).reshape(-1, 2)


def _numbers(flat: list[Any], where: Any, *, least: float = -np.inf) -> FloatArray:
    """Check a list of numbers and convert it to an array."""
    # A set of types is found in one pass. It also excludes bool, which is a subclass of int.
    if set(map(type, flat)) <= {int, float}:
        try:
            numbers = np.array(flat, dtype=np.float64)
        except OverflowError:
            # Integers beyond the range of a float count as extremely large, for the check below.
            numbers = np.array([min(max(number, -1e300), 1e300) for number in flat], dtype=np.float64)
        wrong = ~(np.isfinite(numbers) & (numbers >= least))
        if not wrong.any():
            return numbers
        place, rule = int(wrong.argmax()), "must be finite" if least < 0 else f"must be finite and at least {least:g}"
    else:
        place = next(place for place, number in enumerate(flat) if type(number) not in {int, float})
        rule = "must be a number"
    raise ConfigError(rule, key=where(place), value=flat[place])


def _nest(flat: FloatArray, starts: Sequence[int] | IntArray) -> list[list[int | float]]:
    """Split an array into lists, with whole numbers as integers where all are whole."""
    whole = (
        flat.astype(np.int64).tolist()
        if bool((flat == np.rint(flat)).all() and np.abs(flat).max(initial=0) < 2**62)
        else flat.tolist()
    )
    return [whole[start:end] for start, end in pairwise(starts)]


def _plain(number: float) -> int | float:
    """Return a whole number as an integer."""
    return int(number) if number == int(number) else number
