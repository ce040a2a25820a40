import math
import re

import pytest


def test_prediction_adds_up(meshtune, simulated):
    """The parts of `predict` sum to the step time, and those of the memory to the peak."""
    done = meshtune("predict", simulated, "--config", "pp=2,tp=2,dp=2", "--json")

    assert done.status == 0, done.err
    told = done.json
    assert sum(told["breakdown_s"].values()) == pytest.approx(told["step_time_s"], rel=1e-9)
    assert sum(told["memory_bytes"].values()) == pytest.approx(told["peak_memory_bytes"], rel=1e-9)
    assert told["tokens_per_s_per_device"] == pytest.approx(4096 * 16 / (8 * told["step_time_s"]))
    assert 0 < told["mfu"] < 1
    assert told["fits"] is True


def test_a_prediction_tells_its_uncertainty(meshtune, simulated):
    """`predict` gives the 95% range around the step time and the memory, and the probability that it fits."""
    told = meshtune("predict", simulated, "--config", "tp=8", "--json").json
    shown = meshtune("predict", simulated, "--config", "tp=8").out

    low_s, high_s = told["step_time_range_s"]
    assert low_s < told["step_time_s"] < high_s
    assert high_s / low_s > math.exp(4 * told["step_time_log_error"])
    assert 0 < told["step_time_from_cluster"] < told["step_time_log_error"]
    assert told["peak_memory_log_error"] > 0
    assert 0 <= told["fit_probability"] <= 1
    assert re.search(
        r"^  [\d.]+ to [\d.]+ s with probability 95%, mostly for (a cluster that no fit has seen|the constant \w+) \(",
        shown,
        re.M,
    )
    assert re.search(r"^  [\d.]+ to [\d.]+ GiB with probability 95%; probability of fit [\d.]+$", shown, re.M)


def test_prediction_in_words(meshtune, simulated):
    """`predict` repeats the whole configuration, and gives times, shares and memory with their units."""
    shown = meshtune("predict", simulated, "--config", "tp=8,recompute=full").out

    assert shown.startswith("Predicted for pp=1,tp=8,dp=1,cp=1,up=1,vpp=1,ep=1,mbs=1,recompute=full\n")
    assert re.search(r"^[\d.]+ s per step, [\d,]+ tokens/s per device, MFU [\d.]+%$", shown, re.M)
    assert re.search(r"^  compute +[\d.]+ s +[\d.]+%$", shown, re.M)
    assert re.search(r"^[\d.]+ GiB of 79\.1 GiB per device: fits \(8% must stay free\)$", shown, re.M)


def test_prediction_outside_the_searched_space(meshtune, simulated):
    """What the study does not search can be predicted, with a note on stderr that names the rule."""
    done = meshtune("predict", simulated, "--config", "tp=8", "--set", "space.tp=[1, 2]", "--json")

    assert done.status == 0
    assert done.json["step_time_s"] > 0
    assert done.err == "note: space.tp: the study allows tp only 1, 2\n"


@pytest.mark.parametrize(
    ("change", "part"),
    [("recompute=full", "activations"), ("zero_stage=0", "optimizer"), ("sequence_parallel=false", "activations")],
)
def test_prediction_knows_the_further_dimensions(meshtune, simulated, change, part):
    """Further dimensions are given by their names, also where the study does not open them."""
    base, other = (
        meshtune("predict", simulated, "--config", config, "--json").json
        for config in ("tp=4,dp=2", f"tp=4,dp=2,{change}")
    )

    assert other["memory_bytes"][part] != base["memory_bytes"][part]


def test_the_step_without_a_profile_stands_beside(meshtune, simulated):
    """It is what the same study predicts with `runtime: unknown`."""
    told, unnamed = (
        meshtune("predict", simulated, "--config", "tp=8", *more, "--json").json
        for more in ((), ("--set", "runtime=unknown"))
    )
    shown = meshtune("predict", simulated, "--config", "tp=8").out

    assert told["unnamed_step_time_s"] == pytest.approx(unnamed["step_time_s"])
    assert told["unnamed_step_time_s"] != told["step_time_s"]
    assert f"  {told['unnamed_step_time_s']:.3g} s under `runtime: unknown`" in shown
