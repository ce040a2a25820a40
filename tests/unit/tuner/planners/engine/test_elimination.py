"""Eliminating variables against trying all of their values."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.planners.engine.elimination import Term, cheapest_order, least


@st.composite
def problems(draw):
    """Up to six variables with up to four values, and terms over up to three of them each."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    terms = []
    for _ in range(draw(st.integers(0, 8))):
        scope = tuple(sorted(draw(st.sets(st.integers(0, len(sizes) - 1), max_size=3))))
        seed = draw(st.integers(0, 10**6))
        shape = tuple(sizes[variable] for variable in scope)
        terms.append(Term(scope=scope, table=np.random.default_rng(seed).integers(0, 9, shape).astype(float)))
    return sizes, terms


def cost_at(terms, values):
    """What all terms cost together."""
    return sum(float(term.table[tuple(values[variable] for variable in term.scope)]) for term in terms)


@given(problem=problems(), seed=st.integers(0, 100))
@settings(max_examples=200)
def test_it_finds_the_minimum_in_any_order(problem, seed):
    """No values cost less than those found, which cost what is said; any order of elimination ends with that cost."""
    sizes, terms = problem
    found = least(sizes, terms, cheapest_order(sizes, [term.scope for term in terms]).variables)
    shuffled = np.random.default_rng(seed).permutation(len(sizes)).tolist()

    assert found.cost == cost_at(terms, found.values) == least(sizes, terms, shuffled).cost
    assert found.cost == min(cost_at(terms, values) for values in itertools.product(*map(range, sizes)))


@given(problem=problems(), most_entries=st.integers(1, 30))
def test_what_is_fixed_keeps_tables_small(problem, most_entries):
    """With the fixed variables taken out, no variable's own table has more entries than allowed but its values."""
    sizes, terms = problem
    order = cheapest_order(sizes, [term.scope for term in terms], most_entries=most_entries)
    scopes = [set(term.scope) - order.fixed for term in terms]

    assert sorted([*order.variables, *order.fixed]) == list(range(len(sizes)))
    for variable in order.variables:
        joined = set().union(*(scope for scope in scopes if variable in scope), {variable})
        assert np.prod([sizes[other] for other in joined]) <= max(most_entries, sizes[variable])
        scopes = [scope for scope in scopes if variable not in scope] + [joined - {variable}]


def test_a_chain_needs_small_tables_alone():
    """A chain of variables of three values is eliminated by tables over two of them, however long it is."""
    scopes = [(number, number + 1) for number in range(999)]

    assert cheapest_order([3] * 1000, scopes, most_entries=9).fixed == frozenset()


def test_spared_variables_are_fixed_last():
    """Who was fixed the last time is not fixed again while others can be."""
    scopes = list(itertools.combinations(range(5), 2))
    first = cheapest_order([4] * 5, scopes, most_entries=64).fixed

    again = cheapest_order([4] * 5, scopes, most_entries=64, spared=first).fixed

    assert min(len(first), len(again)) > 0
    assert not first & again


@given(first=problems(), copies=st.integers(1, 3), other=problems())
def test_repeated_tables_are_eliminated_once(first, copies, other):
    """Copies of a problem, side by side, and eliminations of earlier calls change neither the cost nor the values."""
    sizes, terms = first
    size = len(sizes)
    several = [
        Term(scope=tuple(variable + copy * size for variable in term.scope), table=term.table)
        for copy in range(copies)
        for term in terms
    ]
    order = cheapest_order(sizes * copies, [term.scope for term in several]).variables
    known = {}
    for own_sizes, own_terms in (other, first):
        least(own_sizes, own_terms, cheapest_order(own_sizes, [term.scope for term in own_terms]).variables, known)
    once = least(sizes, terms, cheapest_order(sizes, [term.scope for term in terms]).variables)
    num_known = len(known)
    found = least(sizes * copies, several, order, known)

    assert found.cost == copies * once.cost == cost_at(several, found.values)
    assert len(known) - num_known <= size
