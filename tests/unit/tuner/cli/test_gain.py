import pytest

BASELINE = "pp=1,tp=2,dp=4,cp=1,up=1,vpp=1,ep=1,mbs=1"
"""Of the measured rows that are predicted to fit, the one with the least tp and pp."""


@pytest.mark.usefixtures("no_ray")
def test_every_command_tells_the_gain_over_the_baseline(meshtune, replay, tmp_path):
    """run, status, best and the report name the baseline and the gain over it, and no current configuration's."""
    options = (replay, "--set", "search.baseline=true")

    ran = meshtune("run", *options)
    told = [meshtune(command, *options, "--json").json for command in ("run", "status", "best")]
    shown = {command: meshtune(command, *options).out for command in ("status", "best")}
    meshtune("report", *options, "--out", "report.html")

    line = f"1.053x as fast as the baseline ({BASELINE}, 1 s)"
    assert line in ran.out
    assert line in shown["status"]
    assert "1.053x as fast as the baseline" in shown["best"]
    for payload in told:
        assert payload["gain_over_baseline"] == pytest.approx(1.0 / 0.95)
        assert payload["gain_over_current"] is None
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "over the baseline" in report
    assert ">baseline</span>" in report


@pytest.mark.usefixtures("no_ray")
def test_without_either_nothing_is_compared(meshtune, replay):
    """A replayed study without a current configuration is compared with nothing unless it asks for a baseline."""
    ran = meshtune("run", replay, "--trials", 1, "--json").json

    assert (ran["gain_over_current"], ran["gain_over_baseline"]) == (None, None)
