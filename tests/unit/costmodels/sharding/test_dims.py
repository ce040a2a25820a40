"""Rules: which factors there are, where they lie, and which of them an axis can cut."""

import pytest

from costmodels.sharding.dims import Factor, FactorKind, Rule, rule_of

SIZES = {"batch": 8, "in": 16, "out": 32, "heads": 4, "head_dim": 6, "one": 1}


def names(rule, factors):
    """What these are called."""
    return [rule.factors[factor].name for factor in factors]


def test_a_product_reduces_over_what_its_operands_share():
    """Of a product the factors of the result are maps, and the one that only operands carry is a reduction."""
    rule = rule_of("batch in, in out -> batch out", SIZES)

    assert {factor.name: factor.kind for factor in rule.factors} == {
        "batch": FactorKind.MAP,
        "in": FactorKind.REDUCTION,
        "out": FactorKind.MAP,
    }
    assert names(rule, rule.cuttable) == ["batch", "in", "out"]
    assert rule.operand_dims == ((0, 1, None), (None, 0, 1))
    assert rule.result_dims == ((0, None, 1),)


def test_shapes_follow_from_factors():
    """A dim is as long as the product of its factors, and one without any is 1; a source has no operands."""
    rule, source = rule_of("1 (heads head_dim) -> heads head_dim 1", SIZES), rule_of("-> batch in", SIZES)

    assert (rule.operand_shape(0), rule.result_shape(0)) == ((1, 24), (4, 6, 1))
    assert (source.operands, source.result_shape(0)) == ((), (8, 16))


@pytest.mark.parametrize(
    ("pattern", "whole", "cuttable"),
    [
        ("batch (heads head_dim) -> batch heads head_dim", {}, ["batch", "heads"]),
        ("(one heads) -> one heads", {}, ["heads"]),
        ("batch in -> batch in", {"blocked": ("in",)}, ["batch"]),
        ("batch in -> batch in", {"permuted": ("in",)}, ["batch"]),
    ],
)
def test_only_the_slowest_factor_of_a_dim_can_be_cut(pattern, whole, cuttable):
    """Neither can one iteration be cut, nor blocked factors, nor those along which elements move."""
    rule = rule_of(pattern, SIZES, **whole)

    assert names(rule, rule.cuttable) == cuttable


def test_what_one_of_two_results_carries_is_a_map():
    """A factor is a map if any result carries it; the others have partial sums of it."""
    rule = rule_of("batch in -> batch in, batch", SIZES)

    assert rule.factors[1].kind is FactorKind.MAP
    assert rule.result_dims == ((0, 1), (0, None))


def test_mistakes_of_ours_are_told():
    """A tensor carries each factor of its rule once; a pattern needs an arrow and the factors that are blocked."""
    for place, words in ((((0,), (0,)), "may carry a factor only once"), (((1,),), "must hold factors of its rule")):
        with pytest.raises(AssertionError, match=words):
            Rule(factors=(Factor(size=2, kind=FactorKind.MAP),), operands=(place,), results=())
    with pytest.raises(AssertionError, match="has no arrow"):
        rule_of("batch in", SIZES)
    with pytest.raises(AssertionError, match="has no factor 'out'"):
        rule_of("batch -> batch", SIZES, blocked=("out",))
