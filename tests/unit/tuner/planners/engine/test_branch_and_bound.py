import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.graphs.partition import HARD, HARD_OPTIMUM, Partition
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Known, Limits, Stop
from tuner.planners.engine.workers import InProcessWorkers

problems = st.builds(
    Partition,
    numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple),
    num_bins=st.integers(2, 3),
    capacity=st.one_of(st.just(math.inf), st.integers(5, 60).map(float)),
    has_dominance=st.booleans(),
    has_greedy=st.booleans(),
)


class Ticks:
    """A clock that goes on by one second whenever somebody looks."""

    def __init__(self):
        self.now_s = 0

    def __call__(self):
        """Now [s]."""
        self.now_s += 1
        return self.now_s


@settings(max_examples=120)
@given(problem=problems)
def test_it_finds_the_optimum_or_says_that_there_is_none(problem):
    """With and without dominance and a heuristic, the result is that of trying everything."""
    outcome = branch_and_bound(problem)
    least = problem.least()

    assert outcome.stop is Stop.EXHAUSTED
    if least is None:
        assert (outcome.known, outcome.best, outcome.bound) == (Known.INFEASIBLE, None, math.inf)
    else:
        assert (outcome.known, outcome.best.cost, outcome.gap) == (Known.OPTIMAL, least, 0.0)
        assert problem.complete(outcome.best.solution).cost == least


@given(problem=problems, nodes=st.integers(0, 40))
def test_what_is_known_and_why_it_stopped_are_two_things(problem, nodes):
    """Stopped after some nodes, the outcome claims neither more nor less than it knows."""
    outcome = branch_and_bound(problem, limits=Limits(nodes=nodes))
    least = problem.least()

    assert outcome.bound <= (math.inf if least is None else least)
    assert outcome.nodes <= nodes
    if outcome.known is Known.OPTIMAL:
        assert outcome.best.cost == least
    elif outcome.known is Known.INFEASIBLE:
        assert least is None
    elif outcome.known is Known.FEASIBLE:
        assert outcome.best.cost >= least
        assert outcome.gap > 0
    else:
        assert outcome.best is None
        assert outcome.stop is Stop.NODES


def test_a_gap_that_is_good_enough_ends_the_search():
    """With a gap allowed, the search stops for it, earlier, and its solution is no further off than that."""
    outcome = branch_and_bound(HARD, limits=Limits(gap=0.2))

    assert (outcome.stop, outcome.known) == (Stop.GAP, Known.FEASIBLE)
    assert 0 < outcome.gap <= 0.2
    assert outcome.best.cost * (1 - 0.2) <= HARD_OPTIMUM
    assert outcome.nodes < branch_and_bound(HARD).nodes


def test_limits_end_the_search():
    """The limit of time is one of the clock that is given; one of nodes ends a common search, with an honest bound."""
    late = branch_and_bound(HARD, limits=Limits(time_s=50), clock=Ticks())
    with InProcessWorkers() as workers:
        large = branch_and_bound(HARD, workers=workers, limits=Limits(nodes=100))

    assert (late.stop, large.stop) == (Stop.TIME, Stop.NODES)
    assert late.known in {Known.FEASIBLE, Known.UNKNOWN}
    assert 50 <= late.seconds <= 60
    assert large.nodes <= 101
    assert large.bound <= HARD_OPTIMUM


def test_the_trace_only_gets_better():
    """Along the trace time and nodes rise, the cost falls, and the bound rises."""
    outcome = branch_and_bound(HARD)

    assert len(outcome.trace) > 3
    for before, after in itertools.pairwise(outcome.trace):
        assert all(getattr(before, name) <= getattr(after, name) for name in ("seconds", "nodes", "bound"))
        assert all(getattr(before, name) >= getattr(after, name) for name in ("cost", "gap"))
    assert all(progress.bound <= HARD_OPTIMUM <= progress.cost for progress in outcome.trace)
    assert outcome.trace[-1].gap == 0


def test_dominance_loses_nothing_and_saves_nodes():
    """With nodes compared, the same optimum is proven with fewer of them."""
    with_dominance = branch_and_bound(Partition(numbers=HARD.numbers, has_greedy=False))
    without = branch_and_bound(HARD)

    assert with_dominance.best.cost == without.best.cost
    assert with_dominance.dominated > 0
    assert with_dominance.nodes < without.nodes


def test_the_same_search_takes_the_same_course():
    """Ties are broken by order, so two searches of one problem agree in every node."""
    one, other = (branch_and_bound(HARD, clock=Ticks()) for _ in range(2))

    assert one == other
