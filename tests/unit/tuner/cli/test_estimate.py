import pytest

from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import assert_users_mistake, write_replay


def test_a_training_takes_its_steps_times_the_step_time(meshtune, simulated):
    """A training of a million steps takes a million times the predicted step, on as many devices as the study has."""
    per_step = meshtune("estimate", simulated, "--tokens", "1e12", "--json").json
    predicted = meshtune("predict", simulated, "--config", "tp=8", "--json").json

    current, best = per_step["trainings"]

    assert (current["label"], best["label"]) == ("current", "best")
    steps = current["seconds"] / current["step_time_s"]
    assert current["step_time_s"] == pytest.approx(predicted["step_time_s"])
    assert current["seconds_range"] == pytest.approx([steps * step_s for step_s in predicted["step_time_range_s"]])
    assert current["device_hours"] == pytest.approx(current["devices"] * current["seconds"] / 3600)
    saved = current["device_hours"] * (1 - 1 / per_step["gain_over_current"])
    assert per_step["saved_device_hours"] == pytest.approx(saved)
    low, high = per_step["saved_device_hours_interval"]
    assert low < current["device_hours"] - best["device_hours"] < high


def test_the_best_says_which_limits_it_breaks(meshtune, simulated):
    """Under limits of a study `best` tells time and cost of its tokens, and by how much they are more than allowed."""
    options = ("--set", "limits={tokens: 1e12, max_days: 1, max_cost: 1e9}", "--set", "cost.price_per_device_hour=2")
    told = meshtune("best", simulated, *options, "--json").json["training"]

    assert told["breaks"] == ["max_days"]
    assert told["cost"] == pytest.approx(2 * told["device_hours"])
    over = told["seconds"] / 86_400 - 1
    assert f"USD: {over:.0%} more than 1 days" in meshtune("best", simulated, *options).out
    assert meshtune("best", simulated, "--json").json["training"] is None


def test_step_times_that_were_measured_count(meshtune, finished):
    """After trials a training's time is that of the measured step, and no range is given; the saving says that it is
    not the mere ratio of those.
    """
    study, storage, _ = finished

    told = meshtune("estimate", study, "--tokens", "300B", "--storage", storage, "--json").json
    shown = meshtune("estimate", study, "--tokens", "300B", "--storage", storage).out

    best = meshtune("best", study, "--storage", storage, "--json").json
    assert told["tokens"] == 300e9
    assert [training["source"] for training in told["trainings"]] == ["measured", "measured"]
    assert told["trainings"][-1]["step_time_s"] == best["step_time_s"]
    assert told["trainings"][-1]["seconds_range"] is None
    assert told["gain_over_current"] != told["measured_gain"]
    assert "\nBy all trials together, the best saves " in shown


def test_other_sizes_are_predicted(meshtune, simulated):
    """With `--hosts` there is one training for each number of hosts, the same as `rank --hosts` predicts."""
    told = meshtune("estimate", simulated, "--tokens", "15T", "--hosts", "2,1", "--json").json
    ranked = meshtune("rank", simulated, "--hosts", "2,1", "--json").json["sizes"]

    assert [size["label"] for size in told["sizes"]] == ["2", "1"]
    assert [size["step_time_s"] for size in told["sizes"]] == [size["step_time_s"] for size in ranked]
    assert "Best on other numbers of hosts" in meshtune("estimate", simulated, "--tokens", "15T", "--hosts", "2,1").out


@pytest.mark.parametrize("tokens", ["many", "0", "-1e9", "nan", "inf", "1Q", "T", ""])
def test_tokens_are_a_number(meshtune, simulated, tokens):
    """Text that is no number of tokens is a mistake of the user's."""
    assert_users_mistake(meshtune("estimate", simulated, f"--tokens={tokens}"), "--tokens", "number of tokens")


def test_nothing_fits(meshtune, hopeless):
    """Where nothing fits, `estimate` ends 1."""
    done = meshtune("estimate", hopeless, "--tokens", "1e9", "--json")

    assert (done.status, done.json["trainings"]) == (1, [])


def test_an_estimate_is_held_to_the_studys_limits(meshtune, tmp_path):
    """With limits in the study its tokens need no option, costs follow from its price, and broken limits are named."""
    path = tmp_path / "study.yaml"
    limits = "{tokens: 1e9, max_days: 1000, max_cost: 0.01}"
    path.write_text(study(current="{tp: 8}", cost="{price_per_device_hour: 2}", limits=limits), encoding="utf-8")

    told, shown = meshtune("estimate", path, "--json"), meshtune("estimate", path)

    assert told.json["tokens"] == 1e9
    for training in told.json["trainings"]:
        assert training["cost"] == pytest.approx(2 * training["device_hours"])
        assert training["breaks"] == ["max_cost"]
    assert "cost [USD]" in shown.out
    assert shown.out.count("max_cost") == len(told.json["trainings"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_every_answer_says_which_limits_the_best_breaks(meshtune, tmp_path):
    """run, status, best, export and the report tell in words and as JSON that the best breaks a limit; the first three
    also that it keeps all, and that limits are not checked where nobody has said the tokens.
    """
    path = write_replay(tmp_path)
    limits = ("--set", "limits={tokens: 1e12, max_days: 30, max_cost: 1e9}", "--set", "cost.price_per_device_hour=2")
    commands = ("run", "status", "best")

    told = [meshtune(command, path, *limits, "--json").json["training"] for command in commands]
    shown = [meshtune(command, path, *limits).out for command in commands]
    exported = meshtune("export", path, "--to", "json", *limits, "--json").json["notes"]
    meshtune("report", path, *limits, "--out", "report.html")

    over = told[0]["seconds"] / 86_400 / 30 - 1
    words = f"{over:.0%} more than 30 days, which breaks limits.max_days"
    assert [training["breaks"] for training in told] == [["max_days"]] * 3
    for out in (*shown, "\n".join(exported), (tmp_path / "report.html").read_text(encoding="utf-8")):
        assert words in out
    kept = ("--set", "limits={tokens: 1e12, max_days: 9999}")
    unchecked = ("--set", "limits={max_days: 9999}")
    for command in commands:
        assert "within the limits" in meshtune(command, path, *kept).out
        assert (
            "limits.max_days: not checked, because limits.tokens is not given"
            in meshtune(command, path, *unchecked).out
        )
