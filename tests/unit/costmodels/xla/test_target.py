"""Descriptions of devices for XLA's compiler."""

from dataclasses import replace

from costmodels.xla.target import target_of
from hardware.cluster_file import find_cluster


def test_figures_are_those_of_the_device_and_its_generation():
    """An H100: its own bandwidth, memory and multiprocessors, and XLA's figures of compute capability 9.0."""
    device = find_cluster("dgx-h100").devices[0]
    found = target_of(device)

    assert f"core_count: {device.num_sms} " in found
    assert f"device_memory_size: {device.memory_bytes} " in found
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in found
    assert "shared_memory_per_block_optin: 232448" in found


def test_an_unknown_generation_has_no_description():
    """Without a capability, figures of it, or the number of multiprocessors, nothing is made up."""
    device = find_cluster("dgx-h100").devices[0]

    assert target_of(replace(device, name="MI300X")) is None
    assert target_of(replace(device, name="L40S")) is None
    assert target_of(replace(device, num_sms=None)) is None
