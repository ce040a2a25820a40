import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.schedule_check import violations
from tests.oracles.schedule_exhaustive import schedule_exhaustively
from tests.support.graphs.workloads import changed, link, random_workload, workload
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Known, Limits
from tuner.planners.engine.workers import ProcessWorkers
from tuner.planners.scheduling.problem import Fusion, Run, Schedule, Split, Transfer, ways_between
from tuner.planners.scheduling.program import schedule_by_milp
from tuner.planners.scheduling.search import SchedulingProblem

HIGHS_TOLERANCE = 1e-5
"""HiGHS lets a time begin this much too early, in units of the horizon."""


def drawn(seed, num_ops, num_splits, num_fusions, releases=False):
    """A random workload; three devices only where trying everything stays quick."""
    rng = np.random.default_rng(seed)
    num_devices = 3 if num_ops < 4 and rng.random() < 0.3 else 2
    return random_workload(
        rng, num_ops=num_ops, num_devices=num_devices, num_splits=num_splits, num_fusions=num_fusions, releases=releases
    )


workloads = st.builds(
    drawn,
    seed=st.integers(0, 2**32),
    num_ops=st.integers(1, 4),
    num_splits=st.integers(0, 2),
    num_fusions=st.integers(0, 2),
)


releasing = st.builds(
    drawn,
    seed=st.integers(0, 2**32),
    num_ops=st.integers(2, 3),
    num_splits=st.integers(0, 1),
    num_fusions=st.integers(0, 1),
    releases=st.just(True),
)


def best_of(of):
    """The best schedule."""
    return branch_and_bound(SchedulingProblem(of)).best


@given(of=workloads)
def test_it_finds_what_trying_everything_finds(of):
    """On small workloads, with splits and fusions, the schedule is valid and costs what the best of all costs, although
    dominated nodes are left out.
    """
    outcome = branch_and_bound(SchedulingProblem(of))
    best = schedule_exhaustively(of)

    if best is None:
        assert outcome.known is Known.INFEASIBLE
    else:
        assert outcome.known is Known.OPTIMAL
        assert violations(of, outcome.best.solution) == []
        assert outcome.best.cost == pytest.approx(best.cost_s(of), rel=1e-9)


@given(of=releasing)
def test_it_finds_what_trying_everything_finds_where_memory_is_released(of):
    """Where room is short, runs and transfers wait for the end of others as well as they can."""
    test_it_finds_what_trying_everything_finds.hypothesis.inner_test(of)


@pytest.mark.parametrize("seed", [1, 71, 1113, 1252])
def test_a_later_start_can_be_worth_its_lower_peak(seed):
    """What stays of a later operator was there before, so that an operator may have to wait although it has room."""
    rng = np.random.default_rng(seed)
    of = random_workload(
        rng,
        num_ops=int(rng.integers(2, 5)),
        num_splits=int(rng.integers(0, 2)),
        num_fusions=int(rng.integers(0, 2)),
        releases=True,
    )
    test_it_finds_what_trying_everything_finds.hypothesis.inner_test(of)


def test_memory_is_free_again_once_data_have_been_read():
    """A chain of operators needs room for two results at a time where memory is released, for all of them where not."""
    chain = workload([[1.0]] * 4, [(0, 1), (1, 2), (2, 3)], memory_bytes=np.zeros(4), capacity_bytes=np.array([2.0]))
    releasing = changed(chain, working_bytes=np.zeros(4))

    assert best_of(chain) is None
    assert best_of(releasing).cost == pytest.approx(4.0)
    assert best_of(changed(releasing, capacity_bytes=np.array([1.9]))) is None


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_highs_finds(seed):
    """On workloads too large to try everything, HiGHS proves the same cost, or the same lack of a schedule."""
    of = random_workload(np.random.default_rng(seed), num_ops=5 - seed % 2, num_devices=2 + seed % 2)

    ours, theirs = branch_and_bound(SchedulingProblem(of)), schedule_by_milp(of)

    assert ours.known is theirs.known
    if ours.best is not None:
        assert ours.best.cost == pytest.approx(theirs.best.cost, rel=HIGHS_TOLERANCE)
        assert violations(of, theirs.best.solution) == []


@settings(max_examples=40)
@given(of=workloads, seed=st.integers(0, 99))
def test_no_bound_is_above_what_lies_below_it(of, seed):
    """On the way to any schedule no bound is above its cost, nor above the best cost at the root."""
    rng = np.random.default_rng(seed)
    problem = SchedulingProblem(of)
    node = problem.root()
    bounds = [problem.lower_bound(node)]
    while not all(node.state.done):
        children = list(problem.children(node, float("inf")))
        if not children:
            return
        node = children[rng.integers(len(children))]
        bounds.append(problem.lower_bound(node))

    assert bounds == sorted(bounds)
    assert bounds[-1] <= problem.complete(node).cost * (1 + 1e-12)


def test_workers_and_limits_agree_with_one_whole_search():
    """Two processes prove the cost of one, which leaves dominated nodes out; stopped at once, the search has the greedy
    schedule and an honest gap.
    """
    of = random_workload(np.random.default_rng(4), num_ops=7)
    whole = branch_and_bound(SchedulingProblem(of))
    with ProcessWorkers(2) as workers:
        together = branch_and_bound(SchedulingProblem(of), workers=workers)
    short = branch_and_bound(SchedulingProblem(of), limits=Limits(nodes=1))

    assert together.known is Known.OPTIMAL
    assert together.best.cost == pytest.approx(whole.best.cost, rel=1e-9)
    assert whole.dominated > 0
    assert violations(of, short.best.solution) == []
    assert short.bound <= whole.best.cost <= short.best.cost


def test_work_moves_when_the_link_is_worth_it():
    """Two independent operators share two devices; two in a row part only if the transfer costs less than it gains."""
    apart = best_of(workload([[2, 2], [2, 2]])).solution
    fast = best_of(workload([[1, 9], [9, 1]], [(0, 1)], links=(link(0, 1, bandwidth=1.0),))).solution
    slow = best_of(workload([[1, 3], [3, 1]], [(0, 1)], links=(link(0, 1, bandwidth=0.1),))).solution

    assert sorted(apart.devices().values()) == [0, 1]
    assert fast.devices() == {0: 0, 1: 1}
    assert fast.transfers == (Transfer(edge=0, links=(0,), start_s=1.0, end_s=2.0),)
    assert len(set(slow.devices().values())) == 1


@pytest.mark.parametrize(("group", "links", "end_s"), [(None, (0, 1), 1.0), ("nvlink or pcie", (0,), 1.5)])
def test_links_work_together_unless_they_exclude_each_other(group, links, end_s):
    """Data that two links carry at 2 and 1 bytes per second go over both, or over the faster if only one may work."""
    of = workload(
        [[1.0, np.inf], [np.inf, 1.0]],
        [(0, 1)],
        data_bytes=np.array([3.0]),
        links=(link(0, 1, bandwidth=2.0, group=group), link(0, 1, bandwidth=1.0, group=group)),
    )

    transfer = best_of(of).solution.transfers[0]

    assert transfer == Transfer(edge=0, links=links, start_s=1.0, end_s=1.0 + end_s)


def test_transfers_wait_for_their_link():
    """Two transfers over one link follow each other; a second link carries one of them at the same time."""
    of = workload(
        [[1.0, np.inf], [np.inf, 1.0], [np.inf, 1.0]], [(0, 1), (0, 2)], data_bytes=np.full(2, 4.0), links=(link(0, 1),)
    )
    one_link, two_links = best_of(of), best_of(changed(of, links=(link(0, 1, group="a"), link(0, 1, group="a"))))

    assert one_link.cost == pytest.approx(1 + 4 + 4 + 1)
    assert two_links.cost == pytest.approx(1 + 4 + 1 + 1)


@pytest.mark.parametrize(("ports", "end_s"), [(((0, "out"),), 10), (((1, "in"),), 6), ((), 6)])
def test_links_through_one_port_carry_one_transfer_at_a_time(ports, end_s):
    """Data for two devices leave one after the other through a port that both links pass, else at once."""
    of = workload(
        [[1.0, np.inf, np.inf], [np.inf, 1.0, np.inf], [np.inf, np.inf, 1.0]],
        [(0, 1), (0, 2)],
        data_bytes=np.full(2, 4.0),
        links=(link(0, 1, ports=ports), link(0, 2, ports=ports if ports[:1] == ((0, "out"),) else ())),
    )
    best = best_of(of)

    assert best.cost == end_s
    assert violations(of, best.solution) == []


def test_a_way_takes_no_two_links_of_one_port():
    """Two links that pass one port do not work together, although no group excludes it."""
    through = ((0, "out"),)
    of = workload([[1.0, 1.0]], links=(link(0, 1, ports=through), link(0, 1, ports=through), link(0, 1)))

    assert [way.links for way in ways_between(of)[0, 1]] == [(0,), (1,), (2,), (0, 2), (1, 2)]


def test_operators_that_share_a_home_run_on_one_device():
    """Two operators that would each run on another device run on the one that is better for both together."""
    of = workload([[1, 5], [4, 1], [1, 9]], [(0, 1)], links=(link(0, 1), link(1, 0)))
    together = changed(of, mates=((0, 1),))
    far, near = best_of(of), best_of(together)

    assert far.solution.devices()[1] == 1
    assert len({near.solution.devices()[op] for op in (0, 1)}) == 1
    assert near.cost == schedule_exhaustively(together).cost_s(together) > far.cost
    assert violations(together, far.solution) == ["operators (0, 1) share a home"]


def test_the_heavier_model_goes_first():
    """Of two models that compete for one device the one with more weight per second is complete first."""
    of = workload([[2.0], [2.0]], model_of=np.array([0, 1]), weights=np.array([1.0, 3.0]))

    best = best_of(of)

    assert best.solution.completion_s(of).tolist() == [4.0, 2.0]
    assert best.cost == 10.0


@pytest.mark.parametrize(("gather_s", "devices", "cost_s"), [(0.5, 2, 2.5), (2.5, 1, 4.0)])
def test_an_operator_is_split_when_that_pays(gather_s, devices, cost_s):
    """Two halves on two devices beat the whole if gathering them takes little, and not if it takes long."""
    split = Split(op=0, parts=2, part_s=(2.0, 2.0), gather_s=((0.0, gather_s), (gather_s, 0.0)))

    best = best_of(workload([[4.0, 4.0]], splits=(split,)))

    assert (len(best.solution.runs[0].devices), best.cost) == (devices, cost_s)


@pytest.mark.parametrize(("both_s", "num_runs", "cost_s"), [(1.5, 1, 1.5), (2.5, 2, 2.0)])
def test_operators_are_fused_when_that_pays(both_s, num_runs, cost_s):
    """Two operators become one if that is faster than both in a row."""
    fusion = Fusion(first=0, second=1, exec_s=(both_s,), memory_bytes=2.0)

    best = best_of(workload([[1.0], [1.0]], [(0, 1)], fusions=(fusion,)))

    assert (len(best.solution.runs), best.cost) == (num_runs, cost_s)


def test_memory_and_links_decide_where_work_goes():
    """What does not fit on the fast device runs on the slow one; what fits nowhere, or needs a link that is not there,
    is infeasible.
    """
    of = workload([[1, 5], [1, 5]], memory_bytes=np.array([6.0, 6.0]), capacity_bytes=np.array([10.0, 10.0]))
    too_small = changed(of, capacity_bytes=np.array([10.0, 5.0]))
    apart = workload([[1.0, np.inf], [np.inf, 1.0]], [(0, 1)])

    assert best_of(of).cost == 5.0
    assert all(branch_and_bound(SchedulingProblem(one)).known is Known.INFEASIBLE for one in (too_small, apart))


def test_alike_devices_are_not_tried_twice():
    """Of eight devices that are alike the first operator is tried on one."""
    problem = SchedulingProblem(workload(np.ones((3, 8))))

    assert len(list(problem.children(problem.root(), float("inf")))) == 3


def test_a_way_takes_at_most_one_link_of_a_group():
    """Of two links of one group and one of none, a transfer uses one, or one of the group with the free one."""
    of = workload([[1.0, 1.0]], links=(link(0, 1, group="a"), link(0, 1, group="a"), link(0, 1)))

    assert {way.links for way in ways_between(of)[0, 1]} == {(0,), (1,), (2,), (0, 2), (1, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": ()}, "every operator runs once"),
        ({"transfers": ()}, "data cross devices along edges"),
        ({"transfers": (Transfer(edge=0, links=(0,), start_s=0.5, end_s=1.5),)}, "starts before its data are there"),
        ({"transfers": (Transfer(edge=0, links=(0,), start_s=1.5, end_s=2.5),)}, "starts before what it takes"),
        ({"transfers": (Transfer(edge=0, links=(0,), start_s=1.0, end_s=1.1),)}, "does not take its time"),
        ({"transfers": (Transfer(edge=0, links=(1,), start_s=1.0, end_s=2.0),)}, "do not lead from device 0 to 1"),
    ],
)
def test_a_broken_schedule_is_caught(change, message):
    """The checks that the other tests rely on see what is wrong with a schedule."""
    of = workload([[1.0, np.inf], [np.inf, 1.0]], [(0, 1)], links=(link(0, 1), link(1, 0)))
    sound = Schedule(
        runs=(Run(ops=(0,), devices=(0,), start_s=0.0, end_s=1.0), Run(ops=(1,), devices=(1,), start_s=2.0, end_s=3.0)),
        transfers=(Transfer(edge=0, links=(0,), start_s=1.0, end_s=2.0),),
    )

    assert violations(of, sound) == []
    assert any(message in sentence for sentence in violations(of, dataclasses.replace(sound, **change)))


def test_crowded_devices_and_links_are_caught():
    """The checks see two operators at once on a device, and more memory than it has."""
    of = workload([[1.0], [1.0]], capacity_bytes=np.array([1.5]))
    runs = tuple(Run(ops=(op,), devices=(0,), start_s=0.0, end_s=1.0) for op in range(2))

    found = violations(of, Schedule(runs=runs, transfers=()))

    assert [sentence.split()[0:2] for sentence in found] == [["device", "0"], ["device", "0"]]
