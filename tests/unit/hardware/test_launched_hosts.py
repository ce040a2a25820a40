from pathlib import Path

from hardware.cluster_file import cluster_from_mapping
from hardware.launched_hosts import launched, launched_numbers


def spelled(**keys):
    """A cluster of GB200."""
    return cluster_from_mapping({"name": "gb200-nvl72", **keys}, Path())


def test_a_rack_is_launched_host_by_host():
    """A study that counts a domain as one host launches the hosts of four devices that it consists of."""
    racks = spelled(hosts=4, devices_per_host=64)

    started = launched(racks)

    assert started == spelled(hosts=64, devices_per_host=4, hosts_per_domain=16)
    assert started.rank_domain().tolist() == racks.rank_host().tolist()
    assert launched_numbers(racks, (2, 0)) == (*range(32, 48), *range(16))
    assert launched_numbers(racks, ()) == tuple(range(64))


def test_other_hosts_are_launched_as_they_are():
    """Hosts of four, eight devices of a board, and numbers that make no hosts stay as the study has them."""
    for cluster in (
        spelled(hosts=64, devices_per_host=4),
        spelled(hosts=2, devices_per_host=6),
        cluster_from_mapping({"name": "dgx-h100", "hosts": 3}, Path()),
        cluster_from_mapping({"groups": [{"name": "dgx-h100"}, {"device": "A100", "hosts": 2}]}, Path()),
    ):
        assert launched(cluster) is cluster
        assert launched_numbers(cluster, (1, 0)) == (1, 0)
