import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import tuner.study
from tests.tuner.broken_studies import CASES, REPLAY, BrokenStudy, rows, study
from tests.tuner.in_process_executor import InProcessExecutor
from tuner.cli import app, main

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "configs" / "studies"
COMMANDS = tuple(command.name or command.callback.__name__ for command in app.registered_commands)

KEYS = {
    "run": {
        "best",
        "step_time_s",
        "tokens_per_s_per_device",
        "trials",
        "failed",
        "p_star",
        "stop_reason",
        "study_name",
        "storage",
    },
    "space": {"grid", "feasible", "removed"},
    "predict": {
        "step_time_s",
        "breakdown_s",
        "peak_memory_bytes",
        "memory_bytes",
        "fits",
        "mfu",
        "tokens_per_s_per_device",
        "step_time_log_error",
        "step_time_range_s",
        "peak_memory_log_error",
        "fit_probability",
    },
    "simulate": {
        "step_time_s",
        "breakdown_s",
        "peak_memory_bytes",
        "memory_bytes",
        "fits",
        "mfu",
        "tokens_per_s_per_device",
        "predicted_step_time_s",
        "schedule",
        "operator_events",
        "stages",
    },
    "rank": {"configs"},
    "status": {"study_name", "trials", "running", "failed", "best_step_time_s", "p_star", "stop_reason"},
    "best": {"config", "step_time_s", "source", "gain_over_expert"},
    "report": {"written"},
    "export": {"target", "text"},
}
"""The keys that DESIGN's command table promises of each command's JSON."""

MEASURED = (
    # pp, tp, dp, mbs, step time [s]; None failed
    (1, 8, 1, 1, 1.50),
    (1, 8, 1, 2, 1.40),
    (1, 8, 1, 4, 1.35),
    (1, 4, 2, 1, 1.20),
    (1, 4, 2, 2, 1.10),
    (1, 2, 4, 1, 1.00),
    (1, 2, 4, 2, 0.95),
    (1, 1, 8, 1, None),
    (1, 1, 8, 2, None),
    (2, 4, 1, 1, 1.60),
    (2, 2, 2, 1, 1.25),
    (8, 1, 1, 1, None),
)
FASTEST = {"pp": 1, "tp": 2, "dp": 4, "cp": 1, "up": 1, "vpp": 1, "ep": 1, "mbs": 2}


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """What stdout holds: one JSON object, and nothing else."""
        content = json.loads(self.out)
        assert isinstance(content, dict)
        return content


def measured_rows(measured=MEASURED) -> str:
    """A CSV file of runs, failed ones included."""
    return rows(
        *(
            {
                "pp": pp,
                "tp": tp,
                "dp": dp,
                "mbs": mbs,
                "seq_parallel": int(tp > 1),
                "step_seconds": step_time_s or "",
                "notes": "" if step_time_s else "FAILED: out of memory",
            }
            for pp, tp, dp, mbs, step_time_s in measured
        )
    )


def write_replay(folder: Path, measured=MEASURED, **changes: str) -> Path:
    """A study that replays `measured`, with its rows beside it."""
    (folder / "rows.csv").write_text(measured_rows(measured), encoding="utf-8")
    path = folder / "replay.yaml"
    path.write_text(study(REPLAY, name="replayed", **changes), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """The environment of a command that nobody has configured."""
    kept = {name: value for name, value in os.environ.items() if name not in {"MESHTUNE_STORAGE", "RAY_ADDRESS"}}
    return kept | {"PYTHONPATH": str(ROOT)}


def in_process(*arguments: object, cwd: Path, timeout_s: float = 60) -> Done:
    """The command as a user starts it, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tuner", *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Done(status=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch, tmp_path):
    """Every test works in an empty folder of its own, and nobody's settings reach it."""
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def meshtune(capsys, monkeypatch):
    """Runs a command line through `main` in this process."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["meshtune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Done(status=ended.value.code, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def no_ray(monkeypatch):
    """Trials run in this process, so that a test need not wait for Ray."""
    monkeypatch.setattr(tuner.study, "RayExecutor", lambda backend, **_options: InProcessExecutor(backend))


@pytest.fixture
def simulated(tmp_path) -> Path:
    """A small study that the cost model answers."""
    path = tmp_path / "study.yaml"
    path.write_text(study(name="small", expert="{tp: 8}"), encoding="utf-8")
    return path


@pytest.fixture
def hopeless(tmp_path) -> Path:
    """A study of a model that no configuration fits."""
    path = tmp_path / "hopeless.yaml"
    path.write_text(study(model="llama3-405b"), encoding="utf-8")
    return path


@pytest.fixture
def replay(tmp_path) -> Path:
    """A study of twelve measured rows, three of them failed."""
    return write_replay(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str, Done]:
    """The replay after a real run: its file, its storage, and how the run ended."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_replay(folder, expert="{tp: 8}")
    storage = f"sqlite:///{folder / 'done.db'}"
    return path, storage, in_process("run", path, "--storage", storage, "--json", cwd=folder, timeout_s=120)


def assert_users_mistake(done: Done, *words: str) -> None:
    """Status 2, one line on stderr that holds `words`, and nothing on stdout."""
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("meshtune: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


# A run, and what can be asked about it afterwards


def test_run_prints_one_json_object_and_its_progress_elsewhere(finished):
    """`run --json` on a replay ends 0, its stdout is one object with the promised keys, and stderr shows the trials."""
    _, storage, done = finished

    assert done.status == 0, done.err
    assert done.json.keys() >= KEYS["run"]
    assert done.json["best"] == FASTEST
    assert done.json["step_time_s"] == 0.95
    assert done.json["tokens_per_s_per_device"] == pytest.approx(4096 * 16 / (0.95 * 8))
    assert done.json["source"] == "measured"
    assert done.json["study_name"] == "replayed"
    assert done.json["storage"] == storage
    assert re.search(r"\d+/40 trials, best 0\.95 s", done.err)


def test_run_again_tells_the_result_for_people(finished, meshtune):
    """The same command on a finished study runs nothing, and prints the best, how it compares, and Megatron's flags."""
    path, storage, before = finished

    done = meshtune("run", path, "--storage", storage)

    assert done.status == 0, done.err
    assert f"Tried {before.json['trials']} of 12 candidates" in done.out
    assert "Best: pp=1,tp=2,dp=4,cp=1,up=1,vpp=1,ep=1,mbs=2\n" in done.out
    assert "0.95 s per step" in done.out
    assert "(measured)" in done.out
    assert "1.579x as fast as the expert's configuration (1.5 s)" in done.out
    assert "the fastest of all 12 measured rows" in done.out
    assert "--tensor-model-parallel-size 2" in done.out


def test_status_of_a_finished_study(finished, meshtune):
    """`status` repeats what `run` counted, as JSON and for people."""
    path, storage, run = finished

    told, shown = (meshtune("status", path, "--storage", storage, *more) for more in (("--json",), ()))

    assert (told.status, shown.status) == (0, 0)
    assert told.json.keys() >= KEYS["status"]
    for key in ("trials", "failed", "p_star", "stop_reason", "study_name"):
        assert told.json[key] == run.json[key]
    assert (told.json["running"], told.json["best_step_time_s"]) == (0, 0.95)
    assert f"{run.json['trials']} trials, {run.json['failed']} failed; stopped: " in shown.out
    assert "pp=1,tp=2,dp=4" in shown.out


def test_best_of_a_finished_study_is_the_measured_one(finished, meshtune):
    """`best` names the fastest trial, says that it was measured, and how it compares with the expert's."""
    path, storage, _ = finished

    told, shown = (meshtune("best", path, "--storage", storage, *more) for more in (("--json",), ()))

    assert told.json == {
        "config": FASTEST,
        "step_time_s": 0.95,
        "source": "measured",
        "extrapolated": False,
        "gain_over_expert": pytest.approx(1.5 / 0.95),
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
    assert told.json.keys() >= KEYS["export"]
    assert "--tensor-model-parallel-size 2" in told.json["text"]
    assert shown.out == told.json["text"] == (tmp_path / "flags.sh").read_text(encoding="utf-8")
    assert written.out == ""


def test_run_in_a_world_of_the_event_simulator(tmp_path, simulated):
    """A study whose trials the event simulator answers runs on Ray like any other."""
    world = "trial={backend: simulated, fidelity: simulator, seed: 3}"

    done = in_process("run", simulated, "--trials", 3, "--set", world, "--json", cwd=tmp_path, timeout_s=120)

    assert done.status == 0, done.err
    assert (done.json["trials"], done.json["failed"], done.json["source"]) == (3, 0, "synthetic")


@pytest.mark.usefixtures("no_ray")
def test_run_without_a_single_success(meshtune, tmp_path):
    """Where every trial fails, `run` ends 1, says how they failed, and its JSON has no best."""
    path = write_replay(tmp_path, [(pp, tp, dp, mbs, None) for pp, tp, dp, mbs, _ in MEASURED[:3]])

    shown = meshtune("run", path)
    told = meshtune("run", path, "--json")

    assert (told.status, shown.status) == (1, 1)
    assert told.json["best"] is None
    assert told.json["step_time_s"] is None
    assert (told.json["trials"], told.json["failed"]) == (3, 3)
    assert "No configuration completed a trial: 3 out of memory" in shown.out


@pytest.mark.usefixtures("no_ray")
def test_options_of_run_replace_keys_of_the_study(meshtune, simulated):
    """`--trials`, `--seed` and `--set` win over the study file."""
    done = meshtune("run", simulated, "--trials", 2, "--seed", 7, "--set", "trial.backend=simulated", "--json")

    assert done.status == 0, done.err
    assert done.json["trials"] == 2
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


# The space and its predictions


def test_space_counts_and_lists_the_candidates(meshtune, simulated):
    """`space --list` prints as many configurations as `feasible` says, each with every dimension."""
    told = meshtune("space", simulated, "--list", "--json")
    shown = meshtune("space", simulated, "--list")

    assert told.status == 0, told.err
    assert told.json.keys() >= KEYS["space"]
    assert len(told.json["configs"]) == told.json["feasible"] == len(shown.out.splitlines())
    assert told.json["grid"] - told.json["removed"]["memory"] == told.json["feasible"]
    assert all(config.keys() == FASTEST.keys() for config in told.json["configs"])


def test_a_listed_configuration_can_be_given_back(meshtune, simulated):
    """What `space --list` prints is what `--config` takes."""
    line = meshtune("space", simulated, "--list", "--set", "space.sequence_parallel=[true, false]").out.splitlines()[-1]

    done = meshtune("predict", simulated, "--config", line, "--json")

    assert done.status == 0, done.err


def test_space_in_words(meshtune, simulated):
    """`space` tells how many obey the rules, how many of them fit, and what each rule removed."""
    told, shown = meshtune("space", simulated, "--json").json, meshtune("space", simulated)

    first, *removed = shown.out.splitlines()
    assert first == f"{told['grid']} configurations obey every rule, {told['feasible']} of them fit in memory."
    if "memory" in told["removed"]:
        assert removed.pop(0).strip().startswith(f"{told['removed']['memory']:,} need more than each device's memory")
    counted = {line.split()[0]: int(line.split()[1].replace(",", "")) for line in removed[1:]}
    assert counted == {name: count for name, count in told["removed"].items() if name != "memory"}


def test_space_of_a_replay_counts_its_rows(meshtune, replay):
    """The space of a replay is what was measured, failures included."""
    done = meshtune("space", replay)

    assert done.out == "12 measured rows (9 ran, 3 failed) hold 12 different configurations.\n"


def test_why_tells_every_broken_rule(meshtune, simulated):
    """`space --why` names all rules that a configuration breaks, not only the first."""
    told = meshtune("space", simulated, "--why", "tp=3,dp=5,vpp=2,zero_stage=0", "--json")
    shown = meshtune("space", simulated, "--why", "tp=3,dp=5,vpp=2,zero_stage=0")

    assert told.status == shown.status == 0
    assert told.json.keys() >= KEYS["space"] | {"reasons"}
    reasons = told.json["reasons"]
    expected = {"devices", "heads", "kv_heads", "ffn", "sequence", "global_batch", "vpp_two_stages", "job.zero_stage"}
    assert reasons.keys() == expected
    assert "8 devices" in reasons["devices"]
    assert "16 sequences" in reasons["global_batch"]
    assert all(f"  {name}: {reason}\n" in shown.out for name, reason in reasons.items())


def test_why_names_memory(meshtune, hopeless):
    """A configuration that obeys every rule and does not fit has memory as its reason, with the numbers."""
    done = meshtune("space", hopeless, "--why", "tp=8", "--json")

    assert done.status == 0
    assert done.json["reasons"].keys() == {"memory"}
    assert "GiB" in done.json["reasons"]["memory"]


def test_why_of_a_candidate(meshtune, simulated):
    """A configuration that is a candidate has no reasons."""
    assert meshtune("space", simulated, "--why", "tp=8", "--json").json["reasons"] == {}
    assert meshtune("space", simulated, "--why", "tp=8").out.endswith("is in the space.\n")


def test_why_of_the_experts_configuration(meshtune, tmp_path):
    """The expert's configuration may break rules; `--why` tells them, and that it stays."""
    path = tmp_path / "study.yaml"
    path.write_text(study(expert="{tp: 8}", space="{tp: [1, 2, 4]}"), encoding="utf-8")

    done = meshtune("space", path, "--why", "tp=8")

    assert "is in the space as the expert's, although:\n  space.tp:" in done.out


def test_why_of_a_replay_is_whether_somebody_measured_it(meshtune, replay):
    """No rule prunes a replay: its candidates are the measured rows, and nothing else."""
    measured, other = (meshtune("space", replay, "--why", config, "--json") for config in ("dp=8", "tp=2,dp=4,mbs=4"))

    assert measured.json["reasons"] == {}
    assert other.json["reasons"] == {"measured": "is none of the 12 measured configurations"}


def test_prediction_adds_up(meshtune, simulated):
    """The parts of `predict` sum to the step time, and those of the memory to the peak."""
    done = meshtune("predict", simulated, "--config", "pp=2,tp=2,dp=2", "--json")

    assert done.status == 0, done.err
    told = done.json
    assert told.keys() >= KEYS["predict"]
    assert sum(told["breakdown_s"].values()) == pytest.approx(told["step_time_s"], rel=1e-9)
    assert sum(told["memory_bytes"].values()) == pytest.approx(told["peak_memory_bytes"], rel=1e-9)
    assert told["tokens_per_s_per_device"] == pytest.approx(4096 * 16 / (8 * told["step_time_s"]))
    assert 0 < told["mfu"] < 1
    assert told["fits"] is True


def test_a_prediction_tells_its_uncertainty(meshtune, simulated):
    """`predict` gives the 68% range around the step time and the memory, and the probability that it fits."""
    told = meshtune("predict", simulated, "--config", "tp=8", "--json").json
    shown = meshtune("predict", simulated, "--config", "tp=8").out

    low_s, high_s = told["step_time_range_s"]
    assert low_s < told["step_time_s"] < high_s
    assert high_s / low_s == pytest.approx(math.exp(2 * told["step_time_log_error"]))
    assert told["peak_memory_log_error"] > 0
    assert 0 <= told["fit_probability"] <= 1
    assert re.search(r"^  [\d.]+ to [\d.]+ s with probability 68%; constants that weigh most: \w+ ", shown, re.M)
    assert re.search(r"^  [\d.]+ to [\d.]+ GiB with probability 68%; probability of fit [\d.]+$", shown, re.M)


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


def test_simulation_adds_up(meshtune, simulated):
    """`simulate` has the keys of `predict`; its parts sum up, and the closed form beside it is what `predict` says."""
    config = ("--config", "pp=2,tp=2,dp=2,vpp=2")
    told, closed = (meshtune(command, simulated, *config, "--json") for command in ("simulate", "predict"))

    assert told.status == 0, told.err
    assert told.json.keys() >= KEYS["simulate"]
    assert sum(told.json["breakdown_s"].values()) == pytest.approx(told.json["step_time_s"])
    assert sum(told.json["memory_bytes"].values()) == pytest.approx(told.json["peak_memory_bytes"], abs=20)
    assert told.json["breakdown_s"].keys() == closed.json["breakdown_s"].keys()
    assert told.json["memory_bytes"] == closed.json["memory_bytes"]
    assert told.json["predicted_step_time_s"] == closed.json["step_time_s"]
    assert told.json["step_time_s"] == pytest.approx(closed.json["step_time_s"], rel=0.1)
    assert told.json["step_time_s"] != closed.json["step_time_s"]
    assert told.json["operator_events"] > 1000
    assert [stage["stage"] for stage in told.json["stages"]] == [0, 1]
    assert all(0 < stage["idle_share"] < 1 for stage in told.json["stages"])
    assert "trace" not in told.json


def test_schedules_differ_in_time_and_memory(meshtune, simulated):
    """Zero-bubble is faster than 1F1B, and gpipe keeps the activations of more micro-batches."""
    steps = {
        schedule: meshtune("simulate", simulated, "--config", "pp=4,tp=2", "--schedule", schedule, "--json").json
        for schedule in ("1f1b", "gpipe", "zero-bubble")
    }

    assert steps["zero-bubble"]["step_time_s"] < steps["1f1b"]["step_time_s"]
    assert steps["gpipe"]["memory_bytes"]["activations"] > 2 * steps["1f1b"]["memory_bytes"]["activations"]
    assert {step["schedule"] for step in steps.values()} == steps.keys()


def test_a_trace_is_in_the_trace_event_format(meshtune, simulated, tmp_path):
    """Every event of a trace has its time and its place, every place a name, and nothing ends after the step."""
    told = meshtune("simulate", simulated, "--config", "pp=2,tp=4", "--trace", "step.json", "--json").json
    trace = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))

    assert told["trace"] == "step.json"
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(complete) + len(metadata) == len(trace["traceEvents"])
    assert len(complete) > told["operator_events"]  # and the passes
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
    assert min(event["dur"] for event in complete) >= 0
    assert min(event["ts"] for event in complete) >= 0
    assert max(event["ts"] + event["dur"] for event in complete) <= told["step_time_s"] * 1e6
    named = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    assert named.keys() == {event["pid"] for event in complete} == {0, 1}
    threads = {(event["pid"], event["tid"]) for event in metadata if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} <= threads


def test_a_compressed_trace_is_the_same(meshtune, simulated, tmp_path):
    """A name that ends in .gz gives the same trace compressed, and the same bytes each time."""
    for name in ("plain.json", "first.json.gz", "second.json.gz"):
        assert meshtune("simulate", simulated, "--config", "tp=8", "--trace", name, "--json").status == 0

    first = (tmp_path / "first.json.gz").read_bytes()
    assert gzip.decompress(first) == (tmp_path / "plain.json").read_bytes()
    assert first == (tmp_path / "second.json.gz").read_bytes()


def test_simulation_in_words(meshtune, simulated):
    """`simulate` shows both models part by part, a line of passes for each stage, the memory, and the broken rules."""
    done = meshtune("simulate", simulated, "--config", "pp=4,tp=2,recompute=full", "--trace", "step.json")

    assert done.status == 0, done.err
    assert "Simulated for pp=4,tp=2,dp=1,cp=1,up=1,vpp=1,ep=1,mbs=1,recompute=full, 1f1b" in done.out
    assert re.search(r"part +simulated \[s\] +share +predicted \[s\] +share", done.out)
    assert re.search(r"compute +\d+\.\d{4} +\d+\.\d% +\d+\.\d{4} +\d+\.\d%", done.out)
    lines = re.findall(r"^  stage (\d) +\d+\.\d% idle  ([FBO. ]+)$", done.out, re.M)
    assert [stage for stage, _ in lines] == ["0", "1", "2", "3"]
    assert len({len(drawn) for _, drawn in lines}) == 1
    assert lines[0][1].startswith("F")
    assert "GiB per device" in done.out
    assert "step.json; ui.perfetto.dev opens it" in done.err


def test_unlike_replicas_are_told_apart(meshtune, tmp_path):
    """Where replicas run on unlike devices, each kind has its own stages."""
    path = tmp_path / "unlike.yaml"
    cluster = "{groups: [{name: dgx-a100, hosts: 1}, {name: dgx-h100, hosts: 1}]}"
    path.write_text(study(cluster=cluster), encoding="utf-8")

    told, shown = (meshtune("simulate", path, "--config", "tp=8,dp=2", *more) for more in (("--json",), ()))

    assert [(row["replica"], row["stage"]) for row in told.json["stages"]] == [(0, 0), (1, 0)]
    assert told.json["stages"][0]["device"] != told.json["stages"][1]["device"]
    assert "replica 1 stage 0" in shown.out


def test_rank_is_sorted_and_as_long_as_asked(meshtune, simulated):
    """`rank --top` prints so many configurations, the fastest prediction first; ten without it."""
    told, default = meshtune("rank", simulated, "--top", 3, "--json"), meshtune("rank", simulated, "--json")
    shown = meshtune("rank", simulated, "--top", 3)

    configs = told.json["configs"]
    assert told.json.keys() >= KEYS["rank"]
    assert len(configs) == 3
    assert len(default.json["configs"]) == 10
    assert default.json["configs"][:3] == configs
    assert [c["step_time_s"] for c in configs] == sorted(c["step_time_s"] for c in configs)
    assert all(c.keys() >= {*FASTEST, "step_time_s", "peak_memory_bytes"} for c in configs)
    lines = shown.out.splitlines()
    assert len(lines) == 4
    assert len(set(map(len, lines))) == 1
    assert "step [s]  memory [GiB]  tokens/s/device" in lines[0]


def test_rank_agrees_with_predict(meshtune, simulated):
    """The configuration that `rank` puts first has the step time and memory that `predict` tells of it."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]
    config = ",".join(f"{name}={first[name]}" for name in FASTEST)

    told = meshtune("predict", simulated, "--config", config, "--json").json

    assert told["step_time_s"] == pytest.approx(first["step_time_s"])
    assert told["peak_memory_bytes"] == first["peak_memory_bytes"]


def test_rank_puts_what_does_not_fit_last(meshtune, tmp_path):
    """Candidates of a replay that are predicted not to fit come after all that do, marked as such."""
    path = write_replay(tmp_path, space="{memory_headroom: 0.6}")

    fits = [config["fits"] for config in meshtune("rank", path, "--top", 12, "--json").json["configs"]]
    shown = meshtune("rank", path, "--top", 12)

    assert fits == sorted(fits, reverse=True)
    assert True in fits
    assert False in fits
    assert shown.out.count("!") == fits.count(False)
    assert "does not fit" in shown.err


# Other sizes of the cluster


def test_rank_of_sizes(meshtune, simulated):
    """`rank --hosts` gives the best prediction for each number of hosts, in the order asked for."""
    done = meshtune("rank", simulated, "--hosts", "2,1,4", "--json")

    assert done.status == 0, done.err
    sizes = done.json["sizes"]
    assert [(size["hosts"], size["devices"]) for size in sizes] == [(2, 16), (1, 8), (4, 32)]
    assert done.json["smallest_that_fits"] == 1
    for size in sizes:
        degrees = size["config"]
        assert degrees["pp"] * degrees["tp"] * degrees["dp"] * degrees["cp"] * degrees["up"] == size["devices"]
        per_device = 4096 * 16 / (size["devices"] * size["step_time_s"])
        assert size["tokens_per_s_per_device"] == pytest.approx(per_device)
    times = {size["hosts"]: size["step_time_s"] for size in sizes}
    assert times[4] < times[2] < times[1]


def test_rank_of_the_studys_own_size(meshtune, simulated):
    """The best of the study's own size is the one that `rank` puts first."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]

    (size,) = meshtune("rank", simulated, "--hosts", 1, "--json").json["sizes"]

    assert size["config"] == {name: first[name] for name in FASTEST}
    assert size["step_time_s"] == pytest.approx(first["step_time_s"])


def test_the_smallest_size_that_fits(meshtune, simulated):
    """Sizes that are too small have a reason instead of a configuration, and the smallest that fits is named."""
    arguments = ("rank", simulated, "--set", "model=llama3-70b", "--set", "space.pp=[1, 2]", "--hosts", "1,3,8")

    told, shown = meshtune(*arguments, "--json"), meshtune(*arguments)

    assert told.status == 0, told.err
    small, odd, enough = told.json["sizes"]
    assert small["config"] is None
    assert "fits in memory" in small["reason"]
    assert re.fullmatch(r"no configuration obeys every rule; \w+ removed the most", odd["reason"])
    assert enough["config"] is not None
    assert told.json["smallest_that_fits"] == 8
    assert "1 host: none of the" in shown.out
    assert shown.out.endswith("Smallest that fits: 8 hosts (64 devices)\n")


def test_no_size_fits(meshtune, hopeless):
    """Where no size fits, `rank --hosts` ends 1."""
    done = meshtune("rank", hopeless, "--hosts", "1,2", "--json")

    assert done.status == 1
    assert done.json["smallest_that_fits"] is None


@pytest.mark.parametrize("hosts", ["", "x", "1,x", "0", "-1", "1,,2", "1.5", "1,1", "999999999", "1" * 5000, "²"])
def test_a_bad_list_of_sizes(meshtune, simulated, hosts):
    """What is no list of different numbers of hosts is refused by name."""
    assert_users_mistake(meshtune("rank", simulated, f"--hosts={hosts}"), "--hosts", "must list")


def test_sizes_need_equal_hosts(meshtune, tmp_path):
    """A cluster of unlike groups has no one number of hosts."""
    path = tmp_path / "study.yaml"
    path.write_text(study(cluster="{groups: [{name: dgx-h100}, {name: dgx-a100}]}"), encoding="utf-8")

    assert_users_mistake(meshtune("rank", path, "--hosts", "1,2"), "--hosts", "equal hosts", "2 groups")


def test_sizes_need_predictions(meshtune, replay):
    """Nobody measured a replay's job on other sizes."""
    assert_users_mistake(meshtune("rank", replay, "--hosts", "1,2"), "--hosts", "8 devices")


def test_sizes_exclude_top(meshtune, simulated):
    """`--top` beside `--hosts` is refused rather than ignored."""
    assert_users_mistake(meshtune("rank", simulated, "--hosts", "1", "--top", "3"), "--top", "--hosts")


# Nothing found


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("command", ["space", "rank", "run", "best", "export"])
def test_no_candidate_fits(meshtune, hopeless, command):
    """Where nothing fits, each command ends 1, still with its JSON, and tells people where to look."""
    more = ("--to", "json") if command == "export" else ()

    told, shown = meshtune(command, hopeless, *more, "--json"), meshtune(command, hopeless, *more)

    assert (told.status, shown.status) == (1, 1)
    assert told.json.keys() >= KEYS[command]
    words = "0 of them fit in memory" if command == "space" else "No configuration works; `meshtune space` tells why"
    assert words in shown.out + shown.err


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_study_that_has_never_run(meshtune, simulated, tmp_path, command):
    """What is about trials is refused before the first one, with the command that starts them; no database appears."""
    done = meshtune(command, simulated)

    assert_users_mistake(done, "study.yaml", "name = 'small'", f"`meshtune run {simulated}`")
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


@pytest.mark.parametrize("command", [("best",), ("export", "--to", "json")], ids=lambda command: command[0])
def test_the_best_before_any_trial_is_predicted(meshtune, simulated, tmp_path, command):
    """Before any trial the best is what `rank` puts first, said to be predicted; no database appears."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]

    done = meshtune(command[0], simulated, *command[1:], "--json")

    assert done.status == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]
    if command[0] == "best":
        assert done.json["source"] == "predicted"
        assert done.json["config"] == {name: first[name] for name in FASTEST}
        assert done.json["gain_over_expert"] >= 1
    else:
        assert done.err == "note: this configuration is predicted, not measured\n"


def test_another_study_in_the_same_database(finished, meshtune, simulated):
    """A database that holds other studies counts as having none of this one."""
    _, storage, _ = finished

    assert_users_mistake(meshtune("status", simulated, "--storage", storage), "no trials in its storage yet")


# Mistakes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_broken_study_is_told_in_one_message(meshtune, tmp_path, case: BrokenStudy):
    """A study that cannot work ends a command with status 2 and the case's words in one line."""
    assert_users_mistake(meshtune("space", case.write(tmp_path)), *case.words)


@pytest.mark.parametrize(
    ("command", "name"), [("run", "unknown key"), ("status", "missing file"), ("best", "missing CSV")]
)
def test_a_broken_study_in_a_process(tmp_path, command, name):
    """The same holds for a process of its own, whatever the command."""
    case = next(case for case in CASES if case.id == name)

    assert_users_mistake(in_process(command, case.write(tmp_path), "--json", cwd=tmp_path), *case.words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", "STUDY", "--config", "pp=x"), ("--config pp = 'x'", "whole number")),
        (("predict", "STUDY", "--config", "pp=0"), ("--config.pp = 0", "at least 1")),
        (("predict", "STUDY", "--config", "pp=2,pp=2"), ("--config pp = '2'", "given twice")),
        (("predict", "STUDY", "--config", "pq=2"), ("--config = 'pq'", "did you mean")),
        (("predict", "STUDY", "--config", "pp"), ("--config = 'pp'", "name=value")),
        (("predict", "STUDY", "--config", "tp=4"), ("must be the 8 devices", "with dp=2 it would occupy")),
        (("predict", "STUDY", "--config", "tp=3"), ("must be the 8 devices", "`meshtune space --list`")),
        (("predict", "STUDY", "--config", "tp=8,mbs=3"), ("dp*mbs must divide",)),
        (("predict", "STUDY"), ("--config",)),
        (("simulate", "STUDY", "--config", "tp=4"), ("must be the 8 devices", "with dp=2 it would occupy")),
        (
            ("simulate", "STUDY", "--config", "tp=8", "--schedule", "1f1d"),
            ("--schedule = '1f1d'", "did you mean '1f1b'?"),
        ),
        (
            ("simulate", "STUDY", "--config", "pp=2,tp=4,vpp=2", "--schedule", "gpipe"),
            ("--schedule = 'gpipe'", "vpp=2", "vpp=1, or --schedule 1f1b"),
        ),
        (
            ("simulate", "STUDY", "--config", "pp=4,tp=2,vpp=2", "--set", "job.global_batch_size=9"),
            ("--config", "must be a multiple of pp=4", "but got 9", "with vpp=1 it can"),
        ),
        (
            ("simulate", "STUDY", "--config", "tp=8", "--trace", "no/such/folder"),
            ("--trace = 'no/such/folder'", "cannot be written"),
        ),
        (("simulate", "STUDY", "--config", "tp=8", "--trace", "."), ("--trace", "cannot be written")),
        (("export", "STUDY", "--to", "json", "--config", "tp=4"), ("must be the 8 devices",)),
        (("export", "STUDY", "--to", "megatorn"), ("--to = 'megatorn'", "did you mean 'megatron'?")),
        (("export", "STUDY"), ("--to",)),
        (("export", "STUDY", "--to", "json", "--out", "no/such/folder"), ("--out", "cannot be written")),
        (("export", "STUDY", "--to", "json", "--out", "."), ("--out", "cannot be written")),
        (("space", "STUDY", "--why", "garbage"), ("--why = 'garbage'", "name=value")),
        (("space", "STUDY", "--set", "nonsense"), ("--set = 'nonsense'", "key=value")),
        (("space", "STUDY", "--set", "=3"), ("--set = '=3'", "key=value")),
        (("space", "STUDY", "--set", "search.seed=x"), ("search.seed = 'x'", "whole number")),
        (("space", "STUDY", "--set", "name.first=x"), ("--set name.first", "no keys of its own")),
        (("space", "STUDY", "--set", "space.tp=[1"), ("--set space.tp = '[1'", "not valid YAML")),
        (("space", "STUDY", "--set", "serch.seed=1"), ("serch", "did you mean 'search'?")),
        (("space", "STUDY", "--set"), ("--set",)),
        (("run", "STUDY", "--trials", "0"), ("--trials = '0'", "at least 1")),
        (("run", "STUDY", "--trials", "few"), ("--trials = 'few'", "whole number")),
        (("run", "STUDY", "--seed", "-1"), ("--seed = '-1'", "at least 0")),
        (("run", "STUDY", "--storage", "results.db"), ("storage = 'results.db'", "no database URL")),
        (("rank", "STUDY", "--top", "0"), ("--top = '0'", "at least 1")),
        (("rank", "STUDY", "--tpo", "3"), ("--tpo", "--top")),
        (("rank", "STUDY", "another"), ("another",)),
        (("space",), ("STUDY", "`meshtune space --help`")),
        (("spcae", "STUDY"), ("'spcae'", "Did you mean", "'space'")),
        (("space", "no-such-study.yaml"), ("no-such-study.yaml: no such file", "did you mean 'study.yaml'?")),
    ],
    ids=lambda value: " ".join(value) if value[0] in (*COMMANDS, "spcae") else "",
)
def test_bad_options(meshtune, simulated, arguments, words):
    """A mistake on the command line is one message that shows the option, the value and what would be right."""
    given = [simulated if argument == "STUDY" else argument for argument in arguments]

    assert_users_mistake(meshtune(*given), *words)


def test_an_unwritable_report(finished, meshtune):
    """A report that cannot be written is the user's mistake, told with the path."""
    path, storage, _ = finished

    done = meshtune("report", path, "--storage", storage, "--out", "no/such/folder/r.html")

    assert_users_mistake(done, "--out = 'no/such/folder/r.html'", "cannot be written")


@pytest.mark.usefixtures("no_ray")
def test_a_database_that_cannot_be_made(meshtune, simulated):
    """A storage in a folder that does not exist is the user's mistake, told after the progress."""
    done = meshtune("run", simulated, "--storage", "sqlite:///no/such/folder/x.db", "--json")

    assert (done.status, done.out) == (2, "")
    assert "meshtune: storage = 'sqlite:///no/such/folder/x.db': " in done.err
    assert "Traceback" not in done.err


HOSTILE = "\x1b[31mred\nline\u202e\x07"


@pytest.mark.parametrize(
    "arguments",
    [
        ("space", HOSTILE),
        (HOSTILE,),
        ("space", "STUDY", f"--{HOSTILE}"),
        ("space", "STUDY", "--set", f"{HOSTILE}=1"),
        ("space", "STUDY", "--set", f'name="{HOSTILE}"'),
        ("space", "STUDY", "--set", f"space.without=['{HOSTILE}']"),
        ("space", "STUDY", "--why", f"{HOSTILE}=1"),
        ("predict", "STUDY", "--config", f"recompute={HOSTILE}"),
        ("simulate", "STUDY", "--config", "tp=8", "--schedule", HOSTILE),
        ("simulate", "STUDY", "--config", "tp=8", "--trace", f"no/{HOSTILE}"),
        ("export", "STUDY", "--to", HOSTILE),
        ("rank", "STUDY", "--hosts", HOSTILE),
        ("status", "STUDY", "--storage", HOSTILE),
        ("export", "STUDY", "--to", "json", "--out", f"no/{HOSTILE}"),
        ("run", "STUDY", "--trials", HOSTILE),
        ("replan", "STUDY", "--trace", HOSTILE),
        ("replan", "STUDY", "--until", HOSTILE),
        ("simulate", "STUDY", "--config", "tp=8", "--at", "1", "--network", HOSTILE),
    ],
    ids=lambda arguments: repr(" ".join(arguments)),
)
def test_hostile_text_is_shown_escaped(meshtune, simulated, arguments):
    """No text of a user's steers the terminal or breaks the message's one line."""
    done = meshtune(*(simulated if argument == "STUDY" else argument for argument in arguments))

    assert_users_mistake(done, r"\x1b[31mred")
    assert done.err.rstrip("\n").isprintable()


def test_a_hostile_key_of_a_study(meshtune, tmp_path):
    """A key with control characters is shown escaped, too."""
    path = tmp_path / "study.yaml"
    path.write_text(study() + '"\\e[31mkey\\n": 1\n', encoding="utf-8")

    assert_users_mistake(meshtune("space", path), r"\x1b[31mkey\n = 1", "unknown key")


def test_a_control_character_in_a_study(meshtune, tmp_path):
    """A raw control character is no YAML; the message names its line."""
    path = tmp_path / "study.yaml"
    path.write_text(study() + "runtime: \x1b[31mmindspeed\n", encoding="utf-8")

    assert_users_mistake(meshtune("space", path), "study.yaml: line 5", "is not valid YAML")


def test_our_own_mistakes_keep_their_traceback(monkeypatch, simulated):
    """What is no ConfigError is our bug, and is not disguised as the user's mistake."""

    def fail(*_arguments, **_options):
        raise ZeroDivisionError

    monkeypatch.setattr("tuner.config.load_study", fail)
    monkeypatch.setattr(sys, "argv", ["meshtune", "space", str(simulated)])

    with pytest.raises(ZeroDivisionError):
        main()


# The command itself


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(meshtune, command):
    """Each command explains itself, its argument and its options."""
    done = meshtune(command, "--help")

    assert done.status == 0
    assert f"Usage: meshtune {command} [OPTIONS]" in done.out
    assert ("CSV" if command == "calibrate" else "STUDY") in done.out
    assert "--json" in done.out


def test_help_lists_every_command_in_whole_sentences(meshtune):
    """The list of commands has a line for each, and none is cut off."""
    done = meshtune("--help")

    assert done.status == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} .*\.$", done.out, re.M)
    assert "..." not in done.out.partition("Commands:")[2]


def test_without_a_command_the_help_is_on_stderr(meshtune):
    """`meshtune` alone shows what it could do, and prints no result."""
    done = meshtune()

    assert done.status == 2
    assert done.out == ""
    assert "Commands:" in done.err


def test_version(meshtune):
    """`--version` prints the number that the package was built with."""
    built = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)

    assert meshtune("--version").out == f"meshtune {built[1]}\n"


def test_version_of_a_checkout_that_nobody_installed(meshtune, monkeypatch):
    """Without an installed package the number comes from the checkout."""
    from importlib import metadata

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)

    assert re.fullmatch(r"meshtune \d+\.\d+\.\d+\n", meshtune("--version").out)


def test_help_in_a_process(tmp_path):
    """`python -m tuner --help` works from any folder and prints nothing on stderr."""
    done = in_process("--help", cwd=tmp_path)

    assert (done.status, done.err) == (0, "")
    assert "Commands:" in done.out


HEAVY = {"numpy", "optuna", "plotly", "pydantic", "ray", "rich", "scipy", "sklearn", "sqlalchemy", "yaml"}


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ((), set()),
        (("run",), {"pydantic"}),  # typer reads the options of a command with it
    ],
    ids=["meshtune", "run"],
)
def test_help_imports_nothing_heavy(command, allowed):
    """The help is there before anybody has waited for a heavy library."""
    program = (
        "import sys\n"
        "from tuner.cli import main\n"
        f"sys.argv = ['meshtune', *{command!r}, '--help']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)), sep=',')\n"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    loaded = done.stdout.splitlines()[-1]
    assert set(filter(None, loaded.split(","))) <= allowed


def test_a_reader_that_stops_early_sees_no_traceback(tmp_path, simulated):
    """`meshtune space --list | head -1` ends without a complaint."""
    command = f'"{sys.executable}" -m tuner space "{simulated}" --list | head -1'

    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )

    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_shipped_studies_work(meshtune, file):
    """Every example that stands beside the README of the studies has candidates and a best prediction."""
    assert meshtune("space", file, "--json").json["feasible"] > 0
    assert meshtune("rank", file, "--top", 1, "--json").status == 0
