import pytest

from hardware.cluster_file import find_cluster
from hardware.device import device_names, find_device, power_limit_w
from hardware.power import cluster_power_w, idle_power_w

UNKNOWN = {
    *("Ascend-950DT", "Ascend-950PR", "Ascend-A3", "Trainium1-core", "Trainium2-core", "TPU-v5e", "TPU-v5p"),
    *("TPU-v6e", "TPU-v7-core", "VR200"),
}
"""Devices of which no public figure was found."""


def test_a_host_of_eight_h100_draws_what_was_measured():
    """A host that always computes draws the 8.4 kW that Latif et al. measured at most (arXiv 2412.08602, within 2%)."""
    assert cluster_power_w(find_cluster("dgx-h100"), 1.0) == pytest.approx(8400, rel=0.02)


def test_demanding_training_draws_three_quarters_of_the_hosts_rating():
    """Newkirk et al. (arXiv 2506.14551) find 76% of 10.2 kW; devices that wait a fifth of the time come within 5%."""
    assert cluster_power_w(find_cluster("dgx-h100"), 0.8) == pytest.approx(0.76 * 10_200, rel=0.05)


def test_waiting_and_idle_hosts_draw_less():
    """Power falls from computing over waiting to idle, and adds up over hosts."""
    one, three = find_cluster("dgx-a100"), find_cluster("dgx-a100", hosts=3)

    powers = [cluster_power_w(one, 1.0), cluster_power_w(one, 0.5), cluster_power_w(one, 0.0), idle_power_w(one)]

    assert powers == sorted(powers, reverse=True)
    assert len(set(powers)) == len(powers)
    assert cluster_power_w(three, 0.5) == pytest.approx(3 * powers[1])


@pytest.mark.parametrize("name", device_names())
def test_a_power_limit_is_known_or_said_to_be_unknown(name):
    """Every device has a limit of a few watts to 1.4 kW, or stands in the table of unknown ones."""
    limit_w = power_limit_w(find_device(name))

    assert (limit_w is None) == (name in UNKNOWN)
    assert limit_w is None or (1 if name == "cpu-core" else 60) < limit_w <= 1400


def test_an_unknown_limit_makes_no_power():
    """Where the catalog has no figure, the power is unknown rather than zero."""
    assert cluster_power_w(find_cluster("trn2"), 1.0) is None
    assert idle_power_w(find_cluster("trn2")) is None
