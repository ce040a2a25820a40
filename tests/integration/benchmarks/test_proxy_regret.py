"""The benchmark of proxies: which runs stand for which candidates, what it counts, and its command line."""

import json

import numpy as np
import pytest

from benchmarks.calibration import proxy_regret
from benchmarks.support.problems import groups_of, problem_of, read_runs

LAYOUTS = ((8, 1, 1), (8, 1, 2), (4, 1, 1), (4, 1, 2), (4, 2, 1), (4, 2, 2), (2, 2, 1), (2, 2, 2), (2, 1, 4))
"""tp, pp and mbs of the runs; dp fills the devices."""


def runs_on(devices, *, without=()):
    """Runs on so many devices: larger tp and smaller mbs take longer."""
    return [
        {
            "devices": devices,
            "gbs": 256,
            "tp": tp,
            "pp": pp,
            "mbs": mbs,
            "dp": devices // (tp * pp),
            "step_seconds": (1 + 0.2 * np.log2(tp) + 0.1 * (mbs == 1)) * 64 / devices,
        }
        for tp, pp, mbs in LAYOUTS
        if (tp, pp, mbs) not in without
    ]


def pairs_in(path):
    """The pairs of the file's groups."""
    groups, _ = groups_of(read_runs([path])[0], 2)
    return proxy_regret.pairs_of(groups)


def test_the_sibling_is_the_largest_on_a_quarter_of_the_devices(write):
    """A group on 64 devices has that on 16 as sibling, one on 32 has that on 8, and the smaller ones have none."""
    path = write("runs.csv", *(run for devices in (8, 16, 32, 64) for run in runs_on(devices)))

    found = {pair.group.runs[0].devices: pair.sibling.runs[0].devices for pair in pairs_in(path)}

    assert found == {32: 8, 64: 16}


def test_a_proxy_keeps_all_but_pp_and_dp(write):
    """Each candidate is answered by a run with its tp and mbs and the nearest pp; one that nobody ran has no proxy."""
    path = write("runs.csv", *runs_on(64), *runs_on(16, without=[(4, 2, 1), (2, 2, 2)]))

    (pair,) = pairs_in(path)

    found = dict(zip([run.config for run in pair.group.runs], pair.proxies, strict=True))
    for config, proxy in found.items():
        if (config.tp, config.mbs) == (2, 2):
            assert proxy is None
            continue
        expected_pp = 1 if (config.tp, config.mbs) == (4, 1) else config.pp
        assert (proxy.config.tp, proxy.config.mbs, proxy.config.pp) == (config.tp, config.mbs, expected_pp)
        assert proxy.config.num_devices == 16
        assert pair.outcomes[proxy].step_time_s is not None


def test_a_proxy_must_probably_fit(write):
    """A run needing more memory than the sibling's devices have is no proxy there, as in a study; a smaller one is."""
    (pair,) = pairs_in(write("runs.csv", *runs_on(64), *runs_on(16)))

    kept = proxy_regret.that_fit(pair, problem_of(pair.group, ()))

    found = {
        (run.config.tp, run.config.pp, run.config.mbs): proxy
        for run, proxy in zip(kept.group.runs, kept.proxies, strict=True)
    }
    assert found[2, 1, 4] is None
    assert found[8, 1, 1] is not None


def test_only_the_last_trials_use_all_devices(write):
    """A run has at most the proxies that are allowed, then three different candidates at full size."""
    (pair,) = pairs_in(write("runs.csv", *runs_on(64), *runs_on(16)))

    smaller, at_full_size = proxy_regret.run_with_proxies(pair, problem_of(pair.group, ()), 4, seed=0)

    assert 1 <= len(smaller) <= 4
    assert {proxy.config.num_devices for proxy in smaller} == {16}
    assert len(set(at_full_size)) == len(at_full_size) == proxy_regret.AT_FULL_SIZE


def test_it_prints_one_object(write, capsys):
    """With --json standard output holds one object, with the regret of each way on each group and over all."""
    path = write("runs.csv", *runs_on(64), *runs_on(16))

    status = proxy_regret.main(
        ["--measured", str(path), "--seeds", "1", "--min-candidates", "2", "--workers", "1", "--json"]
    )

    told = json.loads(capsys.readouterr().out)
    assert status == 0
    (group,) = told["groups"]
    assert (group["devices"], group["sibling_devices"]) == (64, 16)
    assert 0 < group["num_with_proxy"] <= len(LAYOUTS)
    assert set(group["mean_regret"]) == {
        *("extrapolated", "proxies", "all_at_full_size", "predicted", "prior", "random")
    }
    hours = group["mean_device_hours"]
    assert 0 < hours["extrapolated"] < hours["proxies"]
    # three trials on 64 devices take 60 s to start and seven steps each; the smaller jobs cost besides
    assert hours["proxies"] - hours["extrapolated"] == pytest.approx(3 * 64 * (60 + 7 * 1.3) / 3600, rel=0.1)
    assert group["share_of_device_hours"]["proxies"] == hours["proxies"] / hours["all_at_full_size"]
    assert all(regret >= 0 for regret in group["mean_regret"].values())
    assert told["overall"]["mean_regret"] == group["mean_regret"]
