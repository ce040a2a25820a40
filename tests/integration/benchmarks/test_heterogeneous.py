"""The benchmark of unlike devices: what its figures mean, on its smallest case."""

from dataclasses import replace

import pytest

from benchmarks.papers.heterogeneous import CASES, EVEN, STUDIES, first_of_rank, undivided_s, unlike, works_s
from tests.support.benchmark_runs import json_of

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
