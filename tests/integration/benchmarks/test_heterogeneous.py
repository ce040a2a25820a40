"""The benchmark of unlike devices: what its figures mean, on its smallest case."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.heterogeneous import (
    CASES,
    EVEN,
    MODELS,
    STUDIES,
    at_bandwidth,
    bands,
    first_of_rank,
    undivided_s,
    unlike,
    works_s,
)
from tests.support.benchmark_runs import json_of
from tuner.study_file.config import load_study

ONE_HOST_OF_EACH = (
    "cluster.groups=[{name: rtx4090d, hosts: 1}, {name: v100-pcie, hosts: 1}]",
    "job.global_batch_size=64",
)
"""A quarter of the hosts and of the batch."""


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.assumption)
def test_uneven_work_gains_no_more_than_if_nothing_waited(case):
    """Uneven work is no slower than equal layers; bf16 at the fp32 rate makes V100 far slower, and the gain larger."""
    row = unlike(replace(case, overrides=(*case.overrides, *ONE_HOST_OF_EACH)), "llama-7b")

    assert 1.0 <= row["gain"] <= row["bound"]
    assert (row["r"] > 5) == case.emulates_bf16
    assert (row["gain"] > 1.74) == case.emulates_bf16


def test_the_even_row_is_what_rank_prints_first():
    """The step of equal layers is the first of `meshtune rank --set space.assignment=[]` on the same file."""
    study = STUDIES / "llama-7b-4090d-l20.yaml"
    printed = json_of("tuner", "rank", study, "--set", EVEN, "--top", "1", "--json")
    seconds, config = first_of_rank(CASES[0].config("llama-7b", EVEN))

    assert seconds == pytest.approx(printed["configs"][0]["step_time_s"])
    assert config.assignment.layers == ()


def test_every_figure_has_its_studies():
    """Each model has a study for either pair of devices and one for figure 6c, all of equal work for each device."""
    names = {path.stem for path in STUDIES.glob("*.yaml")}
    work = {
        config.problem.setting.job.global_batch_size / config.problem.setting.cluster.num_devices
        for config in (load_study(path) for path in STUDIES.glob("*.yaml"))
    }

    assert len(names) == 3 * len(MODELS)
    assert {f"{model}-{case.hosts}" for model in MODELS for case in CASES} < names
    assert work == {4.0}


def test_work_that_is_divided_perfectly_takes_half_as_long_on_two_equal_halves():
    """Two kinds of hosts of one speed do what one does in half the time, with nothing waiting."""
    alike = CASES[0].config("llama-7b", EVEN).problem.setting
    group = alike.cluster.groups[0]
    alike = replace(alike, cluster=replace(alike.cluster, groups=(group, replace(group, name="other"))))
    _, config = first_of_rank(CASES[0].config("llama-7b", EVEN))
    first_s, second_s = works_s(alike, config)
    cells = config.num_devices / (config.tp * config.cp * config.up)

    whole_s = alike.job.global_batch_size / config.mbs * first_s
    assert second_s == first_s
    assert undivided_s(alike, config, (first_s, first_s)) == pytest.approx(whole_s / cells)


def test_bandwidth_is_scaled_inside_hosts_and_between():
    """Half of a cluster's bandwidth is half of each of its links, and all of it is the cluster as it was."""
    path = STUDIES / "gpt-13b-v100-16.yaml"
    nominal = load_study(path).problem.setting.cluster
    full, half = (
        load_study(path, overrides=at_bandwidth(nominal, share)).problem.setting.cluster.groups[0]
        for share in (1.0, 0.5)
    )

    for links in ("intra_links", "nic_links"):
        before, same, after = (getattr(group, links)[0] for group in (nominal.groups[0], full, half))
        assert same.bandwidth_bytes_per_s == pytest.approx(before.bandwidth_bytes_per_s)
        assert after.bandwidth_bytes_per_s == pytest.approx(before.bandwidth_bytes_per_s / 2)
        assert (after.latency_s, after.sharers) == (pytest.approx(before.latency_s), before.sharers)


def test_bands_lie_between_the_bandwidths_that_frame_them():
    """Costs of 60%, 20% and 0% at 1, 4 and 16 times the bandwidth pass 52% and 25% between 1 and 4."""
    rows = [
        {"model": "m", "bandwidth": share, "cost": cost, "anew": 0.1} for share, cost in ((1, 0.6), (4, 0.2), (16, 0.0))
    ]
    (found,) = bands(rows)
    narrow, wide = map(float, found["25% to 52%"].split(" to "))

    assert narrow == pytest.approx(2 ** np.interp(0.08, [0, 0.4], [0, 2]), rel=0.05)
    assert 1 < narrow < wide < 4
    (steep,) = bands([row | {"cost": row["cost"] + 1} for row in rows])
    assert steep["2% to 8%"] == "not reached"
