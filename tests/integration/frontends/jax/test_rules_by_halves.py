"""Rules are what the primitives do: on halves along any factor that can be cut, the results are the same."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.jax.rules import rule_of_call
from tests.support.graphs.jax_halves import are_close, cases_of, halved, wholes
from tests.support.graphs.jax_variants import PROGRAMS


@pytest.fixture(scope="module")
def cases():
    """The calls of all programs, one for each kind of rule."""
    found = {}
    for function, arguments in PROGRAMS:
        found |= cases_of(function, arguments, np.random.default_rng(0))
    return list(found.values())


def test_halves_make_up_the_whole(cases):
    """Each primitive of the programs, run on two halves along each factor that its rule lets an axis cut, gives
    the results of one run: put side by side for a map, combined for a reduction.
    """
    found, num_tried, primitives = [], 0, set()
    for case in cases:
        rule = rule_of_call(case.call)
        tried = [number for number in rule.cuttable if rule.factors[number].size % 2 == 0] if rule else []
        expected = wholes(case) if tried else []
        found += [(case.call, rule, number) for number in tried if not are_close(halved(case, rule, number), expected)]
        num_tried += len(tried)
        primitives.update([case.call.primitive] if tried else [])

    assert found == []
    assert num_tried > 300
    assert len(primitives) >= 45


@pytest.mark.parametrize("primitive", ["dot_general", "reduce_max", "concatenate", "top_k"])
def test_a_wrong_rule_is_found(cases, primitive):
    """The check above sees a sum that is taken for a map, and a blocked dim that is."""
    caught = 0
    for case in (case for case in cases if case.call.primitive == primitive):
        rule = rule_of_call(case.call)
        for number, factor in enumerate(rule.factors):
            if factor.kind in (FactorKind.REDUCTION, FactorKind.BLOCKED) and factor.size % 2 == 0:
                factors = list(rule.factors)
                factors[number] = replace(factor, kind=FactorKind.MAP)
                try:
                    caught += not are_close(halved(case, replace(rule, factors=tuple(factors)), number), wholes(case))
                except (TypeError, ValueError):
                    caught += 1

    assert caught
