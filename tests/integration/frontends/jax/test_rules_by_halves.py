"""Rules are what the primitives do: on halves along any factor that can be cut, the results are the same."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.jax.rules import rule_of_call
from tests.support.graphs.jax_halves import are_close, cases_of, computed, halves, joined, whole
from tests.support.graphs.jax_variants import PROGRAMS


@pytest.fixture(scope="module")
def cases():
    """The calls of all programs, one for each kind of rule."""
    found = {}
    for function, arguments in PROGRAMS:
        found |= cases_of(function, arguments, np.random.default_rng(0))
    return list(found.values())


def even_factors(rule):
    """Return the factors of a rule that an axis may cut, and that have an even size."""
    return [number for number in rule.cuttable if rule.factors[number].size % 2 == 0] if rule else []


def taken_for_maps(rule):
    """Yield copies of a rule in which one factor is wrongly a map, with the number of that factor."""
    for number, factor in enumerate(rule.factors):
        if factor.kind in (FactorKind.REDUCTION, FactorKind.BLOCKED) and factor.size % 2 == 0:
            factors = list(rule.factors)
            factors[number] = replace(factor, kind=FactorKind.MAP)
            yield replace(rule, factors=tuple(factors)), number


def is_caught(case, rule, factor):
    """Return whether halves along a factor do not give the results of one run, or can not be run."""
    try:
        expected, *parts = computed([whole(case), *halves(case, rule, factor)])
        return not are_close(joined(case, rule, factor, parts), expected)
    except (TypeError, ValueError):
        return True


def test_halves_make_up_the_whole(cases):
    """Each primitive, run on two halves along each factor that its rule lets an axis cut, gives the results of one run:
    put side by side for a map, combined for a reduction.
    """
    ruled = [(case, rule, factors) for case in cases if (factors := even_factors(rule := rule_of_call(case.call)))]
    tried = [(case, rule, factor) for case, rule, factors in ruled for factor in factors]
    wholes = dict(zip((case for case, *_ in ruled), computed([whole(case) for case, *_ in ruled]), strict=True))
    parts = computed([half for each in tried for half in halves(*each)])
    wrong = [
        (case.call, factor)
        for (case, rule, factor), *pair in zip(tried, parts[::2], parts[1::2], strict=True)
        if not are_close(joined(case, rule, factor, pair), wholes[case])
    ]

    assert wrong == []
    assert len(tried) > 300
    assert len({case.call.primitive for case in wholes}) >= 45


@pytest.mark.parametrize("primitive", ["dot_general", "reduce_max", "concatenate", "top_k"])
def test_a_wrong_rule_is_found(cases, primitive):
    """The check above sees a sum that is taken for a map, and a blocked dim that is."""
    own = [case for case in cases if case.call.primitive == primitive]

    assert any(is_caught(case, *wrong) for case in own for wrong in taken_for_maps(rule_of_call(case.call)))
