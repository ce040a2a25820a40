"""Rules are those of Shardy, which partitions what JAX compiles: an oracle that shares no line with ours."""

import jax
import pytest

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.jax.rules import ELEMENTWISE, rule_of_call
from tests.support.graphs.jax_halves import call_of, equations_of
from tests.support.graphs.jax_variants import PROGRAMS
from tests.support.graphs.shardy import loops_of, shardy_loops

EXCEPTIONS = {
    "argmax": "Shardy sums over pairs of value and index; the primitive has no value in its results to compare",
    "argmin": "as argmax",
    "conv_general_dilated": "in space only: Shardy exchanges halos, even for a window of one element that needs none",
    "optimization_barrier": "Shardy has no rule for it; it hands every operand on",
    "pad": "elements move where as much is cut off behind as is added in front; Shardy looks at the sizes alone",
    "ragged_dot_general": "every device has the sizes of all groups; Shardy cuts their running sum with the groups",
    "reduce": "no collective combines parts by a function of the user, though Shardy has a factor for them",
    "reshape": "Shardy also names what no axis can reach, behind what both sides do not have in common",
    "square": "lowered to an operator of CHLO, for which Shardy has no rule",
    "top_k": "as square",
}
"""Primitives whose rules differ from Shardy's, and why."""

EXCEPTIONS |= dict.fromkeys(
    """
    cholesky eig eigh hessenberg householder_product lu qr schur svd triangular_solve tridiagonal tridiagonal_solve
    """.split(),  # noqa: SIM905  # a list would take a line each
    "lowered to a call of a library, for which Shardy has no rule",
)


def equations():
    """All different calls of the small programs; of elementwise ones those that differ in ranks."""
    found = {}
    for function, arguments in PROGRAMS:
        for equation in equations_of(jax.make_jaxpr(function)(*arguments).jaxpr):
            call = call_of(equation)
            ranks = tuple(map(len, call.operands))
            key = ranks if call.primitive in ELEMENTWISE else str(call)
            found.setdefault((call.primitive, key), equation)
    return [equation for equation in found.values() if equation.invars]


def cuttable(loops):
    """The factors that aren't needed whole, nor move elements."""
    return {loop for loop in loops if loop.kind in (FactorKind.MAP, FactorKind.REDUCTION)}


def in_front(loops):
    """Those of them that operands and results have, and that no other precedes in a dim."""
    return {
        loop
        for loop in cuttable(loops)
        if {side for side, *_ in loop.positions} == {"operand", "result"}
        and not any(place for *_, place in loop.positions)
    }


@pytest.fixture(scope="module")
def pairs():
    """Our factors and Shardy's of each call."""
    return [(call_of(each), loops_of(rule_of_call(call_of(each))), shardy_loops(each)) for each in equations()]


def test_factors_are_those_of_shardy(pairs):
    """Factor for factor, in kind, size and place, rules let an axis cut what Shardy does, but for listed exceptions."""
    different = {call.primitive for call, ours, theirs in pairs if cuttable(ours) != cuttable(theirs)}

    assert different == set(EXCEPTIONS)
    assert len(pairs) > 400


def test_convolutions_differ_in_space_only(pairs):
    """Batch and features of convolutions and of their gradients are cut as Shardy cuts them."""
    for call, ours, theirs in pairs:
        if call.primitive == "conv_general_dilated":
            numbers = call.params["dimension_numbers"]
            space = {
                *(("operand", 0, dim) for dim in numbers.lhs_spec[2:]),
                *(("operand", 1, dim) for dim in numbers.rhs_spec[2:]),
                *(("result", 0, dim) for dim in numbers.out_spec[2:]),
            }

            different = cuttable(ours) ^ cuttable(theirs)
            assert all(position[:3] in space for loop in different for position in loop.positions)


def test_reshapes_are_cut_alike(pairs):
    """The factors in front on both sides of a reshape are those that Shardy finds there."""
    for call, ours, theirs in pairs:
        if call.primitive == "reshape":
            assert in_front(ours) == in_front(theirs), call


def test_what_moves_does_so_for_shardy(pairs):
    """Elements that move along a factor by our rules do so by Shardy's, which sums where a gradient's window does."""
    for call, ours, theirs in (pair for pair in pairs if pair[0].primitive != "pad"):
        moved = {(loop.size, loop.positions) for loop in ours if loop.kind == FactorKind.PERMUTATION}
        known = {
            (loop.size, loop.positions)
            for loop in theirs
            if loop.kind in (FactorKind.PERMUTATION, FactorKind.REDUCTION)
        }

        assert moved <= known, call
