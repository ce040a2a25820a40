"""The benchmark of studies on few hosts: what it runs, what that costs, and the regret of an extrapolated answer."""

import json

import pytest

from benchmarks.search import few_hosts


@pytest.mark.slow
def test_smaller_jobs_cost_the_devices_of_their_hosts(capsys):
    """Four trials on 8 devices cost a hundredth of as many on 512; every way answers with a regret of its own."""
    status = few_hosts.main(["--studies", "llama3-8b", "--seeds", "1", "--trials", "4", "--json"])

    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert status == 0
    assert set(rows) == {"alone", "proxies", "whole"}
    # four starts of a minute on 8 devices, and three of them on 512 in place of one
    start_h = 60 / 3600
    assert 4 * 8 * start_h < rows["alone"]["mean_device_hours"] < 4 * 8 * start_h * 4
    assert 3 * 512 * start_h < rows["proxies"]["mean_device_hours"] < 3 * 512 * start_h * 2
    assert rows["whole"]["share_of_device_hours"] == 1
    assert rows["alone"]["share_of_device_hours"] < 0.15
    for row in rows.values():
        assert row["mean_regret"] >= 0
        assert row["mean_trials"] == 4
