import pytest

from hardware.cluster_file import cluster_names
from hardware.io.errors import ConfigError
from hardware.named_cluster import name_cluster

RACK = {"devices_per_host": 4, "hosts_per_domain": 18}


@pytest.mark.parametrize(
    ("words", "keys", "devices", "hosts"),
    [
        ("dgx-h100", {"name": "dgx-h100"}, None, None),
        ("DGX H100", {"name": "dgx-h100"}, None, None),
        ("H100", {"device": "H100-SXM-80"}, None, None),
        ("64x H100", {"device": "H100-SXM-80"}, 64, None),
        ("64xH100", {"device": "H100-SXM-80"}, 64, None),
        ("64 x H100-80GB", {"device": "H100-SXM-80"}, 64, None),
        ("16 x AMD Instinct MI300X", {"device": "MI300X"}, 16, None),
        ("8 x dgx-h100", {"name": "dgx-h100"}, None, 8),
        ("mi300x", {"name": "mi300x"}, None, None),
        ("gb200-nvl72", {"name": "gb200-nvl72"} | RACK, None, None),
        ("256x GB300", {"device": "GB300"} | RACK, 256, None),
    ],
)
def test_words_name_hosts(words, keys, devices, hosts):
    """A cluster of the catalog, a device, a number of devices, or a number of a cluster's hosts."""
    named = name_cluster(words)

    assert (named.keys, named.devices, named.hosts) == (keys, devices, hosts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dgx-h10", "is no cluster and no device of the catalog; did you mean 'dgx-h100'"),
        ("64x GB20", "is no cluster and no device of the catalog; did you mean 'GB200'"),
        ("0x H100", "names no devices; 1x H100"),
        ("64x", "is no cluster"),
        ("", "is no cluster"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest(words, message):
    """The message has the rule and the nearest name."""
    with pytest.raises(ConfigError, match=message):
        name_cluster(words)


def test_a_host_is_what_an_operating_system_sees():
    """No named host is a whole rack, and hosts of one cluster fill its domains."""
    for name in cluster_names():
        host = name_cluster(name).with_hosts()
        assert host.devices_per_host <= 64, name
        assert host.num_hosts == 1
    assert name_cluster("gb300-nvl72").with_hosts(18).devices_per_domain == 72
