import itertools

from hardware.host_choice import choose_hosts


def test_hosts_that_are_domains_are_taken_in_their_order():
    """Where links end at the host, the first hosts of the order stay."""
    order, rank = (3, 0, 1, 2), [1, 1, 1, 0]

    for count in range(1, 5):
        assert choose_hosts(order, rank, [0, 1, 2, 3], count) == order[:count]


def test_equally_many_hosts_of_few_domains_stay():
    """Racks of 3, 4 and 4 hosts give up the one that lost a host first, and then one host each."""
    domains = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    order, alike = range(11), [0] * 11

    assert choose_hosts(order, alike, domains, 8) == (3, 4, 5, 6, 7, 8, 9, 10)
    assert choose_hosts(order, alike, domains, 9) == (0, 1, 2, 3, 4, 5, 7, 8, 9)
    assert choose_hosts(order, alike, domains, 4) == (3, 4, 5, 6)
    assert choose_hosts(order, alike, domains, 7) == (0, 1, 2, 3, 4, 5, 6)  # a prime is more than any domain has


def test_no_choice_takes_a_worse_host():
    """A set never holds a host of a worse rank while one of a better rank is left out."""
    domains = [0, 0, 1, 1, 2, 2, 2]
    for rank in itertools.product((0, 1), repeat=7):
        order = tuple(sorted(range(7), key=rank.__getitem__))
        for count in range(1, 8):
            chosen = choose_hosts(order, list(rank), domains, count)

            assert len({*chosen}) == count
            assert sorted(rank[host] for host in chosen) == sorted(rank)[:count]
