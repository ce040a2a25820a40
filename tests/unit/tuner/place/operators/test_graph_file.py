"""Placement files of operators: what they mean, and how mistakes in them are told."""

import math

import pytest

from costmodels.operators.kernel_catalog import kernel_constants
from hardware.cluster_file import find_cluster
from hardware.device import GIB
from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError
from tests.support.settings.placements import PLACEMENTS
from tuner.place.operators.graph_file import read_operator_placement

FILE = """
cluster: {groups: [{name: rtx4090d, devices_per_host: 2}, {name: v100-pcie, devices_per_host: 2}]}
precision: fp16
links:
  - {devices: [0, 1], kind: nvlink, bandwidth_gb_per_s: 100, latency_us: 2, exclusive_group: a}
  - {devices: [0, 1], kind: pcie, bandwidth_gb_per_s: 16, latency_us: 2, exclusive_group: a}
graphs:
  one:
    weight: 3
    operators:
      last: {tflop: 2, moved_gib: 1, memory_gib: 2, inputs_gib: {middle: 0.5, start: 0.25}}
      start: {tflop: 4, moved_gib: 2, memory_gib: 1, splits: [{parts: 2, gather_gib: 0.5}]}
      middle: {seconds: {RTX4090D: 0.5}, memory_gib: 1, inputs_gib: {start: 0.5}}
      end: {tflop: 2, moved_gib: 4, inputs_gib: {last: 1.0}}
    fusions: [{first: last, second: end}]
  two:
    operators:
      start: {moved_gib: 1}
"""


def read(tmp_path, text):
    """Read a file of this text."""
    path = tmp_path / "placement.yaml"
    path.write_text(text, encoding="utf-8")
    return read_operator_placement(read_mapping(path), path)


def test_operators_stand_after_their_inputs_with_their_prices(tmp_path):
    """Operators are ordered by their inputs, and priced by a roofline or by measured seconds, else by inf."""
    found = read(tmp_path, FILE)
    workload = found.workload
    op = {name: at for at, name in enumerate(found.operators[:4])}
    device = find_cluster("v100-pcie").devices[0]
    constants = kernel_constants(device.name).matmul

    assert found.operators == ("start", "middle", "last", "end", "start")
    assert workload.model_of.tolist() == [0, 0, 0, 0, 1]
    assert workload.weights.tolist() == [3, 1]
    computed_s = 4e12 / (device.fp16_flop_per_s * constants.peak_share) + constants.latency_s
    assert workload.exec_s[op["start"], 2] == pytest.approx(computed_s)
    moved_s = GIB / (device.memory_bandwidth_bytes_per_s * constants.bandwidth_share) + constants.latency_s
    assert workload.exec_s[4, 3] == pytest.approx(moved_s)
    assert workload.exec_s[op["middle"]].tolist() == [0.5, 0.5, math.inf, math.inf]
    assert workload.memory_bytes.tolist() == [GIB, GIB, 2 * GIB, 0, 0]
    assert found.host_of == (0, 0, 1, 1)


def test_a_fusion_moves_less_and_a_split_gathers_over_the_best_link(tmp_path):
    """Fused operators neither write nor read what passes between them; parts are gathered over the widest link."""
    workload = read(tmp_path, FILE).workload
    (fusion,), (split,) = workload.fusions, workload.splits
    device = find_cluster("rtx4090d").devices[0]
    constants = kernel_constants(device.name).matmul
    moved_s = (1 + 4 - 2) * GIB / (device.memory_bandwidth_bytes_per_s * constants.bandwidth_share)
    computed_s = 4e12 / (device.fp16_flop_per_s * constants.peak_share)
    near = [link.link for link in workload.links if (link.source, link.target) == (0, 1)]

    assert fusion.exec_s[0] == pytest.approx(max(moved_s, computed_s) + constants.latency_s)
    assert fusion.memory_bytes == 2 * GIB
    assert [link.kind for link in near] == ["nvlink", "pcie"]
    widest = max(near, key=lambda link: link.bandwidth_bytes_per_s)
    assert split.gather_s[0][1] == pytest.approx(widest.latency_s + 0.5 * GIB / widest.bandwidth_bytes_per_s)
    assert split.gather_s[0][2] > split.gather_s[0][1]
    assert split.part_s[0] < workload.exec_s[0, 0]


def test_stated_links_replace_those_of_the_cluster_between_two_devices(tmp_path):
    """Devices 0 and 1 have the two stated links in either direction, and all other pairs one of the cluster."""
    links = read(tmp_path, FILE).workload.links
    count = {}
    for link in links:
        count[link.source, link.target] = count.get((link.source, link.target), 0) + 1

    assert count == {(a, b): 1 + ({a, b} == {0, 1}) for a in range(4) for b in range(4) if a != b}
    inside, across = (next(one.link for one in links if (one.source, one.target) == pair) for pair in ((2, 3), (1, 2)))
    assert inside.bandwidth_bytes_per_s > across.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{middle: 0.5, start", "{midle: 0.5, start", "graphs.one.operators.last.inputs_gib = 'midle'.*'middle'"),
        ("start: {tflop: 4,", "start: {inputs_gib: {last: 1}, tflop: 4,", "wait for each other: .*start -> "),
        ("RTX4090D: 0.5", "RTX4090: 0.5", "no device of the cluster; did you mean 'RTX4090D'"),
        ("{seconds: {RTX4090D", "{tflop: 1, seconds: {RTX4090D", "middle.tflop = 1.0: is not used where `seconds`"),
        ("start: {moved_gib: 1}", "start: {memory_gib: 1}", "graphs.two.operators.start: takes no time"),
        ("memory_gib: 2, inputs", "memory_gib: 70, inputs", "last.memory_gib = 70.0: fits on no device: 70 GiB"),
        ("parts: 2", "parts: 5", "splits.0.parts = 5: are more than there are devices; at most 4"),
        ("parts: 2, gather_gib: 0.5}", "parts: 2}, {parts: 2}", "second split into as many parts"),
        ("second: end", "second: ends", "fusions.0.second = 'ends': is no operator; did you mean 'end'"),
        ("second: end", "second: middle", "does not take the results of last"),
        ("{first: last, second: end}", "{first: start, second: last}", "also waits for start by way of middle"),
        ("{first: last, second: end}", "{first: start, second: middle}", "fusions.0.seconds: is required"),
        ("[0, 1], kind: pcie", "[0, 9], kind: pcie", "links.1.devices = 9: is no device of the cluster; 0 to 3"),
        ("[0, 1], kind: pcie", "[1, 1], kind: pcie", "a link joins two devices"),
        ("{name: rtx4090d, devices_per_host: 2}", "{name: rtx4090d, hosts: 3}", "has 26 devices; .* at most 16"),
        ("precision: fp16", "precision: fp8", "has no known peak on V100"),
        ("devices_per_host: 2}]}", "devices_per_host: 2}], switch: {hosts: 1, uplink_gb_per_s: 9}}", "cluster.switch"),
        ("last: {tflop", "last: {same_device_as: strat, tflop", "last.same_device_as = 'strat': is no other operator"),
        ("last: {tflop", "last: {same_device_as: last, tflop", "last.same_device_as = 'last': is no other operator"),
        ("weight: 3", "weight: 0", "graphs.one.weight"),
        ("weight: 3", "wight: 3", "did you mean 'weight'"),
    ],
)
def test_a_mistake_is_named(tmp_path, old, new, message):
    """A wrong value is one ConfigError with its file, its key and what would be valid."""
    assert old in FILE
    with pytest.raises(ConfigError, match=message) as found:
        read(tmp_path, FILE.replace(old, new, 1))

    assert found.value.file == str(tmp_path / "placement.yaml")


def test_operators_that_name_each_other_share_a_device(tmp_path):
    """Whoever names whom, all that are joined are one set, without operators of other graphs with the same name."""
    text = FILE.replace("last: {tflop", "last: {same_device_as: start, tflop")
    text = text.replace("end: {tflop", "end: {same_device_as: last, tflop")
    found = read(tmp_path, text)

    assert [[found.operators[op] for op in mates] for mates in found.workload.mates] == [["start", "last", "end"]]
    assert found.workload.mates == ((0, 2, 3),)


def test_too_many_operators_are_refused(tmp_path):
    """More operators than the search can handle are refused by their number."""
    many = "\n".join(f"      op{at}: {{moved_gib: 1}}" for at in range(60))
    with pytest.raises(ConfigError, match="have 65 operators together; at most 64"):
        read(tmp_path, FILE.rstrip() + "\n" + many + "\n")


def test_too_many_links_are_refused(tmp_path):
    """More links between two devices than the search can combine are refused."""
    link = "  - {devices: [1, 0], kind: pcie, bandwidth_gb_per_s: 16, latency_us: 2}\n"
    with pytest.raises(ConfigError, match="devices 0 and 1 have 6 links; at most 5"):
        read(tmp_path, FILE.replace("graphs:", 4 * link + "graphs:"))


def test_ready_files_of_operators_are_read():
    """Each ready file of operators is a workload whose name and devices are those of its name."""
    paths = [path for path in PLACEMENTS.glob("*.yaml") if "graphs" in read_mapping(path)]

    assert paths
    for path in paths:
        found = read_operator_placement(read_mapping(path), path)
        assert path.stem == found.name
        assert path.stem.endswith(f"-{found.workload.num_devices}")
