from pathlib import Path

import pytest

from hardware.cluster_file import cluster_from_mapping
from hardware.io.errors import ConfigError
from tuner.imports import IMPORTERS
from tuner.study_file.cluster_keys import StatedHosts, check_formats, cluster_keys

RACK = {"devices_per_host": 4, "hosts_per_domain": 18}


@pytest.mark.parametrize(
    ("words", "stated", "keys"),
    [
        ("dgx-h100", {"hosts": 8, "devices_per_host": 8}, {"name": "dgx-h100", "hosts": 8}),
        ("dgx-h100", {"hosts": 8, "devices_per_host": 4}, {"name": "dgx-h100", "hosts": 8, "devices_per_host": 4}),
        ("dgx-h100", {"devices": 32}, {"name": "dgx-h100", "hosts": 4}),
        ("dgx-h100", {"devices": 2}, {"name": "dgx-h100", "hosts": 1, "devices_per_host": 2}),
        ("dgx-h100", {}, {"name": "dgx-h100", "hosts": 1}),
        ("H100", {"hosts": 2}, {"device": "H100-SXM-80", "hosts": 2}),
        ("64x H100", {"devices": 8}, {"device": "H100-SXM-80", "hosts": 8}),
        ("64xH100", {"hosts": 8, "devices_per_host": 8}, {"device": "H100-SXM-80", "hosts": 8}),
        ("64xH100", {"devices_per_host": 4}, {"device": "H100-SXM-80", "hosts": 16, "devices_per_host": 4}),
        ("4x H100", {}, {"device": "H100-SXM-80", "hosts": 1, "devices_per_host": 4}),
        ("4 x dgx-h100", {}, {"name": "dgx-h100", "hosts": 4}),
        ("gb200-nvl72", {"hosts": 64, "devices_per_host": 4}, {"name": "gb200-nvl72", "hosts": 64} | RACK),
        ("256x GB300", {}, {"device": "GB300", "hosts": 64} | RACK),
        (
            "GB300",
            {"hosts": 32, "devices_per_host": 4, "segment": 8},
            {"device": "GB300", "hosts": 32, "devices_per_host": 4, "hosts_per_domain": 8},
        ),
    ],
)
def test_words_and_hosts_become_keys(words, stated, keys):
    """Hosts are what is launched: a script's number, that of the words, or as many as the configuration needs."""
    found = cluster_keys(words, StatedHosts(**stated), Path())

    assert found == keys
    cluster_from_mapping(found, Path())


@pytest.mark.parametrize(
    ("words", "stated", "message"),
    [
        ("dgx-h10", {}, "--cluster = 'dgx-h10': is no cluster and no device .*did you mean 'dgx-h100'"),
        ("8xH100", {"hosts": 64, "devices_per_host": 4}, "states 8 devices, but the configuration starts 64 x 4"),
        ("20x H100", {}, "states 20 devices, but the configuration starts 8 on each host"),
        ("GB200", {"hosts": 2, "devices_per_host": 8}, "has hosts of 4 devices, but .* starts 8 processes .*dgx-h100"),
        ("no.yaml", {}, "no.yaml: no such file"),
    ],
)
def test_words_that_contradict_the_hosts(words, stated, message):
    """Each mistake is one message with the words."""
    with pytest.raises(ConfigError, match=message):
        cluster_keys(words, StatedHosts(**stated), Path())


def test_a_file_describes_the_cluster(tmp_path):
    """A file is named where it has the hosts of the script; else its keys stand in the study with those hosts."""
    study = tmp_path / "studies"
    study.mkdir()
    file = tmp_path / "ours.yaml"
    file.write_text("device: H100\nhosts: 16\ntrace: down.csv\n", encoding="utf-8")
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text("groups: [{device: H100}, {device: A100}]\n", encoding="utf-8")

    assert cluster_keys(str(file), StatedHosts(hosts=16), study) == {"file": "../ours.yaml"}
    assert cluster_keys(str(mixed), StatedHosts(devices_per_host=8), study) == {"file": "../mixed.yaml"}
    assert cluster_keys(str(file), StatedHosts(hosts=2, devices_per_host=8), study) == {
        "device": "H100",
        "hosts": 2,
        "trace": "../down.csv",
    }
    with pytest.raises(ConfigError, match="describes other hosts than the configuration uses: hosts = 4 for 2"):
        cluster_keys(str(mixed), StatedHosts(hosts=4), study)
    file.write_text("device: H1000\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ours.yaml: device = 'H1000'"):
        cluster_keys(str(file), StatedHosts(), study)


@pytest.mark.parametrize(("device", "runs"), [("H100", False), ("B200", True), ("GB300", True), ("MI355X", True)])
def test_a_format_that_devices_lack_is_refused(device, runs):
    """MXFP8 needs Blackwell, or a device with fp4 units of another vendor: else every trial would die."""
    script = "torchrun pretrain_gpt.py --micro-batch-size 1 --num-layers 2 --fp8-format e4m3 --fp8-recipe mxfp8"
    imported = IMPORTERS["megatron"](script)
    cluster = cluster_from_mapping({"device": device, "hosts": 1}, Path())

    if runs:
        check_formats(imported, cluster)
    else:
        with pytest.raises(ConfigError, match="from Blackwell on, and the cluster has H100") as refused:
            check_formats(imported, cluster)
        assert (refused.value.key, refused.value.value) == ("--fp8-recipe", "mxfp8")
