"""`from tuner import ...`: the door for Python users."""

import importlib.util
import json
import re

import pytest
from typer.testing import CliRunner

import tuner
from hardware.io.errors import ConfigError
from tests.support.documented import ROOT, blocks_of
from tests.support.settings.placements import PLACEMENTS
from tuner.cli.main import app
from tuner.run.studies import make_sampler
from tuner.search.sampler import ThompsonSampler
from tuner.study_file.config import load_study

STUDY = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}
trial: {backend: simulated}
"""

NEEDS = {
    "for_titan": ("torchtitan", "torchtitan"),
    "for_trainer": ("transformers", "transformers"),
    "parallelize_as": ("torch", "'meshtune[torch]'"),
    "pin_layouts": ("jax", "'meshtune[jax]'"),
    "plan_jax": ("jax", "'meshtune[jax]'"),
    "plan_torch": ("torch", "'meshtune[torch]'"),
    "titan_step": ("torchtitan", "torchtitan"),
}
"""The names that need a library of no default extra: its module and what to install."""


@pytest.fixture
def file(tmp_path):
    """The file of a small study."""
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path / "study.yaml"


def test_the_doors_names_are_sorted_and_documented():
    """`__all__` is sorted, and the page on Python imports and describes each of its names."""
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    first = blocks_of(ROOT / "docs/python.md")[0].text

    assert sorted(tuner.__all__) == tuner.__all__
    assert re.findall(r"\w+", first) == ["from", "tuner", "import", *tuner.__all__]
    assert set(re.findall(r"`(\w+)[(`]", page.split("## Predict")[0])) >= set(tuner.__all__)


def test_each_name_is_loaded_when_it_is_used():
    """Every name is what its own module has; those of a library that is missing say what to install."""
    assert tuner.ThompsonSampler is ThompsonSampler
    assert tuner.load_study is load_study
    for name in set(tuner.__all__) - NEEDS.keys():
        assert callable(getattr(tuner, name))
    for name, (library, package) in NEEDS.items():
        if importlib.util.find_spec(library) is None:
            with pytest.raises(ImportError, match=f"pip install {re.escape(package)}$"):
                getattr(tuner, name)
    with pytest.raises(AttributeError, match="no attribute 'ranking'"):
        tuner.ranking  # noqa: B018 # looking it up is the test


def test_rank_and_predict_return_what_the_commands_print(file):
    """The plain results of the functions are the JSON of the commands, from a path and from a loaded study."""
    runner = CliRunner()

    def printed(*words):
        return json.loads(runner.invoke(app, [words[0], str(file), *words[1:], "--json"]).stdout)

    assert json.loads(json.dumps(tuner.rank(str(file), top=3))) == printed("rank", "--top", "3")["configs"]
    assert len(tuner.rank(file, top=None)) > 3
    wanted = "pp=2,tp=4,dp=1"
    found = [tuner.predict(file, wanted), tuner.predict(load_study(file), {"pp": 2, "tp": 4, "dp": 1})]
    assert found[0] == found[1]
    assert json.loads(json.dumps(found[0])) == printed("predict", "--config", wanted)


def test_place_models_returns_what_the_command_prints():
    """The plain result has the keys of the command's JSON, with the framework's arguments, and is no worse than its
    baselines; what runs on a clock aside, both are the same placement.
    """
    file = PLACEMENTS / "ppo-7b-16.yaml"
    told = CliRunner().invoke(
        app, ["place", str(file), "--time-limit", "2", "--gap", "0.5", "--export", "verl", "--json"]
    )
    printed = json.loads(told.stdout)
    found = tuner.place_models(str(file), time_limit_s=2, gap=0.5, framework="verl")

    assert json.loads(json.dumps(found)).keys() == printed.keys()
    assert found["gap"] <= 0.5
    assert [module["name"] for module in found["modules"]] == [module["name"] for module in printed["modules"]]
    assert all(found["step_time_s"] <= one["step_time_s"] for one in found["baselines"] if one["step_time_s"])
    assert any(line.startswith("trainer.nnodes=") for line in found["export"]["lines"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_limit_s": 0}, "time_limit_s = 0: must be a number above 0"),
        ({"gap": float("nan")}, "gap = nan: must be a number of at least 0"),
        ({"framework": "ver1"}, "framework = 'ver1': is no framework of placements"),
    ],
)
def test_a_wrong_argument_of_place_models_is_named(arguments, message):
    """An argument that can't work is one message with its name and its rule."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        tuner.place_models(PLACEMENTS / "ppo-7b-16.yaml", **arguments)


def test_what_cannot_be_launched_is_refused(file):
    """A configuration for another number of devices is one message, which names the key and the devices."""
    with pytest.raises(ConfigError, match="cannot be launched on the 8 devices") as caught:
        tuner.predict(file, "pp=2,tp=8")

    assert caught.value.key == "config"


def test_a_studys_sampler_works_in_a_plain_loop(file):
    """`make_sampler` gives a sampler of the study's candidates that ends `study.optimize`."""
    optuna = pytest.importorskip("optuna")
    sampler = make_sampler(
        load_study(file, overrides=["search.draws=10", "search.confidence=0.1"]), stop_when_confident=True
    )
    study = optuna.create_study(sampler=sampler)

    study.optimize(lambda trial: 1.0 + sampler.suggest(trial).tp, n_trials=20)

    assert 0 < len(study.trials) < 20
