"""Rules are what the operators do: on halves along any factor that can be cut, the results are the same."""

from dataclasses import replace

import pytest

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.torch.flat import HANDED_ON, OF_A_SHAPE
from tests.support.graphs.torch_halves import are_close, cases_of, halved, kind_of
from tests.support.graphs.torch_variants import PROGRAMS


@pytest.fixture(scope="module")
def cases():
    """The calls of all programs, one for each kind of rule."""
    found = {}
    for program in PROGRAMS.values():
        found |= {kind_of(case): case for case in cases_of(*program)}
    return list(found.values())


def test_every_operator_has_a_rule(cases):
    """Nothing in the programs is unknown but what hands a tensor on or looks at its shape alone."""
    unknown = {case.call.primitive for case in cases if case.rule is None}

    assert unknown <= HANDED_ON | OF_A_SHAPE


def test_rules_have_the_shapes_of_their_tensors(cases):
    """The factors of each dim multiply to its size."""
    for case in cases:
        rule = case.rule
        if rule is not None:
            call = case.call
            assert call.operands == tuple(rule.operand_shape(slot) for slot in range(len(rule.operands))), call
            assert call.results == tuple(rule.result_shape(slot) for slot in range(len(rule.results))), call


def test_halves_make_up_the_whole(cases):
    """Each operator of the programs, run on two halves along each factor that its rule lets an axis cut, gives the
    results of one run: put side by side for a map, combined for a reduction.
    """
    found, num_tried, primitives = [], 0, set()
    for case in cases:
        rule = case.rule
        tried = [number for number in rule.cuttable if rule.factors[number].size % 2 == 0] if rule else []
        found += [(case.call, number) for number in tried if not are_close(halved(case, rule, number), case.results)]
        num_tried += len(tried)
        primitives.update([case.call.primitive] if tried else [])

    assert found == []
    assert num_tried > 1000
    assert len(primitives) >= 100


@pytest.mark.parametrize("primitive", ["mm", "convolution_backward", "amax", "cat", "topk", "native_group_norm"])
def test_a_wrong_rule_is_found(cases, primitive):
    """The check above sees a sum that is taken for a map, and a blocked dim that is."""
    caught = 0
    for case in (case for case in cases if case.call.primitive == primitive):
        rule = case.rule
        for number, factor in enumerate(rule.factors):
            if factor.kind in (FactorKind.REDUCTION, FactorKind.BLOCKED) and factor.size % 2 == 0:
                factors = list(rule.factors)
                factors[number] = replace(factor, kind=FactorKind.MAP)
                try:
                    made = halved(case, replace(rule, factors=tuple(factors)), number)
                    caught += not are_close(made, case.results)
                except (IndexError, RuntimeError, TypeError, ValueError):
                    caught += 1

    assert caught
