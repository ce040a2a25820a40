"""How an operator's iteration space lies on the dims of its tensors: factors, and the rule that places them.

An operator loops over factors: of a matrix product (i, k) x (k, j) -> (i, j) they are i, j and k. A mesh axis that
serves a factor cuts every operand and result dim that carries it, and an axis serves one factor of an operator at most.
What cutting a factor does depends on its kind:

    map          results are cut as the operands are; nothing is communicated
    reduction    every device has a partial sum of the whole result
    blocked      the operator needs the factor whole
    permutation  elements move along the factor (a shift, a halo, a reversal): cutting it needs neighbours' elements

A dim may carry several factors, the slowest first, as (heads, head_dim) after a reshape: an axis can cut the first one
only. A factor of a rule is the same for its operands and results, whatever they are called elsewhere.

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
"""The factors of each dim of a tensor, the slowest first."""


class FactorKind(StrEnum):
    """What cutting a factor does."""

    MAP = "map"
    REDUCTION = "reduction"
    BLOCKED = "blocked"
    PERMUTATION = "permutation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """One loop of an operator.

    Attributes:
        size: Its iterations.
        kind: What cutting it does.
        name: What it is called, where somebody named it.
    """

    size: int
    kind: FactorKind
    name: str = ""

    def __post_init__(self) -> None:
        assert self.size >= 1, f"a factor has iterations, but {self.name!r} has {self.size}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The iteration space of an operator, and where it lies.

    Attributes:
        factors: Its loops.
        operands: Of each operand the factors of each dim; a dim of size 1 may have none.
        results: The same of each result.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Place, ...]
    results: tuple[Place, ...]

    def __post_init__(self) -> None:
        for place in (*self.operands, *self.results):
            used = [factor for dim in place for factor in dim]
            assert all(0 <= factor < len(self.factors) for factor in used), "a place names factors of its rule"
            assert len(set(used)) == len(used), "a tensor carries a factor once"

    @cached_property
    def cuttable(self) -> tuple[int, ...]:
        """The factors that an axis can serve: maps and reductions of more than one iteration that no other precedes."""
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
        """The dim of each operand that each factor cuts [operand][factor]; None where it cuts none."""
        return tuple(self._dims(place) for place in self.operands)

    @cached_property
    def result_dims(self) -> tuple[tuple[int | None, ...], ...]:
        """The same of the results [result][factor]."""
        return tuple(self._dims(place) for place in self.results)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The shape that an operand must have."""
        return self._shape(self.operands[operand])

    def result_shape(self, result: int) -> tuple[int, ...]:
        """The shape that a result must have."""
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
    pattern: str,
    sizes: Mapping[str, int],
    *,
    blocked: Collection[str] = (),
    permuted: Collection[str] = (),
) -> Rule:
    """A rule from words: `rule_of("batch q, q out -> batch out", sizes)` is a product that reduces over q.

    Tensors stand between commas, dims between spaces, and parentheses hold a dim of several factors, the slowest first;
    `1` is a dim of size one. What stands among the operands alone is a reduction, all else a map.

    Args:
        pattern: Operands, an arrow, and results.
        sizes: Of each factor by its name; more may be given.
        blocked: Factors that the operator needs whole.
        permuted: Factors along which elements move.
    """
    operands, results = ([_words(side) for side in part.split(",")] if part.strip() else [] for part in _sides(pattern))
    names = list(dict.fromkeys(name for tensor in (*operands, *results) for dim in tensor for name in dim))
    in_results = {name for tensor in results for dim in tensor for name in dim}
    missing = [name for name in (*blocked, *permuted) if name not in names]
    assert not missing, f"{pattern!r} has no factor {missing[0]!r}"

    def kind_of(name: str) -> FactorKind:
        if name in blocked:
            return FactorKind.BLOCKED
        if name in permuted:
            return FactorKind.PERMUTATION
        return FactorKind.MAP if name in in_results else FactorKind.REDUCTION

    numbers = {name: number for number, name in enumerate(names)}
    return Rule(
        factors=tuple(Factor(size=sizes[name], kind=kind_of(name), name=name) for name in names),
        operands=tuple(tuple(tuple(numbers[name] for name in dim) for dim in tensor) for tensor in operands),
        results=tuple(tuple(tuple(numbers[name] for name in dim) for dim in tensor) for tensor in results),
    )


def _sides(pattern: str) -> tuple[str, str]:
    operands, arrow, results = pattern.partition("->")
    assert arrow, f"{pattern!r} has no arrow"
    return operands, results


def _words(tensor: str) -> list[list[str]]:
    """The dims of a tensor, each as the names of its factors."""
    found = re.findall(r"\(([^)]*)\)|(\S+)", tensor)
    return [[name for name in (several or one).split() if name != "1"] for several, one in found]
