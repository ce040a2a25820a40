import optuna
import pytest

from tests.support.studies.command_line import write_replay

BASELINE = "pp=1,tp=2,dp=4,cp=1,up=1,vpp=1,ep=1,mbs=1"
"""Of the measured rows that are predicted to fit, the one with the least tp and pp."""


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_every_command_tells_the_gain_over_the_baseline(meshtune, replay, tmp_path):
    """run, status, best and the report name the baseline and the gain over it, and no current configuration's."""
    options = (replay, "--set", "search.baseline=true")

    ran = meshtune("run", *options)
    told = [meshtune(command, *options, "--json").json for command in ("run", "status", "best")]
    shown = {command: meshtune(command, *options).out for command in ("status", "best")}
    meshtune("report", *options, "--out", "report.html")

    low, high = told[0]["gain_over_baseline_interval"]
    line = f"{told[0]['gain_over_baseline']:.3f}x as fast as the baseline ({BASELINE}, 1 s)"
    for out in (ran.out, *shown.values()):
        assert f"{line}; {low:.3f}x to {high:.3f}x with probability 90%" in out
    for payload in told:
        assert payload["measured_gain"] == pytest.approx(1.0 / 0.95)
        assert payload["gain_over_baseline"] == pytest.approx(1.0 / 0.95, rel=0.01)
        assert payload["gain_over_baseline_interval"] == [low, high]
        assert 1.0 < low < payload["gain_over_baseline"] < high < 1.12
        assert (payload["gain_over_current"], payload["gain_over_current_interval"]) == (None, None)
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "over the baseline" in report
    assert ">baseline</span>" in report


@pytest.mark.usefixtures("no_ray")
def test_without_either_nothing_is_compared(meshtune, replay):
    """A replayed study without a current configuration is compared with nothing unless it asks for a baseline."""
    ran = meshtune("run", replay, "--trials", 1, "--json").json

    assert (ran["gain_over_current"], ran["gain_over_baseline"]) == (None, None)


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_nothing_is_gained_over_a_current_configuration_that_does_not_run(meshtune, tmp_path):
    """Where the current configuration ran out of memory, every answer says so, and none has a gain, a saving or a
    training of it.
    """
    path = write_replay(tmp_path, current="{tp: 1, dp: 8}")
    said = "The current configuration does not run (it ran out of memory in trial 0): nothing is compared with it."

    ran = meshtune("run", path)
    shown = [
        meshtune(*command) for command in (("status", path), ("best", path), ("estimate", path, "--tokens", "1e12"))
    ]
    told = [meshtune(command, path, "--json").json for command in ("run", "status", "best")]
    estimate = meshtune("estimate", path, "--tokens", "1e12", "--json").json
    meshtune("report", path, "--out", "report.html")

    for done in (ran, *shown):
        assert said in done.out
        assert "x as fast as" not in done.out
        assert "saves" not in done.out
    for payload in (*told, estimate):
        assert (payload["gain_over_current"], payload["gain_over_current_interval"]) == (None, None)
        assert payload["reference"]["known"] == "failed"
    assert [training["label"] for training in estimate["trainings"]] == ["best"]
    assert estimate["saved_device_hours"] is None
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert said in report
    assert "You run" not in report


@pytest.mark.usefixtures("no_ray")
def test_a_low_confidence_stands_beside_the_gain(meshtune, tmp_path):
    """A search that ends early tells on the line of its gain how little it knows of what it did not try."""
    path = write_replay(tmp_path, current="{tp: 8}")

    ran, best = meshtune("run", path, "--trials", 2), meshtune("best", path)

    for done in (ran, best):
        (line,) = (line for line in done.out.splitlines() if "as fast as the current" in line)
        assert "that no untried configuration is faster" in line


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_a_study_from_before_has_the_measured_gain(meshtune, tmp_path):
    """Without a kept gain the ratio of measured steps is told, with no interval; to run the study again keeps one."""
    path = write_replay(tmp_path, current="{tp: 8}")
    meshtune("run", path)
    storage = f"sqlite:///{tmp_path / 'meshtune.db'}"
    study = optuna.load_study(study_name="replayed", storage=storage)
    study.set_user_attr("gain", None)

    before = meshtune("best", path, "--json").json
    meshtune("run", path)
    after = meshtune("best", path, "--json").json

    assert before["gain_over_current"] == before["measured_gain"]
    assert before["gain_over_current_interval"] is None
    assert after["gain_over_current_interval"][0] < after["gain_over_current"]
