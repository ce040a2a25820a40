"""Rules: which factors there are, where they lie, and which of them an axis can cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.sharding.dims import Factor, FactorKind, Rule, rule_of
from tests.support.graphs.random_graphs import SHAPES, rules

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
    """A dim is as long as the product of its factors, and one without any is 1."""
    rule = rule_of("1 (heads head_dim) -> heads head_dim 1", SIZES)

    assert rule.operand_shape(0) == (1, 24)
    assert rule.result_shape(0) == (4, 6, 1)


def test_only_the_slowest_factor_of_a_dim_can_be_cut():
    """A merged dim can be cut by its first factor; the second one can't be cut in any tensor of the operator."""
    rule = rule_of("batch (heads head_dim) -> batch heads head_dim", SIZES)

    assert names(rule, rule.cuttable) == ["batch", "heads"]


def test_a_factor_behind_one_iteration_can_be_cut():
    """What precedes it counts only if it has more than one iteration."""
    rule = rule_of("(one heads) -> one heads", SIZES)

    assert names(rule, rule.cuttable) == ["heads"]


@pytest.mark.parametrize("word", ["blocked", "permuted"])
def test_factors_that_are_needed_whole_cannot_be_cut(word):
    """Neither blocked factors nor those along which elements move can be cut."""
    rule = rule_of("batch in -> batch in", SIZES, **{word: ("in",)})

    assert names(rule, rule.cuttable) == ["batch"]


def test_one_iteration_cannot_be_cut():
    """A factor of size 1 stays whole."""
    assert rule_of("one batch -> one batch", SIZES).cuttable == (1,)


def test_a_source_has_no_operands():
    """Nothing before the arrow is no operand."""
    rule = rule_of("-> batch in", SIZES)

    assert rule.operands == ()
    assert rule.result_shape(0) == (8, 16)


def test_what_one_of_two_results_carries_is_a_map():
    """A factor is a map if any result carries it; the others have partial sums of it."""
    rule = rule_of("batch in -> batch in, batch", SIZES)

    assert rule.factors[1].kind is FactorKind.MAP
    assert rule.result_dims == ((0, 1), (0, None))


@pytest.mark.parametrize(
    ("place", "words"), [(((0,), (0,)), "may carry a factor only once"), (((1,),), "must hold factors of its rule")]
)
def test_wrong_places_are_told(place, words):
    """A tensor carries each factor of its rule once."""
    with pytest.raises(AssertionError, match=words):
        Rule(factors=(Factor(size=2, kind=FactorKind.MAP),), operands=(place,), results=())


def test_a_pattern_needs_an_arrow_and_its_factors():
    """A pattern without an arrow, or a blocked factor that it lacks, is a mistake of ours."""
    with pytest.raises(AssertionError, match="has no arrow"):
        rule_of("batch in", SIZES)
    with pytest.raises(AssertionError, match="has no factor 'out'"):
        rule_of("batch -> batch", SIZES, blocked=("out",))


@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3).flatmap(rules))
@settings(max_examples=100, deadline=None)
def test_cuttable_factors_lead_every_dim(rule):
    """A cuttable factor is a map or a reduction, and none with iterations stands before it in any dim."""
    for factor in rule.cuttable:
        assert rule.factors[factor].size > 1
        assert rule.factors[factor].kind in (FactorKind.MAP, FactorKind.REDUCTION)
        for place in (*rule.operands, *rule.results):
            for dim in place:
                before = dim[: dim.index(factor)] if factor in dim else ()
                assert all(rule.factors[other].size == 1 for other in before)


@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3).flatmap(rules))
@settings(max_examples=100, deadline=None)
def test_dims_and_places_say_the_same(rule):
    """A factor cuts the dim that carries it, and none where no dim does."""
    for places, dims in ((rule.operands, rule.operand_dims), (rule.results, rule.result_dims)):
        for place, of_factor in zip(places, dims, strict=True):
            for factor, dim in enumerate(of_factor):
                assert [number for number, parts in enumerate(place) if factor in parts] == (
                    [] if dim is None else [dim]
                )
