from pathlib import Path

import pytest

from hardware.cluster_file import cluster_from_mapping
from hardware.dynamics import hosts_alone
from tuner.subject.meaning import describe_cluster

AS_BEFORE = {"name", "device", "hosts", "devices_per_host", "intra_links", "nic_links"}


def spelled(**keys):
    """A cluster of GB200."""
    return cluster_from_mapping({"name": "gb200-nvl72", **keys}, Path())


@pytest.mark.parametrize(
    "keys",
    [
        {"hosts": 4, "devices_per_host": 64},
        {"hosts": 2},
        {"hosts": 1, "devices_per_host": 4},
        {"hosts": 64, "devices_per_host": 4, "hosts_per_domain": 1},
    ],
)
def test_hosts_that_are_domains_mean_what_they_meant(keys):
    """Studies from before there were domains of several hosts go on: no further field describes their cluster."""
    described = describe_cluster(spelled(**keys))

    assert set(described) == {"name", "groups", "inter_group_links"}
    assert set(described["groups"][0]) == AS_BEFORE


def test_domains_are_part_of_the_meaning():
    """Domains of several hosts are told apart from hosts, and those that lost a host from whole ones."""
    racks = spelled(hosts=8, devices_per_host=4, hosts_per_domain=4)
    torn = describe_cluster(hosts_alone(racks, (0, 2, 3, 4, 5, 6, 7)))

    assert describe_cluster(racks)["groups"][0]["hosts_per_domain"] == 4
    assert "domains" not in describe_cluster(racks)
    assert torn["domains"] == (0, 0, 0, 1, 1, 1, 1)
