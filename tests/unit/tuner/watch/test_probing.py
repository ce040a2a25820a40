"""Probe of a watch on a network that is known: when it measures, what it finds, and what it tells."""

from tests.support.simulated_network import SimulatedNetwork
from tuner.watch.hosts import Seat
from tuner.watch.link_shares import Links, Steps
from tuner.watch.probing import Probing


def seats(*names):
    """Places with these nodes; an empty name is a lost one."""
    return [Seat(node=name.strip("-"), identity="", is_lost=name.startswith("-")) for name in names]


def probing(network, told, *, every_s=0.0, links=None):
    """A probe of a network whose clock is the number of probes until now."""
    return Probing(
        network, every_s=every_s, links=links or Links(), on_trouble=told.append, clock=lambda: network.clock_s
    )


def test_it_measures_when_it_is_time():
    """A probe measures at first, and again when the interval has passed, but not while a change is being answered."""
    network = SimulatedNetwork()
    one = probing(network, [], every_s=10.0)
    counts = []
    for clock_s, may_measure in ((0.0, False), (1.0, True), (10.0, True), (11.0, False), (12.0, True), (13.0, True)):
        network.clock_s = clock_s
        one.look(seats("a", "b"), may_measure)
        counts.append(network.num_probes)

    assert counts == [0, 1, 1, 1, 2, 2]


def test_a_slow_host_is_found_and_found_to_be_back():
    """A host at a tenth is named after as many probes as have to agree, and is whole again as many after it is fast."""
    network, found = SimulatedNetwork(), []
    one = probing(network, [])
    for share in (1.0, 1.0, 0.1, 0.1, 1.0, 1.0):
        network.share_of_host["b"] = share
        found.append(one.look(seats("a", "b", "c", "d"), True))

    assert found == [{}, {}, {}, {(1,): 0.1}, {(1,): 0.1}, {}]


def test_a_lost_host_keeps_its_share_and_another_node_has_none():
    """The share of a node stays with it while it is lost, and does not pass to the node that takes its place."""
    network = SimulatedNetwork()
    one = probing(network, [])
    for share in (1.0, 1.0, 0.1, 0.1):
        network.share_of_host["b"] = share
        one.look(seats("a", "b", "c"), True)

    assert one.look(seats("a", "-b", "c"), True) == {(1,): 0.1}
    assert one.look(seats("a", "d", "c"), True) == {}
    assert one.look(seats("d", "a", "b"), False) == {(2,): 0.1}


def test_a_slow_path_is_measured_until_it_is_fast_again():
    """A path that was slow while its hosts were neighbours is measured when they are none any more."""
    network = SimulatedNetwork()
    one = probing(network, [])
    path = frozenset(("a", "c"))
    for share in (1.0, 1.0, 0.1, 0.1):
        network.share_of_path[path] = share
        slow = one.look(seats("a", "-b", "c", "d"), True)
    kept = one.look(seats("a", "b", "c", "d"), True)
    network.share_of_path[path] = 1.0
    fast, measured = [], []
    for _ in range(3):
        fast.append(one.look(seats("a", "b", "c", "d"), True))
        measured.append(("a", "c") in network.last_pairs)

    assert slow == kept == {(0, 2): 0.1}
    assert fast == [{(0, 2): 0.1}, {}, {}]
    assert measured == [True, True, False]


def test_trouble_is_told_once():
    """A host that does not answer is told once, and again if it has answered in between; its links are not guessed."""
    network, told, counts = SimulatedNetwork(), [], []
    one = probing(network, told)
    for silent in ([], [], ["b"], ["b"], ["b", "c"], [], ["b"]):
        network.silent = {*silent}
        found = one.look(seats("a", "b", "c", "d"), True)
        counts.append(len(told))
        assert found == {}

    assert counts == [0, 0, 1, 1, 2, 2, 3]
    assert told[0] == "the links of b cannot be probed: gave no answer"


def test_a_single_host_is_not_probed():
    """One host that stands has no neighbour, and nothing is sent."""
    network = SimulatedNetwork()
    assert probing(network, []).look(seats("a", "-b"), True) == {}
    assert network.num_probes == 0


def test_another_process_goes_on():
    """A probe with the links of an earlier one needs no new reference, and counts what that one has seen."""
    network = SimulatedNetwork()
    first = probing(network, [])
    for share in (1.0, 1.0, 0.1):
        network.share_of_host["b"] = share
        first.look(seats("a", "b", "c"), True)
    second = probing(network, [], links=first.links)

    assert Steps().repeats == 2
    assert second.look(seats("a", "b", "c"), True) == {(1,): 0.1}
