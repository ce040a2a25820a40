"""The event engine: tasks that wait for each other and share devices and links."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.simulator.events import NOTHING, Route, TaskGraph, run


@st.composite
def graphs(draw):
    """A graph without circles, over a few devices and links, and their capacities."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_links, num_devices = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    graph = TaskGraph()
    for task in range(draw(st.integers(1, 14))):
        after = [other for other in range(task) if rng.random() < 0.2]
        uses = tuple((link, float(rng.uniform(0.2, 1.0))) for link in range(num_links) if rng.random() < 0.4)
        graph.add(
            Route(float(rng.uniform(0.1, 2.0)), uses),
            after=after,
            latency_s=float(rng.choice([0.0, rng.uniform(0.0, 0.3)])),
            devices=(int(rng.integers(num_devices)),) if rng.random() < 0.6 else (),
        )
    return graph, rng.uniform(0.5, 1.5, num_links).tolist()


def alone(capacity, *tasks, overlap_efficiency=1.0):
    """The ends of tasks that wait for nothing, given as routes."""
    graph = TaskGraph()
    for route in tasks:
        graph.add(route)
    return run(graph, capacity, overlap_efficiency).end_s.tolist()


@given(graphs(), st.floats(0.0, 1.0))
def test_tasks_begin_when_the_last_that_they_wait_for_ends(drawn, overlap_efficiency):
    """Every task begins at the end of one of those, none before; the critical path has no gap."""
    graph, capacity = drawn
    timeline = run(graph, capacity, overlap_efficiency)
    path = timeline.critical_path()

    for task in range(len(graph)):
        after = [other for waiting, other in zip(graph.waiting, graph.awaited, strict=True) if waiting == task]
        latest_s = max((timeline.end_s[other] for other in after), default=0.0)
        assert timeline.start_s[task] == latest_s
        assert (timeline.waited_for[task] == NOTHING) == (not after)
    assert timeline.start_s[path[0]] == 0.0
    assert timeline.end_s[path[-1]] == timeline.makespan_s
    assert [timeline.end_s[task] for task in path[:-1]] == [timeline.start_s[task] for task in path[1:]]


@given(graphs(), st.floats(0.0, 1.0))
def test_no_task_is_faster_than_alone_and_none_slower_than_in_a_row(drawn, overlap_efficiency):
    """Sharing delays a task, by no more than doing everything one after the other would."""
    graph, capacity = drawn
    timeline = run(graph, capacity, overlap_efficiency)
    needs_s = [
        demand.latency_s + route.work_s * max([1.0, *(amount / capacity[link] for link, amount in route.uses)])
        for demand in graph.demands
        for route in demand.routes
    ]

    assert (timeline.end_s - timeline.start_s >= np.array(needs_s) * (1 - 1e-9)).all()
    # three on one device with harm h run at 1 / (1 + 2 h) each, which is 3 / (1 + 2 h) >= 1 together
    assert timeline.makespan_s <= sum(needs_s) * (1 + 1e-9)


@given(graphs(), st.floats(0.0, 1.0))
def test_no_link_carries_more_than_its_capacity(drawn, overlap_efficiency):
    """What crosses a link up to any moment fits into its capacity, and all work is done in the end."""
    graph, capacity = drawn
    timeline = run(graph, capacity, overlap_efficiency)

    for link, most in enumerate(capacity):
        users = [
            (task, amount * route.work_s)
            for task, demand in enumerate(graph.demands)
            for route in demand.routes
            for crossed, amount in route.uses
            if crossed == link
        ]
        for begin_s in {timeline.start_s[task] for task, _ in users}:
            for end_s in {timeline.end_s[task] for task, _ in users}:
                inside = [
                    carried
                    for task, carried in users
                    if begin_s <= timeline.start_s[task] and timeline.end_s[task] <= end_s
                ]
                assert sum(inside) <= most * max(end_s - begin_s, 0.0) * (1 + 1e-9) + 1e-12 or not inside


def test_two_on_one_link_share_it_while_both_run():
    """Equal transfers that begin together end together, at half the rate each; alone, one takes half of that.

    One that begins after half of the other is done delays it by its own half; a latency takes nothing from a link.
    """
    over_link = Route(1.0, ((0, 1.0),))
    staggered, latent = TaskGraph(), TaskGraph()
    staggered.add(over_link)
    wait = staggered.add(Route(0.5))
    staggered.add(Route(0.25, ((0, 1.0),)), after=[wait])
    latent.add(over_link)
    latent.add(over_link, latency_s=1.0)

    assert alone([1.0], over_link) == [1.0]
    assert alone([1.0], over_link, over_link) == [2.0, 2.0]
    assert run(staggered, [1.0], 1.0).end_s == pytest.approx([1.25, 0.5, 1.0])
    assert run(latent, [1.0], 1.0).end_s.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("overlap_efficiency", [0.0, 0.4, 1.0])
def test_kernels_beside_each_other_save_the_stated_share(overlap_efficiency):
    """Two on one device take the longer one's time and what is not saved of the shorter one's."""
    graph = TaskGraph()
    graph.add(Route(2.0), devices=(0,))
    graph.add(Route(1.0), devices=(0,))

    assert run(graph, [], overlap_efficiency).makespan_s == pytest.approx(2.0 + (1 - overlap_efficiency) * 1.0)


def test_of_links_that_exclude_each_other_the_faster_one_at_that_moment_is_taken():
    """The first transfer takes the wide link; one that begins beside it the narrow one, which is faster than half."""
    graph = TaskGraph()
    wide, narrow = Route(1.0, ((0, 1.0),)), Route(1.5, ((1, 1.0),))
    graph.add(wide, narrow)
    graph.add(wide, narrow)
    timeline = run(graph, [1.0, 1.0], 1.0)

    assert timeline.end_s.tolist() == [1.0, 1.5]
    assert timeline.route.tolist() == [0, 1]


def test_alternating_traffic_at_its_mean_share_takes_what_alternating_takes():
    """A pass whose collectives fill a third of it delays a transfer as if each in turn halved the rate."""
    mean = alone([1.0], Route(30.0, ((0, 1 / 3),)), Route(12.0, ((0, 1.0),)))
    graph = TaskGraph()
    last = NOTHING
    for _ in range(250):
        last = graph.add(Route(0.08), after=[last])
        last = graph.add(Route(0.04, ((0, 1.0),)), after=[last])
    transfer = graph.add(Route(12.0, ((0, 1.0),)))
    alternating = run(graph, [1.0], 1.0).end_s

    assert alternating[transfer] == pytest.approx(mean[1], rel=0.01)
    assert alternating[last] == pytest.approx(mean[0], rel=0.01)


def test_what_crosses_a_dead_link_never_ends():
    """Neither does what waits for it; everything else does."""
    graph = TaskGraph()
    dead = graph.add(Route(1.0, ((0, 1.0),)))
    after = graph.add(Route(1.0), after=[dead])
    other = graph.add(Route(1.0))
    end_s = run(graph, [0.0], 1.0).end_s

    assert math.isinf(end_s[dead])
    assert math.isinf(end_s[after])
    assert end_s[other] == 1.0


def test_a_circle_is_an_error():
    """Tasks that wait for each other are told, not waited for."""
    graph = TaskGraph()
    first = graph.add(Route(1.0))
    second = graph.add(Route(1.0), after=[first])
    graph.wait(first, second)

    with pytest.raises(ValueError, match="wait for each other"):
        run(graph, [], 1.0)
