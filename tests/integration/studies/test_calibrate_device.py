import json
import time
from contextlib import nullcontext

import numpy as np
import pytest
from scipy.stats import kendalltau

from costmodels.operators.isolated import isolated_call_s, isolated_operator
from costmodels.operators.kernels import alone_s
from docs.site.json_keys import JSON_KEYS
from trials.torch_training.benchmarks.device import DeviceBenchmarks
from trials.torch_training.benchmarks.messages import Refusal, Timing
from tuner.calibrate import device as calibration
from tuner.calibrate.calibration_plan import calibration_plan, calls_of
from tuner.search.earlier_runs import IsolatedSample
from tuner.search.observations import observations_of
from tuner.search.prior import initial_posterior
from tuner.storage.history import Past, past_of
from tuner.storage.history.isolated import keep_isolated
from tuner.storage.history.tables import make_tables
from tuner.storage.opening import open_store
from tuner.study_file.config import load_study

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 512,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
LARGER = MODEL | {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
STUDY = """
name: {name}
model: {model}
cluster: {cluster}
job: {{sequence_length: {length}, global_batch_size: {batch}, precision: {precision}}}
runtime: torchtitan
space: {space}
trial: {{backend: simulated, operator_error: {error}, seed: {seed}}}
storage: {storage}
"""
TWO_CORES = "{name: cpu-host, hosts: 1, devices_per_host: 2}"


@pytest.fixture
def study(tmp_path):
    """Writes a study file and returns its path; all of one test share a storage."""
    for model, sizes in (("small", MODEL), ("larger", LARGER)):
        (tmp_path / f"{model}.json").write_text(json.dumps(sizes), encoding="utf-8")

    def write(name="tiny", **changes):
        values = {
            "name": name,
            "model": "small.json",
            "length": 64,
            "batch": 4,
            "cluster": TWO_CORES,
            "precision": "fp32",
            "space": "{mbs: [1], pp: [1]}",
            "error": 0.3,
            "seed": 0,
            "storage": f"sqlite:///{tmp_path / 'study.db'}",
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(STUDY.format(**(values | changes)), encoding="utf-8")
        return path

    return write


@pytest.fixture
def torch():
    """What measures."""
    pytest.importorskip("torch", reason="calibration needs torch: pip install 'meshtune[torch]'")


@pytest.mark.usefixtures("torch")
def test_a_tiny_study_calibrates_and_knows_it_afterwards(calibrate, study, tmp_path):
    """The first run measures every call, the second one none, and the page and the JSON tell of all of them."""
    path, page = study(space="{mbs: [1], pp: [1], tp: [2]}"), tmp_path / "page.html"
    status, out, err = calibrate("--device", path, "--seconds", 30, "--json", "--out", page)
    first = json.loads(out)

    assert status == 0, err
    assert first.keys() == JSON_KEYS["calibrate"]["with `--device`"].keys()
    assert (first["device"], first["precision"], first["known"]) == ("cpu-core", "fp32", 0)
    assert first["measured"] == first["planned"] > 20
    assert first["refused"] == {}
    assert first["kinds"].keys() >= {"matmul", "flash_attention", "norm", "elementwise", "all_gather"}
    for kind in first["kinds"].values():
        assert kind["shapes"] > 0
        assert kind["of_formula"] > 0
        assert kind["of_peak"] > 0
    assert first["plot"] == str(page)
    assert "Measured over predicted" in page.read_text(encoding="utf-8")

    status, out, _ = calibrate("--device", path, "--seconds", 30, "--json")
    second = json.loads(out)

    assert (status, second["measured"], second["known"]) == (0, 0, first["measured"])
    assert second["kinds"] == first["kinds"]
    assert second["plot"] is None


def answering(_self, calls):
    """Every call takes a second."""
    for call in calls:
        yield call, Timing(time_s=1.0, runs=5)


def interrupted(_self, calls):
    """Ctrl-C comes after three calls."""
    yield from answering(_self, calls[:3])
    raise KeyboardInterrupt


def refusing(_self, calls):
    """Nothing can be run."""
    for call in calls:
        yield call, Refusal(reason="RuntimeError: no")


@pytest.fixture
def measure(monkeypatch, torch):  # noqa: ARG001 -- the command asks for torch before it measures
    """Replaces what measures, so that no rank is started."""

    def replace(function):
        monkeypatch.setattr(DeviceBenchmarks, "measure", function)

    monkeypatch.setattr(calibration, "RankProcesses", nullcontext)
    return replace


def test_an_interrupted_calibration_goes_on(calibrate, study, measure):
    """What was measured before Ctrl-C is kept, the next run measures the rest, and --force measures all anew."""
    path = study()
    measure(interrupted)
    status, _, err = calibrate("--device", path)

    assert (status, err.splitlines()[-1]) == (130, "meshtune: interrupted")
    assert len(past_of(load_study(path)).alone) == 3

    measure(answering)
    status, out, err = calibrate("--device", path)

    assert status == 0, err
    assert "; 3 were known already." in out
    assert "speed over formula" in out
    assert "0 were known already." in calibrate("--device", path, "--force")[1]


def test_a_calibration_ends_with_its_time(calibrate, study, measure):
    """Where calls take longer than was planned, what is left is told, and measured by the same command again."""

    def slow(_self, calls):
        for call in calls:
            time.sleep(0.5)
            yield call, Timing(time_s=0.5, runs=5)

    path = study()
    measure(slow)
    status, out, err = calibrate("--device", path, "--seconds", 1)

    assert status == 0, err
    assert "The time ran out before" in out

    measure(answering)
    assert json.loads(calibrate("--device", path, "--seconds", 1, "--json")[1])["known"] in {2, 3}


def test_what_cannot_be_run_is_told(calibrate, study, measure):
    """Refused calls are counted by their reason; where nothing could be run the command says so by its status."""
    measure(refusing)
    status, out, _ = calibrate("--device", study(), "--json")

    assert status == 1
    assert json.loads(out)["refused"].keys() == {"RuntimeError: no"}


@pytest.mark.usefixtures("torch")
def test_a_study_without_candidates_measures_nothing(calibrate, study):
    """Where no configuration works there is nothing to measure, and the status says so."""
    status, out, err = calibrate("--device", study(space="{tp: [2], dp: [2]}"))

    assert (status, out) == (1, "")
    assert "No configuration works" in err


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"cluster": "{name: dgx-a100}"}, (), "is not in this machine: torch finds no GPU"),
        ({"precision": "fp8", "cluster": "{name: dgx-h100}"}, (), "cannot run yet"),
        (
            {"cluster": "{groups: [{name: dgx-h100, hosts: 1}, {name: dgx-a100, hosts: 1}]}", "precision": "bf16"},
            (),
            "has several kinds of devices",
        ),
        ({}, ("--seconds", "soon"), "--seconds = 'soon': must be a number above 0"),
        ({}, ("--out", "page.yaml"), "must end in .html"),
        ({}, ("--out", "no/page.html"), "a directory that does not exist"),
        ({}, ("--measured", "runs.csv"), "cannot be combined with --device"),
        ({}, ("--runtime", "nanotron"), "cannot be combined with --device"),
    ],
)
@pytest.mark.usefixtures("torch")
def test_mistakes_are_one_message(calibrate, study, tmp_path, monkeypatch, changes, arguments, words):
    """What cannot be calibrated ends with status 2, one line that says why, and no database."""
    if "no GPU" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    status, out, err = calibrate("--device", study(**changes), *arguments)

    assert (status, out) == (2, "")
    assert words in err
    assert err.splitlines()[-1].startswith("meshtune: ")
    assert "Traceback" not in err
    assert not (tmp_path / "study.db").exists()


def test_torch_is_asked_for(calibrate, study, monkeypatch):
    """Without torch the message says how to install it."""
    monkeypatch.setattr(calibration.importlib.util, "find_spec", lambda _name: None)
    status, out, err = calibrate("--device", study())

    assert (status, out) == (2, "")
    assert "pip install 'meshtune[torch]'" in err


@pytest.mark.parametrize("option", [("--seconds", 5), ("--storage", "sqlite:///x.db"), ("--set", "a=b")])
def test_options_of_a_device_need_one(calibrate, option):
    """What says how to measure a device is refused where files are read."""
    status, _, err = calibrate("--measured", "runs.csv", "--out", "x.yaml", *option)

    assert status == 2
    assert "belongs to --device" in err


def world_of(path):
    """A study, its candidates, and what their steps take in its simulated world."""
    config = load_study(path)
    grid = config.problem.space().grid
    return config, grid, np.log(config.trials.backend.hidden_step(grid).step_time_s)


def alone_in(config, call):
    """What a call takes alone in the study's world."""
    if call.is_collective:
        shape = np.log2(np.maximum(np.array([call.shape]), 1.0))
        return isolated_call_s(call, config.problem.setting.cluster) * float(
            np.exp(config.trials.backend._error(call.kind, shape))[0]
        )
    operator, (device,) = isolated_operator(call), config.problem.setting.cluster.devices
    label = f"{operator.kind} {operator.phase} {device.name}"
    error = config.trials.backend._error(label, np.log2(np.maximum(operator.shape, 1.0)))
    return float((alone_s(operator, device) * np.exp(error))[0])


def keep_world(config, grid, seconds=20.0):
    """Calibrates the study's world: what a calibration would have measured there, in the study's storage."""
    calls = calls_of(config.problem.setting, grid, most_ranks=8)
    store = open_store(config.storage)
    make_tables(store)
    for one in calibration_plan(calls.wanted, seconds):
        time_s = alone_in(config, one.call)
        keep_isolated(store, IsolatedSample(device="cpu-core", call=one.call, time_s=time_s, count=100))


def prior_of(config, grid, past):
    """The logarithm of the step times that a study expects before its first trial."""
    everywhere = np.arange(len(grid))
    posterior = initial_posterior([(config.problem.subject.measured_setting, everywhere)], grid, past)
    return posterior.expected(observations_of([], lambda _: None), everywhere).log_step_s


@pytest.mark.parametrize("seed", range(2))
def test_a_calibrated_device_ranks_candidates_better(study, seed):
    """In a world whose kernels and links err smoothly by 60%, calibration brings the prior's order of the candidates
    near the true one (Kendall's tau), and its step times within 5%.
    """
    sizes = {"model": "larger.json", "length": 512, "batch": 32}
    config, grid, truth = world_of(study(cluster="{name: cpu-host}", space="{}", error=0.6, seed=seed, **sizes))
    before = prior_of(config, grid, past_of(config))
    keep_world(config, grid)
    after = prior_of(config, grid, past_of(config))

    tau_before, tau_after = (kendalltau(prior, truth).statistic for prior in (before, after))
    assert tau_after > 0.85
    assert tau_after > tau_before + 0.2
    assert np.median(np.abs(after - truth)) < 0.05 < np.median(np.abs(before - truth))


def test_a_calibration_is_evidence_for_every_study_of_its_device_and_precision(study):
    """Another study in the same storage begins with it, without `history:`; in another precision it says nothing."""
    config, grid, _ = world_of(study("first", error=0.6))
    assert past_of(config) == Past()
    keep_world(config, grid)
    longer = load_study(study("second", space="{mbs: [2], pp: [1]}"))
    other = load_study(study("third", precision="bf16"))
    past = past_of(longer)

    assert past.runs == past.samples == ()
    assert len(past.alone) > 20
    assert "of a calibration" in past.in_words
    for later, changes in ((longer, True), (other, False)):
        its_grid = later.problem.space().grid
        told, untold = (prior_of(later, its_grid, known) for known in (past_of(later), Past()))
        assert np.allclose(told, untold) != changes


def test_a_named_database_counts_once(study):
    """A calibration that `history:` names too is the same evidence, and that of another database is further one."""
    path = study("first")
    config, grid, _ = world_of(path)
    keep_world(config, grid)
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}history: ['{config.storage}']\n", encoding="utf-8")

    assert set(past_of(load_study(path)).alone) == set(past_of(config).alone)


def test_a_call_that_is_measured_again_replaces_its_row(study):
    """One row per call: measuring it anew keeps the last time, and no sample of a trial is among them."""
    config, grid, _ = world_of(study())
    keep_world(config, grid, seconds=1.0)
    before = past_of(config).alone
    store = open_store(config.storage)
    keep_isolated(store, IsolatedSample(device="cpu-core", call=before[0].call, time_s=7.0, count=5))
    after = past_of(config).alone

    assert len(after) == len(before)
    assert [sample.time_s for sample in after if sample.call == before[0].call] == [7.0]
    assert past_of(config).samples == ()
    assert config.storage.file.exists()
