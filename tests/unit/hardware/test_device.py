import pickle
from itertools import chain

import pytest

from hardware.device import CATALOG, PRECISIONS, device_names, find_device, find_devices
from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError

# The spellings of the published measurements that the project ships and is judged by.
# fmt: off
MEASURED = (
    "A100-SXM-80", "A100-SXM-40", "A100-PCIe-80", "A100-PCIe-40", "V100-SXM-32", "V100-SXM-16", "V100-PCIe-32",
    "V100-PCIe-16", "V100-PCIe", "A800-SXM-80", "H100-SXM-80", "H100-PCIe-80", "H800-SXM-80", "H20", "H200-SXM",
    "GB200", "B200", "GB300", "B300", "L40S", "L20", "RTX4090", "RTX4090D", "P100-SXM", "MI300X", "MI325X",
    "MI355X", "Ascend-910A", "Ascend-910B", "GH200-96", "T4-16", "RTX3090", "TitanRTX", "TPU-v3", "TPU-v3-core",
    "TPU-v4", "TPU-v5e", "TPU-v5p", "TPU-v6e", "RTX-2080", "RTX-3090", "Titan-RTX",
    "Gaudi2", "Gaudi3", "Trainium1", "Trainium2", "MI250X", "H100-NVL", "RTX-PRO-6000", "TPU7x",
)
# fmt: on
MEASURED_WITH_REMARKS = (
    "H100-96GB-HBM2e-500W (Grand Teton)",
    "Ascend-910B (A2)",
    "Ascend-910B (800T A2)",
    "Ascend-910B (900 A2 PoDc)",
    "Ascend-A3 (910C, per die)",
    "RTX2080 (variant not stated)",
    "TPU-v6e (Trillium)",
    "B200 (README row says H200 for the tp2+pp4 70B line; text says B200)",
)


def numbers_of(entry):
    """Every `{value: ...}` of a catalog, at any depth."""
    if isinstance(entry, dict):
        return [entry] if "value" in entry else list(chain.from_iterable(map(numbers_of, entry.values())))
    return list(chain.from_iterable(map(numbers_of, entry))) if isinstance(entry, list) else []


def test_every_measured_spelling_is_one_device():
    """Each spelling of the measured files names one device, and so one pair with an open count."""
    for name in (*MEASURED, *MEASURED_WITH_REMARKS):
        assert find_devices(name) == ((0, find_device(name)),), name


@pytest.mark.parametrize("name", device_names())
def test_every_device_is_usable(name):
    """Every device has a peak, memory, bandwidths, links and a source of each figure, and pickles to itself."""
    device = find_device(name)
    sources = dict(device.sources)

    slower = 1000 if name == "cpu-core" else 1  # the least of an accelerator, in which a core has no part

    assert device.name == name
    assert device.peak_flop_per_s("bf16") == device.peak_flop_per_s("fp16") > 1e13 / slower
    assert 4e9 / slower < device.memory_bytes < 4e11
    assert 1e11 / slower < device.memory_bandwidth_bytes_per_s < 3e13
    assert device.scale_up.bandwidth_bytes_per_s >= device.scale_out.bandwidth_bytes_per_s
    assert device.devices_per_host >= 1
    assert pickle.loads(pickle.dumps(device)) == device  # noqa: S301 our own bytes
    assert hash(device) == hash(find_device(name))
    assert {"memory_gib", "scale_up.bandwidth_gb_per_s", "scale_out.latency_us"} <= set(sources)
    assert all(text.endswith(("(high)", "(medium)", "(low)", "(assumed)")) for text in sources.values())


@pytest.mark.parametrize("catalog", ["devices.yaml", "clusters.yaml"])
def test_every_catalog_number_has_a_source(catalog):
    """No number stands in a catalog without a known source, an honest confidence, and no source is unused."""
    mapping = read_mapping(CATALOG / catalog)
    numbers = numbers_of(mapping)

    assert numbers
    assert {number["source"] for number in numbers} == set(mapping["sources"])
    for number in numbers:
        assumed = mapping["sources"][number["source"]].startswith("assumed")
        assert not (assumed and number["confidence"] == "high"), number


def test_spellings_and_remarks_name_a_device():
    """Case, spaces and dashes do not matter; a known remark names its own device, an unknown one is ignored."""
    spellings = ("RTX4090D", "rtx-4090-d", "GeForce RTX 4090 D", "rtx_4090d")

    assert {find_device(spelling).name for spelling in spellings} == {"RTX4090D"}
    assert find_device("Ascend-910B (900 A2 PoDc)") != find_device("Ascend-910B")
    assert find_device("Ascend-910B (800T A2)") == find_device("Ascend-910B (in a shed)") == find_device("Ascend-910B")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80"),
        ("NVIDIA H100 NVL", "H100-NVL-94"),
        ("H100-94GB", "H100-NVL-94"),
        ("H100 (94 GiB)", "H100-NVL-94"),
        ("H100-94GB (NVL)", "H100-NVL-94"),
        ("H100 SXM5 94GB", "H100-SXM-94"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32"),
        ("NVIDIA GH200 480GB", "GH200-96"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("MI325_OAM", "MI325X"),
        ("Ascend 910C", "Ascend-A3"),
        ("Ascend910_9382", "Ascend-A3"),
        ("Ascend 950", "Ascend-950DT"),
        ("VR NVL144", "VR200"),
    ],
)
def test_drivers_and_their_users_spell_devices_in_many_ways(spelling, name):
    """What nvidia-smi, amd-smi and logs print is a device: with the vendor, the memory and its kind, or the board."""
    assert find_device(spelling).name == name


def test_a_tpu_core_is_half_a_chip():
    """A TPU v3 core has half the peak, memory and bandwidth of its chip."""
    core, chip = find_device("TPU-v3-core"), find_device("TPU-v3")

    assert core.peak_flop_per_s("bf16") * 2 == chip.peak_flop_per_s("bf16")
    assert core.memory_bandwidth_bytes_per_s * 2 == chip.memory_bandwidth_bytes_per_s
    assert core.memory_bytes * 2 == pytest.approx(chip.memory_bytes, abs=2)


# Published for a whole host: AWS Trn1 (3,040 TFLOP/s, 512 GiB) and 16 chips of Trainium2, four modules of MI250X, four
# chips of TPU7x.
@pytest.mark.parametrize(
    ("name", "devices", "host_tflops", "host_gib"),
    [
        ("Trainium1", 32, 3040, 512),
        ("Trainium2", 64, 16 * 667, 16 * 96),
        ("MI250X", 8, 4 * 383, 4 * 128),
        ("Ironwood", 8, 4 * 2307, 4 * 192),
    ],
)
def test_a_device_is_what_frameworks_see_as_one(name, devices, host_tflops, host_gib):
    """The cores or dies that are ranks of their own add up to the published peak and memory of their host."""
    device = find_device(name)

    assert device.devices_per_host == devices
    assert device.peak_flop_per_s("bf16") * devices == pytest.approx(host_tflops * 1e12, rel=0.001)
    assert device.memory_bytes * devices == pytest.approx(host_gib * 2**30, rel=0.015)


def test_mixed_devices_are_counted():
    """`mixed:` lists counts and names in order."""
    found = find_devices("mixed:24xRTX-2080+8xV100+16xTitan-RTX")

    assert [(count, device.name) for count, device in found] == [(24, "RTX2080"), (8, "V100-SXM-32"), (16, "TitanRTX")]


@pytest.mark.parametrize("text", ["mixed:", "mixed:8V100", "mixed:0xV100", "mixed:8xV100+", "mixed:8xH1000", "", "()"])
def test_an_unreadable_device_is_the_users_mistake(text):
    """What names no device ends in one ConfigError, never in another exception."""
    with pytest.raises(ConfigError):
        find_devices(text)


def test_bf16_falls_back_to_fp16():
    """A V100 has no bf16, so a job that says bf16 runs at its fp16 peak."""
    v100 = find_device("V100-SXM-32")

    assert v100.bf16_flop_per_s is None
    assert v100.peak_flop_per_s("bf16") == v100.fp16_flop_per_s == 125e12


def test_missing_units_and_unknown_names_are_told_apart():
    """An unknown device gets a suggestion, fp8 on an A100 what the A100 has, and fp9 the precisions there are."""
    a100 = find_device("A100-SXM-80")

    with pytest.raises(ConfigError, match=r"device = 'H10O-SXM-80': is not a known device; did you mean 'H100-SXM-80'"):
        find_device("H10O-SXM-80")
    with pytest.raises(ConfigError, match=r"no known peak on A100-SXM-80; use one of: bf16, fp16, tf32, fp32"):
        a100.peak_flop_per_s("fp8")
    with pytest.raises(ConfigError, match=", ".join(sorted(PRECISIONS))):
        a100.peak_flop_per_s("fp9")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100-94GB", "H100-NVL-94"),
        ("H100-94G", "H100-NVL-94"),
        ("H100-NVL", "H100-NVL-94"),
        ("NVIDIA H100 80GB SXM5", "H100-SXM-80"),
        ("H100-96G", "H100-96GB-HBM2e-500W"),
        ("H20-96GB", "H20"),
        ("H200-141", "H200-SXM"),
        ("A100-40GB", "A100-SXM-40"),
        ("A100-40G", "A100-SXM-40"),
        ("A100-40GB-PCIe", "A100-PCIe-40"),
        ("A100-80GB-SXM", "A100-SXM-80"),
        ("A100 SXM (80 GiB)", "A100-SXM-80"),
        ("V100-32G", "V100-SXM-32"),
        ("T4-16GB", "T4-16"),
        ("RTX-4090-24GB", "RTX4090"),
        ("MI300X-192", "MI300X"),
        ("MI250X-64GB", "MI250X-GCD"),
        ("B200-180", "B200"),
        ("B200-183GB", "B200"),
        ("B200-SXM-192GB", "B200"),
        ("GB200-186", "GB200"),
        ("Ascend-910B-64GB", "Ascend-910B"),
        ("HGX-H200", "H200-SXM"),
    ],
)
def test_the_size_of_the_memory_may_stand_anywhere_in_a_name(written, name):
    """Another place or unit of the memory, or none, is the same device."""
    assert find_device(written).name == name


@pytest.mark.parametrize("written", ["H100-72GB", "H20-141GB", "GH200-144GB", "A800-40GB", "MI250X-128GB", "L4-24GB"])
def test_another_size_of_memory_is_another_device(written):
    """A name with a memory that no known device of this kind has is refused, and never taken for a sibling."""
    with pytest.raises(ConfigError, match="is not a known device"):
        find_device(written)
