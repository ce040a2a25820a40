import re
import signal

import pytest

from tests.support.studies.command_line import FASTEST
from tests.support.studies.in_process_executor import InProcessExecutor


def test_run_prints_one_json_object_and_its_progress_elsewhere(finished):
    """`run --json` on a replay ends 0, its stdout is one object with the promised keys, and stderr shows the trials."""
    _, storage, done = finished

    assert done.status == 0, done.err
    assert done.json["best"] == FASTEST
    assert done.json["step_time_s"] == 0.95
    assert done.json["tokens_per_s_per_device"] == pytest.approx(4096 * 16 / (0.95 * 8))
    assert done.json["source"] == "measured"
    assert done.json["measured_gain"] == pytest.approx(1.5 / 0.95)
    assert done.json["gain_over_current"] == pytest.approx(1.5 / 0.95, rel=0.02)
    assert done.json["study_name"] == "replayed"
    assert done.json["storage"] == storage
    assert re.search(r"\d+/40 trials, best 0\.95 s", done.err)
    assert "trial 0   current (tp=8)" in done.err


def test_run_again_tells_the_result_for_people(finished, meshtune):
    """The same command on a finished study runs nothing, and prints the best, how it compares, and Megatron's flags."""
    path, storage, before = finished

    done = meshtune("run", path, "--storage", storage)

    assert done.status == 0, done.err
    assert f"Tried {before.json['trials']} of 12 candidates" in done.out
    assert "Best: pp=1,tp=2,dp=4,cp=1,up=1,vpp=1,ep=1,mbs=2\n" in done.out
    assert "0.95 s per step" in done.out
    assert "(measured)" in done.out
    assert f"{before.json['gain_over_current']:.3f}x as fast as the current configuration (1.5 s); 1.5" in done.out
    assert "the fastest of all 12 measured rows" in done.out
    assert "--tensor-model-parallel-size 2" in done.out


def test_status_of_a_finished_study(finished, meshtune):
    """`status` repeats what `run` counted, as JSON and for people."""
    path, storage, run = finished

    told, shown = (meshtune("status", path, "--storage", storage, *more) for more in (("--json",), ()))

    assert (told.status, shown.status) == (0, 0)
    for key in ("trials", "failed", "p_star", "stop_reason", "study_name", "gain_over_current", "gain_over_baseline"):
        assert told.json[key] == run.json[key]
    assert (told.json["running"], told.json["best_step_time_s"]) == (0, 0.95)
    assert f"{run.json['trials']} trials, {run.json['failed']} failed; stopped: " in shown.out
    assert shown.out.count("out of memory: ") == min(run.json["failed"], 3)
    assert "pp=1,tp=2,dp=4" in shown.out


def test_best_of_a_finished_study_is_the_measured_one(finished, meshtune):
    """`best` names the fastest trial, says that it was measured, and how it compares with the current one."""
    path, storage, run = finished

    told, shown = (meshtune("best", path, "--storage", storage, *more) for more in (("--json",), ()))

    assert told.json == {
        "config": FASTEST,
        "step_time_s": 0.95,
        "idle_hosts": None,
        "source": "measured",
        "clock": "wall",
        "extrapolated": False,
        "gain_over_current": run.json["gain_over_current"],
        "gain_over_current_interval": run.json["gain_over_current_interval"],
        "gain_over_baseline": None,
        "gain_over_baseline_interval": None,
        "measured_gain": pytest.approx(1.5 / 0.95),
        "reference": {"role": "current", "known": "measured", "reason": None, "step_time_s": 1.5},
        "training": None,
        "taught_by_trials": run.json["trials"],
        "looked_in": storage.removeprefix("sqlite:///"),
    }
    assert "(measured)" in shown.out


def test_report_of_a_finished_study_is_written(finished, meshtune, tmp_path):
    """`report` writes one HTML file and tells where."""
    path, storage, _ = finished

    done = meshtune("report", path, "--storage", storage, "--out", tmp_path / "r.html", "--json")

    assert done.status == 0, done.err
    assert done.json == {"written": str(tmp_path / "r.html")}
    assert "<html" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_export_of_a_finished_study(finished, meshtune, tmp_path):
    """`export` prints the best configuration's flags, or writes just them to a file."""
    path, storage, _ = finished
    chosen = ("export", path, "--storage", storage, "--to", "megatron")

    told, shown, written = meshtune(*chosen, "--json"), meshtune(*chosen), meshtune(*chosen, "--out", "flags.sh")

    assert (told.status, shown.status, written.status) == (0, 0, 0)
    assert "--tensor-model-parallel-size 2" in told.json["text"]
    assert shown.out == told.json["text"] == (tmp_path / "flags.sh").read_text(encoding="utf-8")
    assert written.out == ""


@pytest.mark.usefixtures("no_ray")
def test_run_in_a_world_of_the_event_simulator(meshtune, simulated):
    """A study whose trials the event simulator answers runs like any other."""
    world = "trial={backend: simulated, fidelity: simulator, seed: 3}"

    done = meshtune("run", simulated, "--trials", 1, "--set", world, "--json")

    assert done.status == 0, done.err
    assert (done.json["trials"], done.json["failed"], done.json["source"]) == (1, 0, "synthetic")


@pytest.mark.usefixtures("no_ray")
def test_options_of_run_replace_keys_of_the_study(meshtune, simulated):
    """`--trials`, `--seed` and `--set` win over the study file."""
    done = meshtune("run", simulated, "--trials", 1, "--seed", 7, "--set", "trial.backend=simulated", "--json")

    assert done.status == 0, done.err
    assert done.json["trials"] == 1
    assert done.json["stop_reason"] == "max_trials"
    assert done.json["source"] == "synthetic"


@pytest.mark.usefixtures("no_ray")
def test_an_interrupted_run_says_so_and_keeps_what_it_has(meshtune, monkeypatch, replay):
    """Ctrl-C ends a run with status 130; its JSON holds what was found until then."""
    monkeypatch.setattr(InProcessExecutor, "poll", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))

    done = meshtune("run", replay, "--json")

    assert done.status == 130
    assert done.json["stop_reason"] == "interrupted"
    assert done.err.endswith("meshtune: interrupted\n")


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=lambda number: number.name)
def test_run_that_is_told_to_end_gives_its_claim_up_and_goes_on_later(meshtune, monkeypatch, replay, number):
    """A batch system's signals end a run with status 75; the study is free, and the same command completes it."""
    poll = InProcessExecutor.poll
    monkeypatch.setattr(InProcessExecutor, "poll", lambda *_: signal.raise_signal(number))

    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    told = meshtune("run", replay, "--json")
    signal.signal(number, before)
    monkeypatch.setattr(InProcessExecutor, "poll", poll)
    done = meshtune("run", replay, "--json")

    assert (told.status, told.json["stop_reason"]) == (75, "interrupted")
    assert told.err.endswith("meshtune: told to end; the same command goes on\n")
    assert (done.status, done.json["stop_reason"]) == (0, "confident")


@pytest.mark.usefixtures("no_ray")
def test_run_under_nohup_is_not_ended_by_the_end_of_its_terminal(meshtune, monkeypatch, replay):
    """SIGHUP stays ignored if it was when the run began."""
    poll = InProcessExecutor.poll

    def hang_up(*arguments):
        signal.raise_signal(signal.SIGHUP)
        return poll(*arguments)

    monkeypatch.setattr(InProcessExecutor, "poll", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert meshtune("run", replay, "--json").status == 0
    finally:
        signal.signal(signal.SIGHUP, before)
