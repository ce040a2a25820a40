import json

import pytest

from tests.support.settings.placements import PLACEMENTS

FILE = str(PLACEMENTS / "ppo-7b-16.yaml")


def test_prints_a_placement_for_people(meshtune):
    """The table names every module, and the lines below it the step, the bound and the baselines."""
    told = meshtune("place", FILE, "--time-limit", "2")

    assert told.status == 0, told.err
    for word in ("rollout (generate", "actor (train", "lower bound", "colocated", "halves", "hosts 0-1"):
        assert word in told.out


def test_json_is_no_worse_than_its_baselines(meshtune, tmp_path):
    """The step of the answer is at most that of each baseline and at least the bound, and the trace is written."""
    trace = tmp_path / "step.json"
    told = meshtune("place", FILE, "--time-limit", "2", "--trace", str(trace), "--json")
    found = told.json

    assert found["lower_bound_s"] <= found["step_time_s"]
    steps_s = [one["step_time_s"] for one in found["baselines"] if one["step_time_s"] is not None]
    assert steps_s
    assert all(found["step_time_s"] <= other for other in steps_s)
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--time-limit", "0"], "--time-limit"),
        (["--gap", "much"], "--gap"),
        (["--export", "ver1"], "did you mean 'verl'"),
    ],
)
def test_a_wrong_option_is_named(meshtune, options, message):
    """An option that can't work is one message and status 2."""
    told = meshtune("place", FILE, *options)

    assert told.status == 2
    assert message in told.err


def test_says_where_nothing_fits(meshtune, tmp_path):
    """A model that fits on no set of devices is named, with status 2."""
    text = (PLACEMENTS / "ppo-7b-16.yaml").read_text(encoding="utf-8")
    path = tmp_path / "large.yaml"
    path.write_text(text.replace("qwen2.5-7b", "llama3-405b"), encoding="utf-8")
    told = meshtune("place", str(path), "--time-limit", "2")

    assert told.status == 2
    assert "modules.actor: fits on no set of up to 16 devices" in told.err
