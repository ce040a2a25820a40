"""Sharding rules: the factors of an operator's iteration space and their positions on the dims of its tensors.

An operator loops over factors. A matrix product (i, k) x (k, j) -> (i, j) has the factors i, j and k. A mesh axis that
serves a factor partitions every operand dim and result dim that carries the factor. An axis serves at most one factor
of an operator. The effect of partitioning depends on the factor's kind:

    map          results are partitioned like the operands; nothing is communicated
    reduction    every device holds a partial sum of the whole result
    blocked      the operator needs the whole factor, so it cannot be partitioned
    permutation  elements move along the factor (a shift, a halo, a reversal); partitioning needs elements of neighbours

A dim may carry several factors, the slowest first, for example (heads, head_dim) after a reshape. An axis can then
partition only the first one. A factor of a rule means the same loop in all its operands and results, although their
dims may have different names elsewhere.

Sources: section 2.3 and the couplings of section 3.1 of ManuMatic; the factor types of Shardy (OpenXLA,
docs/sharding_representation.md and the dialect's `op_sharding_rule`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

Place = tuple[tuple[int, ...], ...]
"""Factors of each dim of a tensor, the slowest first."""


class FactorKind(StrEnum):
    """Kind of a factor: the effect of partitioning it over an axis."""

    MAP = "map"
    REDUCTION = "reduction"
    BLOCKED = "blocked"
    PERMUTATION = "permutation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """One loop of an operator.

    Attributes:
        size: Number of iterations of the loop.
        kind: Effect of partitioning the loop over a mesh axis.
        name: Name of the loop; empty if the frontend gave none.
    """

    size: int
    kind: FactorKind
    name: str = ""

    def __post_init__(self) -> None:
        assert self.size >= 1, f"a factor needs at least one iteration, but {self.name!r} has {self.size}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Iteration space of an operator, and the position of its factors on the operator's tensors.

    Attributes:
        factors: Loops of the operator, in the order of their numbers.
        operands: Factors of each dim of each operand; a dim of size 1 may have none.
        results: Factors of each dim of each result, in the form of `operands`.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Place, ...]
    results: tuple[Place, ...]

    def __post_init__(self) -> None:
        for place in (*self.operands, *self.results):
            used = [factor for dim in place for factor in dim]
            assert all(0 <= factor < len(self.factors) for factor in used), "a place must hold factors of its rule"
            assert len(set(used)) == len(used), "a tensor may carry a factor only once"

    @cached_property
    def cuttable(self) -> tuple[int, ...]:
        """Factors that an axis can serve.

        These are maps and reductions of more than one iteration that come first on all their dims.
        """
        # A factor behind another one on a dim is strided, so that an axis cannot give a contiguous part of it to a
        # device.
        behind = {
            factor
            for place in (*self.operands, *self.results)
            for dim in place
            for factor in self._with_iterations(dim)[1:]
        }
        return tuple(
            number
            for number, factor in enumerate(self.factors)
            if factor.size > 1 and factor.kind in (FactorKind.MAP, FactorKind.REDUCTION) and number not in behind
        )

    @cached_property
    def operand_dims(self) -> tuple[tuple[int | None, ...], ...]:
        """Dim of each operand that each factor partitions [operand][factor]; None if the operand lacks the factor."""
        return tuple(self._dims(place) for place in self.operands)

    @cached_property
    def result_dims(self) -> tuple[tuple[int | None, ...], ...]:
        """Dim of each result that each factor partitions [result][factor]; None if the result lacks the factor."""
        return tuple(self._dims(place) for place in self.results)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Return the shape that an operand must have."""
        return self._shape(self.operands[operand])

    def result_shape(self, result: int) -> tuple[int, ...]:
        """Return the shape that a result must have."""
        return self._shape(self.results[result])

    def _shape(self, place: Place) -> tuple[int, ...]:
        return tuple(math.prod(self.factors[factor].size for factor in dim) for dim in place)

    def _with_iterations(self, dim: tuple[int, ...]) -> list[int]:
        return [factor for factor in dim if self.factors[factor].size > 1]

    def _dims(self, place: Place) -> tuple[int | None, ...]:
        found: list[int | None] = [None] * len(self.factors)
        for position, dim in enumerate(place):
            for factor in dim:
                found[factor] = position
        return tuple(found)


def rule_of(
    pattern: str, sizes: Mapping[str, int], *, blocked: Collection[str] = (), permuted: Collection[str] = ()
) -> Rule:
    """Parse a rule: `rule_of("batch q, q out -> batch out", sizes)` is a product that reduces over q.

    Commas separate tensors and spaces separate dims. Parentheses hold a dim of several factors, the slowest first. `1`
    is a dim of size one. A factor that only operands carry is a reduction; all others are maps.

    Args:
        pattern: Operands, an arrow, and results.
        sizes: Size of each factor by its name; names beyond those of the pattern are ignored.
        blocked: Names of factors that the operator needs whole.
        permuted: Names of factors along which elements move.
    """
    before, arrow, after = pattern.partition("->")
    assert arrow, f"{pattern!r} has no arrow"
    operands, results = (
        [_parse_dims(side) for side in part.split(",")] if part.strip() else [] for part in (before, after)
    )
    names = list(dict.fromkeys(name for tensor in (*operands, *results) for dim in tensor for name in dim))
    in_results = {name for tensor in results for dim in tensor for name in dim}
    # A misspelt name would otherwise leave its factor free to be partitioned.
    missing = [name for name in (*blocked, *permuted) if name not in names]
    assert not missing, f"{pattern!r} has no factor {missing[0]!r}"

    def kind_of(name: str) -> FactorKind:
        if name in blocked:
            return FactorKind.BLOCKED
        if name in permuted:
            return FactorKind.PERMUTATION
        return FactorKind.MAP if name in in_results else FactorKind.REDUCTION

    # Factors are numbered in the order of their first appearance.
    numbers = {name: number for number, name in enumerate(names)}
    return Rule(
        factors=tuple(Factor(size=sizes[name], kind=kind_of(name), name=name) for name in names),
        operands=tuple(tuple(tuple(numbers[name] for name in dim) for dim in tensor) for tensor in operands),
        results=tuple(tuple(tuple(numbers[name] for name in dim) for dim in tensor) for tensor in results),
    )


def _parse_dims(tensor: str) -> list[list[str]]:
    """Return the dims of a tensor, each as the names of its factors."""
    # A dim is either a parenthesised list of factors or a single word.
    found = re.findall(r"\(([^)]*)\)|(\S+)", tensor)
    return [[name for name in (several or one).split() if name != "1"] for several, one in found]
