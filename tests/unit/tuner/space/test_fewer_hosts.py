"""Layouts that leave hosts idle: their prices, their rules, and the search against all subsets of a few hosts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping
from tests.oracles.host_subsets import best_on, subsets
from tests.support.settings.random_clusters import slowed_clusters
from tests.support.settings.random_settings import grid_of, job_of, setting_for
from tuner.space.enumeration import SpaceOptions, broken_rules, build_space, launchable
from tuner.space.fewer_hosts import IDLE_HOSTS

FEWER = SpaceOptions(opened=("assignment",), uneven=(IDLE_HOSTS,))
EVEN = SpaceOptions(opened=("assignment",))


def mixed(*kinds, devices=2):
    """A cluster of small hosts of these kinds and numbers."""
    groups = [{"name": name, "hosts": hosts, "devices_per_host": devices} for name, hosts in kinds]
    return cluster_from_mapping({"groups": groups}, Path())


FOUR_AND_TWO = mixed(("dgx-h100", 2), ("v100-pcie", 4))


def hosts_of(cluster):
    """The hosts of a cluster one by one: what each is, and its network where networks are joined."""
    networks = cluster.networks or range(len(cluster.groups))
    return [
        (replace(group, hosts=1), network if cluster.inter_group_links else 0)
        for group, network in zip(cluster.groups, networks, strict=True)
        for _ in range(group.hosts)
    ]


@given(slowed_clusters(), st.data())
def test_a_part_of_a_cluster_has_the_listed_hosts_in_their_order(cluster, data):
    """Each listed host keeps its devices, links and network, and a slow pair stays where both of its hosts do."""
    hosts = data.draw(st.lists(st.sampled_from(range(cluster.num_hosts)), min_size=1, unique=True))
    part = cluster.reordered(hosts)
    every = hosts_of(cluster)

    assert hosts_of(part) == [every[host] for host in hosts]
    slow = {(frozenset((pair.first_host, pair.second_host)), pair.share) for pair in cluster.slow_pairs}
    kept = {(frozenset((hosts[pair.first_host], hosts[pair.second_host])), pair.share) for pair in part.slow_pairs}
    assert kept == {(pair, share) for pair, share in slow if pair <= set(hosts)}


@pytest.mark.parametrize("hosts", [(0, 1), (3, 0), (2, 5, 0, 4)])
def test_hosts_left_out_are_as_if_they_were_not_there(hosts):
    """Time, memory and simulation are those of the cluster of the listed hosts alone."""
    job, even = job_of(num_layers=8, batch=16), ParallelConfig(pp=2, tp=2, dp=len(hosts) // 2, mbs=2)
    whole, part = setting_for(job, FOUR_AND_TWO), setting_for(job, FOUR_AND_TWO.reordered(hosts))
    listed = replace(even, assignment=Assignment(hosts=hosts))

    (there_s,), (alone_s,) = (
        estimate_step(setting, grid_of(config)).step_time_s for setting, config in ((whole, listed), (part, even))
    )
    assert there_s == pytest.approx(alone_s, rel=1e-12)
    there, alone = (estimate_memory(*given) for given in ((whole, grid_of(listed)), (part, grid_of(even))))
    assert there.peak_bytes.tolist() == alone.peak_bytes.tolist()
    assert there.capacity_bytes.tolist() == alone.capacity_bytes.tolist()
    assert simulate_step(whole, listed).step_time_s == simulate_step(part, even).step_time_s


def test_the_devices_are_those_of_the_listed_hosts():
    """The rule on devices counts the listed hosts alone, and a host that does not exist is refused."""
    setting = setting_for(job_of(num_layers=8, batch=16), FOUR_AND_TWO)
    on_two, on_three, beyond = (
        ParallelConfig(pp=2, tp=2, assignment=Assignment(hosts=hosts)) for hosts in ((0, 3), (0, 1, 2), (0, 6))
    )

    assert launchable(setting, on_two)
    assert "devices" not in broken_rules(setting, FEWER, on_two)
    assert not launchable(setting, on_three)
    assert "6 devices" in broken_rules(setting, FEWER, on_three)["devices"]
    assert not launchable(setting, beyond)
    assert "some of the 6 hosts" in broken_rules(setting, FEWER, beyond)["assignment"]


@st.composite
def small_mixed_settings(draw):
    """Draw two kinds of one to three hosts, each with its own network, and a small job."""
    names = draw(st.lists(st.sampled_from(["dgx-h100", "dgx-a100", "v100-pcie", "rtx4090d"]), min_size=2, max_size=2))
    nics = draw(st.lists(st.sampled_from([0.5, 3.0, 25.0, 50.0]), min_size=2, max_size=2))
    groups = [
        {
            "name": name,
            "hosts": draw(st.integers(1, 3)),
            "devices_per_host": 2,
            "nic_links": [{"kind": "infiniband", "bandwidth_gb_per_s": nic, "latency_us": 4}],
        }
        for name, nic in zip(names, nics, strict=True)
    ]
    job = job_of(num_layers=8, batch=draw(st.sampled_from([12, 24, 60])), sequence_length=2048)
    return setting_for(replace(job, precision="fp16"), cluster_from_mapping({"groups": groups}, Path()))


@pytest.mark.slow
@given(small_mixed_settings())
@settings(max_examples=10)
def test_the_search_finds_the_best_subset_of_a_few_hosts(setting):
    """With even work the fastest candidate is the fastest over all subsets of the hosts, and its price the same."""
    space = build_space(setting, FEWER, current=None)
    fits = space.memory.fits(FEWER.memory_headroom)
    found_s = estimate_step(setting, space.grid, memory=space.memory).step_time_s[fits].min(initial=math.inf)
    best_s = min(best_on(setting, EVEN, hosts) for hosts in subsets(setting.cluster.num_hosts))

    assert found_s == pytest.approx(best_s, rel=1e-12)
