"""Answers for operators, against an exhaustive search of small files."""

import numpy as np
import pytest

from hardware.io.config_file import parse_yaml
from tests.oracles.schedule_check import violations
from tests.oracles.schedule_exhaustive import schedule_exhaustively
from tuner.place.operators.answer import check_answer, place_operators, used_bytes
from tuner.place.operators.graph_file import read_operator_placement
from tuner.place.operators.timeline import events_of

CLUSTER = """
groups:
  - {name: rtx4090d, devices_per_host: 1, nic_links: [{kind: infiniband, bandwidth_gb_per_s: 25, latency_us: 5}]}
  - name: v100-pcie
    devices_per_host: 1
    nic_links: [{kind: infiniband, bandwidth_gb_per_s: 25, latency_us: 5}]
"""


def random_file(rng):
    """Draw a file of four operators of one or two models, with a split, a fusion and exclusive links."""
    graphs = {}
    for name, count in zip("ab", ((4,), (2, 2))[rng.integers(2)], strict=False):
        operators = {}
        for at in range(count):
            takes = {f"op{before}": float(rng.uniform(0.05, 0.5)) for before in range(at) if rng.random() < 0.6}
            operators[f"op{at}"] = {
                "tflop": float(rng.uniform(1, 8)),
                "moved_gib": float(rng.uniform(0.5, 8)),
                "memory_gib": float(rng.uniform(1, 9)),
                "inputs_gib": takes,
            }
        operators["op0"]["splits"] = [{"parts": 2, "gather_gib": float(rng.uniform(0, 0.3))}]
        fusions = [{"first": "op0", "second": "op1"}] if "op0" in operators["op1"]["inputs_gib"] else []
        graphs[name] = {"operators": operators, "fusions": fusions, "weight": float(rng.uniform(0.5, 2))}
    links = [
        {"devices": [0, 1], "kind": kind, "bandwidth_gb_per_s": rate, "latency_us": 3, "exclusive_group": "one"}
        for kind, rate in (("nvlink", 25), ("pcie", 12))
    ]
    return {"cluster": parse_yaml(CLUSTER), "precision": "fp16", "graphs": graphs, "links": links}


@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_the_best_of_all_schedules(tmp_path, seed):
    """With no gap allowed, the cost is that of trying every schedule, nothing is broken, and no baseline is better."""
    placement = read_operator_placement(random_file(np.random.default_rng(seed)), tmp_path / "file.yaml")
    answer = place_operators(placement, time_s=60, gap=0)
    best = schedule_exhaustively(placement.workload)

    check_answer(answer)
    assert answer.is_proven
    assert answer.outcome.best.cost == pytest.approx(best.cost_s(placement.workload), rel=1e-9)
    assert violations(placement.workload, answer.schedule) == []
    assert [one.name for one in answer.baselines] == ["one device", "heft", "highs"]


def test_memory_counts_each_device_of_a_split_and_both_ends_of_a_transfer(tmp_path):
    """Two halves of an operator take half each, and data that are sent take memory where they are made and used."""
    mapping = {
        "cluster": {"name": "v100-pcie", "devices_per_host": 2},
        "precision": "fp16",
        "graphs": {
            "one": {
                "operators": {
                    "a": {"tflop": 100.0, "memory_gib": 4.0, "splits": [{"parts": 2}]},
                    "b": {"tflop": 100.0, "memory_gib": 1.0, "inputs_gib": {"a": 0.5}},
                    "c": {"tflop": 100.0, "memory_gib": 1.0, "inputs_gib": {"a": 0.25}},
                }
            }
        },
    }
    placement = read_operator_placement(mapping, tmp_path / "file.yaml")
    schedule = place_operators(placement, time_s=10, gap=0).schedule
    home = schedule.devices()
    used = used_bytes(placement.workload, schedule) / 2**30
    events = events_of(placement, schedule)

    assert home[1] != home[2]
    sent = 0.25 if home[1] == home[0] else 0.5
    assert sorted(used.tolist()) == pytest.approx(sorted([2 + 1 + 0.75, 2 + 1 + sent]))
    assert len([event for event in events if event.name == "a"]) == 2
    assert [event.devices for event in events if event.kind == "send"] == [(home[0], 1 - home[0])]
